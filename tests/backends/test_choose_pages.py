"""The choice of the pages that a step reads: the definition against brute force, and the C kernel against the definition."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest
import rounding
import torch
from paged_inputs import make_kv, make_query, needs_library

from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu import library
from kv_hf.backends.cpu.decode import choose_pages as choose_in_c
from kv_hf.backends.dispatch import paged_attention
from kv_hf.backends.reference import selection
from kv_hf.errors import CacheMismatchError
from kv_hf.page_summary import (
    Summary,
    part_bytes,
    part_fields,
    summary_of,
    summary_words,
    turned_by,
    word_channels,
)
from kv_hf.quant.page_parts import part_of, words_to_read
from kv_hf.read_budget import NEWEST_PAGES, ReadBudget
from kv_hf.spec import LANES
from kv_hf.spec import ROWS as ROWS_LAYOUT

# pages and exact tokens: long rows, one below from_tokens, one without pages, one with fewer pages than are read
ROWS = [(37, 11), (50, 20), (0, 17), (9, 16), (3, 19)]
FORMATS = ("exact", "int8", "fp8", "int6", "plain4", "plain2", "int4", "int3")
# relative, of the largest mass of a row: scores of some tens are sums of up to 128 products, each off by 2^-24
ROUNDING = 128 * 40 * 2**-24
# where integers hold coefficients (attend.inc, score_limit): 4 sigma of a score
COARSE = {torch.bfloat16: 4 * 2**-8, torch.float16: 4 * 2**-11}


def long_kv(keys="int4", *, layout=LANES, budget=None, dim=64, **options):
    options = {"rows": ROWS, "page": 16, "slots": 40, "shuffle": 3, "poison": True, **options}
    values = "int4" if keys == "int3" else keys  # 3 bits of 16 tokens fill no words
    kv = make_kv(keys, values, key_dim=dim, layout=layout, **options)
    return replace(kv, budget=budget or ReadBudget(pages=8, from_tokens=200))


def call_of(kv, q_len=1, group=2, dtype=torch.float32, **options):
    query = 2 * make_query(kv, q_len=q_len, group=group, dtype=dtype)
    return AttentionCall(query, kv, kv.spec.query_dim**-0.5, **options)


def places(kv, choice):
    """The places of the pages that were chosen of each row."""
    table, counts = choice
    found = []
    for row, count in enumerate(counts.tolist()):
        held = kv.block_table[row, : int(kv.num_pages[row])].tolist()
        found.append([held.index(page) for page in table[row, :count].tolist()])
    return found


def assert_same_choice(call, choice):
    """The choice is the reference's, up to pages whose masses rounding may exchange, and finds as much mass."""
    expected = places(call.kv, selection.choose_pages(call))
    mass = selection.page_mass(call)
    rounding = ROUNDING + (COARSE.get(call.query.dtype, 0.0) if library.isa() == 3 else 0.0)
    for row, (ours, theirs) in enumerate(zip(places(call.kv, choice), expected, strict=True)):
        assert len(ours) == len(theirs) and ours == sorted(ours)
        only_ours, only_theirs = sorted({*ours} - {*theirs}), sorted({*theirs} - {*ours})
        for one, other in zip(only_ours, only_theirs, strict=True):
            apart = abs(float(mass[row, one] - mass[row, other]))
            assert apart <= rounding * float(mass[row, :50].max())
        assert float(mass[row, ours].sum()) >= 0.99 * float(mass[row, theirs].sum())


# -- the definition --------------------------------------------------------------------------------------------------


def test_rows_below_read_from_are_read_whole_and_the_newest_page_always():
    kv = long_kv(budget=ReadBudget(pages=8, from_tokens=200))
    found = places(kv, selection.choose_pages(call_of(kv)))
    assert [len(row) for row in found] == [8, 8, 0, 9, 3]  # the row of 9 pages has 160 tokens
    for from_tokens, count in ((603, 8), (604, 37)):  # exact tokens count
        some = long_kv(budget=ReadBudget(pages=8, from_tokens=from_tokens))
        assert len(places(some, selection.choose_pages(call_of(some)))[0]) == count
    for row, (pages, _) in enumerate(ROWS):
        assert set(range(max(0, pages - NEWEST_PAGES), pages)) <= set(found[row])


