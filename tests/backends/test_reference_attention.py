"""Paged attention against an fp64 softmax over tokens that were decoded and laid out by `paged_inputs`."""

import pytest
import torch
from paged_inputs import (
    DTYPES,
    PAGE,
    ROWS,
    assert_within,
    check,
    exact_attention,
    make_kv,
    make_query,
    row_alone,
    tokens_of,
)
from rounding import Rounding

from kv_hf.backends import dispatch
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.reference.pages import TILE_TOKENS, dense_side
from kv_hf.errors import CacheMismatchError, CacheOptionError
from kv_hf.formats import format_names
from kv_hf.spec import LANES
from kv_hf.spec import ROWS as ROWS_LAYOUT

# -- sizes, formats, precisions --------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("q_len", [1, 3, 16])
def test_paged_attention_equals_dense_softmax(head_dim, group, q_len):
    kv = make_kv("int8", key_dim=head_dim)
    for dtype in (torch.float64, torch.float32):
        check(make_query(kv, q_len, group, dtype), kv)


@pytest.mark.parametrize("values", format_names("keys", "values"))
@pytest.mark.parametrize("keys", format_names("keys", "values"))
def test_paged_attention_reads_every_pair_of_formats(keys, values):
    kv = make_kv(keys, values)
    check(make_query(kv, 3), kv)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_paged_attention_reads_every_format_at_every_head_dim(name, head_dim):
    kv = make_kv(name, key_dim=head_dim)
    check(make_query(kv, 1), kv)


@pytest.mark.parametrize("name", format_names("keys", "values"))
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_paged_attention_rounds_low_precision_once(name, dtype):
    """Accumulated in fp32: only the result is rounded, to half an ulp."""
    kv = make_kv(name, dtype=dtype)
    check(make_query(kv, 3, dtype=dtype), kv)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 64), (64, 128), (80, 32)])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_paged_attention_takes_keys_and_values_of_different_dims(name, key_dim, value_dim):
    kv = make_kv(name, key_dim=key_dim, value_dim=value_dim)
    out = check(make_query(kv, 3), kv)
    assert out.shape[-1] == value_dim


@pytest.mark.parametrize("tile", [1, 16, 32, 48, 4096])
def test_paged_attention_does_not_depend_on_its_tile(monkeypatch, tile):
    """The largest score moves from tile to tile, so that the running softmax has to rescale."""
    kv = make_kv("exact")
    for row, scale in enumerate([20.0, 0.1, 1.0, 1.0, 1.0]):
        kv.residual_keys[row] *= scale
    kv.key_pages["codes"] *= torch.linspace(0.1, 20, len(kv.key_pages["codes"]))[
        :, None, None, None
    ]
    query = make_query(kv, 3)
    monkeypatch.setattr(reference, "TILE_TOKENS", tile)
    check(query, kv)


def test_paged_attention_walks_many_tiles():
    kv = make_kv("int4", rows=[(70, 9), (33, 20), (0, 2)])
    assert kv.block_table.shape[1] * PAGE > 2 * TILE_TOKENS
    check(make_query(kv, 3), kv)


def test_paged_attention_survives_scores_that_overflow_exp():
    kv = make_kv("exact")
    query = make_query(kv, 3, dtype=torch.float32) * 400
    out = check(query, kv)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("sinks", [0, 1, 20])
def test_paged_attention_puts_the_sinks_in_front_of_the_pages(sinks):
    """With a causal chunk of 16 queries, a token at a wrong place is seen by the wrong queries."""
    kv = make_kv("exact", rows=[(3, 30), (2, 21), (0, 5)], sinks=sinks)
    check(make_query(kv, 16), kv)


# -- rows and padding ------------------------------------------------------------------------------------------


def test_paged_attention_gives_zeros_to_a_row_without_tokens():
    kv = make_kv(poison=True)
    out = check(make_query(kv, 3, dtype=torch.float32), kv)
    assert ROWS[4] == (0, 0)
    assert torch.equal(out[4], torch.zeros_like(out[4]))
    assert bool((out[:4].abs().sum((1, 2, 3)) > 0).all())


