"""Which token lies where, planned and in plain numbers; the counts of page ids; tables and steps that layers get."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kv_hf
from kv_hf.errors import CacheMismatchError, InterruptedForwardError, PagePoolExhaustedError
from kv_hf.geometry import Geometry, Place, full_pages, place_of, window_token
from kv_hf.pages.forward import Forward
from kv_hf.pages.pool import PagePool
from kv_hf.pages.rows import Batch, Rows, RowSizes
from kv_hf.pages.step import CPU, FixedStep, Row, Tables
from kv_hf.row_pages import RowPages, page_peaks, page_use

PAGE, WINDOW = 16, 40
PADDING = None  # what a column of left padding holds


class Layer:
    """Stores one number per token instead of tensors: `pages` by page id, and the exact window of each row."""

    def __init__(self, group, forward, index):
        self.group, self.forward, self.layer_idx = group, forward, index
        self.forget()

    def forget(self):
        self.seen, self.pages, self.windows = 0, {}, []

    def append(self, columns):
        """Take columns [rows][q_len] of numbers (PADDING where padded); return the step, and what the forward reads."""
        step = self.forward.join(self, len(columns), len(columns[0]))
        view, nothing = step.view, [0] * len(columns)
        windows = self.windows or [[] for _ in columns]
        if step.first is not None:
            windows = self.seal(step.first, step.first_leaving, windows)
        assert list(map(len, windows)) == step.exact_before.tolist() == view.starts.tolist()
        assert view.skips.tolist() == step.skip.tolist()
        runs = []
        for window, new, skip, added in zip(windows, columns, step.skip, step.new, strict=True):
            assert new[:skip] == [PADDING] * skip and len(new) == skip + added
            runs.append(window + new[skip:])
        assert view.exact_lens.tolist() == list(map(len, runs))
        pages = zip(view.block_table.tolist(), view.num_pages.tolist(), strict=True)
        reads = [
            self.in_order(row[:count], run) for (row, count), run in zip(pages, runs, strict=True)
        ]
        leaving = nothing if step.leaving is None else step.leaving
        self.windows = self.seal(step.seal, leaving, runs)
        assert step.capacity > max(self.pages, default=-1)
        # what stays is written in place: all must fit, and nothing may move
        assert step.fits == (max(map(len, runs)) <= self.group.sizes.slots)
        stays = all(run[: len(w)] == w for run, w in zip(runs, self.windows, strict=True))
        assert step.moves_rest or stays
        self.take_part(step)
        return step, reads

    def take_part(self, step):
        self.seen = step.seen_after
        self.forward.arrived += 1
        self.forward.changing = False

    def seal(self, jobs, leaving, runs):
        """Copy runs of tokens into pages; return what stays exact of `runs`."""
        for row, slot, page in [] if jobs is None else jobs.jobs.tolist():
            self.pages[page] = runs[row][slot : slot + PAGE]
            assert len(self.pages[page]) == PAGE
        sinks = self.group.sizes.sink_tokens
        return [run[:sinks] + run[sinks + gone :] for run, gone in zip(runs, leaving, strict=True)]

    def follow(self):
        """Do what another order of rows, or a crop, has done to the rows."""
        step = self.group.step
        assert all(0 <= source < len(self.windows) for source in step.sources)
        self.windows = [list(self.windows[source]) for source in step.sources]
        for row, page, tokens in step.reopened:
            sinks = self.group.sizes.sink_tokens
            self.windows[row] = self.windows[row][:sinks] + self.pages[page][:tokens]
        self.windows = [
            w[: row.exact] for w, row in zip(self.windows, self.group.rows, strict=True)
        ]
        self.seen = step.seen_after

    def in_order(self, pages, window):
        sinks = self.group.sizes.sink_tokens
        return window[:sinks] + [n for page in pages for n in self.pages[page]] + window[sinks:]

    def tokens(self):
        """What each row holds now; pages that were given back are left out."""
        rows = zip(self.group.rows, self.windows, strict=True)
        return [self.in_order(row.pages, window) for row, window in rows]


def make(layers=1, *, windows=(None,), sinks=4, recent=0, max_pages=None, recording=False):
    """Return a forward, and `layers` layers of each sliding window."""
    groups = [Rows(RowSizes(PAGE, sinks, recent, one), PagePool(max_pages)) for one in windows]
    forward = Forward(groups)
    for group in groups if recording else ():
        group.record_past()
    return forward, [
        Layer(group, forward, place * layers + index)
        for place, group in enumerate(groups)
        for index in range(layers)
    ]


def one(**options):
    """Return the rows of one layer, and the layer."""
    forward, (layer,) = make(**options)
    return forward.groups[0], layer


def select(layers, sources):
    forward = layers[0].forward
    for group in forward.groups:
        group.check_rows(sources)
    with forward.change():
        for group in forward.groups:
            group.select(sources)
        for layer in layers:
            layer.follow()


def crop(layers, count):
    forward = layers[0].forward
    for group in forward.groups:
        group.check_crop(count)
    with forward.change():
        for group in forward.groups:
            group.crop(count)
        for layer in layers:
            layer.follow()


def reset(layers):
    for group in layers[0].forward.groups:
        group.reset()
    for layer in layers:
        layer.forget()
    layers[0].forward.clear()


def columns_of(paddings, q_len, start=0):
    """Columns start .. start + q_len of rows of these paddings: number 1000 * row + column."""
    places = range(start, start + q_len)
    return [
        [PADDING if column < padding else 1000 * row + column for column in places]
        for row, padding in enumerate(paddings)
    ]


def real(columns):
    return [[token for token in row if token is not PADDING] for row in columns]


def mask_of(paddings, columns):
    return (torch.arange(columns) >= torch.tensor(paddings)[:, None]).long()


def state_of(forward):
    """Everything that a refused forward must leave alone: ids that it was the first to get are free."""
    groups = [(group.rows, group.seen, group.step, group.pool.held()) for group in forward.groups]
    return groups, forward.members, forward.arrived, forward.changing


# -- single forwards -----------------------------------------------------------------------------------------


def test_tables_show_the_pages_of_every_row():
    group, layer = one()
    group.observe_padding(mask_of([0, 90], 100))
    layer.append(columns_of([0, 90], 100))
    view = layer.append(columns_of([0, 90], 1, 100))[0].view
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
    later = layer.append(columns_of([0, 90], 1, 101))[0].view
    assert later.on(torch.device("meta")) is not moved  # its lengths are others


def test_tables_of_an_earlier_step_keep_their_pages():
    """Kernels of an earlier step may still run when the next ones are made: they read their rows' pages."""
    tables, shown = Tables(), []
    for pages in (
        ((0, 1), (2,)),
        ((0, 1), (2, 3)),  # appended in place: behind what the earlier step reads
        ((0, 1, 4), (2, 3)),  # wider
        ((0, 1, 4), (2, 5)),  # another page in the place of one: a new table
        ((2, 5), (0, 1, 4)),
        ((2,), (0, 1, 4)),
        ((2, 6), (0, 1, 4)),
    ):
        shown.append((pages, tables.show(pages)[CPU]))
        for held, table in shown:
            for row, place in zip(held, table.tolist(), strict=True):
                assert place[: len(row)] == list(row)


