"""The rule of which token lies where, against a row that is filled token by token; and all who follow it, against it."""

import numpy as np
import pytest
import torch
from paged_inputs import check, make_kv, make_query, needs_library
from rounding import Rounding

from kv_hf.backends.cpu import decode
from kv_hf.backends.reference import attention as reference
from kv_hf.geometry import Geometry, Place, full_pages, place_of, window_token
from kv_hf.pages.forward import Forward
from kv_hf.pages.pool import PagePool
from kv_hf.pages.rows import Rows, RowSizes
from kv_hf.row_pages import RowPages
from kv_hf.spec import LANES

# rows around every border: the table of cases that all who place tokens are checked with
SIZES = [
    Geometry(16, 4, 0),
    Geometry(16, 0, 0),
    Geometry(32, 1, 40),
    Geometry(16, 33, 5),
    Geometry(16, 4, 0, 1),
    Geometry(16, 4, 0, 40),
    Geometry(32, 0, 7, 33),
    Geometry(16, 20, 3, 17),
]


def lengths_of(sizes):
    """Row lengths around the sinks, the first and later borders of pages, and the borders that leave the window."""
    borders = [0, sizes.sink_tokens, sizes.kept, sizes.kept + sizes.page_size]
    borders += [sizes.kept + 3 * sizes.page_size, sizes.sink_tokens + 2 * sizes.page_size]
    if sizes.window is not None:
        start = sizes.sink_tokens + sizes.window - 1
        borders += [sizes.window, start + sizes.page_size, start + 4 * sizes.page_size]
    return sorted({length for at in borders for length in (at - 1, at, at + 1) if length >= 0})


def name_of(sizes):
    window = "" if sizes.window is None else f"-window{sizes.window}"
    return f"page{sizes.page_size}-sinks{sizes.sink_tokens}-recent{sizes.recent_tokens}{window}"


sizes_of_the_table = pytest.mark.parametrize("sizes", SIZES, ids=name_of)
FULL = [sizes for sizes in SIZES if sizes.window is None]


def filled(sizes, tokens):
    """(window, pages): the tokens in each slot, of a row to which tokens were appended one by one."""
    window, pages = [], []
    for token in range(tokens):
        window.append(token)
        if len(window) == sizes.sink_tokens + sizes.recent_tokens + sizes.page_size:
            first = sizes.sink_tokens
            pages.append(window[first : first + sizes.page_size])
            del window[first : first + sizes.page_size]
    return window, pages


@sizes_of_the_table
def test_place_of_is_where_a_row_filled_by_tokens_has_each(sizes):
    where = {"page_size": sizes.page_size, "sink_tokens": sizes.sink_tokens}
    for tokens in lengths_of(sizes):
        window, pages = filled(sizes, tokens)
        assert (len(pages), len(window)) == (sizes.sealed(tokens), sizes.exact(tokens))
        assert len(window) < sizes.slots
        places = {place_of(token, len(pages), **where): token for token in range(tokens)}
        expected = {Place(None, slot): token for slot, token in enumerate(window)}
        for page, held in enumerate(pages):
            expected |= {Place(page, slot): token for slot, token in enumerate(held)}
        assert places == expected


@pytest.mark.parametrize("sizes", [one for one in SIZES if one.window], ids=name_of)
def test_out_of_sight_counts_pages_that_no_later_query_sees(sizes):
    for tokens in lengths_of(sizes):
        _, pages = filled(sizes, tokens + 2 * sizes.slots)
        seen_from = tokens - sizes.window + 1  # by the next token's query
        hidden = [page for page in pages if page[-1] < seen_from]
        assert sizes.out_of_sight(tokens) == len(hidden)


@sizes_of_the_table
def test_counts_are_the_same_for_numbers_arrays_and_tensors(sizes):
    lengths = lengths_of(sizes)
    for count in (sizes.sealed, sizes.exact, sizes.out_of_sight, RowPages(**vars_of(sizes)).held):
        plain = [count(tokens) for tokens in lengths]
        assert count(torch.tensor(lengths)).tolist() == plain
        if count.__name__ != "held":
            assert count(np.array(lengths)).tolist() == plain
    assert full_pages(-1, 16) == 0


def vars_of(sizes):
    return {
        name: getattr(sizes, name)
        for name in ("page_size", "sink_tokens", "recent_tokens", "window")
    }


def rows_of(sizes):
    own = RowSizes(sizes.page_size, sizes.sink_tokens, sizes.recent_tokens, sizes.window)
    return Rows(own, PagePool())


@sizes_of_the_table
@pytest.mark.parametrize("steps", [0, 1])
def test_page_group_holds_what_the_rule_says(sizes, steps):
    """All lengths of the table as one batch, padded on the left; the last token may come in a step of its own."""
    lengths = [tokens for tokens in lengths_of(sizes) if tokens > steps]
    group = rows_of(sizes)
    width = max(lengths)
    group.observe_padding(torch.tensor([[0] * (width - n) + [1] * n for n in lengths]))
    for columns in (width - steps, *[1] * steps):
        Forward([group]).begin(len(lengths), columns)
    for row, tokens in zip(group.rows, lengths, strict=True):
        hidden = min(sizes.out_of_sight(tokens), sizes.sealed(tokens))
        assert row.padding == width - tokens
        assert (row.dropped, row.dropped + len(row.pages)) == (hidden, sizes.sealed(tokens))
        assert row.exact == sizes.exact(tokens)
    before = [sizes.sealed(tokens - 1 if steps else 0) for tokens in lengths]
    check_jobs(group.step.seal, sizes, group.rows, before)


def check_jobs(seal, sizes, rows, before):
    """Each page to seal begins in the slot that its first token has in a window whose row had sealed `before` pages."""
    where = {"page_size": sizes.page_size, "sink_tokens": sizes.sink_tokens}
    for row, slot, page in [] if seal is None else seal.jobs.tolist():
        token = window_token(slot, before[row], **where)
        number = rows[row].dropped + rows[row].pages.index(page)
        assert place_of(token, number + 1, **where) == Place(number, 0)


def batch_of(sizes, layout):
    """Pages and windows of rows of all lengths of the table, the longest of them without padding."""
    lengths = lengths_of(sizes)
    rows = [(sizes.sealed(tokens), sizes.exact(tokens)) for tokens in lengths]
    return make_kv(
        "exact", rows=rows, heads=1, page=sizes.page_size, sinks=sizes.sink_tokens, slots=sizes.slots, layout=layout,
        shuffle=3, poison=True, more_padding=2,
    )  # fmt: skip


def cases_of(kv, q_len):
    """What hides tokens: causality alone, a mask of columns, a sliding window."""
    shape = (kv.rows, 1, q_len, kv.seen)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.7
    return {"causal": {}, "mask": {"mask": mask}, "sliding": {"sliding_window": 20}}


TORCH = {"reference": reference.paged_attention}


@pytest.mark.parametrize("hidden", ["causal", "mask", "sliding"])
@pytest.mark.parametrize("sizes", FULL, ids=name_of)
@pytest.mark.parametrize("backend", [*TORCH, pytest.param("c", marks=needs_library)])
def test_backends_read_tokens_where_the_rule_says(backend, sizes, hidden):
    """paged_inputs.tokens_of, which the expected attention is computed from, finds each token by `place_of`."""
    kv = batch_of(sizes, LANES)
    attend = TORCH.get(backend, decode.paged_attention)
    query = make_query(kv, 3, 1, torch.float32)
    check(query, kv, attend, Rounding.of(backend, query.dtype), **cases_of(kv, 3)[hidden])