def test_pages_of_most_mass_are_read():
    kv = long_kv()
    mass = torch.zeros(5, 50)
    mass[0, [3, 5, 30]] = torch.tensor([1.0, 3.0, 2.0])

    def chosen(**budget):
        kept = replace(kv, budget=ReadBudget(from_tokens=1, **budget))
        return places(kv, selection.choose_by_mass(mass, kept))

    assert chosen(pages=3)[:2] == [[5, 30, 36], [0, 1, 49]]  # of equals the first
    assert chosen(share=0.11)[0] == [3, 5, 30, 36]


@pytest.mark.parametrize("keys", [name for name in FORMATS if name != "int6"])
def test_words_that_rope_turns_into_each_other(keys):
    for dim in (48, 64, 80, 128):
        spec = long_kv(keys, dim=dim).spec.keys
        words, turn = word_channels(spec), turned_by(spec)
        for at, word in enumerate(words):
            turned = {(channel + dim // 2) % dim for channel in word}
            if turn:
                assert turned == set(words[(at + turn) % len(words)])
            elif not spec.scheme.wide:  # whose places are of any channel
                assert turned == set(word) or turned not in map(set, words)
    assert bool(turn) == (keys in ("exact", "int8", "fp8"))


# -- an index, which holds the words of the keys that a choice reads ------------------------------------------------------


def by_index(kv, words):
    """The same rows over an index of all pages."""
    nothing = {name: one[:0] for name, one in kv.value_pages.items()}
    return replace(
        kv, key_pages=part_of(kv.key_pages, words, kv.spec.keys), value_pages=nothing, words=words
    )


def words_of(kv):
    """Words of one row's pages, as an index fixes them for all rows."""
    if summary_of(kv.spec.keys) is Summary.ALL_CHANNELS:
        return None
    ids = kv.block_table[0, :8].long()
    return words_to_read({name: one[ids] for name, one in kv.key_pages.items()}, kv.spec.keys)


@pytest.mark.parametrize("layout", [LANES, ROWS_LAYOUT])
@pytest.mark.parametrize("keys", FORMATS)
def test_an_index_holds_the_words_that_are_read_and_gives_the_same_masses(keys, layout):
    for dim in (48, 64, 80):
        kv = long_kv(keys, dim=dim, layout=layout, rows=[(8, 20)])  # as many pages as fix the words
        spec, words = kv.spec.keys, words_of(kv)
        part = part_of(kv.key_pages, words, spec)
        fields = {name: (tuple(one.shape[1:]), one.dtype) for name, one in part.items()}
        assert fields == part_fields(spec)
        assert part_bytes(spec) == sum(one[0].nbytes for one in part.values())
        call = call_of(kv, q_len=2)
        indexed = replace(call, kv=by_index(kv, words))
        rounding.assert_close(selection.page_mass(indexed), selection.page_mass(call))
        if words is not None:
            assert words.shape == (spec.num_kv_heads, summary_words(spec))
            assert part["codes"].nbytes < kv.key_pages["codes"].nbytes


# -- the C kernel ----------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", FORMATS)
def test_c_chooses_as_the_reference(keys, dtype):
    """By whole pages and by their index; the packed arguments of both are kept apart."""
    for dim, page, options in (
        (64, 16, {"q_len": 1}),
        (80, 64, {"q_len": 3, "group": 3, "softcap": 20.0}),
        (128, 64, {"q_len": 16, "group": 1, "sink_logits": torch.linspace(-2, 3, 2)}),
    ):
        kv = long_kv(keys, dim=dim, dtype=dtype, page=page, slots=page + 24)
        assert kv.spec.keys.layout == LANES
        call = call_of(kv, dtype=dtype, **options)
        for one in (call, replace(call, kv=by_index(kv, words_of(kv)))):
            assert_same_choice(one, choose_in_c(one))


BUDGETS = [
    ReadBudget(share=0.3, from_tokens=1), ReadBudget(pages=5, share=0.2, from_tokens=1),
    ReadBudget(pages=1, from_tokens=1), ReadBudget(pages=8, from_tokens=10**6),
]  # fmt: skip


@needs_library
def test_c_follows_every_budget_and_group():
    """Groups smaller than a vector had no mass. The words that are read of a page and codes of 3 bits share scratch memory."""
    some = [long_kv("int4", budget=budget) for budget in BUDGETS]
    for group, keys in product((1, 8, 16, 32), ("plain4", "plain2", "int4", "int3")):
        some.append(long_kv(keys, page=64, slots=88, key_group=group))
    options = {"rows": ROWS, "heads": 1, "page": 64, "slots": 88, "layout": LANES}
    wide = make_kv("exact", "int3", key_dim=256, value_dim=64, **options)
    some.append(replace(wide, budget=ReadBudget(pages=8, from_tokens=200)))
    for kv in some:
        assert_same_choice(call_of(kv), choose_in_c(call_of(kv)))


@needs_library
@pytest.mark.parametrize(
    "rows", [[(0, 17)], [(0, 17), (0, 9)], [(0, 30), (3, 10), (0, 0)]], ids=repr
)
def test_c_writes_the_counts_of_rows_without_pages(rows):
    budget = ReadBudget(share=0.9, from_tokens=12)
    kv = long_kv("int4", rows=rows, budget=budget)
    junk = torch.full((64,), 2**30, dtype=torch.int32)  # what fresh memory may hold
    del junk
    call = call_of(kv)
    for ours, theirs in zip(choose_in_c(call), selection.choose_pages(call), strict=True):
        assert torch.equal(ours, theirs)
    assert budget.chooses(0, 100) is False


@needs_library
def test_c_refuses_pages_that_do_not_exist():
    kv = long_kv("int4")
    table = kv.block_table.clone()
    table[1, 7] = 10**6
    with pytest.raises(CacheMismatchError, match="block_table"):
        choose_in_c(call_of(replace(kv, block_table=table)))


# -- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["reference", pytest.param("c", marks=needs_library)])
def test_attention_reads_the_chosen_pages_and_no_others(kernel):
    """The result is that of a softmax over the tokens of the chosen pages, sinks and tail."""
    kv = long_kv("int4")
    call = call_of(kv, q_len=2)
    choice = selection.choose_pages(call)
    out = paged_attention(call, kernel)
    parts = replace(call, kv=replace(kv, block_table=choice[0], num_pages=choice[1], budget=None))
    rounding.assert_close(out, paged_attention(parts, "reference"))
    whole = paged_attention(replace(call, kv=replace(kv, budget=None)), kernel)
    assert not torch.allclose(out[0], whole[0], atol=1e-4)  # a row of which a part is read
    assert torch.equal(out[2:], whole[2:])  # rows that are read as a whole


def test_prompts_sliding_windows_and_masks_read_everything():
    """Of a mask it is said."""
    kv = long_kv("int4", rows=[(37, 24), (50, 24)], layout=ROWS_LAYOUT)
    for options in (
        {"q_len": 17},
        {"sliding_window": 300},
        {"mask": torch.zeros(1, 1, 1, kv.seen)},
    ):
        call, said = call_of(kv, **options), nullcontext()
        whole = replace(call, kv=replace(kv, budget=None))
        if "mask" in options:
            said = pytest.warns(UserWarning, match="option 'read' says")
        with said:
            found = paged_attention(call, "reference")
        assert torch.equal(found, paged_attention(whole, "reference"))