def test_fixed_step_holds_the_numbers_of_the_last_step_alone():
    """Jobs of an earlier step would seal its page again, over what the page holds by now."""
    group, layer = one()
    layer.append(columns_of([0, 0], 18))
    fixed = FixedStep(2, 8, 100, CPU)
    for column in range(18, 40):
        step, _ = layer.append(columns_of([0, 0], 1, column))
        assert fixed.takes(step)
        fixed.write(step)
        standing = fixed.standing_for(step)
        for name in ("num_pages", "exact_lens", "padding", "starts", "skips"):
            assert torch.equal(getattr(standing.view, name), getattr(step.view, name))
        table = step.view.block_table
        assert torch.equal(standing.view.block_table[:, : table.shape[1]], table)
        jobs = [job for job in standing.seal.jobs.tolist() if job != [-1] * 3]
        assert jobs == ([] if step.seal is None else step.seal.jobs.tolist())
        assert fixed.seen == column


def test_append_in_chunks_skips_what_a_row_of_a_longer_shared_prefix_holds():
    group, first = one()
    first.append(columns_of([0], 36))
    pages = group.rows[0].pages
    rows = Rows(group.sizes, group.pool)
    rows.adopt((Row(0, pages[:1], 4), Row(0, pages, 4, ahead=16)), 20)
    layer = Layer(rows, Forward([rows]), 0)
    layer.pages, layer.windows, layer.seen = first.pages, [[0, 1, 2, 3]] * 2, 20
    for start in range(20, 55, 7):
        new = list(range(start, start + 7))
        _, reads = layer.append([new, [n if n >= 36 else PADDING for n in new]])
        assert reads == [list(range(start + 7)), list(range(max(36, start + 7)))]
        rows.check_integrity()