def test_paged_attention_gives_zeros_to_queries_in_front_of_the_first_token():
    """A chunk of 16 queries on a row of 3 tokens: 13 of them are padding."""
    kv = make_kv()
    out = check(make_query(kv, 16, dtype=torch.float32), kv)
    assert ROWS[2] == (0, 3)
    assert torch.equal(out[2, :, :13], torch.zeros_like(out[2, :, :13]))
    assert bool((out[2, :, 13:].abs().sum((0, 2)) > 0).all())


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
def test_paged_attention_does_not_depend_on_the_padding(masked):
    results = []
    for more in (0, 9):
        kv = make_kv("int4", more_padding=more)
        mask = None
        if masked:
            generator = torch.Generator().manual_seed(5)
            mask = torch.rand(kv.rows, 1, 3, kv.seen - more, generator=generator) > 0.3
            mask = torch.cat([torch.ones(kv.rows, 1, 3, more).bool(), mask], -1)
        results.append(check(make_query(kv, 3, dtype=torch.float32), kv, mask=mask))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_paged_attention_of_a_row_does_not_depend_on_its_batch(name):
    kv = make_kv(name)
    query = make_query(kv, 3)
    together = reference.paged_attention(AttentionCall(query, kv, 0.1))
    for row in range(kv.rows):
        only = slice(row, row + 1)
        alone = row_alone(kv, row)
        out = reference.paged_attention(AttentionCall(query[only], alone, 0.1))
        assert torch.allclose(out, together[only], rtol=0, atol=1e-13)


# -- where pages lie, and what lies beside them ------------------------------------------------------------------


@pytest.mark.parametrize("name", format_names("keys", "values"))
@pytest.mark.parametrize("shuffle", [1, 2])
def test_paged_attention_is_the_same_for_permuted_page_ids(name, shuffle):
    plain, permuted = make_kv(name), make_kv(name, shuffle=shuffle)
    assert not torch.equal(plain.block_table, permuted.block_table)
    query = make_query(plain, 3, dtype=torch.float32)
    outs = [reference.paged_attention(AttentionCall(query, kv, 0.125)) for kv in (plain, permuted)]
    assert torch.equal(*outs)


@pytest.mark.parametrize("name", format_names("keys", "values"))
@pytest.mark.parametrize("masking", ["causal", "bool", "float"])
def test_paged_attention_never_reads_unused_slots_and_pages(name, masking):
    clean, poisoned = make_kv(name), make_kv(name, poison=True)
    assert bool(poisoned.residual_keys.isnan().any())
    query = make_query(clean, 3, dtype=torch.float32)
    mask = {
        "causal": None,
        "bool": torch.ones(1, 1, 3, clean.seen).bool(),
        "float": torch.zeros(1, 1, 3, clean.seen),
    }[masking]
    sinks = torch.zeros(query.shape[1])
    outs = [
        reference.paged_attention(
            AttentionCall(query, kv, 0.125, mask=mask, softcap=20.0, sink_logits=sinks)
        )
        for kv in (clean, poisoned)
    ]
    assert bool(outs[1].isfinite().all())
    assert torch.equal(*outs)


def test_paged_attention_changes_none_of_its_inputs():
    kv = make_kv("int4")
    query = make_query(kv, 3)
    tensors = {
        "query": query,
        "residual_keys": kv.residual_keys,
        "residual_values": kv.residual_values,
        **kv.key_pages,
        **{f"value {name}": tensor for name, tensor in kv.value_pages.items()},
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    reference.paged_attention(AttentionCall(query, kv, 0.125, softcap=3.0))
    assert [name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])] == []


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize("window", [1, 2, 7, 16, 30, 90, 1000])
def test_paged_attention_sees_a_sliding_window(window, masked):
    """The window slides over sinks, pages and tail alike, and each query has its own."""
    kv = make_kv("exact")
    mask = torch.ones(1, 1, 3, kv.seen).tril(kv.seen - 3).bool() if masked else None
    check(make_query(kv, 3), kv, mask=mask, sliding_window=window)


# -- masks, softcap, sink logits ---------------------------------------------------------------------------------


def random_mask(kv, kind, shape):
    generator = torch.Generator().manual_seed(7)
    mask = torch.rand(*shape, kv.seen, generator=generator)
    if kind == "bool":
        return mask > 0.4
    additive = 3 * mask - 1
    return additive.masked_fill(mask < 0.2, float("-inf")) if kind == "float-inf" else additive


MASK_SHAPES = {"all": (1, 1, 3), "rows": (5, 1, 3), "heads": (1, 4, 3), "rows-heads": (5, 4, 3)}


