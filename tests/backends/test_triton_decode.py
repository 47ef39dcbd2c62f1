"""The Triton decode kernel in the interpreter, against an fp64 softmax over decoded tokens (see paged_inputs)."""

from dataclasses import replace
from functools import partial

import interpreter
import pytest
import torch
from interpreter import attend, attend_with_ptx, call, needs_interpreter
from paged_inputs import ROWS, assert_within, check, exact_attention, make_kv, make_query
from rounding import Rounding

from kv_hf.backends.base import AttentionCall
from kv_hf.formats import format_names

pytestmark = needs_interpreter

# a program per row, kv head, split and block of columns: most cases have one kv head, and two where heads are told
# apart: groups and chunks, splits, masks and sink logits of heads, permuted pages, strides
FEW = [(3, 5), (0, 2)]  # pages and exact tokens of each row, for cases that need no more
FP32 = torch.float32


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def check_kernel(query, kv, kernel=attend, **options):

    def called(*args, **given):
        return call(kernel, *args, **given)

    return check(query, kv, called, Rounding.of("triton", query.dtype), **options)


def check_splits(query, kv, splits, **options):
    return check_kernel(query, kv, partial(attend, splits=splits), **options)


# -- formats and sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", format_names("keys", "values"))
@pytest.mark.parametrize("keys", format_names("keys", "values"))
def test_decode_reads_every_pair_of_formats(keys, values):
    kv = make_kv(keys, values, rows=FEW, heads=1)
    check_kernel(make_query(kv, 3, dtype=FP32), kv)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, slow(192), slow(256)])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_decode_takes_every_head_dim(name, head_dim):
    kv = make_kv(name, key_dim=head_dim, rows=FEW, heads=1)
    check_kernel(make_query(kv, 1, dtype=FP32), kv)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 64), (64, 128), (80, 32)])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_decode_takes_keys_and_values_of_different_dims(name, key_dim, value_dim):
    kv = make_kv(name, key_dim=key_dim, value_dim=value_dim, rows=FEW, heads=1)
    assert check_kernel(make_query(kv, 1, dtype=FP32), kv).shape[-1] == value_dim


@pytest.mark.parametrize("page", [32, 64, 128, slow(256)])
@pytest.mark.parametrize("name", ["exact", "int8", "int4", "int2"])
def test_decode_takes_every_page_size(name, page):
    """Pages of 128 tokens are two tiles, and four where the keys' scales change every 32 tokens (int2)."""
    kv = make_kv(name, page=page, slots=page + 20, rows=[(3, page + 7), (0, 2)], heads=1)
    check_kernel(make_query(kv, 3, dtype=FP32), kv)


@pytest.mark.parametrize("group", [1, slow(2), 3, slow(4), 8])
@pytest.mark.parametrize("q_len", [1, 3, 16])
def test_decode_takes_every_group_and_chunk(q_len, group):
    """8 heads of 16 queries are four blocks of 32 columns; 3 of 3 leave columns unused."""
    kv = make_kv("int4", rows=FEW, heads=1 if group * q_len > 64 else 2)
    check_kernel(make_query(kv, q_len, group, FP32), kv)


GROUPS = {
    "key-groups-of-a-tile": {"key_group": 16, "page": 64},
    "key-groups-below-a-tile": {"key_group": 8, "page": 32},
    "value-groups-of-part-of-a-run": {"value_group": 16},
    "value-groups-of-a-run": {"value_group": 32},
    "value-groups-across-runs": {"value_group": 8},
}


@pytest.mark.parametrize("sizes", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("name", ["int4", "int2"])
def test_decode_takes_every_group_size(name, sizes):
    kv = make_kv(name, rows=FEW, heads=1, **{"slots": 80, **sizes})
    check_kernel(make_query(kv, 1, dtype=FP32), kv)


MIXED = ("int2_mixed", "int4_mixed")
ROTATED = ("int2_rotated", "int3_rotated", "int4_rotated")
PAIRS = [*((keys, "exact") for keys in MIXED), *(("int4", values) for values in ROTATED)]


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, slow(256)])
@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_decode_reads_mixed_keys_and_rotated_values(keys, values, head_dim):
    """Rotated blocks of 16 to 128 channels, which at 80 and 96 lie across the runs of a byte."""
    group = None if values == "exact" else head_dim
    options = {"rows": FEW, "heads": 2 if keys in MIXED else 1, "shuffle": 1, "poison": True}
    kv = make_kv(keys, values, key_dim=head_dim, value_group=group, **options)
    check_kernel(make_query(kv, 1, dtype=FP32), kv)