@pytest.mark.parametrize("source", [2, -3, 7])
def test_select_out_of_range_raises_and_changes_nothing(source):
    group, layer = one()
    layer.append(columns_of([0, 0], 40))
    before = state_of(layer.forward)
    with pytest.raises(CacheMismatchError, match=f"row index {source} is out of range .* 2 rows"):
        select([layer], [0, source])
    with pytest.raises(CacheMismatchError, match="at least one row"):
        select([layer], [])
    assert state_of(layer.forward) == before


# -- left padding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_observe_padding_counts_leading_zeros_only(dtype):
    group, layer = one()
    group.observe_padding(torch.tensor([[0, 0, 1, 0, 1], [1, 0, 1, 1, 0]]).to(dtype))
    assert layer.append(columns_of([2, 0], 5))[0].skip.tolist() == [2, 0]


def test_crop_into_the_padding_keeps_what_is_left_of_it():
    group, layer = one()
    group.observe_padding(mask_of([0, 30], 40))
    layer.append(columns_of([0, 30], 40))
    crop([layer], 20)
    assert [row.padding for row in group.rows] == [0, 20]
    assert layer.tokens() == [list(range(20)), []]
    group.check_integrity()
    group.observe_padding(mask_of([0, 30], 45))
    layer.append(columns_of([0, 30], 25, 20))
    assert layer.tokens() == real(columns_of([0, 30], 45))
    crop([layer], 45)
    assert group.needs_padding()
    layer.append(columns_of([0, 0], 10))
    assert layer.tokens() == columns_of([0, 0], 10)


# -- interrupted forwards ------------------------------------------------------------------------------------


def test_a_layer_that_joins_with_another_change_raises():
    forward, layers = make(2)
    for layer in layers:
        layer.append(columns_of([0, 0], 40))
    layers[0].append(columns_of([0, 0], 3, 40))
    before = state_of(forward)
    for rows, q_len in ((2, 2), (2, 4), (1, 3)):
        with pytest.raises(InterruptedForwardError, match=f"layer 1 cannot append {q_len} columns"):
            layers[1].append(columns_of([0] * rows, q_len, 40))
    assert state_of(forward) == before
    layers[1].append(columns_of([0, 0], 3, 40))  # the change that was asked for still goes
    assert layers[1].tokens() == layers[0].tokens() == columns_of([0, 0], 43)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda group: group.pool._free.append(0), "free to be handed out"),
        (lambda group: setattr(group.pool, "num_ids", 1), "that there are are held"),
        (lambda group: setattr(group, "seen", group.seen + 1), "tokens, expected"),
    ],
    ids=["free-but-held", "never-handed-out", "length"],
)
def test_check_integrity_finds_damage(damage, says):
    group, layer = one()
    layer.append(columns_of([0, 0], 40))
    group.check_integrity()
    damage(group)
    with pytest.raises(ValueError, match=says):
        group.check_integrity()


def test_check_integrity_finds_a_window_that_is_too_long():
    group, layer = one(recording=True)
    layer.append(columns_of([0], 4 + 2 * PAGE - 1))
    group.check_integrity()
    group.end_recording()  # the next append seals what is too much by then: nothing is wrong
    group.check_integrity()
    (row,) = group.rows
    group.batch, group.seen = Batch.of([replace(row, exact=5 + 2 * PAGE)]), 5 + 2 * PAGE
    with pytest.raises(ValueError, match=f"{5 + 2 * PAGE} exact tokens in {4 + 2 * PAGE} slots"):
        group.check_integrity()


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


# -- page ids -----------------------------------------------------------------------------------------------


class Holder:
    """Whoever holds pages."""

    def __init__(self, pool, *pages):
        self.pages = pages
        pool.register(self)

    def held_pages(self):
        return self.pages


