"""Page ids and their counts against a plain model."""

from collections import Counter

import pytest
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

from kv_hf.errors import PagePoolExhaustedError
from kv_hf.pages.pool import PagePool


def state_of(pool):
    """Everything that a refused call must leave alone."""
    return (
        pool.num_ids,
        pool.num_held,
        [pool.count(page) for page in range(pool.num_ids)],
        list(pool._free),
    )


def test_allocate_hands_out_ids_from_0_up():
    pool = PagePool()
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(0) == []
    assert pool.allocate(2) == [3, 4]
    assert (pool.num_ids, pool.num_held) == (5, 5)
    assert [pool.count(page) for page in range(5)] == [1] * 5


def test_allocate_reuses_freed_ids_the_last_freed_first():
    pool = PagePool()
    pool.allocate(5)
    pool.release([1, 3])
    assert (pool.num_ids, pool.num_held) == (5, 3)
    assert pool.allocate(3) == [3, 1, 5]
    assert (pool.num_ids, pool.num_held) == (6, 6)


def test_release_keeps_a_page_until_its_last_holder_is_gone():
    pool = PagePool()
    (page,) = pool.allocate(1)
    pool.share([page, page])
    assert pool.count(page) == 3
    pool.release([page, page])
    assert (pool.count(page), pool.num_held) == (1, 1)
    pool.release([page])
    assert (pool.count(page), pool.num_held) == (0, 0)


def test_allocate_past_max_pages_raises_and_changes_nothing():
    pool = PagePool(max_pages=4)
    pool.allocate(3)
    pool.release([1])
    before = state_of(pool)
    with pytest.raises(PagePoolExhaustedError, match=r"max_pages=4 is reached: 2 pages .* 3 more"):
        pool.allocate(3)
    assert state_of(pool) == before
    assert len(pool.allocate(2)) == 2
    with pytest.raises(PagePoolExhaustedError):
        pool.allocate(1)


def test_check_room_raises_without_allocating():
    pool = PagePool(max_pages=2)
    pool.check_room(2)
    with pytest.raises(PagePoolExhaustedError):
        pool.check_room(3)
    assert (pool.num_ids, pool.num_held) == (0, 0)


def test_share_does_not_count_against_max_pages():
    pool = PagePool(max_pages=1)
    (page,) = pool.allocate(1)
    pool.share([page] * 10)
    assert (pool.num_held, pool.count(page)) == (1, 11)


@pytest.mark.parametrize("verb", ["share", "release"])
def test_a_free_page_cannot_be_held_again(verb):
    pool = PagePool()
    pool.allocate(2)
    pool.release([1])
    with pytest.raises(ValueError, match=f"page 1 is free and cannot be {verb}d"):
        getattr(pool, verb)([1])
    pool.check_integrity([[0]])


@pytest.mark.parametrize(
    "holders",
    [[[0, 1]], [[0, 1], [0], [0]], [[0, 1], [0], [2]], [[1], [0]], []],
    ids=["too-few", "too-many", "free-page-held", "shared-once", "nobody"],
)
def test_check_integrity_finds_wrong_counts(holders):
    pool = PagePool()
    pool.allocate(3)
    pool.share([0])
    pool.release([2])
    pool.check_integrity([[0, 1], [0]])
    with pytest.raises(ValueError, match="has count"):
        pool.check_integrity(holders)


@pytest.mark.parametrize("free", [[], [2, 2], [2, 0]], ids=["lost", "twice", "held"])
def test_check_integrity_finds_a_wrong_list_of_free_pages(free):
    pool = PagePool()
    pool.allocate(3)
    pool.release([2])
    pool._free[:] = free
    with pytest.raises(ValueError, match="list of free pages"):
        pool.check_integrity([[0, 1]])


class Holder:
    """Whoever holds pages."""

    def __init__(self, *pages):
        self.pages = pages

    def held_pages(self):
        return self.pages


def test_recount_sets_counts_to_what_holders_hold():
    pool, holder = PagePool(), Holder((0, 2), (2,))
    pool.register(holder)
    pool.allocate(4)
    pool.recount()
    assert [pool.count(page) for page in range(4)] == [1, 0, 2, 0]
    pool.check_integrity()
    assert sorted(pool.allocate(3)) == [1, 3, 4]
    del holder  # what a holder held that is gone is counted no longer
    assert pool.num_held == 0


class PoolMachine(RuleBasedStateMachine):
    """Holders are lists of ids, as rows are; the model is a Counter over them."""

    @initialize(max_pages=st.one_of(st.none(), st.integers(1, 12)))
    def start(self, max_pages):
        self.pool = PagePool(max_pages)
        self.max_pages = max_pages
        self.holders = []

    @property
    def counts(self):
        return Counter(page for holder in self.holders for page in holder)

    def draw_holder(self, data):
        return data.draw(st.integers(0, len(self.holders) - 1))

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        held = self.counts
        fits = self.max_pages is None or len(held) + count <= self.max_pages
        before = state_of(self.pool)
        if not fits:
            with pytest.raises(PagePoolExhaustedError):
                self.pool.allocate(count)
            assert state_of(self.pool) == before
            return
        ids = self.pool.allocate(count)
        assert len(set(ids)) == count
        assert not set(ids) & set(held)
        # ids stay dense: a new one only when no freed one is left, or storage would grow for nothing
        assert self.pool.num_ids == max(before[0], len(held) + count)
        self.holders.append(ids)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        pages = list(self.holders[self.draw_holder(data)])
        self.pool.share(pages)
        self.holders.append(pages)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        self.pool.release(self.holders.pop(self.draw_holder(data)))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release_the_end_of_a_holder(self, data):
        holder = self.draw_holder(data)
        kept = data.draw(st.integers(0, len(self.holders[holder])))
        self.pool.release(self.holders[holder][kept:])
        self.holders[holder] = self.holders[holder][:kept]

    @precondition(lambda self: self.pool.num_held < self.pool.num_ids)
    @rule(data=st.data())
    def refuse_free_page(self, data):
        counts = self.counts
        free = [page for page in range(self.pool.num_ids) if not counts[page]]
        page = data.draw(st.sampled_from(free))
        before = state_of(self.pool)
        for verb in (self.pool.share, self.pool.release):
            with pytest.raises(ValueError, match=f"page {page} is free"):
                verb([page])
        assert state_of(self.pool) == before

    @invariant()
    def counts_agree(self):
        counts = self.counts
        self.pool.check_integrity(self.holders)
        assert [self.pool.count(page) for page in range(self.pool.num_ids)] == [
            counts[page] for page in range(self.pool.num_ids)
        ]
        assert self.pool.num_held == len(counts)
        assert self.max_pages is None or self.pool.num_ids <= self.max_pages


def test_page_pool_counts_like_a_plain_model():
    run_state_machine_as_test(
        PoolMachine, settings=settings(max_examples=100, stateful_step_count=30)
    )
