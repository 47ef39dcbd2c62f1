"""Pages of rows in plain numbers equal those of a real page group, whatever its windows and lengths."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kv_hf.pages.forward import Forward
from kv_hf.pages.pool import PagePool
from kv_hf.pages.rows import Rows, RowSizes
from kv_hf.row_pages import RowPages, page_peaks, page_use

SIZES = st.builds(
    RowPages,
    page_size=st.sampled_from([16, 32, 64]),
    sink_tokens=st.sampled_from([0, 1, 4, 33]),
    recent_tokens=st.sampled_from([0, 1, 16, 150]),
    window=st.one_of(st.none(), st.integers(1, 400)),
)


def real_group(sizes, lengths, new):
    """Return a group after prompts of these lengths and `new` steps, and the ids in use after each step."""
    own = RowSizes(sizes.page_size, sizes.sink_tokens, sizes.recent_tokens, sizes.window)
    group = Rows(own, PagePool())
    width = max(lengths)
    group.observe_padding(torch.tensor([[0] * (width - n) + [1] * n for n in lengths]))
    ids = []
    for step in range(new + 1):
        Forward([group]).begin(len(lengths), 1 if step else width)
        ids.append(group.pool.num_ids)
    return group, ids


@settings(max_examples=80)
@given(
    sizes=SIZES,
    lengths=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    new=st.integers(0, 300),
)
@example(RowPages(16, 0, 0, 40), [60, 45, 7], 200)
@example(RowPages(16, 4, 150, 3), [300, 1], 300)
def test_page_use_is_that_of_a_page_group(sizes, lengths, new):
    group, ids = real_group(sizes, lengths, new)
    rows = [length + new for length in lengths]
    use = page_use(sizes, rows, max(lengths))
    assert (use.first, use.most) == (ids[0], ids[-1])
    assert use.held == tuple(len(row.pages) for row in group.rows)
    for row, tokens in zip(group.rows, rows, strict=True):
        assert (row.dropped, row.exact) == (sizes.dropped(tokens), sizes.exact(tokens))
    grown = [(0, ids[0])]
    grown += [(step, ids[step]) for step in range(1, new + 1) if ids[step] > ids[step - 1]]
    assert page_peaks(sizes, rows, new) == grown


@settings(max_examples=50)
@given(
    sizes=SIZES,
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    new=st.integers(1, 120),
)
def test_without_a_prompt_no_prompt_takes_more(sizes, lengths, new):
    rows = [length + new for length in lengths]
    bound, use = page_use(sizes, rows), page_use(sizes, rows, max(lengths))
    assert bound.most >= use.most and all(map(int.__ge__, bound.held, use.held))
    if sizes.window is None:
        assert (bound.most, bound.held) == (use.most, use.held)
    assert bound.most == page_use(sizes, rows, 1).most
    longer = page_use(sizes, [tokens + 1 for tokens in rows])
    assert longer.most >= bound.most and all(map(int.__ge__, longer.held, bound.held))


@pytest.mark.parametrize("window", [None, 1024, 131_072])
def test_long_texts_take_few_operations(window, monkeypatch):
    """A million tokens: pages are looked at, not tokens, and with a window no more than a window's."""
    sizes = RowPages(64, 4, 0, window)
    looked = []
    in_use = RowPages.in_use
    monkeypatch.setattr(
        RowPages, "in_use", lambda self, rows: looked.append(rows.numel()) or in_use(self, rows)
    )
    page_use(sizes, [2**20] * 32)
    page_use(sizes, [2**20] * 32, 1000)
    assert sum(looked) <= 2 * (2**20 // 64 if window is None else window // 64 + 8)
