"""Planning of steps, against lists of token numbers per row and layers that only follow what steps say."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kv_hf.errors import CacheMismatchError, InterruptedForwardError, PagePoolExhaustedError
from kv_hf.pages.rows import Batch
from kv_hf.pages.step import block_table
from kv_hf.spec import sealed_pages

PAGE = 16
PADDING = None  # what a column of left padding holds


# -- a layer that stores numbers instead of tensors --------------------------------------------------------


class Layer:
    """Stores one number per token: `pages` by page id, and the exact window of each row."""

    def __init__(self, group, index):
        self.group, self.index = group, index
        self.forget()

    def forget(self):
        self.epoch, self.pages, self.windows = 0, {}, []

    def append(self, columns):
        """Take columns [rows][q_len] of numbers (PADDING where padded); return what the forward reads."""
        step = self.group.append(self.index, self.epoch, len(columns), len(columns[0]))
        self.windows = self.windows or [[] for _ in columns]
        reads, windows = [], []
        for row, (change, new) in enumerate(zip(step.rows, columns, strict=True)):
            assert change.source == row
            window = self.seal(change.sealed_first, self.windows[row])
            assert len(window) == change.exact_before
            assert new[: change.skip] == [PADDING] * change.skip
            assert len(new) == change.skip + change.new
            run = window + new[change.skip :]
            view = step.view
            assert int(view.exact_lens[row]) == len(run)
            pages = view.block_table[row, : int(view.num_pages[row])].tolist()
            reads.append(self.in_order(pages, run))
            windows.append(self.seal(change.sealed, run))
            assert len(windows[-1]) == change.exact_after
        assert step.num_ids > max(self.pages, default=-1)
        # without a rebuild the window is written in place: nothing may leave it, and all must fit
        if not step.rebuild:
            assert all(not change.sealed for change in step.rows)
            assert max(len(window) for window in windows) <= self.group.slots
        self.windows = windows
        self.epoch += 1
        self.group.tracker.done(self.index)
        return step, reads

    def seal(self, ids, run):
        """Move the first pages behind the sinks out of `run`; return what stays exact."""
        for page in ids:
            end = self.group.sink_tokens + self.group.page_size
            self.pages[page] = run[self.group.sink_tokens : end]
            assert len(self.pages[page]) == self.group.page_size
            run = run[: self.group.sink_tokens] + run[end:]
        return run

    def select_rows(self, sources):
        step = self.group.select_rows(self.index, self.epoch, sources)
        windows = []
        for change in step.rows:
            # a tensor's rows cannot be selected by a negative index
            assert 0 <= change.source < len(self.windows)
            assert change.exact_before == change.exact_after == len(self.windows[change.source])
            windows.append(list(self.windows[change.source]))
        self.windows = windows
        self.epoch += 1
        self.group.tracker.done(self.index)

    def crop(self, count):
        step = self.group.crop(self.index, self.epoch, count)
        for row, change in enumerate(step.rows):
            window = self.windows[row]
            assert len(window) == change.exact_before
            if change.reopened is not None:
                page, tokens = change.reopened
                window = window[: self.group.sink_tokens] + self.pages[page][:tokens]
                assert len(window) == change.exact_after
            assert change.exact_after <= len(window)
            self.windows[row] = window[: change.exact_after]
        self.epoch += 1
        self.group.tracker.done(self.index)

    def in_order(self, pages, window):
        sinks = self.group.sink_tokens
        paged = [token for page in pages for token in self.pages[page]]
        return window[:sinks] + paged + window[sinks:]

    def tokens(self):
        """What each row holds now."""
        rows = zip(self.group.rows, self.windows, strict=True)
        return [self.in_order(row.pages, window) for row, window in rows]


def make_group(layers=1, *, sinks=4, recent=0, max_pages=None):
    group = PageGroup(PAGE, sinks, recent, max_pages)
    return group, [Layer(group, index) for index in range(layers)]


def columns_of(lengths, q_len, start=0):
    """Columns start .. start + q_len of rows of these paddings: number 1000 * row + column."""
    return [
        [
            PADDING if column < padding else 1000 * row + column
            for column in range(start, start + q_len)
        ]
        for row, padding in enumerate(lengths)
    ]


def real(columns):
    return [[token for token in row if token is not PADDING] for row in columns]


def mask_of(paddings, columns):
    return torch.tensor(
        [[int(column >= padding) for column in range(columns)] for padding in paddings]
    )


def state_of(group):
    """Everything that a refused step must leave alone."""
    pool = group.pool
    counts = [pool.count(page) for page in range(pool.num_ids)]
    return group.rows, group.seen, group.epoch, group.tracker.step, counts, list(pool._free)


# -- single steps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recording", [False, True], ids=["plain", "recording"])
@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (4, 0), (4, 7), (20, 40)])
def test_append_seals_by_the_documented_rule_at_every_length(sinks, recent, recording):
    group, (layer,) = make_group(sinks=sinks, recent=recent)
    if recording:
        group.record_past()

    def full_pages(tokens):
        return sealed_pages(tokens, page_size=PAGE, sink_tokens=sinks, recent_tokens=recent)

    for tokens in range(1, 150):
        step, _ = layer.append([[tokens]])
        before = full_pages(tokens - 1)
        # a forward reads as sealed what was full when it began
        assert step.view.num_pages.tolist() == [before]
        assert step.view.block_table.shape == (1, before)
        # while recording, the token may be taken back: the page that it fills is not sealed yet
        sealed = before if recording else full_pages(tokens)
        assert len(group.rows[0].pages) == group.pool.num_held == sealed
        assert step.rebuild == (sealed > before)
        group.confirm()  # a crop of 0: all drafted tokens were accepted
    assert sealed > 3
    assert layer.tokens() == [list(range(1, 150))]


@pytest.mark.parametrize(
    "split", [[150], [1] * 150, [64, 1, 85], [5, 16, 16, 113], [149, 1]], ids=str
)
def test_append_seals_the_same_pages_however_the_tokens_are_split(split):
    """A tail that ages per call instead of per token is a known fault of other caches."""
    group, (layer,) = make_group()
    at = 0
    for q_len in split:
        layer.append(columns_of([0, 0], q_len, at))
        at += q_len
    contents = [[layer.pages[page] for page in row.pages] for row in group.rows]
    expected = [
        [list(range(1000 * row + 4 + 16 * n, 1000 * row + 20 + 16 * n)) for n in range(9)]
        for row in range(2)
    ]
    assert contents == expected
    assert [row.exact for row in group.rows] == [6, 6]


def test_append_gives_rows_pages_of_their_own():
    group, (layer,) = make_group()
    layer.append(columns_of([0, 0, 0], 40))
    pages = [page for row in group.rows for page in row.pages]
    assert sorted(pages) == list(range(6))
    assert block_table(group.rows).tolist() == [list(row.pages) for row in group.rows]


def test_append_fills_short_rows_of_the_table_with_an_allocated_id():
    group, (layer,) = make_group()
    group.observe_padding(mask_of([0, 90], 100))
    layer.append(columns_of([0, 90], 100))
    step, _ = layer.append(columns_of([0, 90], 1, 100))
    assert step.view.num_pages.tolist() == [6, 0]
    assert step.view.block_table.dtype == step.view.exact_lens.dtype == torch.int32
    assert step.view.block_table.tolist() == [[0, 1, 2, 3, 4, 5], [0] * 6]
    assert step.view.padding.tolist() == [0, 90]


def test_table_view_moves_to_a_device_once():
    _, (layer,) = make_group()
    layer.append(columns_of([0], 40))
    view = layer.append(columns_of([0], 1, 40))[0].view
    assert view.on(torch.device("cpu")) is view
    moved = view.on(torch.device("meta"))
    assert moved is view.on(torch.device("meta"))
    assert {
        t.device.type for t in (moved.block_table, moved.num_pages, moved.exact_lens, moved.padding)
    } == {"meta"}


def test_append_of_another_batch_size_raises_and_changes_nothing():
    group, (layer,) = make_group()
    layer.append(columns_of([0, 0], 40))
    before = state_of(group)
    for rows in (1, 3):
        with pytest.raises(CacheMismatchError, match=f"batch of 2 rows, got keys for {rows}"):
            layer.append(columns_of([0] * rows, 40, 40))
        assert state_of(group) == before
    layer.append(columns_of([0, 0], 10, 40))
    assert layer.tokens() == columns_of([0, 0], 50)


def test_append_past_max_pages_raises_and_changes_nothing():
    group, (layer,) = make_group(max_pages=4)
    layer.append(columns_of([0, 0], 40))
    before = state_of(group)
    with pytest.raises(PagePoolExhaustedError, match="max_pages=4"):
        layer.append(columns_of([0, 0], 16, 40))
    assert state_of(group) == before
    # what still fits works: the tail has room for 11 more tokens
    layer.append(columns_of([0, 0], 11, 40))
    assert layer.tokens() == columns_of([0, 0], 51)


@pytest.mark.parametrize("source", [2, -3, 7])
def test_select_rows_out_of_range_raises_and_changes_nothing(source):
    group, (layer,) = make_group()
    layer.append(columns_of([0, 0], 40))
    before = state_of(group)
    with pytest.raises(CacheMismatchError, match=f"row index {source} is out of range .* 2 rows"):
        layer.select_rows([0, source])
    assert state_of(group) == before


def test_select_rows_shares_sealed_pages_and_frees_those_of_dropped_rows():
    group, (layer,) = make_group()
    layer.append(columns_of([0, 0, 0], 40))
    kept, dropped = group.rows[1].pages, (*group.rows[0].pages, *group.rows[2].pages)
    layer.select_rows([1, 1, -2])
    assert [row.pages for row in group.rows] == [kept] * 3
    assert [group.pool.count(page) for page in kept] == [3, 3]
    assert [group.pool.count(page) for page in dropped] == [0] * 4
    # the rows go apart again: new pages are their own
    layer.append([[row * 1000 + n for n in range(20)] for row in range(3)])
    assert len({row.pages[-1] for row in group.rows}) == 3
    assert layer.tokens() == [
        columns_of([0, 0, 0], 40)[1] + [row * 1000 + n for n in range(20)] for row in range(3)
    ]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 19, 20, 21, 35, 36, 38, 40, 41, 1000])
def test_crop_reopens_a_page_only_when_it_must(count):
    """40 tokens: 4 sinks, two pages, 4 in the tail."""
    group, (layer,) = make_group()
    layer.append(columns_of([0], 40))
    pages = group.rows[0].pages
    layer.crop(count)
    left = max(0, 40 - count)
    whole, rest = divmod(max(0, left - 4), PAGE)
    assert group.rows[0].pages == pages[: min(2, whole)]
    reopened = (pages[whole], rest) if whole < 2 and rest else None
    assert group.tracker.step.rows[0].reopened == reopened
    assert layer.tokens() == [list(range(left))]
    assert group.seen == left
    group.check_integrity()
    layer.append([[-1] * 30])
    assert layer.tokens() == [list(range(left)) + [-1] * 30]


def test_crop_of_a_shared_page_leaves_it_to_the_other_rows():
    group, layers = make_group(2)
    for layer in layers:
        layer.append(columns_of([0], 40))
    for layer in layers:
        layer.select_rows([0, 0])
    for layer in layers:
        layer.crop(10)
    # both rows gave page 1 back; it is read while the step runs, and free afterwards
    assert [row.pages for row in group.rows] == [(0,), (0,)]
    assert group.pool.count(0) == 2
    assert layers[1].tokens() == [list(range(30))] * 2


@pytest.mark.parametrize("count", [1, 5, 15, 16])
def test_crop_of_a_forwards_own_tokens_never_reopens_while_recording(count):
    """Even behind a prefill, whose pages have to be sealed: a page of it stays in the window."""
    group, (layer,) = make_group()
    group.record_past()
    at = 0
    for q_len in (200, 17, 16, 33, 100, 20):
        layer.append(columns_of([0], q_len, at))
        layer.crop(count)
        at += q_len - count
        assert group.tracker.step.rows[0].reopened is None
        assert layer.tokens() == [list(range(at))]
    assert group.pool.num_held > 10


@pytest.mark.parametrize("recent", [0, 7])
@pytest.mark.parametrize("rejected", [1, 5, PAGE - 1])
def test_crop_right_behind_a_forward_leaves_no_trace_while_recording(recent, rejected):
    """Assisted decoding must give the tokens of plain decoding: a rejected draft may not change a byte."""
    plain, (layer,) = make_group(recent=recent)
    drafting, (drafting_layer,) = make_group(recent=recent)
    plain.record_past()
    drafting.record_past()
    for at in range(100):
        step, _ = layer.append([[at]])
        drafted, _ = drafting_layer.append([[at] + [-1] * rejected])
        assert drafted.view.num_pages.tolist() == step.view.num_pages.tolist()
        drafting_layer.crop(rejected)
        assert drafting.tracker.step.rows[0].reopened is None
        assert drafting.rows == plain.rows
        assert drafting_layer.windows == layer.windows
        assert drafting_layer.pages == layer.pages
        plain.confirm()
    assert len(layer.pages) > 4


def test_reset_gives_all_pages_back_and_takes_another_batch():
    group, layers = make_group(2)
    for layer in layers:
        layer.append(columns_of([0, 0], 40))
    for layer in layers:
        layer.select_rows([1, 1, 0])
    group.reset()
    assert (group.pool.num_held, group.rows, group.seen, group.epoch) == (0, (), 0, 0)
    group.check_integrity()
    for layer in layers:
        layer.forget()
        layer.append(columns_of([0], 40))
    assert group.pool.num_ids == 4  # freed ids are used again
    assert layers[1].tokens() == columns_of([0], 40)


# -- left padding --------------------------------------------------------------------------------------------


def test_observe_padding_keeps_padding_out_of_the_pages():
    paddings = [0, 7, 39, 100]
    group, (layer,) = make_group()
    group.observe_padding(mask_of(paddings, 101))
    _, reads = layer.append(columns_of(paddings, 101))
    assert reads == layer.tokens() == real(columns_of(paddings, 101))
    assert [len(row.pages) for row in group.rows] == [
        (101 - p - 4) // PAGE if p < 100 else 0 for p in paddings
    ]
    assert group.pool.num_ids == 6 + 5 + 3
    assert [row.padding for row in group.rows] == paddings
    assert not group.needs_padding()


@pytest.mark.parametrize("upfront", [False, True], ids=["mask-per-chunk", "mask-up-front"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_observe_padding_holds_over_chunks(upfront, chunk):
    """Chunked prefill: a row may be padding only for several forwards before its first token."""
    paddings, total = [0, 3, 33, 64], 100
    group, (layer,) = make_group()
    if upfront:
        group.observe_padding(mask_of(paddings, total))
    for start in range(0, total, chunk):
        end = min(start + chunk, total)
        if not upfront:
            group.observe_padding(mask_of(paddings, end))
        step, reads = layer.append(columns_of(paddings, end - start, start))
        assert reads == real(columns_of(paddings, end))
        assert step.view.padding.tolist() == [min(p, end) for p in paddings]
        assert group.needs_padding() == (end <= max(paddings))
        group.check_integrity()
    assert [len(row.pages) for row in group.rows] == [(100 - p - 4) // PAGE for p in paddings]
    assert group.pool.num_ids == sum(len(row.pages) for row in group.rows)


def test_observe_padding_cannot_change_stored_tokens():
    group, (layer,) = make_group()
    group.observe_padding(mask_of([0, 5], 40))
    layer.append(columns_of([0, 5], 40))
    before = state_of(group)
    group.observe_padding(mask_of([30, 30], 40))
    assert state_of(group) == before
    layer.append(columns_of([0, 5], 20, 40))
    assert layer.tokens() == real(columns_of([0, 5], 60))


def test_observe_padding_of_a_row_ignores_masks_of_other_shapes():
    group, (layer,) = make_group()
    group.observe_padding(torch.zeros(2, 1, 4, 10))
    group.observe_padding(mask_of([5, 5, 5], 10))  # another batch
    layer.append(columns_of([0, 0], 10))
    assert layer.tokens() == columns_of([0, 0], 10)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_observe_padding_counts_leading_zeros_only(dtype):
    mask = torch.tensor([[0, 0, 1, 0, 1], [1, 0, 1, 1, 0]]).to(dtype)
    group, (layer,) = make_group()
    group.observe_padding(mask)
    step, _ = layer.append(columns_of([2, 0], 5))
    assert [change.skip for change in step.rows] == [2, 0]


def test_select_rows_takes_the_padding_along():
    group, (layer,) = make_group()
    group.observe_padding(mask_of([0, 30], 40))
    layer.append(columns_of([0, 30], 40))
    layer.select_rows([1, 0, 1])
    assert [row.padding for row in group.rows] == [30, 0, 30]
    layer.append([[7] * 10 for _ in range(3)])
    old = real(columns_of([0, 30], 40))
    assert layer.tokens() == [old[1] + [7] * 10, old[0] + [7] * 10, old[1] + [7] * 10]


def test_select_rows_of_padding_only_rows_treats_copies_alike():
    """A mask is about the rows of its time: row 1's padding may not fall to whoever is row 1 later."""
    group, (layer,) = make_group()
    group.observe_padding(mask_of([0, 50], 100))
    layer.append(columns_of([0, 50], 20))
    layer.select_rows([1, 1])
    layer.append([[7] * 10, [7] * 10])
    assert [row.padding for row in group.rows] == [20, 20]
    assert layer.tokens() == [[7] * 10] * 2
    group.check_integrity()


