"""The choice of pages in Triton: in the interpreter against the reference, and compiled."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from harness import slow, slow_but
from paged_inputs import make_kv, make_query
from rounding import WALK
from test_choose_pages import by_index, words_of
from triton_machine import call, choose, runs_kernels

from kv_hf.backends.base import AttentionCall
from kv_hf.backends.reference import selection as reference
from kv_hf.quant.codec import decode
from kv_hf.read_budget import ReadBudget

FORMATS = ("exact", "fp8", "int8", "int6", "plain4", "plain2", "int4", "int3")
ROWS = [(21, 7), (9, 20), (0, 3), (0, 0), (2, 6)]
SOME = ReadBudget(pages=5, from_tokens=64)
SCALE = 0.2
BF16 = torch.bfloat16


def kv_of(keys, budget=SOME, rows=ROWS, **options):
    options = {"value_dim": 16, "poison": True, "shuffle": 1} | options
    return replace(make_kv(keys, "exact", rows=rows, **options), budget=budget)


def score_error(asked):
    """How far rounding may move any score of pages."""
    kv, query = asked.kv, asked.query.float()
    spec = kv.spec.keys
    held = torch.cat([kv.block_table[row, :count] for row, count in enumerate(kv.num_pages)]).long()
    fields = {name: tensor[held] for name, tensor in kv.key_pages.items()}
    size = decode(fields, spec, torch.float32).abs().amax((0, 2))  # [heads, channels]
    if "offset" in fields:  # codes and offsets are summed apart
        size = size + 2 * fields["offset"].float().abs().amax((0, 2, 3))[:, None]
    heads, group = size.shape[0], query.shape[1] // size.shape[0]
    terms = query.abs() * size.repeat_interleave(group, 0)[None, :, None]
    assert heads * group == query.shape[1]
    # sums are in float32. Queries of 16 bits are multiplied by codes in float16: their products with scales, and the
    # middles, are rounded to it
    unit = 2.0**-24 * (WALK * spec.head_dim**0.5 + 8)
    if asked.query.dtype != torch.float32 and not spec.scheme.is_exact:
        unit += 2 * 2.0**-11
    return float(terms.sum(-1).max()) * abs(asked.softmax_scale) * unit


def check(asked, kernel=choose, whole=None):
    """Masses are the reference's within rounding, and the choice follows from them. Returns the choice.

    whole: the call over whole pages, where `asked` has an index of them.
    """
    kv = asked.kv
    table, counts, mass = call(kernel, asked)
    wanted = reference.page_mass(asked)
    weighed = torch.isfinite(mass[:, :1])  # the others were not scored
    held = (torch.arange(kv.block_table.shape[1]) < kv.num_pages[:, None]) & weighed
    # a page's mass errs as its score does, and as the sum of all does
    error = torch.expm1(torch.tensor(4 * score_error(whole or asked)))
    assert error < 0.5
    allowed = error * wanted + 2.0**-40
    assert ((mass - wanted).abs() <= allowed)[held].all()
    chosen = reference.choose_by_mass(torch.where(held, mass, 0.0), kv)
    assert torch.equal(counts, chosen[1])
    assert torch.equal(table, chosen[0])
    return table, counts


SIZES = [(keys, 64) for keys in FORMATS] + [("exact", 128), ("plain4", 80), ("int4", 128)]
OTHER_SIZES = [
    (keys, dim)
    for keys in FORMATS
    for dim in (16, 48, 80, 96, 128, 256)
    if (keys, dim) not in SIZES
]


@runs_kernels
@pytest.mark.parametrize(
    ("keys", "dim"),
    slow_but(SIZES, SIZES + OTHER_SIZES),
)
def test_choice_is_the_references(keys, dim):
    """By whole pages, and by an index of pages that live outside: the words that are read, and middles.

    Pages that no row holds, and slots without a token, hold nan. Plans of both are kept apart.
    """
    kv = kv_of(keys, key_dim=dim)
    whole = AttentionCall(make_query(kv, dtype=torch.float32), kv, SCALE)
    for asked in (replace(whole, kv=by_index(kv, words_of(kv))), whole):
        _, counts = check(asked, whole=whole)
        assert counts.tolist() == [5, 5, 0, 0, 2]


PAGES = [
    ("plain4", {"page": 64, "slots": 80}), ("int8", {"page": 128, "slots": 140}), ("exact", {"page": 32, "slots": 50}),
    ("plain2", {"page": 16, "key_group": 8}), ("int3", {"page": 32, "slots": 50, "key_group": 16}),
    ("int4", {"page": 32, "slots": 50, "key_group": 8}),
]  # fmt: skip


@runs_kernels
def test_choice_of_every_page_size_group_and_dtype():
    """Queries of 16 bits not in bfloat16, of which the interpreter multiplies the bits."""
    for keys, options in PAGES:
        kv = kv_of(keys, rows=[(19, 3), (7, 9)], heads=1, **options)
        check(AttentionCall(make_query(kv, dtype=torch.float32), kv, SCALE))
    for keys in ("exact", "plain4", "int4"):
        kv = kv_of(keys, dtype=torch.float16)
        check(AttentionCall(make_query(kv, dtype=torch.float16), kv, 0.05))


@runs_kernels
@pytest.mark.compiled
@pytest.mark.parametrize("keys", slow_but(("fp8", "plain4", "int4"), FORMATS))
def test_compiled_choice_is_the_references(keys):
    kv = kv_of(keys, dtype=torch.float16, rows=[(9, 7), (2, 6)], heads=1)
    check(AttentionCall(make_query(kv, dtype=torch.float16), kv, 0.05))


OPTIONS = [
    {"q_len": 3}, {"q_len": 16, "group": 4}, {"group": 7}, {"group": 20}, {"softcap": 3.0}, {"sinks": True},
    {"softcap": 5.0, "sinks": True, "q_len": 2},
]  # fmt: skip


@runs_kernels
@pytest.mark.parametrize("splits", slow_but([4], [4, 1]))
def test_choice_with_every_option(splits):
    kv = kv_of("int4")
    for options in OPTIONS:
        shape = options.get("q_len", 1), options.get("group", 2)
        query = make_query(kv, *shape, dtype=torch.float32)
        logits = torch.linspace(-2, 6, query.shape[1]) if "sinks" in options else None
        asked = AttentionCall(query, kv, SCALE, softcap=options.get("softcap"), sink_logits=logits)
        check(asked, partial(choose, splits=splits))


BUDGETS = [
    ReadBudget(pages=1), ReadBudget(share=0.29), ReadBudget(share=1 / 3, pages=6),
]  # fmt: skip


@runs_kernels
def test_every_budget():
    for budget in BUDGETS:
        kv = kv_of("int4", replace(budget, from_tokens=0))
        check(AttentionCall(make_query(kv, dtype=torch.float32), kv, 1.0))
    # the first row is as long as a text has to be, the second a token shorter
    short = ReadBudget(pages=3, from_tokens=21 * 16 + 7)
    kv = kv_of("int4", short, rows=[(21, 7), (21, 6), (4, 0)])
    _, counts = check(AttentionCall(make_query(kv, dtype=torch.float32), kv, SCALE))
    assert counts.tolist() == [3, 21, 4]
    # 0.29 * 100 is 28.999.. in float64 and 29 in float32
    kv = kv_of("int4", ReadBudget(share=0.29, from_tokens=0), rows=[(100, 1), (50, 0)], heads=1)
    _, counts = check(AttentionCall(make_query(kv, dtype=torch.float32), kv, SCALE))
    assert counts.tolist() == [int(0.29 * 100), int(0.29 * 50)]


@runs_kernels
@pytest.mark.parametrize("budget", [SOME, ReadBudget(share=0.9, from_tokens=0)], ids=str)
def test_pages_without_mass(budget):
    """Most masses vanish in float32: the first of these fill up what the budget leaves."""
    kv = kv_of("int4", budget, rows=[(40, 7), (9, 20)])
    table, counts, mass = call(choose, AttentionCall(make_query(kv, dtype=torch.float32), kv, 60.0))
    assert (mass[0] == 0).sum() > 20
    mass = torch.where(torch.isfinite(mass), mass, 0.0)
    expected = reference.choose_by_mass(mass, kv)
    assert torch.equal(counts, expected[1])
    assert torch.equal(table, expected[0])


@runs_kernels
@pytest.mark.parametrize("budget", [ReadBudget(pages=900), slow(ReadBudget(share=0.8))], ids=str)
def test_more_pages_than_are_counted_at_once(budget):
    kv = kv_of("int4", replace(budget, from_tokens=0), rows=[(2100, 3)], heads=1, key_dim=32)
    check(AttentionCall(make_query(kv, dtype=torch.float32), kv, SCALE), partial(choose, splits=5))


# -- launches ----------------------------------------------------------------------------------------------------


def test_a_step_launches_two_kernels_more_and_compiles_them_once(gpu):
    """While a sequence grows from 4k to 32k tokens."""
    from kv_hf.backends.dispatch import paged_attention

    kv = kv_of("int4", ReadBudget(pages=30), rows=[(3, 5)], dtype=BF16, poison=False)
    query = make_query(kv, dtype=BF16)
    for width in (*range(256, 900, 61), 1024, 2048):
        table = kv.block_table[:, :1].repeat(1, width)
        grown = replace(kv, block_table=table, seen=16 * width)
        paged_attention(AttentionCall(query, grown, SCALE), "triton")
        paged_attention(AttentionCall(query, replace(grown, seen=4095), SCALE), "triton")
    attending = ["decode_kernel", "combine_kernel"]
    both = ["score_kernel", "choose_kernel", *attending, *attending]
    assert gpu.names() == both * (len(gpu.launches) // len(both))
    assert gpu.variants == dict.fromkeys(both, 1)


def test_a_choice_reads_no_number_of_the_device(gpu, monkeypatch):
    """Not even once: it may be captured in a graph."""
    from kv_hf.backends.triton import selection

    kv = kv_of("int4", rows=[(30, 5)], dtype=BF16, poison=False)
    asked = AttentionCall(make_query(kv, dtype=BF16), kv, SCALE)

    def refuse(*args):
        raise AssertionError("a step waits for the device")

    for name in ("item", "tolist", "__int__", "__bool__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for _ in range(2):
        table, counts = selection.choose_pages(asked)
    assert (table.shape, counts.shape) == ((1, 5), (1,))
    assert (table.dtype, counts.dtype) == (torch.int32, torch.int32)


def test_a_gpu_that_refuses_the_kernel_gets_the_references_choice():
    pytest.importorskip("triton")
    from fake_driver import pretend_gpu

    from kv_hf.backends.triton import selection

    kv = kv_of("int4", rows=[(30, 5)], dtype=BF16, poison=False)
    asked = AttentionCall(make_query(kv, dtype=BF16), kv, SCALE)
    wanted = reference.choose_pages(asked)
    with pretend_gpu(shared_memory=1024) as gpu:
        with pytest.warns(UserWarning, match="chosen by 'reference'.*shared memory"):
            first = selection.choose_pages(asked)
        again = selection.choose_pages(asked)
    assert not gpu.launches
    for found in (first, again):
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
