"""The Triton decode kernels in the interpreter, of keys and values and of latents, against an fp64 softmax over decoded tokens.

CASES is one table (see paged_inputs): what pages hold, what the queries ask for, and in how many splits.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import paged_inputs
import pytest
import torch
from paged_inputs import ROWS, assert_within, exact_attention, make_kv, make_query
from rounding import Rounding
from test_triton_latent import RAGGED
from test_triton_latent import make_kv as make_latents
from triton_machine import attend, call, compiled_pairs, runs_kernels

from kv_hf.backends.base import AttentionCall
from kv_hf.backends.reference import attention as reference
from kv_hf.formats import format_names
from kv_hf.quant.codec import decode

pytestmark = runs_kernels

# a program per row, kv head, split and block of columns: most cases have one kv head, and two where heads are told
# apart: groups and chunks, splits, masks and sink logits of heads, permuted pages, strides
FEW = [(3, 5), (0, 2)]  # pages and exact tokens of each row, for cases that need no more
FP32 = torch.float32
NAMES = format_names("keys", "values")
MIXED = ("int2_mixed", "int4_mixed")
ROTATED = ("int2_rotated", "int3_rotated", "int4_rotated")
PAIRS = [*((keys, "exact") for keys in MIXED), *(("int4", values) for values in ROTATED)]


def check(query, kv, splits=2, kernel=attend, **options):
    """Compare with fp64: no error beyond what rounding in this kernel explains."""

    def called(*args, **given):
        return call(kernel, *args, splits=splits, **given)

    return paged_inputs.check(query, kv, called, Rounding.of("triton", query.dtype), **options)


def slow_one(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def pages(keys="int4", values=None, *, q_len=3, group=2, times=1, **held):
    """Keys and values of one head and few rows, and queries that are `times` as large as usual."""
    kv = make_kv(keys, values, **{"rows": FEW, "heads": 1, **held})
    return times * make_query(kv, q_len, group, FP32), kv


def latents(name="int4", *, q_len=3, heads=3, **held):
    """Latents of few rows, and queries of some heads for them."""
    kv = make_latents(name, **held)
    return make_query(kv, q_len, heads, FP32), kv


def random_mask(kind, *shape):
    """Return what makes a mask [*shape, columns] for pages."""

    def make(kv):
        mask = torch.rand(*shape, kv.seen, generator=torch.Generator().manual_seed(7))
        if kind == "bool":
            return mask > 0.4
        additive = 3 * mask - 1
        if kind == "lowest":
            return additive.masked_fill(mask < 0.2, torch.finfo(FP32).min)
        return additive.masked_fill(mask < 0.2, float("-inf")) if kind == "float-inf" else additive

    return make


def hides_a_query(kv):
    mask = torch.ones(1, 1, 3, kv.seen).bool()
    mask[:, :, 1] = False
    return mask


# finfo.min everywhere is the same for all tokens: softmax gives their mean. With more splits it is the mean of the splits'
# means: beside such a number a log-sum-exp has no room for counts
def all_alike(kv):
    return torch.full((1, 1, 1, kv.seen), torch.finfo(FP32).min)


def causal(kv):
    return torch.ones(1, 1, 3, kv.seen).tril(kv.seen - 3).bool()


def case(made, splits=2, slow=False, **options):
    """Return a case: what makes queries and pages, splits, and options, of which functions get the pages."""
    return made, splits, slow, options


def formats():
    for keys, values in product(NAMES, NAMES):
        yield case(partial(pages, keys, values))
    for name, dim in product(NAMES, (16, 64, 80, 96, 128, 192, 256)):
        yield case(partial(pages, name, key_dim=dim, q_len=1), slow=dim > 128)
    for name, (key_dim, value_dim) in product(NAMES, ((128, 64), (64, 128), (80, 32))):
        yield case(partial(pages, name, key_dim=key_dim, value_dim=value_dim, q_len=1))


def page_sizes():
    """Pages of 128 tokens are two tiles, and four where the keys' scales change every 32 tokens (int2)."""
    for name, page in product(("exact", "int8", "int4", "int2"), (32, 64, 128, 256)):
        held = {"page": page, "slots": page + 20, "rows": [(3, page + 7), (0, 2)]}
        yield case(partial(pages, name, **held), slow=page == 256)


