"""The forward in progress: planned for all windows at its first layer, done when every layer has taken part.

One promise holds behind an exception, or Ctrl-C, in a forward: the next use of the cache raises and says `reset()`.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..errors import InterruptedForwardError
from .rows import Rows
from .step import Step

STOPPED = (
    "an earlier forward, or another change of this cache, stopped half-way, so that its layers hold different texts; "
    "call reset() and start again"
)


class Forward:
    """What the layers of one cache have taken part in.

    A layer is known by the columns that it has seen: as many as its rows have, and it begins a forward; fewer, and it joins
    the one in progress.

    Args:
        groups: the rows of each sliding window.
    Attributes:
        members: layers that take part in a forward, known from the second one on; 0 before.
        joined: layers that have appended their tokens in the forward in progress, or the last one.
        changing: a layer, or the cache, is in the middle of a change; outside of one, it was interrupted there.
        states_moved: a state of linear attention has moved since generate() set this to False.
    """

    def __init__(self, groups: Sequence[Rows]) -> None:
        self.groups = tuple(groups)
        self.clear()

    def clear(self) -> None:
        """Begin anew: nothing is known of the layers."""
        self.members = self.joined = 0
        self.changing = self.states_moved = False

    def resume(self, members: int) -> None:
        """Stand after a first forward in which `members` layers took part."""
        self.members = self.joined = members

    def check(self) -> None:
        """Raise InterruptedForwardError where an earlier forward or change has not reached its end."""
        if self.changing or (self.members and self.joined != self.members):
            raise InterruptedForwardError(STOPPED)

    @contextmanager
    def change(self) -> Iterator[None]:
        """Mark a change of all layers, which nobody may use where it stops in the middle."""
        self.check()
        self.changing = True
        yield
        self.changing = False

    def join(self, layer: Any, count: int, q_len: int) -> Step:
        """Return the step by which `layer` appends `q_len` columns to `count` rows; it is `changing` until the layer
        has `joined`.

        Raises: CacheMismatchError for another number of rows; PagePoolExhaustedError, and what growing the storage raises, with
            the cache unchanged; InterruptedForwardError where an earlier forward stopped half-way.
        """
        group, seen = layer.group, layer.seen
        if seen == group.seen:
            self.begin(count, q_len)
        elif self.changing:
            self.check()
        step: Any = group.step
        begins_there = step is not None and seen == step.seen_before
        if not begins_there or (seen + q_len, count) != (step.seen_after, step.rows):
            # another forward over layers that differ would append to the first ones again
            self.changing |= not begins_there
            raise InterruptedForwardError(
                f"layer {layer.layer_idx} cannot append {q_len} columns here: it has seen {seen} of {group.seen} columns of "
                "this cache. An earlier forward stopped half-way, or layers were changed one without the others; "
                "call reset() and start again"
            )
        self.changing = True
        return step

    def begin(self, count: int, q_len: int) -> None:
        """Plan the append of `q_len` columns to `count` rows in all windows, or in none where one has no room."""
        self.check()
        groups = self.groups
        with ExitStack() as stack:
            for group in groups:  # from ids that are handed out until rows hold them
                stack.enter_context(group.pool.lock)
            try:
                plans = [group.plan(count, q_len) for group in groups]
                taken = [
                    [] if plan.step.plain else group.pool.allocate(plan.num_pages)
                    for group, plan in zip(groups, plans, strict=True)
                ]
                for group, plan, ids in zip(groups, plans, taken, strict=True):
                    group.make_room(plan, ids)
            except BaseException:  # pages that no row holds are free again by themselves
                for group in groups:
                    group.forget_padding()  # of a forward that never was
                raise
            self.changing = True
            for group, plan, ids in zip(groups, plans, taken, strict=True):
                group.commit(plan, ids)
            self.members, self.joined = self.joined, 0
            self.changing = False