def test_crop_into_the_padding_keeps_what_is_left_of_it():
    group, (layer,) = make_group()
    group.observe_padding(mask_of([0, 30], 40))
    layer.append(columns_of([0, 30], 40))
    layer.crop(20)
    assert [row.padding for row in group.rows] == [0, 20]
    assert layer.tokens() == [list(range(20)), []]
    group.check_integrity()
    group.observe_padding(mask_of([0, 30], 45))
    layer.append(columns_of([0, 30], 25, 20))
    assert layer.tokens() == real(columns_of([0, 30], 45))


def test_crop_to_nothing_forgets_the_padding():
    group, (layer,) = make_group()
    group.observe_padding(mask_of([0, 3], 10))
    layer.append(columns_of([0, 3], 10))
    layer.crop(10)
    assert group.needs_padding()
    layer.append(columns_of([0, 0], 10))
    assert layer.tokens() == columns_of([0, 0], 10)


# -- interrupted forwards ------------------------------------------------------------------------------------


STEPS = {
    "append": lambda layer: layer.append(columns_of([0, 0], 3, 40)),
    "select_rows": lambda layer: layer.select_rows([1, 0]),
    "crop": lambda layer: layer.crop(2),
}


@pytest.mark.parametrize("then", STEPS)
@pytest.mark.parametrize("broken", STEPS)
@pytest.mark.parametrize("joined", [1, 2])
def test_a_step_after_an_interrupted_one_raises_and_changes_nothing(broken, then, joined):
    group, layers = make_group(3)
    for layer in layers:
        layer.append(columns_of([0, 0], 40))
    for layer in layers[:joined]:
        STEPS[broken](layer)
    before = state_of(group)
    missing = [layer.index for layer in layers[joined:]]
    with pytest.raises(
        InterruptedForwardError, match=rf"before layers {missing}".replace("[", r"\[")
    ) as error:
        STEPS[then](layers[0])
    assert "reset()" in str(error.value)
    assert state_of(group) == before
    group.reset()
    for layer in layers:
        layer.forget()
        layer.append(columns_of([0], 60))
    for layer in layers:
        layer.crop(1)
    assert [layer.tokens() for layer in layers] == [[list(range(59))]] * 3