def test_ids_are_handed_out_again_when_no_holder_lists_them():
    pool = PagePool()
    one, two = Holder(pool, pool.allocate(2)), Holder(pool, pool.allocate(3))
    three = Holder(pool, [4, 0], [0])  # some of them twice
    assert (pool.num_ids, pool.num_held, pool.held(besides=two)) == (5, 5, {0, 1, 4})
    del one, two
    assert (pool.num_ids, pool.num_held) == (5, 2)
    assert pool.lacking(5) == 2 and pool.num_ids == 5
    three.pages += (pool.allocate(5),)
    assert three.pages[-1] == [1, 2, 3, 5, 6] and (pool.num_ids, pool.num_held) == (7, 7)
    pool.check_integrity()


def test_ids_beyond_256_are_made_as_many_as_storage_makes_room_for():
    pool = PagePool()
    held = Holder(pool, pool.allocate(256))
    assert pool.num_ids == 256
    held.pages += (pool.allocate(1),)
    assert (pool.num_ids, held.pages[-1]) == (258, [256])
    bounded = PagePool(max_pages=257)
    held = Holder(bounded, bounded.allocate(257))
    assert bounded.num_ids == 257


def test_allocate_past_max_pages_raises_and_changes_nothing():
    pool = PagePool(max_pages=4)
    held = Holder(pool, pool.allocate(3))
    held.pages = ([0, 2],)
    with pytest.raises(PagePoolExhaustedError, match=r"max_pages=4 is reached: 2 pages .* 3 more"):
        pool.allocate(3)
    assert (pool.num_ids, pool.held()) == (3, {0, 2})
    held.pages += (pool.allocate(2),)
    assert held.pages[-1] == [1, 3]
    with pytest.raises(PagePoolExhaustedError):
        pool.allocate(1)


@pytest.mark.parametrize(
    ("free", "pages"), [([2], [0, 2]), ([2, 2], [0]), ([5], [0]), ([1], [0, 7])]
)
def test_check_integrity_finds_pages_that_could_be_handed_out_twice(free, pages):
    pool = PagePool()
    held = Holder(pool, pool.allocate(3))
    pool.check_integrity()
    pool._free[:], held.pages = free, (pages,)
    with pytest.raises(ValueError, match="handed out|are held"):
        pool.check_integrity()


# -- caches that share pages -----------------------------------------------------------------------------------


def filled(length=150, **options):
    model = tiny_models.shared_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=16, **options)
    with torch.no_grad():
        model(tiny_models.tokens(1, length), past_key_values=cache)
    return model, cache


def step(model, cache, seed, count=1):
    with torch.no_grad():
        return model(tiny_models.tokens(1, count, seed=seed), past_key_values=cache).logits


def test_max_pages_bounds_a_cache_and_its_copies_together():
    model, cache = filled(max_pages=12)
    copied = copy.deepcopy(cache)
    step(model, copied, 1, 48)
    with pytest.raises(kv_hf.PagePoolExhaustedError):
        step(model, cache, 1, 16)
    cache.check_integrity()


# -- which token lies where ----------------------------------------------------------------------------------

# rows around every border: the table of cases that all who place tokens are checked with
GEOMETRIES = [
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


sizes_of_the_table = pytest.mark.parametrize("sizes", GEOMETRIES, ids=name_of)


def filled_by_tokens(sizes, tokens):
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
        window, pages = filled_by_tokens(sizes, tokens)
        assert (len(pages), len(window)) == (sizes.sealed(tokens), sizes.exact(tokens))
        assert len(window) < sizes.slots
        places = {place_of(token, len(pages), **where): token for token in range(tokens)}
        expected = {Place(None, slot): token for slot, token in enumerate(window)}
        for page, held in enumerate(pages):
            expected |= {Place(page, slot): token for slot, token in enumerate(held)}
        assert places == expected


@pytest.mark.parametrize("sizes", [one for one in GEOMETRIES if one.window], ids=name_of)
def test_out_of_sight_counts_pages_that_no_later_query_sees(sizes):
    for tokens in lengths_of(sizes):
        _, pages = filled_by_tokens(sizes, tokens + 2 * sizes.slots)
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


def test_a_page_that_a_crop_decodes_is_held_until_the_next_forward():
    """Somebody beside it would seal over the page before the layers have decoded its first tokens."""
    group, layer = one()
    beside = Holder(group.pool)
    layer.append(columns_of([0], 60))
    page = group.rows[0].pages[1]
    group.crop(25)
    assert page not in group.rows[0].pages and page in group.pool.held()
    group.plan(1, 1)
    assert page not in group.pool.held() and not beside.pages
