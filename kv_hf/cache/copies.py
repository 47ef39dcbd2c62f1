"""Copies of a cache, states of it for others, and whether all of its layers tell of the same tokens. Knows no formats."""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from ..errors import CacheMismatchError, InterruptedForwardError, UnsupportedModelError
from ..pages.group import PageGroup
from ..pages.group_state import held_pages
from .base import CacheBase
from .layer import PagedLayer
from .report import tensor_bytes
from .state import CacheState, LayerPages, LayerState, LiveTensors, portable, with_wider


def release_pages(layers: Sequence[Any]) -> None:
    """Let go of all pages of a cache that is gone: a finalizer, which may run at any moment."""
    for group in {layer.group for layer in layers if isinstance(layer, PagedLayer)}:
        group.let_go()


class Copyable(CacheBase):
    """Copies of a growing cache, the pages that they share, and the checks that every change was finished."""

    _releases = False
    groups: tuple[PageGroup, ...]

    @property
    def paged_layers(self) -> list[PagedLayer]:
        """The layers that live in pages."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent cache that shares this one's sealed pages, which never change.

        The exact windows are copied. Both caches draw new pages from one pool: `max_pages` bounds them together.
        """
        own = ("options", "_config", "_attention_config")
        pages = [layer.storage for layer in self.paged_layers if layer.storage is not None]
        shared = (*self.arena.shared_parts(), *pages, *(getattr(self, name) for name in own))
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

    def state(self) -> CacheState:
        """Return what this cache holds, for a file or another cache; its tensors are this cache's own, not copies.

        Raises: CacheMismatchError for an empty cache; InterruptedForwardError after a forward that stopped half-way;
            UnsupportedModelError where layers hold more than pages and exact tokens.
        """
        self._check_complete()
        held = {layer.layer_idx: layer for layer in self.paged_layers}
        pages = {id(group): held_pages(group.rows) for group in self.groups}
        return CacheState(
            with_wider(portable(self.options), self.paged_layers),
            self.model_signature,
            tuple(group.state() for group in self.groups),
            tuple(
                LayerState.of(
                    index, layer.store.spec, self._group_number(layer), layer.store.device
                )
                for index, layer in held.items()
                if layer.store is not None
            ),
            LiveTensors(held, {index: pages[id(layer.group)] for index, layer in held.items()}),
            self.computed_by,
        )

    def _check_complete(self) -> None:
        """Raise an error unless the cache holds tokens, in pages and exact windows alone, up to the same column."""
        if not self.group.rows:
            raise CacheMismatchError("this cache is empty: there is nothing to save")
        kept = [
            f"{index} ({type(layer).__name__})"
            for index, layer in enumerate(self.layers)
            if (layer.extra_bytes if isinstance(layer, PagedLayer) else tensor_bytes(vars(layer)))
        ]
        if kept:
            raise UnsupportedModelError(
                f"layers {', '.join(kept)} hold states beside their pages (transformers' own, or indexer keys); saved caches hold "
                "pages only"
            )
        layers = self.paged_layers
        behind = [one.layer_idx for one in layers if not one.is_up_to_date or not one.store]
        if behind:
            raise InterruptedForwardError(
                f"layers {behind} have not taken part in all forwards of this cache: an earlier one stopped half-way; it "
                "cannot be saved"
            )
        self.check_integrity()
        if any(layer.window != layer.group.window for layer in layers):
            raise UnsupportedModelError(
                "this cache keeps all pages of sliding layers for its prefix_store; save one that was made without a store"
            )

    def _take_over(self, state: CacheState, pages: Mapping[int, LayerPages]) -> None:
        for number, (group, theirs) in enumerate(zip(self.groups, state.groups, strict=True)):
            for index, row in enumerate(theirs.rows):
                if (row.pages or row.dropped) and row.exact < group.sink_tokens:
                    raise CacheMismatchError(f"row {index} holds pages, but not its first tokens")
            group.restore(theirs, [layer for layer, one in pages.items() if one.group == number])
        self.check_integrity()
        for one in state.layers:
            layer: Any = self.layers[one.layer]
            num_pages = state.groups[pages[one.layer].group].num_pages
            layer.resume(one, state.tensors, num_pages)
        self.check_integrity()

    def _group_number(self, layer: Any) -> int:
        return next(number for number, group in enumerate(self.groups) if group is layer.group)

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
            group.tracker.check_done()

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