def test_a_layer_that_joins_with_another_change_raises():
    group, layers = make_group(2)
    for layer in layers:
        layer.append(columns_of([0, 0], 40))
    layers[0].append(columns_of([0, 0], 3, 40))
    before = state_of(group)
    for change in (
        lambda: layers[1].append(columns_of([0, 0], 2, 40)),
        lambda: layers[1].crop(3),
        lambda: layers[1].select_rows([0, 1]),
    ):
        with pytest.raises(InterruptedForwardError, match=r"layer 1 cannot .* 1 of 2 steps"):
            change()
    assert state_of(group) == before
    layers[1].append(columns_of([0, 0], 3, 40))  # the change that was asked for still goes
    assert layers[1].tokens() == layers[0].tokens() == columns_of([0, 0], 43)


def test_a_first_forward_that_stops_half_way_is_found_by_the_layer_left_behind():
    """Nobody knows yet which layers there are: the first layer goes on, the second one cannot."""
    _, layers = make_group(2)
    layers[0].append(columns_of([0], 10))
    layers[0].append(columns_of([0], 10, 10))
    with pytest.raises(InterruptedForwardError, match=r"layer 1 cannot append .* 0 of 2 steps"):
        layers[1].append(columns_of([0], 10, 10))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda group: group.pool.share([0]), "has count"),
        (lambda group: group.pool.release([0]), "has count"),
        (lambda group: setattr(group, "seen", group.seen + 1), "tokens, expected"),
    ],
    ids=["held-too-often", "free-but-held", "length"],
)
def test_check_integrity_finds_damage(damage, says):
    group, (layer,) = make_group()
    layer.append(columns_of([0, 0], 40))
    group.check_integrity()
    damage(group)
    with pytest.raises(ValueError, match=says):
        group.check_integrity()