@pytest.mark.parametrize(
    ("keys", "values", "sizes"),
    [
        *((k, "exact", {"page": 32, "slots": 50, "key_group": g}) for k in MIXED for g in (8, 16)),
        *(
            ("exact", v, {"key_dim": 80 if g == 40 else 64, "value_group": g})
            for v in ROTATED
            for g in (16, 8, 40)
        ),
    ],
)
def test_decode_reads_mixed_keys_and_rotated_values_in_groups(keys, values, sizes):
    kv = make_kv(keys, values, rows=FEW, heads=1, **sizes)
    check_kernel(make_query(kv, 3, dtype=FP32), kv)


# -- splits, rows, padding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 2, slow(5), 16])
@pytest.mark.parametrize("name", ["exact", "int4"])
def test_decode_does_not_depend_on_its_splits(name, splits):
    """16 splits are more than any row has pages: most are empty, and their partial results stay unwritten."""
    few = {} if splits < 16 else {"rows": ROWS[::2], "heads": 1}
    kv = make_kv(name, **few)
    check_splits(make_query(kv, 3, dtype=FP32), kv, splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_decode_gives_zeros_to_rows_and_queries_without_tokens(splits):
    """Row 4 is empty; row 2 has 3 tokens for a chunk of 16 queries."""
    kv = make_kv("int8", heads=1, poison=True)
    out = check_splits(make_query(kv, 16, dtype=FP32), kv, splits)
    assert torch.equal(out[4], torch.zeros_like(out[4]))
    assert torch.equal(out[2, :, :13], torch.zeros_like(out[2, :, :13]))
    assert bool((out[2, :, 13:].abs().sum((0, 2)) > 0).all())


@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_decode_takes_a_cache_without_any_page(name):
    """Neither in the table nor in storage: nothing of either may be read."""
    kv = make_kv(name, rows=[(0, 7), (0, 0), (0, 1)], heads=1)
    empty = [{n: t[:0] for n, t in pages.items()} for pages in (kv.key_pages, kv.value_pages)]
    kv = replace(kv, key_pages=empty[0], value_pages=empty[1])
    assert kv.block_table.shape[1] == 0
    check_kernel(make_query(kv, 3, dtype=FP32), kv)


def test_decode_reads_no_page_for_a_split_without_tiles():
    """Page 0 is nobody's and nan: a split that reads ahead where it has nothing to do would spread it."""
    kv = make_kv("int4", rows=[(0, 7), (2, 5)])
    moved = [
        {
            n: torch.cat([torch.full_like(t[:1], float("nan") if n != "codes" else 0), t])
            for n, t in pages.items()
        }
        for pages in (kv.key_pages, kv.value_pages)
    ]
    kv = replace(kv, key_pages=moved[0], value_pages=moved[1], block_table=kv.block_table + 1)
    check_splits(make_query(kv, 3, dtype=FP32), kv, 8)


@pytest.mark.parametrize("name", format_names("keys", "values"))
@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
def test_decode_never_reads_unused_slots_and_pages(name, masked):
    """Unused slots, pages that nobody holds and table entries past a row's pages change no bit of the result."""
    options = {"softcap": 20.0, "sink_logits": torch.zeros(2), "softmax_scale": 0.125}
    outs = []
    for poison in (False, True):
        kv = make_kv(name, heads=1, poison=poison, shuffle=0)
        mask = torch.zeros(1, 1, 3, kv.seen) if masked else None
        outs.append(
            call(attend, AttentionCall(make_query(kv, 3, dtype=FP32), kv, mask=mask, **options))
        )
    assert bool(kv.residual_keys.isnan().any())
    assert bool(outs[1].isfinite().all())
    assert torch.equal(*outs)


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_decode_of_one_query_needs_no_mask_on_a_preallocated_cache(splits):
    """A table as wide as the room, of which each row holds a part; `seen` columns that most rows do not reach."""
    kv = make_kv("int4", heads=1, poison=True, more_padding=40)
    table = kv.block_table[:, -1:].repeat(1, 40)
    table[:, : kv.block_table.shape[1]] = kv.block_table
    kv = replace(kv, block_table=table)
    check_splits(make_query(kv, 1, dtype=FP32), kv, splits)


def test_decode_gives_a_view_of_tokens_with_their_heads_side_by_side():
    kv = make_kv("int4", rows=FEW)
    out = call(attend, AttentionCall(make_query(kv, 3, dtype=FP32), kv, 0.125))
    assert out.transpose(1, 2).is_contiguous()


def test_decode_is_the_same_for_permuted_page_ids():
    outs = []
    for shuffle in (0, 1):
        kv = make_kv("int4", shuffle=shuffle)
        outs.append(call(attend, AttentionCall(make_query(kv, dtype=FP32), kv, 0.125)))
    assert torch.equal(*outs)


@pytest.mark.parametrize("sinks", [0, 1, 20])
def test_decode_puts_the_sinks_in_front_of_the_pages(sinks):
    kv = make_kv("exact", rows=[(3, 30), (2, 21), (0, 5)], heads=1, sinks=sinks)
    check_kernel(make_query(kv, 16, dtype=FP32), kv)


def test_decode_takes_queries_of_any_strides():
    kv = make_kv("int4", rows=FEW)
    query = make_query(kv, 3, dtype=FP32)
    moved = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert not moved.is_contiguous()
    outs = [call(attend, AttentionCall(q, kv, 0.125)) for q in (query, moved)]
    assert torch.equal(*outs)


# -- sliding windows, masks, softcap, sink logits ----------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize("window", [1, 7, slow(16), 30, slow(90), 1000])
def test_decode_sees_a_sliding_window(window, masked):
    kv = make_kv("exact", heads=1)
    mask = torch.ones(1, 1, 3, kv.seen).tril(kv.seen - 3).bool() if masked else None
    check_kernel(make_query(kv, 3, dtype=FP32), kv, mask=mask, sliding_window=window)


def random_mask(kv, kind, shape):
    mask = torch.rand(*shape, kv.seen, generator=torch.Generator().manual_seed(7))
    if kind == "bool":
        return mask > 0.4
    additive = 3 * mask - 1
    if kind == "lowest":
        return additive.masked_fill(mask < 0.2, torch.finfo(torch.float32).min)
    return additive.masked_fill(mask < 0.2, float("-inf")) if kind == "float-inf" else additive


@pytest.mark.parametrize("shape", [(1, 1, 3), (5, 1, 3), (1, 4, 3), (5, 4, 3)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "float-inf", "lowest"])
def test_decode_applies_masks(kind, shape):
    kv = make_kv("int4", heads=2 if shape[1] > 1 else 1, more_padding=3)
    check_kernel(make_query(kv, 3, dtype=FP32), kv, mask=random_mask(kv, kind, shape))


def test_decode_reads_the_first_columns_of_a_mask_that_is_too_wide():
    kv = make_kv("int4", rows=FEW)
    query = make_query(kv, 3, dtype=FP32)
    wide = random_mask(kv, "bool", (2, 4, 3))
    wide = torch.cat([wide, torch.ones(2, 4, 3, 11).bool()], -1)
    out = call(attend, AttentionCall(query, kv, 0.125, mask=wide))
    narrow = wide[..., : kv.seen].contiguous()
    assert torch.equal(out, call(attend, AttentionCall(query, kv, 0.125, mask=narrow)))


def test_decode_averages_where_a_mask_holds_only_the_lowest_number():
    """finfo.min everywhere is the same for all tokens: softmax gives their mean, not zeros.

    With more splits it is the mean of the splits' means: beside such a number a log-sum-exp has no room for counts.
    """
    kv = make_kv("exact", rows=FEW)
    mask = torch.full((1, 1, 1, kv.seen), torch.finfo(FP32).min)
    out = check_splits(make_query(kv, dtype=FP32), kv, 1, mask=mask)
    assert bool((out.abs().sum((1, 2, 3)) > 0).all())


def test_decode_gives_zeros_where_the_mask_hides_everything():
    kv = make_kv("int8", heads=1)
    mask = torch.ones(1, 1, 3, kv.seen).bool()
    mask[:, :, 1] = False
    out = check_kernel(make_query(kv, 3, dtype=FP32), kv, mask=mask)
    assert torch.equal(out[:, :, 1], torch.zeros_like(out[:, :, 1]))


@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_decode_caps_the_scores_before_the_mask(softcap, kind):
    kv = make_kv("int8", rows=FEW, heads=1)
    mask = None if kind is None else random_mask(kv, kind, (1, 1, 3))
    check_kernel(make_query(kv, 3, dtype=FP32), kv, mask=mask, softcap=softcap)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("size", [1.0, 30.0, -30.0, float("-inf")])
def test_decode_adds_sink_logits_to_the_denominator(size, splits):
    kv = make_kv("int8", rows=[*FEW, (0, 0)])
    logits = size * torch.linspace(0.5, 1.5, 4)
    out = check_splits(make_query(kv, 3, dtype=FP32), kv, splits, sink_logits=logits)
    assert torch.equal(out[2], torch.zeros_like(out[2]))


def test_decode_takes_all_options_together():
    kv = make_kv("int4", "int8", key_dim=128, value_dim=64, shuffle=3, poison=True, rows=FEW)
    check_kernel(
        make_query(kv, 16, group=4, dtype=FP32),
        kv,
        mask=random_mask(kv, "float-inf", (2, 8, 16)),
        softcap=8.0,
        sliding_window=40,
        sink_logits=torch.linspace(-2, 2, 8),
    )


# -- numbers -----------------------------------------------------------------------------------------------------


def test_decode_survives_scores_that_overflow_exp():
    kv = make_kv("exact", heads=1)
    out = check_kernel(make_query(kv, 3, dtype=FP32) * 400, kv)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("size", [1e-20, 1e20], ids=str)
def test_decode_keeps_queries_in_range(size):
    """Queries are brought near 1 by a power of two: without it their squares leave fp32's range."""
    kv = make_kv("int4", rows=FEW)
    query = make_query(kv, dtype=FP32)
    out = call(attend, AttentionCall(query * size, kv, 0.125 / size))
    assert_within(out, *exact_attention(query, kv, 0.125, Rounding.of("triton", FP32)))


# -- what only NVIDIA GPUs run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "values", "isa"),
    [
        *((name, name, isa) for name in format_names("keys", "values") for isa in (80, 90)),
        *((keys, "int4", 90) for keys in MIXED),
        *(("int4", values, 90) for values in ROTATED),
    ],
)
def test_decode_with_ptx_errs_no_more_than_float16(keys, values, isa):
    """The NVIDIA branch: PTX unpacking, codes as float16 subnormals, scales as powers of two, float16 products."""
    options = {"heads": 1, "dtype": torch.float16, "rows": [(5, 0), (2, 0), (3, 2)], "sinks": 0}
    kv = make_kv(keys, values, value_group=64 if values in ROTATED else None, **options)
    query = make_query(kv, 3, dtype=torch.float16)
    check_kernel(query, kv, partial(attend_with_ptx, isa=isa))


@pytest.mark.parametrize("sizes", [(1e-4, 1e-4), (1e3, 1e3), (1e-4, 1e3)], ids=str)
@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "int2"])
def test_decode_with_ptx_keeps_small_and_large_numbers_in_float16(name, sizes):
    """Weights times the scales of small values vanish in float16 unless they are scaled up, and large ones overflow."""
    key_size, value_size = sizes
    kv = make_kv(name, heads=1, dtype=torch.float16, rows=[(6, 0)], sinks=0)
    for fields, size in ((kv.key_pages, key_size), (kv.value_pages, value_size)):
        for field in ("scale", "offset"):
            if field in fields:
                fields[field].copy_((fields[field].float() * size).half())
    query = make_query(kv, 1, dtype=torch.float16)
    scale = 0.1 / max(key_size, 1.0)
    out = call(attend_with_ptx, AttentionCall(query, kv, scale), isa=90)
    assert_within(out, *exact_attention(query, kv, scale, Rounding.of("triton", torch.float16)))


@pytest.mark.parametrize("bits", [2, 4, 8], ids=str)
def test_ptx_unpacks_every_byte(bits):
    assert call(interpreter.unpack_every_byte, bits)
