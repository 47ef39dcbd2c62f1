"""Copies of a cache, and whether all of its layers tell of the same tokens. Knows no formats."""

import copy
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from transformers.cache_utils import DynamicCache

from ..errors import InterruptedForwardError
from .build import release_pages
from .layer import PagedLayer

if TYPE_CHECKING:
    from ..pages.arena import PageArena
    from ..pages.group import PageGroup


class Copyable(DynamicCache):
    """What copies of a PagedCache share, and the checks that every change of it was finished.

    Attributes:
        halfway: a change of all layers is going on; outside of one, it was interrupted.
    """

    halfway = False
    _releases = False
    groups: "tuple[PageGroup, ...]"
    arena: "PageArena"

    @property
    def paged_layers(self) -> list[PagedLayer]:
        """The layers that live in pages."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent cache that shares this one's sealed pages, which never change.

        The exact windows are copied. Both caches draw new pages from one pool: `max_pages` bounds them together.
        """
        own = ("options", "_config", "_attention_config")
        shared = (*self.arena.shared_parts(), *(getattr(self, name) for name in own))
        memo.update((id(part), part) for part in shared)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied._releases = False
        for cache in (self, copied):
            cache.release_when_gone()
        # last: stopped before, the copy holds no page, and stopped from here on, it gives back what it holds
        for theirs, ours in zip(copied.groups, self.groups, strict=True):
            theirs.share_rows(ours)
        return copied

    def __copy__(self) -> Self:
        # two caches with one set of rows would pull the rug from under each other
        return copy.deepcopy(self)

    def release_when_gone(self) -> None:
        """See to it that pages are freed with this cache although others share their storage."""
        if not self._releases:
            weakref.finalize(self, release_pages, self.layers)
            self._releases = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a pickle: pages that other caches held in it are free here."""
        vars(self).update(state)
        self._releases = False
        for group in self.groups:
            group.pool.recount()

    def change_layers(self, change: Callable[[Any], None]) -> None:
        """Call `change` with each layer; where it does not reach the last one, the cache is of no use until reset()."""
        self.check_steps()
        for layer in self.layers:
            change(layer)
            self.halfway = (
                True  # not before: the first layer may refuse, and then nothing has changed
            )
        self.halfway = False

    def check_whole(self) -> None:
        """Raise InterruptedForwardError where a change of all layers stopped half-way."""
        if self.halfway:
            raise InterruptedForwardError(
                "a reset, crop, new order of rows, or a prefix that was attached has reached only some layers of this "
                "cache; call reset() and start again"
            )

    def check_steps(self) -> None:
        """Raise InterruptedForwardError where the last forward or change is known not to have reached all layers."""
        self.check_whole()
        for group in self.groups:
            group.lockstep.check_done()

    def check_done(self) -> None:
        """Raise InterruptedForwardError where the last forward or change did not reach all layers."""
        self.check_steps()
        behind = [one.layer_idx for one in self.paged_layers if one.store and not one.is_up_to_date]
        if behind:
            raise InterruptedForwardError(
                f"layers {behind} are behind the others: a forward of this cache stopped half-way; call reset() and "
                "start again"
            )

    def check_integrity(self) -> None:
        """Raise ValueError unless counts, lengths, storage and layers agree.

        That is InterruptedForwardError where a forward, or a change of all layers, stopped half-way.
        """
        self.check_done()
        begun = [group for group in self.groups if group.epoch]
        for group in self.groups:
            group.check_integrity()
            if group.epoch and group.seen != begun[0].seen:
                raise InterruptedForwardError(
                    f"groups of layers have seen {group.seen} and {begun[0].seen} columns: a forward of this cache "
                    "stopped half-way; call reset() and start again"
                )
        for layer in self.paged_layers:
            if layer.storage is None:
                continue
            layer.storage.check_integrity()
            most = max((page + 1 for row in layer.group.rows for page in row.pages), default=0)
            if layer.storage.capacity < most:
                raise ValueError(
                    f"layer {layer.layer_idx} has no room for a page of the block table"
                )