def groups_and_chunks():
    """8 heads of 16 queries are four blocks of 32 columns; 3 of 3 leave columns unused."""
    for group, q_len in product((1, 2, 3, 4, 8), (1, 3, 16)):
        heads = 1 if group * q_len > 64 else 2
        yield case(partial(pages, q_len=q_len, group=group, heads=heads), slow=group in (2, 4))


def group_sizes():
    """Key groups of a tile and below one; value groups of a run, of a part of it, and across runs."""
    sizes = [{"key_group": 16, "page": 64}, {"key_group": 8, "page": 32}]
    sizes += [{"value_group": channels} for channels in (16, 32, 8)]
    for name, given in product(("int4", "int2"), sizes):
        yield case(partial(pages, name, q_len=1, **{"slots": 80, **given}))


def mixed_and_rotated():
    """Rotated blocks of 16 to 128 channels, which at 80 and 96 lie across the runs of a byte."""
    for (keys, values), dim in product(PAIRS, (16, 64, 80, 96, 128, 256)):
        held = {"key_dim": dim, "value_group": None if values == "exact" else dim}
        held |= {"heads": 2 if keys in MIXED else 1, "shuffle": 1, "poison": True, "q_len": 1}
        yield case(partial(pages, keys, values, **held), slow=dim == 256)
    for keys, group in product(MIXED, (8, 16)):
        yield case(partial(pages, keys, "exact", page=32, slots=50, key_group=group))
    for values, group in product(ROTATED, (16, 8, 40)):
        dim = 80 if group == 40 else 64
        yield case(partial(pages, "exact", values, key_dim=dim, value_group=group))


def rows_and_splits():
    """16 splits are more than any row has pages: most are empty, and their partial results stay unwritten."""
    for name, splits in product(("exact", "int4"), (1, 2, 5, 16)):
        few = {"rows": ROWS[::2]} if splits == 16 else {"rows": ROWS, "heads": 2}
        yield case(partial(pages, name, **few), splits, slow=splits == 5)
    for sinks in (0, 1, 20):
        held = {"rows": [(3, 30), (2, 21), (0, 5)], "sinks": sinks, "q_len": 16}
        yield case(partial(pages, "exact", **held))
    # an empty row, and one of 3 tokens for a chunk of 16 queries
    for splits in (1, 3):
        yield case(partial(pages, "int8", rows=ROWS, poison=True, q_len=16), splits)


def options():
    for window, mask in product((1, 7, 16, 30, 90, 1000), (None, causal)):
        made = partial(pages, "exact", rows=ROWS)
        yield case(made, slow=window in (16, 90), sliding_window=window, mask=mask)
    for kind, shape in product(
        ("bool", "float", "float-inf", "lowest"), ((1, 1), (5, 1), (1, 4), (5, 4))
    ):
        made = partial(pages, rows=ROWS, heads=2 if shape[1] > 1 else 1, more_padding=3)
        yield case(made, mask=random_mask(kind, *shape, 3))
    yield case(partial(pages, "int8", rows=ROWS), mask=hides_a_query)
    yield case(partial(pages, "exact", q_len=1), 1, mask=all_alike)
    for cap, kind in product((0.5, 5.0, 50.0), (None, "bool", "float")):
        yield case(partial(pages, "int8"), softcap=cap, mask=kind and random_mask(kind, 1, 1, 3))
    for size, splits in product((1.0, 30.0, -30.0, float("-inf")), (1, 3)):
        made = partial(pages, "int8", rows=[*FEW, (0, 0)], heads=2)
        yield case(made, splits, sink_logits=size * torch.linspace(0.5, 1.5, 4))
    held = {"key_dim": 128, "value_dim": 64, "shuffle": 3, "poison": True, "heads": 2}
    together = {"softcap": 8.0, "sliding_window": 40, "sink_logits": torch.linspace(-2, 2, 8)}
    made = partial(pages, "int4", "int8", q_len=16, group=4, **held)
    yield case(made, mask=random_mask("float-inf", 2, 8, 16), **together)
    yield case(partial(pages, "exact", rows=ROWS, times=400))  # scores that overflow exp


