"""Pages of rows, planned and in plain numbers; the counts of page ids; tables and steps that layers get."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kv_hf.geometry import Geometry
from kv_hf.pages.forward import Forward
from kv_hf.pages.pool import PagePool
from kv_hf.pages.rows import Rows, RowSizes
from kv_hf.pages.step import CPU, Tables
from kv_hf.row_pages import RowPages, page_use


def rows_of(sizes):
    """Return no rows yet, of these sizes."""
    return Rows(
        RowSizes(sizes.page_size, sizes.sink_tokens, sizes.recent_tokens, sizes.window), PagePool()
    )


def append(group, *columns):
    """Append columns to two rows; return where their tokens lie then."""
    for count in columns:
        Forward([group]).begin(2, count)
    return group.step.view


# -- single forwards -----------------------------------------------------------------------------------------


def test_tables_show_the_pages_of_every_row():
    group = rows_of(Geometry(16, 4, 0))
    group.observe_padding((torch.arange(100) >= torch.tensor([[0], [90]])).long())
    view = append(group, 100, 1)
    assert view.num_pages.tolist() == [6, 0]
    assert view.block_table.dtype == view.exact_lens.dtype == torch.int32
    # short rows are filled up with an id that there is
    assert view.block_table.tolist() == [[0, 1, 2, 3, 4, 5], [0] * 6]
    assert view.padding.tolist() == [0, 90]
    assert view.on(CPU) is view
    moved = view.on(torch.device("meta"))
    assert moved is view.on(torch.device("meta"))
    tensors = (moved.block_table, moved.num_pages, moved.exact_lens, moved.padding)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert append(group, 1).on(torch.device("meta")) is not moved  # its lengths are others


def test_a_page_that_a_crop_decodes_is_held_until_the_next_forward():
    """Somebody beside it would seal over the page before the layers have decoded its first tokens."""
    group = rows_of(Geometry(16, 4, 0))
    beside = Owner(group.pool)
    append(group, 60)
    page = group.rows[0].pages[1]
    group.crop(25)
    assert page not in group.rows[0].pages and page in group.pool.held()
    group.plan(2, 1)
    assert page not in group.pool.held() and not beside.pages


def test_tables_of_an_earlier_step_keep_their_pages():
    """Kernels of an earlier step may still run when the next ones are made: they read their rows' pages."""
    tables, made = Tables(), []
    for pages in (
        ((0, 1), (2,)),
        ((0, 1), (2, 3)),  # appended in place: behind what the earlier step reads
        ((0, 1, 4), (2, 3)),  # wider
        ((0, 1, 4), (2, 5)),  # another page in the place of one: a new table
        ((2, 5), (0, 1, 4)),
        ((2,), (0, 1, 4)),
        ((2, 6), (0, 1, 4)),
    ):
        made.append((pages, tables.of(pages)[CPU]))
        for held, table in made:
            for row, place in zip(held, table.tolist(), strict=True):
                assert place[: len(row)] == list(row)


# -- pages of rows in plain numbers -------------------------------------------------------------------------

SIZES = st.builds(
    RowPages,
    page_size=st.sampled_from([16, 32, 64]),
    sink_tokens=st.sampled_from([0, 1, 4, 33]),
    recent_tokens=st.sampled_from([0, 1, 16, 150]),
    window=st.one_of(st.none(), st.integers(1, 400)),
)


def real_group(sizes, lengths, new):
    """Return a group after prompts of these lengths and `new` steps, and the ids in use after each step."""
    group, width = rows_of(sizes), max(lengths)
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
def test_page_use_is_that_of_a_page_group(sizes, lengths, new):
    group, ids = real_group(sizes, lengths, new)
    rows = [length + new for length in lengths]
    use = page_use(sizes, rows, max(lengths))
    assert use.most == ids[-1]
    assert use.held == tuple(len(row.pages) for row in group.rows)
    for row, tokens in zip(group.rows, rows, strict=True):
        assert (row.dropped, row.exact) == (sizes.gone(tokens), sizes.exact(tokens))


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


# -- page ids -----------------------------------------------------------------------------------------------


class Owner:
    """Owns pages."""

    def __init__(self, pool, *pages):
        self.pages = pages
        pool.register(self)

    def held_pages(self):
        return self.pages


def test_ids_beyond_256_are_made_as_many_as_storage_makes_room_for():
    pool = PagePool()
    assert len(pool.allocate(257)) == 257 and pool.num_ids == 258


@pytest.mark.parametrize(("free", "pages"), [([2], [0, 2]), ([2, 2], [0]), ([1], [0, 7])])
def test_check_integrity_finds_pages_that_could_be_handed_out_twice(free, pages):
    pool = PagePool()
    held = Owner(pool, pool.allocate(3))
    pool.check_integrity()
    pool._free[:], held.pages = free, (pages,)
    with pytest.raises(ValueError, match="handed out|are held"):
        pool.check_integrity()