@pytest.mark.parametrize("shape", MASK_SHAPES.values(), ids=MASK_SHAPES)
@pytest.mark.parametrize("kind", ["bool", "float", "float-inf"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_paged_attention_applies_masks(kind, shape, dtype):
    kv = make_kv("int4")
    check(make_query(kv, 3, dtype=dtype), kv, mask=random_mask(kv, kind, shape))


def test_paged_attention_replaces_causality_by_the_mask():
    """A mask of ones lets the first query of a chunk see the last token."""
    kv = make_kv("exact")
    query = make_query(kv, 3)
    everything = torch.ones(1, 1, 3, kv.seen).bool()
    out = check(query, kv, mask=everything)
    assert not torch.allclose(out, check(query, kv))
    # the causal mask written out, over columns of which the padding is one part, is no mask
    causal = everything.tril(kv.seen - 3)
    assert torch.allclose(check(query, kv, mask=causal), check(query, kv), atol=1e-14, rtol=0)


def test_paged_attention_gives_zeros_where_the_mask_hides_everything():
    kv = make_kv()
    mask = torch.ones(1, 1, 3, kv.seen).bool()
    mask[:, :, 1] = False
    out = check(make_query(kv, 3, dtype=torch.float32), kv, mask=mask)
    assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))
    assert bool((out[:4, :, 2].abs().sum((1, 2)) > 0).all())
    hidden = torch.zeros(1, 1, 3, kv.seen).masked_fill(~mask, float("-inf"))
    assert torch.equal(out, check(make_query(kv, 3, dtype=torch.float32), kv, mask=hidden))


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_paged_attention_caps_the_scores_before_the_mask(softcap, kind):
    kv = make_kv("int8")
    mask = None if kind is None else random_mask(kv, kind, (1, 1, 3))
    check(4 * make_query(kv, 3), kv, mask=mask, softcap=softcap)


@pytest.mark.parametrize("kind", [None, "bool", "float-inf"])
@pytest.mark.parametrize("size", [1.0, 30.0, -30.0])
def test_paged_attention_adds_sink_logits_to_the_denominator(kind, size):
    kv = make_kv("int8")
    mask = None if kind is None else random_mask(kv, kind, (1, 1, 3))
    logits = size * torch.linspace(0.5, 1.5, 16)
    out = check(make_query(kv, 3, group=8), kv, mask=mask, sink_logits=logits)
    assert torch.equal(
        out[4], torch.zeros_like(out[4])
    )  # a row without tokens has a sink, and no value


def test_paged_attention_reads_a_sink_logit_of_minus_infinity_as_no_sink():
    kv = make_kv("int8")
    query = make_query(kv, 3)
    off = torch.full((query.shape[1],), float("-inf"))
    assert torch.equal(check(query, kv, sink_logits=off), check(query, kv))


def test_paged_attention_takes_all_options_together():
    kv = make_kv("int4", "int8", key_dim=128, value_dim=64, shuffle=3, poison=True)
    check(
        make_query(kv, 16, group=8, dtype=torch.float32),
        kv,
        mask=random_mask(kv, "float-inf", (5, 16, 16)),
        softcap=8.0,
        sink_logits=torch.linspace(-2, 2, 16),
    )


# -- dense tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_dense_side_lays_out_padding_sinks_pages_and_tail(name, dtype, side):
    kv = make_kv(
        name, dtype=dtype, key_dim=64, value_dim=32, shuffle=1, poison=True, more_padding=5
    )
    dense = dense_side(kv, side)
    assert dense.dtype == dtype
    assert dense.shape == (5, 2, kv.seen, 64 if side == "keys" else 32)
    for row in range(kv.rows):
        start = int(kv.padding[row])
        assert torch.equal(dense[row, :, :start], torch.zeros_like(dense[row, :, :start]))
        assert torch.equal(dense[row, :, start:], tokens_of(kv, side, row, dtype))


def test_dense_side_walks_many_tiles():
    kv = make_kv("int4", rows=[(70, 9), (33, 20)])
    dense = dense_side(kv, "values")
    for row in range(2):
        assert torch.equal(dense[row, :, int(kv.padding[row]) :], tokens_of(kv, "values", row))


def test_dense_side_is_a_copy():
    kv = make_kv("exact")
    dense_side(kv, "keys").fill_(9.0)
    assert not bool((kv.residual_keys == 9.0).any())
    assert not bool((kv.key_pages["codes"] == 9.0).any())


@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_dense_side_attends_as_the_pages_do(name):
    kv = make_kv(name, more_padding=3)
    query = make_query(kv, 3, dtype=torch.float32)
    held = torch.arange(kv.seen) >= kv.padding[:, None]
    mask = held[:, None, None] & torch.ones(3, kv.seen).bool().tril(kv.seen - 3)
    dense = torch.nn.functional.scaled_dot_product_attention(
        query,
        dense_side(kv, "keys"),
        dense_side(kv, "values"),
        attn_mask=mask,
        enable_gqa=True,
    )
    rounding = Rounding.of("reference", torch.float32)
    expected, bound = exact_attention(query, kv, 64**-0.5, rounding)
    assert_within(dense[:4], expected[:4], bound[:4])


# -- dispatch ---------------------------------------------------------------------------------------------------------