# name, page size, tokens of a scale: places of a word lie in one token group or in several, and the words of small pages fill
# no tile alone
LATENT_PAGES = [
    ("exact", 64, None),
    ("int8", 64, None),
    ("int4", 64, None),
    ("int4", 64, 16),
    ("int2", 64, None),
    ("int2", 128, None),
]
MORE_LATENT_PAGES = [
    ("int8", 32, None), ("fp8", 128, None), ("int4", 32, None), ("int4", 64, 32), ("int4", 128, None), ("int4", 128, 32),
    ("int4", 256, 16), ("int2", 32, None), ("int2", 64, 16), ("int2", 64, 64), ("int2", 128, 128), ("int2", 256, None),
    ("int2", 512, 16),
]  # fmt: skip
LATENT_SIZES = [
    {"rope_dim": 0},
    {"rank": 240},
    {"rank": 8, "rope_dim": 8},
    {"rank": 128, "page": 64, "slots": 90},
    {"group": 16},
]


def latents_of_every_kind():
    for name in format_names("latent"):
        yield case(partial(latents, name, poison=True))
    for name, rope in (("int4", "exact"), ("exact", "int8")):
        yield case(partial(latents, name, rope=rope))
    for name, page, tokens in (*LATENT_PAGES, *MORE_LATENT_PAGES):
        made = partial(latents, name, page=page, tokens=tokens, slots=page + 26, q_len=1)
        yield case(made, slow=(name, page, tokens) in MORE_LATENT_PAGES)
    for name, sizes in product(("exact", "fp8", "int8", "int4", "int2"), LATENT_SIZES):
        quick = name == ("int8" if "group" in sizes else "int4")
        yield case(partial(latents, name, q_len=1, **sizes), slow=not quick)
    for name, splits in (("int4", 1), ("int4", 9), ("int4", 3), ("exact", 3), ("int8", 9)):
        yield case(
            partial(latents, name, rows=RAGGED, poison=True),
            splits,
            slow=name != "int4" or splits == 3,
        )
    yield case(partial(latents, "int8", heads=7))


def latents_with_options():
    for name, kind in product(("int2", "exact"), ("bool", "float-inf")):
        made = partial(latents, name, rows=RAGGED[:3], padding=3)
        yield case(made, slow=name == "exact", mask=random_mask(kind, 3, 1, 3))
    for name, window in product(("int4", "exact"), (1, 30, 1000)):
        slow = name == "exact" or window == 1000
        yield case(partial(latents, name, rows=RAGGED[:2]), 1, slow=slow, sliding_window=window)
    yield case(partial(latents, "int4", rows=RAGGED[:2]), softcap=0.7)
    for splits in (1, 2):
        yield case(partial(latents, "int8"), splits, sink_logits=torch.linspace(-1, 2, 3))


CASES = (
    formats,
    page_sizes,
    groups_and_chunks,
    group_sizes,
    mixed_and_rotated,
    rows_and_splits,
    options,
    latents_of_every_kind,
    latents_with_options,
)


@pytest.mark.parametrize(
    ("cases", "slow"),
    [(one, False) for one in CASES]
    + [pytest.param(one, True, marks=pytest.mark.slow) for one in CASES],
    ids=lambda value: getattr(value, "__name__", "slow" if value else "quick"),
)
def test_decode_is_the_definition(cases, slow):
    for made, splits, is_slow, options in cases():
        if is_slow == slow:
            query, kv = made()
            given = {name: one(kv) if callable(one) else one for name, one in options.items()}
            try:
                out = check(query, kv, splits, **given)
            except AssertionError as error:
                raise AssertionError(f"{made}, {splits} splits, {options}: {error}") from error
            assert bool(out.isfinite().all())


# -- what the result does not depend on ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "latents"])
def test_decode_takes_a_cache_without_any_page(name):
    """Neither in the table nor in storage: nothing of either may be read."""
    rows = [(0, 7), (0, 0), (0, 1)]
    query, kv = latents(rows=rows) if name == "latents" else pages(name, rows=rows)
    empty = [{n: t[:0] for n, t in one.items()} for one in (kv.key_pages, kv.value_pages)]
    assert kv.block_table.shape[1] == 0
    check(query, replace(kv, key_pages=empty[0], value_pages=empty[1]))


