"""The bound of rounding holds for every order of the sums, and is too small for the faults that kernels have."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from paged_inputs import (
    assert_within,
    exact_attention,
    excess,
    make_kv,
    make_query,
    terms_of,
)
from rounding import Rounding, roundings

from kv_hf.backends.base import AttentionCall
from kv_hf.backends.reference import attention as reference

SCALE = 0.125
FP32 = Rounding.of("c", torch.float32)

# -- right results are within ----------------------------------------------------------------------------------


def in_order(terms, order):
    """Add up the last axis in fp32, one term after the other."""
    return np.add.accumulate(terms[..., order].astype(np.float32), -1, dtype=np.float32)[..., -1]


def attend_in_order(query, kv, order):
    """The first row's attention in fp32, every sum in one lane and in an order of its own; codes apart from offsets."""
    out = []
    keys, values = (terms_of(kv, side, 0) for side in ("keys", "values"))
    for head in range(query.shape[1]):
        at = head // (query.shape[1] // keys.numbers.shape[0])
        parts = [(side.codes[at].numpy(), side.offsets[at].numpy()) for side in (keys, values)]
        q = query[0, head].numpy() * np.float32(SCALE)
        terms = np.concatenate([q[:, None] * part for part in parts[0]], -1)
        scores = in_order(terms, order(terms.shape[-1]))
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        own = order(weights.shape[-1])
        total = in_order(weights, own)[:, None]
        terms = np.concatenate([weights[:, None] * part.T for part in parts[1]], -1)
        out.append(in_order(terms, order(terms.shape[-1])) / total)
    return torch.from_numpy(np.stack(out))[None]


