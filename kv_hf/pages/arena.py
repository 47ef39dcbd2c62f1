"""Page ids and storage that caches may share: the place where sealed pages live.

A cache makes an arena of its own. Copies of it, and all caches of one prefix store, share one: a page is then
held by several of them, and freed when the last lets go.
"""

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import CacheMismatchError
from ..spec import PageSpec, SideSpec
from .blocks import Neighbours
from .rows import Rows
from .pool import PagePool
from .storage import PageStorage


def _difference(
    held: PageSpec, there: torch.device, needed: PageSpec, here: torch.device
) -> tuple[str, str]:
    """Return in words what is held and what is needed instead, as far as they differ."""
    pairs = [
        (_words(one), _words(other)) for one, other in zip(held.sides, needed.sides, strict=False)
    ]
    differing = [pair for pair in pairs if pair[0] != pair[1]]
    if there != here or not differing:
        differing.append((f"pages on {there}", f"pages on {here}"))
    ours, theirs = zip(*differing, strict=True)
    return " and ".join(ours), " and ".join(theirs)


def _words(side: SideSpec) -> str:
    dtype = str(side.dtype).removeprefix("torch.")
    return f"{side.side} in {side.scheme.name} ({dtype}, {side.num_kv_heads} heads of {side.head_dim}, pages of {side.page_size})"


class PageArena:
    """Pools of page ids, one for each group, and storage, one for each layer.

    Args:
        max_pages: bound of each pool, as in CacheConfig.
    """

    def __init__(self, max_pages: int | None = None) -> None:
        self.max_pages = max_pages
        self.pools: dict[int | None, PagePool] = {}
        self.storages: dict[int, PageStorage] = {}
        self.neighbours: dict[int, Neighbours] = {}
        self.lock = threading.RLock()

    def grow_together(self, groups: Iterable[Sequence[int]]) -> None:
        """Let the storages of each of `groups` grow in blocks; groups that are known already stay as they are."""
        for layers in groups:
            if not self.neighbours.keys() & set(layers):
                self.neighbours.update(dict.fromkeys(layers, Neighbours(layers)))

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock."""
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock = threading.RLock()

    def pool(self, window: int | None) -> PagePool:
        """Return the pool of the group with this sliding window (None: full attention)."""
        return self.pools.setdefault(window, PagePool(self.max_pages))

    def storage(
        self, layer_idx: int, spec: PageSpec, device: torch.device, group: Rows
    ) -> PageStorage:
        """Return the storage of a layer of `group`, made on first use; from then on nobody takes it away.

        Raises: CacheMismatchError where another cache has or will have pages of another spec or device there.
        """
        with self.lock:
            others = any(
                getattr(holder, "touched", False) and holder is not group
                for holder in group.pool.holders
            )
            found = self._storage(layer_idx, spec, device, others)
            group.touched = True
            return found

    def _storage(
        self, layer_idx: int, spec: PageSpec, device: torch.device, others: bool
    ) -> PageStorage:
        found = self.newest(layer_idx)
        if found is not None and (found.asked, found.device) == (spec, device):
            return found
        if found is not None and (others or self.num_held):
            ours, theirs = _difference(found.asked, found.device, spec, device)
            raise CacheMismatchError(
                f"layer {layer_idx}: pages are shared with a cache of other formats, sizes, dtype or device: it holds {ours}, this "
                f"one needs {theirs}. Use one prefix_store per dtype (torch.autocast gives keys or values another one) and device, "
                "or call its clear() when no cache uses it"
            )
        self.storages[layer_idx] = self.make_storage(layer_idx, spec, device)
        return self.storages[layer_idx]

    def make_storage(self, layer_idx: int, spec: PageSpec, device: torch.device) -> PageStorage:
        """Make the storage of a layer."""
        storage = PageStorage(spec, device)
        if layer_idx in self.neighbours:
            self.neighbours[layer_idx].join(layer_idx, storage)
        return storage

    def newest(self, layer_idx: int) -> PageStorage | None:
        """Return the storage that the pages of a layer lie in now, None before there is any."""
        found = self.storages.get(layer_idx)
        if found is not None and found.successor is not None:
            self.storages[layer_idx] = found = found.newest
        return found

    def specs(self) -> list[PageSpec]:
        """Return what the pages of each layer with storage are like."""
        return [one.newest.spec for one in list(self.storages.values())]

    def replace(self, layer_idx: int, old: PageStorage, new: PageStorage) -> None:
        """Let `new`, which holds all pages of `old`, take its place for every cache, under the lock that both share.

        Layers that hold `old` find `new` before they write next; what reads `old` may finish.
        """
        old.hand_over(new)
        if self.storages.get(layer_idx) is old:
            self.storages[layer_idx] = new

    @property
    def staging_bytes(self) -> int:
        """Bytes on devices through which pages that live outside are read."""
        return 0

    @property
    def num_held(self) -> int:
        """Pages that somebody holds, over all pools."""
        return sum(pool.num_held for pool in self.pools.values())

    def clear(self) -> None:
        """Give all memory back where nobody holds a page, nor has tokens that will be sealed into one."""
        with self.lock:
            holders = [holder for pool in self.pools.values() for holder in pool.holders]
            if not self.num_held and not any(getattr(holder, "touched", 0) for holder in holders):
                self.storages.clear()
                for neighbours in self.neighbours.values():
                    neighbours.forget()
                for pool in self.pools.values():
                    pool.clear()

    def shared_parts(self) -> list[Any]:
        """Return the objects that a copy of a cache shares with it."""
        storages = [one.newest for one in list(self.storages.values())]
        return [self, *self.pools.values(), *storages]