def test_ops_give_what_the_reference_gives():
    kv = make_kv()
    query = make_query(kv, 3, dtype=torch.float32)
    expected = reference.paged_attention(AttentionCall(query, kv, 0.125))
    named = dispatch.paged_attention(AttentionCall(query, kv, 0.125), kernel="reference")
    assert torch.equal(named, expected)


@pytest.mark.parametrize("layout", [ROWS_LAYOUT, LANES])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_ops_apply_every_option(kernel, layout):
    kv = make_kv("int4", layout=layout)

    def attend(asked):
        return dispatch.paged_attention(asked, kernel)

    query = make_query(kv, 3, dtype=torch.float32)
    check(query, kv, attend)
    mask = random_mask(kv, "float", (1, 4, 3))
    logits = torch.linspace(-1, 1, 4)
    check(query, kv, attend, mask=mask, softcap=3.0, sink_logits=logits, sliding_window=40)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_ops_expand_a_mask_of_one_query(kind):
    kv = make_kv("int4")
    query = make_query(kv, 3)
    mask = random_mask(kv, kind, (5, 1, 1))
    out = dispatch.paged_attention(AttentionCall(query, kv, 0.125, mask=mask))
    whole = mask.expand(5, 4, 3, kv.seen).contiguous()
    assert torch.equal(out, dispatch.paged_attention(AttentionCall(query, kv, 0.125, mask=whole)))
    check(query, kv, dispatch.paged_attention, mask=mask)


def test_ops_read_the_first_columns_of_a_mask_that_is_too_wide():
    """Masks made for a static length are longer than what was seen so far."""
    kv = make_kv("int4")
    query = make_query(kv, 3)
    mask = random_mask(kv, "bool", (5, 4, 3))
    wide = torch.cat([mask, torch.zeros(5, 4, 3, 11).bool()], -1)
    outs = [dispatch.paged_attention(AttentionCall(query, kv, 0.125, mask=m)) for m in (mask, wide)]
    assert torch.equal(*outs)


def _ask(**changes):
    """Call dispatch with arguments that fit, except for `changes`; the kv has 5 rows, 2 kv heads of 64."""
    kv = make_kv()
    arguments = {"query": make_query(kv, 3), "kv": kv, "softmax_scale": 0.125, **changes}
    kernel = arguments.pop("kernel", "auto")
    return dispatch.paged_attention(AttentionCall(**arguments), kernel)


def test_ops_refuse_nothing_that_fits():
    assert _ask().shape == (5, 4, 3, 64)


BAD_QUERIES = {
    "rows": (4, 4, 3, 64),
    "head-dim": (5, 4, 3, 32),
    "heads": (5, 3, 3, 64),
    "three-axes": (5, 4, 64),
}


@pytest.mark.parametrize("shape", BAD_QUERIES.values(), ids=BAD_QUERIES)
def test_ops_refuse_a_query_that_does_not_fit(shape):
    with pytest.raises(CacheMismatchError) as error:
        _ask(query=torch.zeros(shape))
    assert str(error.value).startswith("query must be [5, a multiple of 2, q_len, 64]")
    assert str(shape) in str(error.value)


BAD_MASKS = {
    "rows": (4, 1, 3, 91),
    "heads": (1, 3, 3, 91),
    "q_len": (1, 1, 2, 91),
    "two-axes": (5, 91),
}


@pytest.mark.parametrize("shape", BAD_MASKS.values(), ids=BAD_MASKS)
def test_ops_refuse_a_mask_that_does_not_broadcast(shape):
    with pytest.raises(CacheMismatchError) as error:
        _ask(mask=torch.ones(shape).bool())
    assert str(error.value) == f"mask must broadcast to (5, 4, 3, 91), got {shape}"


def test_ops_refuse_a_mask_that_is_too_short():
    with pytest.raises(CacheMismatchError, match="mask must have at least 91 columns, got 90"):
        _ask(mask=torch.ones(1, 1, 3, 90).bool())


@pytest.mark.parametrize("shape", [(3,), (2,), (1, 8)], ids=str)
def test_ops_refuse_sink_logits_that_do_not_fit(shape):
    with pytest.raises(CacheMismatchError, match="sink_logits"):
        _ask(sink_logits=torch.zeros(shape))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("refrence", ["'refrence'", "did you mean 'reference'?", "auto"]),
        ("flash", ["'flash'", "auto", "reference"]),
        (7, ["7", "auto", "reference"]),
    ],
    ids=str,
)
def test_ops_refuse_an_unknown_kernel(name, says):
    with pytest.raises(CacheOptionError) as error:
        _ask(kernel=name)
    assert str(error.value).startswith("kernel must be one of")
    assert [part for part in says if part not in str(error.value)] == []