ORDERS = {
    "as-they-lie": np.arange,
    "backwards": lambda n: np.arange(n)[::-1],
    "shuffled": np.random.default_rng(0).permutation,
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(("name", "head_dim", "pages"), [("int4", 64, 2), ("int8", 256, 20)])
def test_bound_holds_for_every_order_of_the_sums(name, head_dim, pages, order):
    """A processor's vectors decide the order; one sum after the other rounds the most."""
    worst = 0.0
    for seed in range(5):
        kv = make_kv(name, rows=[(pages, 9)], key_dim=head_dim, seed=seed)
        query = make_query(kv, 1, dtype=torch.float32, seed=seed + 100)
        out = attend_in_order(query, kv, order)
        expected, bound = exact_attention(query, kv, SCALE, FP32)
        assert_within(out, expected, bound)
        worst = max(worst, float(excess(out, expected, bound).max()))
    assert worst > 0.01, "the bound is far above any error: it would not see faults"


def test_bound_of_a_row_without_tokens_allows_no_error():
    kv = make_kv(rows=[(0, 0)])
    for part in exact_attention(make_query(kv, 1, dtype=torch.float32), kv, SCALE, FP32):
        assert not bool(part.any())


def test_roundings_never_exceed_the_terms():
    assert [roundings(n) for n in (0, 1, 16, 64, 1024)] == [0.0, 1.0, 8.0, 16.0, 64.0]


# -- faults are not -------------------------------------------------------------------------------------------


def changed(kv, side, field, change):
    """The pages with one field of the first page of the first row changed."""
    fields = getattr(kv, side)
    tensor = fields[field].clone()
    page = int(kv.block_table[0, 0])
    tensor[page] = change(tensor[page])
    return replace(kv, **{side: {**fields, field: tensor}})


def token_of_the_next_page(kv, side):
    def change(codes):
        other = getattr(kv, side)["codes"][int(kv.block_table[0, 1])]
        kept = codes.clone()
        # keys lie as [tokens, bytes], values as [bytes, tokens]
        (kept if side == "key_pages" else kept.mT)[:, 3] = (
            other if side == "key_pages" else other.mT
        )[:, 3]
        return kept

    return changed(kv, side, "codes", change)


def window_moved(kv):
    keys = kv.residual_keys.clone()
    keys[:, :, 4:-1] = kv.residual_keys[:, :, 5:]
    return replace(kv, residual_keys=keys)


def sums_in_bfloat16(query, kv, options):
    """Products of scores and values summed, and so rounded, in bfloat16."""
    expected = []
    for row in range(kv.rows):
        keys, values = (
            terms_of(kv, side, row).numbers.repeat_interleave(2, 0) for side in ("keys", "values")
        )
        scores = (query[row].bfloat16() @ keys.bfloat16().mT).float() * SCALE
        count = keys.shape[1]
        late = torch.ones(query.shape[2], count).triu(count - query.shape[2] + 1).bool()
        weights = torch.softmax(scores.masked_fill(late, float("-inf")), -1)
        expected.append((weights.bfloat16() @ values.bfloat16()).to(query.dtype))
    return torch.stack(expected)


def tf32(query):
    """Round to the 10 bits that tensor cores keep of a float32 unless they are told not to."""
    bits = query.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def run(query, kv, options):
    return reference.paged_attention(AttentionCall(query, kv, SCALE, **options))


def pages_scaled(kv, side, field):
    """A thousandth more, in one page."""
    return changed(kv, side, field, lambda numbers: numbers * 1.001)


# keys of pages in storage, of the options, of what a kernel computes with
FAULTS = {
    "key-of-the-next-page": lambda q, kv, o: run(q, token_of_the_next_page(kv, "key_pages"), o),
    "value-of-the-next-page": lambda q, kv, o: run(q, token_of_the_next_page(kv, "value_pages"), o),
    "page-of-another-row": lambda q, kv, o: run(q, replace(kv, block_table=kv.block_table.flip(0)), o),
    "tail-off-by-one": lambda q, kv, o: run(q, window_moved(kv), o),
    "newest-token-unseen": lambda q, kv, o: run(q, replace(kv, exact_lens=kv.exact_lens - 1), o),
    "window-off-by-one": lambda q, kv, o: run(q, kv, {**o, "sliding_window": o["sliding_window"] + 1}),
    "mask-off-by-one": lambda q, kv, o: run(q, kv, {**o, "mask": o["mask"].roll(1, -1)}),
    "mask-of-another-head": lambda q, kv, o: run(q, kv, {**o, "mask": o["mask"].roll(1, 1)}),
    "heads-swapped": lambda q, kv, o: run(q, kv, o)[:, [1, 0, 2, 3]],
    "queries-swapped": lambda q, kv, o: run(q, kv, o).flip(2),
    "kv-head-of-the-next-query": lambda q, kv, o: run(q.roll(1, 1), kv, o).roll(-1, 1),
}  # fmt: skip
SLIGHT_FAULTS = {
    "key-scale": lambda q, kv, o: run(q, pages_scaled(kv, "key_pages", "scale"), o),
    "value-scale": lambda q, kv, o: run(q, pages_scaled(kv, "value_pages", "scale"), o),
    "key-offset": lambda q, kv, o: run(q, pages_scaled(kv, "key_pages", "offset"), o),
    "value-offset": lambda q, kv, o: run(q, pages_scaled(kv, "value_pages", "offset"), o),
    "lowest-bit-of-codes": lambda q, kv, o: run(q, changed(kv, "key_pages", "codes", lambda c: c ^ 1), o),
    "softmax-scale": lambda q, kv, o: reference.paged_attention(AttentionCall(q, kv, 1.001 * SCALE, **o)),
    "softcap-dropped": lambda q, kv, o: run(q, kv, {**o, "softcap": None}),
    "sink-dropped": lambda q, kv, o: run(q, kv, {**o, "sink_logits": None}),
    "sink-of-the-next-head": lambda q, kv, o: run(q, kv, {**o, "sink_logits": o["sink_logits"].roll(1)}),
    "sums-in-bfloat16": sums_in_bfloat16,
}  # fmt: skip
FP32_FAULTS = {
    "tf32": lambda q, kv, o: run(tf32(q), kv, o),
    "result-in-bfloat16": lambda q, kv, o: run(q, kv, o).bfloat16().float(),
}
OPTIONS = {
    "softcap": {"softcap": 50.0},
    "sink": {"sink_logits": torch.linspace(-1, 1, 4)},
    "window": {"sliding_window": 30},
    "mask": {"mask": torch.rand(1, 4, 3, 100, generator=torch.Generator().manual_seed(3)) > 0.3},
}


# (rounding, faults that its bound has to see, how many times the bound they have to be off)
SEEN = {
    "fp32": (FP32, FAULTS | SLIGHT_FAULTS | FP32_FAULTS, 3),
    "reference": (Rounding.of("reference", torch.float32), FAULTS | SLIGHT_FAULTS | FP32_FAULTS, 3),
    # only the result is rounded to 16 bits: sums in bfloat16, which fp32 was promised for, are seen
    "bf16": (Rounding.of("c", torch.bfloat16), FAULTS | SLIGHT_FAULTS, 3),
    "fp16": (Rounding.of("c", torch.float16), FAULTS | SLIGHT_FAULTS, 3),
    # rounding of decoded keys and of weights hides what is smaller: such faults are found with fp32 queries
    "triton bf16": (Rounding(torch.bfloat16, operands=torch.bfloat16, apart=False), FAULTS, 1.5),
    "triton fp16": (Rounding(torch.float16, operands=torch.float16, apart=False), FAULTS, 1.5),
}


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("kernel", SEEN)
def test_bound_sees_faults(kernel, name):
    rounding, faults, least = SEEN[kernel]
    kv = make_kv(name, rows=[(5, 11), (5, 20)], dtype=rounding.result)
    query = make_query(kv, 3, dtype=rounding.result)
    for fault in faults.keys() - ({"value-offset"} if name == "int8" else set()):  # has none
        options = OPTIONS.get(fault.split("-")[0], {})
        expected, bound = exact_attention(query, kv, SCALE, rounding, **options)
        assert_within(run(query, kv, options), expected, bound)
        times = float(excess(faults[fault](query, kv, options), expected, bound).max())
        assert times > (1.5 if fault.startswith("sink-") else least), fault
