"""The Triton decode kernels in the interpreter, of keys and values and of latents, against an fp64 softmax over decoded tokens.

CASES is one table (see paged_inputs): what pages hold, what the queries ask for, and in how many splits.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from unittest.mock import patch

import paged_inputs
import pytest
import torch
from harness import slow_but
from paged_inputs import (
    PLAIN,
    ROWS,
    assert_within,
    exact_attention,
    latent_spec,
    make_kv,
    make_latents,
    make_query,
)
from rounding import Rounding
from triton_machine import attend, call, compiled_pairs, runs_kernels, skip_where

from kv_hf.backends.base import AttentionCall
from kv_hf.formats import format_names
from kv_hf.spec import ROWS as ROWS_LAYOUT

pytestmark = runs_kernels

# a program per row, kv head, split and block of columns: most cases have one kv head, and two where heads are told
# apart: groups and chunks, splits, masks and sink logits of heads, permuted pages, strides
FEW = [(3, 5), (0, 2)]  # pages and exact tokens of each row, for cases that need no more
FP32 = torch.float32
NAMES = format_names("keys", "values")
MIXED = ("int3", "int4")  # keys of several widths
ROTATED = ("int2", "int3", "int4")  # values
PAIRS = [*((keys, "exact") for keys in MIXED), *(("plain4", values) for values in ROTATED)]


def check(query, kv, splits=2, kernel=attend, **options):
    """Compare with fp64: no error beyond what rounding in this kernel explains."""

    def called(*args, **given):
        return call(kernel, *args, splits=splits, **given)

    return paged_inputs.check(query, kv, called, Rounding.of("triton", query.dtype), **options)


def pages(keys="int4", values=None, *, q_len=3, group=2, times=1, **held):
    """Keys and values of one head and few rows, and queries that are `times` as large as usual."""
    kv = make_kv(keys, values, **{"rows": FEW, "heads": 1, **held})
    return times * make_query(kv, q_len, group, FP32), kv


HELD = {"rows", "slots", "more_padding", "sinks"}  # of what `filled` takes


def latents(name="int4", *, q_len=3, heads=3, k_rope=None, **given):
    """Latents of few rows, and queries of some heads for them."""
    held = {"rows": FEW, "slots": 40} | {key: given.pop(key) for key in HELD & set(given)}
    spec = latent_spec(name, k_rope, **{"dtype": FP32, "layout": ROWS_LAYOUT, **given})
    kv = make_latents(spec, **held)
    return make_query(kv, q_len, heads, spec.keys.dtype), kv


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


def case(made, splits=2, **options):
    """Return a case: what makes queries and pages, splits, and options, of which functions get the pages."""
    return made, splits, options


def formats():
    for keys, values in product(NAMES, NAMES):
        yield case(partial(pages, keys, values, poison=True))
    for name, dim in product((*NAMES, *PLAIN), (16, 64, 80, 96, 128)):
        yield case(partial(pages, name, key_dim=dim, q_len=1))
    for name, (key_dim, value_dim) in product(NAMES, ((128, 64), (64, 128), (80, 32))):
        yield case(partial(pages, name, key_dim=key_dim, value_dim=value_dim, q_len=1))


def sizes():
    """Pages of 128 tokens are two tiles, and four where the keys' scales change every 32 tokens (plain2).

    8 heads of 16 queries are four blocks of 32 columns; 3 of 3 leave columns unused.
    """
    for name, page in (
        ("exact", 32),
        ("int8", 64),
        ("plain4", 128),
        ("plain2", 128),
        ("int4", 128),
    ):
        held = {"page": page, "slots": page + 20, "rows": [(3, page + 7), (0, 2)]}
        yield case(partial(pages, name, **held))
    for group, q_len in ((1, 16), (3, 3), (8, 1), (8, 16)):
        yield case(partial(pages, q_len=q_len, group=group))
    groups = [{"key_group": 8, "page": 32}, {"value_group": 32}, {"value_group": 8}]
    for name, given in product(("int6", *PLAIN), groups):
        yield case(partial(pages, name, q_len=1, **{"slots": 80, **given}))


def mixed_and_rotated():
    """Rotated blocks of 16 to 128 channels, which at 80 and 96 lie across the runs of a byte."""
    for (keys, values), dim in product(PAIRS, (16, 48, 64, 80, 96, 128)):
        held = {"key_dim": dim, "value_group": None if values == "exact" else dim}
        held |= {"heads": 2 if keys in MIXED else 1, "shuffle": 1, "poison": True, "q_len": 1}
        yield case(partial(pages, keys, values, **held))
    for keys, group in product(MIXED, (8, 16)):
        yield case(partial(pages, keys, "exact", page=32, slots=50, key_group=group))
    for values, group in product((*ROTATED, "around0"), (16, 8, 40)):
        dim = 80 if group == 40 else 64
        yield case(partial(pages, "exact", values, key_dim=dim, value_group=group))


def rows_and_splits():
    """16 splits are more than any row has pages: most are empty, and their partial results stay unwritten."""
    for name, splits in product(("exact", "int4"), (1, 2, 16)):
        few = {"rows": ROWS[::2]} if splits == 16 else {"rows": ROWS, "heads": 2}
        yield case(partial(pages, name, **few), splits)
    for sinks in (0, 1, 20):
        held = {"rows": [(3, 30), (2, 21), (0, 5)], "sinks": sinks, "q_len": 16}
        yield case(partial(pages, "exact", **held))
    # an empty row, and one of 3 tokens for a chunk of 16 queries
    for splits in (1, 3):
        yield case(partial(pages, "int8", rows=ROWS, poison=True, q_len=16), splits)


def options():
    for window, mask in product((1, 7, 30, 1000), (None, causal)):
        yield case(partial(pages, "exact", rows=ROWS), sliding_window=window, mask=mask)
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


def latents_of_every_kind():
    """Places of a word lie in one token group or in several, and the words of small pages fill no tile alone."""
    for name in format_names("latent"):
        yield case(partial(latents, name))
    for name, k_rope in (("int4", "exact"), ("exact", "int8")):
        yield case(partial(latents, name, k_rope=k_rope))
    few = [
        ("exact", 64, None),
        ("int8", 64, None),
        ("int4", 64, None),
        ("int4", 64, 16),
        ("int2", 64, None),
        ("int2", 128, None),
    ]
    for name, page, tokens in few:
        yield case(partial(latents, name, page=page, tokens=tokens, slots=page + 26, q_len=1))
    for given in (
        {"rope": 0},
        {"rank": 240},
        {"rank": 8, "rope": 8},
        {"rank": 128, "page": 64, "slots": 90},
    ):
        yield case(partial(latents, "int4", q_len=1, **given))
    yield case(partial(latents, "int8", q_len=1, group=16))
    for splits in (1, 9):
        yield case(partial(latents, "int4", rows=ROWS), splits)
    yield case(partial(latents, "int8", heads=7))


def latents_with_options():
    """A page of 64 tokens is a tile of several places, whose tokens lie apart."""
    for kind, page in (("bool", 16), ("float-inf", 16), ("bool", 64)):
        held = {"page": page, "slots": page + 24, "rows": ROWS[:3], "more_padding": 3}
        yield case(partial(latents, "int2", **held), mask=random_mask(kind, 3, 1, 3))
    for window in (1, 30):
        yield case(partial(latents, "int4", rows=ROWS[:2]), 1, sliding_window=window)
    yield case(partial(latents, "int4", rows=ROWS[:2]), softcap=0.7)
    for splits in (1, 2):
        yield case(partial(latents, "int8"), splits, sink_logits=torch.linspace(-1, 2, 3))


CASES = (
    formats, sizes, mixed_and_rotated, rows_and_splits, options, latents_of_every_kind, latents_with_options,
)  # fmt: skip


@pytest.mark.parametrize("cases", CASES, ids=lambda value: value.__name__)
def test_decode_is_the_definition(cases):
    for made, splits, options in cases():
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
            n: torch.cat([torch.full_like(t[:1], float("nan") if t.is_floating_point() else 0), t])
            for n, t in one.items()
        }
        for one in (kv.key_pages, kv.value_pages)
    ]
    kv = replace(kv, key_pages=moved[0], value_pages=moved[1], block_table=kv.block_table + 1)
    check(query, kv, 8)


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
    kv = make_kv(keys, values, **options)
    check(make_query(kv, 3, dtype=torch.float16), kv)


def check_scaled(query, kv, key_size, value_size):
    """Compare where the numbers of pages are as many times as large."""
    for fields, size in ((kv.key_pages, key_size), (kv.value_pages, value_size)):
        for field in {"scale", "offset"} & set(fields):
            fields[field].copy_((fields[field].float() * size).half())
    scale = 0.1 / max(key_size, 1.0)
    out = call(attend, AttentionCall(query, kv, scale))
    assert_within(out, *exact_attention(query, kv, scale, Rounding.of("triton", query.dtype)))


@pytest.mark.compiled
@pytest.mark.parametrize("sizes", [(1e-4, 1e-4), (1e3, 1e3), (1e-4, 1e3)], ids=str)
@pytest.mark.parametrize("name", slow_but(["int4"], ["int4", "fp8", "int8", "int2", *PLAIN]))
def test_compiled_decode_keeps_small_and_large_numbers_in_float16(name, sizes):
    """Weights times the scales of small values vanish in float16 unless they are scaled up, and large ones overflow."""
    kv = make_kv(name, heads=1, dtype=torch.float16, rows=[(6, 0)], sinks=0)
    check_scaled(make_query(kv, 1, dtype=torch.float16), kv, *sizes)


QUICK = [(name, 64) for name in ("int4", "int2", "int8", "fp8", "exact")]
OTHERS = product(("int4", "int2", "fp8", "int8"), (16, 128, 256))


@pytest.mark.compiled
@pytest.mark.parametrize(("name", "page"), slow_but(QUICK, [*QUICK, *OTHERS]), ids=str)
@pytest.mark.parametrize("size", slow_but([1.0], [1.0, 1e-3, 1e3]), ids=str)
def test_compiled_decode_of_latents_errs_no_more_than_float16(name, page, size):
    """The NVIDIA branch: codes as float16 subnormals, units as powers of two, products in float16."""
    query, kv = latents(name, page=page, dtype=torch.float16, rows=[(3, 0), (1, 2)], sinks=0)
    check_scaled(query, kv, size, size)


# -- faults that the emulated GPU sees -----------------------------------------------------------------------------------

# edits of the kernel's PTX: what is told of it
FAULTS = {
    "none": (lambda text: text, None),
    "no-barriers": (lambda text: text.replace("bar.sync", "// bar.sync"), "without a barrier|nobody wrote"),
    "no-wait": (lambda text: text.replace("cp.async.wait_group", "// cp.async.wait_group"), "wait_group missing"),
    "rows-in-one-place": (lambda text: text.replace("%nctaid.y", "0"), "global memory that program . wrote"),
}  # fmt: skip


@pytest.mark.compiled
def test_faults_of_the_decode_kernel_are_noticed():
    """Without that, tests of compiled kernels could not fail where a GPU only sometimes does."""
    skip_where(False, "a GPU carries out no edited PTX")
    import emulated_gpu
    import ptx

    query, kv = pages(q_len=1, rows=[(9, 3), (5, 2)], dtype=torch.float16)
    asked, kernel = AttentionCall(query.half(), kv, 0.1), ptx.Kernel
    for edit, told in FAULTS.values():
        emulated_gpu.compiled.cache_clear()
        with patch.object(ptx, "Kernel", lambda text, edit=edit: kernel(edit(text))):
            if told is None:
                call(attend, asked, splits=3)
                continue
            with pytest.raises(AssertionError, match=told):
                call(attend, asked, splits=3)
    emulated_gpu.compiled.cache_clear()
    kv.block_table[0, 4] = len(kv.key_pages["codes"]) + 1000
    with pytest.raises(ptx.PtxError, match="out of bounds"):
        call(attend, asked)