def test_decode_reads_no_page_for_a_split_without_tiles():
    """Page 0 is nobody's and nan: a split that reads ahead where it has nothing to do would spread it."""
    query, kv = pages(rows=[(0, 7), (2, 5)], heads=2)
    moved = [
        {
            n: torch.cat([torch.full_like(t[:1], float("nan") if n != "codes" else 0), t])
            for n, t in one.items()
        }
        for one in (kv.key_pages, kv.value_pages)
    ]
    kv = replace(kv, key_pages=moved[0], value_pages=moved[1], block_table=kv.block_table + 1)
    check(query, kv, 8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
def test_decode_never_reads_unused_slots_and_pages(name, masked):
    """Unused slots, pages that nobody holds and table entries past a row's pages change no bit of the result."""
    options = {"softcap": 20.0, "sink_logits": torch.zeros(2), "softmax_scale": 0.125}
    outs = []
    for poison in (False, True):
        query, kv = pages(name, rows=ROWS, poison=poison)
        mask = torch.zeros(1, 1, 3, kv.seen) if masked else None
        outs.append(call(attend, AttentionCall(query, kv, mask=mask, **options)))
    assert bool(kv.residual_keys.isnan().any())
    assert bool(outs[1].isfinite().all())
    assert torch.equal(*outs)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_decode_of_one_query_needs_no_mask_on_a_preallocated_cache(splits):
    """A table as wide as the room, of which each row holds a part; `seen` columns that most rows do not reach."""
    query, kv = pages(rows=ROWS, q_len=1, poison=True, more_padding=40)
    table = kv.block_table[:, -1:].repeat(1, 40)
    table[:, : kv.block_table.shape[1]] = kv.block_table
    check(query, replace(kv, block_table=table), splits)


def test_decode_takes_tensors_as_they_lie():
    """Page ids may be permuted, queries have any strides, and a mask more columns than were seen; a token's heads lie together."""
    query, kv = pages(heads=2)
    moved = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert not moved.is_contiguous()
    narrow = random_mask("bool", 2, 4, 3)(kv)
    wide = torch.cat([narrow, torch.ones(2, 4, 3, 11).bool()], -1)
    first = call(attend, AttentionCall(query, kv, 0.125, mask=narrow))
    assert first.transpose(1, 2).is_contiguous()
    for q, held, mask in (
        (moved, kv, narrow),
        (query, pages(heads=2, shuffle=1)[1], narrow),
        (query, kv, wide),
    ):
        assert torch.equal(call(attend, AttentionCall(q, held, 0.125, mask=mask)), first)


@pytest.mark.parametrize("size", [1e-20, 1e20], ids=str)
def test_decode_keeps_queries_in_range(size):
    """Queries are brought near 1 by a power of two: without it their squares leave fp32's range."""
    query, kv = pages(q_len=1, heads=2)
    out = call(attend, AttentionCall(query * size, kv, 0.125 / size))
    assert_within(out, *exact_attention(query, kv, 0.125, Rounding.of("triton", FP32)))


# -- what only NVIDIA GPUs run -------------------------------------------------------------------------------------


@pytest.mark.compiled
@pytest.mark.parametrize(("keys", "values"), compiled_pairs())
def test_compiled_decode_errs_no_more_than_float16(keys, values):
    """The NVIDIA branch: PTX unpacking, codes as float16 subnormals, scales as powers of two, float16 products."""
    options = {"heads": 1, "dtype": torch.float16, "rows": [(5, 0), (2, 0), (3, 2)], "sinks": 0}
    kv = make_kv(keys, values, value_group=64 if values in ROTATED else None, **options)
    check(make_query(kv, 3, dtype=torch.float16), kv)


@pytest.mark.compiled
@pytest.mark.parametrize("sizes", [(1e-4, 1e-4), (1e3, 1e3), (1e-4, 1e3)], ids=str)
@pytest.mark.parametrize("name", ["int4", slow_one("fp8"), slow_one("int8"), slow_one("int2")])
def test_compiled_decode_keeps_small_and_large_numbers_in_float16(name, sizes):
    """Weights times the scales of small values vanish in float16 unless they are scaled up, and large ones overflow."""
    key_size, value_size = sizes
    kv = make_kv(name, heads=1, dtype=torch.float16, rows=[(6, 0)], sinks=0)
    for fields, size in ((kv.key_pages, key_size), (kv.value_pages, value_size)):
        for field in ("scale", "offset"):
            if field in fields:
                fields[field].copy_((fields[field].float() * size).half())
    query = make_query(kv, 1, dtype=torch.float16)
    scale = 0.1 / max(key_size, 1.0)
    out = call(attend, AttentionCall(query, kv, scale))
    assert_within(out, *exact_attention(query, kv, scale, Rounding.of("triton", torch.float16)))


def unpack_every_byte(bits, code):
    """What the assembly gives for all 256 bytes: float16 numbers of each run of codes."""
    from ptx import carry_out

    from kv_hf.backends.triton import dequant

    words = np.arange(256, dtype=np.uint8).view(np.uint32)
    if bits < 8:
        text, runs = dequant._take_in_place.fn(bits), 8 // bits
    else:
        text, runs = (dequant._signed if code == "signed" else dequant._by_shifts).fn(False), 1
    outs = carry_out(text, 2 * runs, words)
    return [
        np.stack(outs[2 * run : 2 * run + 2], -1).view(np.float16).ravel() for run in range(runs)
    ]


def unpack_every_word(bits, code):
    """What the assembly gives for all 65,536 words: float16 numbers of each place."""
    from ptx import carry_out

    from kv_hf.backends.triton import dequant

    words = np.arange(65536, dtype=np.uint16).view(np.uint32)
    if bits < 8:
        texts = [dequant._take_place.fn(place, bits) for place in range(16 // bits)]
        outs = [carry_out(text, 1, words)[0] for text in texts]
    else:
        text = (dequant._signed if code == "signed" else dequant._by_shifts).fn(True)
        outs = carry_out(text, 2, words)
    return [out.view(np.float16) for out in outs]


@pytest.mark.parametrize(
    ("bits", "code"), [(2, "unsigned"), (4, "unsigned"), (8, "signed"), (8, "float8")], ids=str
)
@pytest.mark.parametrize("unpack", [unpack_every_byte, unpack_every_word])
def test_assembly_unpacks_every_number(unpack, bits, code):
    """Codes of 2 and 4 bits stay where they are in a byte: as float16 subnormals, times a power of two."""
    numbers = unpack(bits, code)
    every = torch.arange(len(numbers[0]))
    for place, got in enumerate(numbers):
        codes = (every >> (bits * place)) & ((1 << bits) - 1)
        if code == "unsigned":
            wanted = (codes << (bits * place % 8)).double() * 2.0**-24
        elif code == "signed":
            wanted = codes.to(torch.uint8).view(torch.int8).double()
        else:
            wanted = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
        finite = wanted.isfinite()
        assert torch.equal(torch.from_numpy(got.copy()).double()[finite], wanted[finite])


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "page"),
    [("int4", 64), ("int2", 64), ("int8", 64), ("fp8", 64), ("exact", 64), slow_one("int4", 16), slow_one("int4", 128), slow_one("int2", 16),
     slow_one("int2", 32), slow_one("int2", 128), slow_one("int2", 256), slow_one("fp8", 16), slow_one("int8", 16)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("size", [1.0, slow_one(1e-3), slow_one(1e3)], ids=str)
def test_compiled_decode_of_latents_errs_no_more_than_float16(name, page, size):
    """The NVIDIA branch: codes as float16 subnormals, units as powers of two, products in float16.

    Rounding a query times its scales moves a score by eps * sum |q| |code * scale|, and so all shares together by
    twice that. Each weight is rounded, times |code * scale| of at most twice the largest number, and the result is.
    """
    query, kv = latents(name, page=page, dtype=torch.float16, rows=[(3, 0), (1, 2)], slots=4)
    for field in {"scale", "offset"} & set(kv.key_pages):
        kv.key_pages[field].copy_((kv.key_pages[field].float() * size).half())
    query, scale = query.half(), 0.1 / max(size, 1.0)
    expected = reference.paged_attention(AttentionCall(query.double(), kv, scale))
    out = call(attend, AttentionCall(query, kv, scale))
    eps, moved = 2.0**-11, 0.0
    stored_side = kv.spec.keys
    stored = decode(kv.key_pages, stored_side, torch.float64)
    largest = max(float(stored.abs().max()), float(kv.residual_keys.abs().max()))
    if "offset" in kv.key_pages:  # else queries are multiplied as they are
        top = 2**stored_side.scheme.bits - 1
        offset = kv.key_pages["offset"].double()
        codes = stored - offset.repeat_interleave(page // offset.shape[2], 2)
        q = query[..., : stored_side.head_dim].double().abs()
        moved = eps * float((q.flatten(0, 2) @ codes.abs().flatten(0, 2).mT).max())
        moved += (
            2.0**-25 * top * stored_side.head_dim * 2 * float(query.abs().max())
        )  # of subnormal products
    allowed = (2 * scale * moved + 3 * eps) * largest
    assert float((out.double() - expected).abs().max()) <= allowed
    assert allowed < 0.05 * largest