def test_check_integrity_finds_a_window_that_is_too_long():
    group, (layer,) = make_group()
    group.record_past()
    layer.append(columns_of([0], 4 + 2 * PAGE - 1))
    group.check_integrity()
    group.end_recording()  # the next append seals what is too much by then: nothing is wrong
    group.check_integrity()
    (row,) = group.rows
    group.batch, group.seen = Batch.of([replace(row, exact=5 + 2 * PAGE)]), 5 + 2 * PAGE
    with pytest.raises(ValueError, match=f"{5 + 2 * PAGE} exact tokens in {4 + 2 * PAGE} slots"):
        group.check_integrity()


# -- any order of steps --------------------------------------------------------------------------------------


@dataclass
class PlainRow:
    """A row of the model: its tokens, serial numbers of its sealed pages, columns of padding."""

    padding: int
    tokens: list = field(default_factory=list)
    sealed: list = field(default_factory=list)

    def copy(self):
        return PlainRow(self.padding, list(self.tokens), list(self.sealed))


class GroupMachine(RuleBasedStateMachine):
    """Three layers against lists of token numbers; pages are only counted in the model, by serial number."""

    @initialize(
        sinks=st.sampled_from([0, 4, 20]),
        recent=st.sampled_from([0, 5, 32]),
        recording=st.booleans(),
        max_pages=st.sampled_from([None, None, 12, 40]),
        paddings=st.lists(st.sampled_from([0, 0, 3, 16, 40, 90]), min_size=1, max_size=4),
    )
    def start(self, sinks, recent, recording, max_pages, paddings):
        self.group, self.layers = make_group(3, sinks=sinks, recent=recent, max_pages=max_pages)
        if recording:
            self.group.record_past()
        self.held = sinks + recent  # tokens of a row that no page takes
        self.serial = 0
        self.begin(paddings)

    def begin(self, paddings):
        self.rows = [PlainRow(padding) for padding in paddings]
        self.seen = 0
        self.confirmed = 0
        self.steps = 0
        for layer in self.layers:
            layer.forget()

    def next_serial(self):
        self.serial += 1
        return self.serial

    @property
    def pages(self):
        """Serial numbers of all pages that some row holds."""
        return {page for row in self.rows for page in row.sealed}

    def new_columns(self, q_len):
        return [
            [
                PADDING if column < row.padding else self.next_serial()
                for column in range(self.seen, self.seen + q_len)
            ]
            for row in self.rows
        ]

    def pages_after(self, row, new):
        """Pages that the forward of `new` tokens reads as sealed, and those that are sealed behind it."""
        tokens = len(row.tokens)
        if self.group.recording:  # only tokens that a crop has left standing are sealed ahead
            certain = min(tokens, max(0, self.confirmed - row.padding))
        else:
            certain = tokens
        found = max(len(row.sealed), (certain - self.held) // PAGE)
        if not self.group.recording:
            return found, max(found, (tokens + new - self.held) // PAGE)
        after = found  # the new tokens may be taken back: only what the window has no room for is sealed
        while tokens + new - after * PAGE > self.held + 2 * PAGE:
            after += 1
        return found, after

    @precondition(lambda self: self.seen < 1000)
    @rule(q_len=st.one_of(st.integers(1, 20), st.integers(1, 200)), order=st.permutations(range(3)))
    def append(self, q_len, order):
        columns = self.new_columns(q_len)
        mask = mask_of([row.padding for row in self.rows], self.seen + q_len)
        self.group.observe_padding(mask)
        added = real(columns)
        pages = [self.pages_after(row, len(new)) for row, new in zip(self.rows, added, strict=True)]
        found, after = zip(*pages, strict=True)
        needed = sum(after) - sum(len(row.sealed) for row in self.rows)
        limit = self.group.pool.max_pages
        if limit is not None and len(self.pages) + needed > limit:
            before = state_of(self.group)
            for layer in self.layers:
                with pytest.raises(PagePoolExhaustedError):
                    layer.append(columns)
            assert state_of(self.group) == before
            return
        for row, new, count in zip(self.rows, added, after, strict=True):
            row.tokens += new
            row.sealed += [self.next_serial() for _ in range(count - len(row.sealed))]
        self.seen += q_len
        self.steps += 1
        for index in order:  # whichever layer comes first plans the step
            step, reads = self.layers[index].append(columns)
            assert reads == [row.tokens for row in self.rows]
            # read as sealed: exactly the pages that were full when the forward began
            assert tuple(step.view.num_pages.tolist()) == found
            assert step.view.padding.tolist() == [min(row.padding, self.seen) for row in self.rows]

    @rule()
    def confirm(self):
        self.group.confirm()
        self.confirmed = self.seen

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), order=st.permutations(range(3)))
    def select_rows(self, data, order):
        batch = len(self.rows)
        sources = data.draw(st.lists(st.integers(-batch, batch - 1), min_size=1, max_size=5))
        self.rows = [self.rows[source].copy() for source in sources]
        self.steps += 1
        for index in order:
            self.layers[index].select_rows(sources)

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), order=st.permutations(range(3)))
    def crop(self, data, order):
        count = data.draw(st.one_of(st.integers(1, 40), st.integers(1, self.seen + 5)))
        self.seen = self.confirmed = max(0, self.seen - count)
        self.steps += 1
        for row in self.rows:
            del row.tokens[max(0, self.seen - row.padding) :]
            # the pages that still lie wholly behind the sinks; a page that is cut is open again
            del row.sealed[max(0, len(row.tokens) - self.group.sink_tokens) // PAGE :]
        for index in order:
            self.layers[index].crop(count)

    @precondition(
        lambda self: self.steps > 6
    )  # early ones would keep the other rules from going far
    @rule(paddings=st.lists(st.sampled_from([0, 5, 16, 50]), min_size=1, max_size=4))
    def reset(self, paddings):
        self.group.reset()
        self.begin(paddings)

    @precondition(lambda self: self.seen)
    @rule(more=st.sampled_from([-1, 1]))
    def refuse_other_batch(self, more):
        rows = len(self.rows) + more or 2
        before = state_of(self.group)
        for layer in self.layers:
            with pytest.raises(CacheMismatchError):
                layer.append([[0]] * rows)
        assert state_of(self.group) == before

    @precondition(lambda self: self.seen)
    @rule()
    def refuse_row_out_of_range(self):
        before = state_of(self.group)
        for layer in self.layers:
            with pytest.raises(CacheMismatchError):
                layer.select_rows([0, len(self.rows)])
        assert state_of(self.group) == before

    @precondition(lambda self: self.steps > 4)
    @rule(
        joined=st.integers(1, 2),
        change=st.sampled_from(["crop", "select"]),
        paddings=st.lists(st.sampled_from([0, 5, 16]), min_size=1, max_size=3),
    )
    def interrupt_then_reset(self, joined, change, paddings):
        apply = {
            "crop": lambda layer: layer.crop(1),
            "select": lambda layer: layer.select_rows([0]),
        }[change]
        for layer in self.layers[:joined]:
            apply(layer)
        before = state_of(self.group)
        with pytest.raises(InterruptedForwardError):
            self.layers[0].append([[0]] * len(self.group.rows))
        assert state_of(self.group) == before
        self.reset(paddings)

    @invariant()
    def group_agrees_with_the_model(self):
        group = self.group
        group.check_integrity()
        assert (group.seen, group.epoch) == (self.seen, self.steps)
        assert group.pool.num_held == len(self.pages)
        assert group.pool.max_pages is None or group.pool.num_ids <= group.pool.max_pages
        if not self.steps:
            return
        assert [len(row.pages) for row in group.rows] == [len(row.sealed) for row in self.rows]
        # pages are shared exactly as the model shares them
        for ours in self.rows:
            for theirs in self.rows:
                shared = len(set(ours.sealed) & set(theirs.sealed))
                mine = group.rows[self.rows.index(ours)].pages
                other = group.rows[self.rows.index(theirs)].pages
                assert len(set(mine) & set(other)) == shared
        for layer in self.layers:
            assert layer.tokens() == [row.tokens for row in self.rows]


def test_page_group_agrees_with_plain_lists_of_tokens():
    run_state_machine_as_test(
        GroupMachine, settings=settings(max_examples=150, stateful_step_count=40, deadline=None)
    )
