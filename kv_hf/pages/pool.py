"""Page ids and their reference counts. Knows nothing of rows, layers or tensors."""

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, Protocol

from ..errors import PagePoolExhaustedError


class PageHolder(Protocol):
    """Whoever holds pages of a pool: the rows of a cache, or a store of prefixes."""

    def held_pages(self) -> Iterable[Iterable[int]]:
        """Return the page ids that it holds, as lists; an id as often as it is held."""
        ...


class PagePool:
    """Hands out page ids from 0 up and counts who holds them. Safe to be used from several threads.

    An id is free (count 0) or held (count >= 1). Freed ids are handed out again, the last freed first. Whoever takes ids
    keeps `lock` until a registered holder holds them, because the counts only repeat what the holders hold: `recount` sets
    them anew where a holder is gone or a change stopped half-way.

    Args:
        max_pages: largest number of ids ever held at once, or None for no limit.
    Attributes:
        holder_gone: set by finalizers, which may run at any moment: count anew before the next ids are handed out.
    """

    def __init__(self, max_pages: int | None = None) -> None:
        self.max_pages = max_pages
        self._counts: list[int] = []
        self._free: list[int] = []
        self._prepare()

    def _prepare(self) -> None:
        self.lock = threading.RLock()
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._registered = 0
        self.holder_gone = False

    def __getstate__(self) -> dict[str, Any]:
        """Counts and limits; who holds the pages registers again where the pickle is read."""
        return {name: getattr(self, name) for name in ("max_pages", "_counts", "_free")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    @property
    def num_ids(self) -> int:
        """Ids ever handed out: storage must have room for this many pages."""
        return len(self._counts)

    @property
    def num_held(self) -> int:
        """Pages with at least one holder."""
        with self.lock:
            self._follow_holders()
            return len(self._counts) - len(self._free)

    def register(self, holder: PageHolder) -> None:
        """Count what `holder` holds as long as it lives."""
        self.holders.add(holder)
        self._registered += 1

    def _follow_holders(self) -> None:
        """Count anew where a holder is gone."""
        if self.holder_gone or len(self.holders) < self._registered:
            self.recount()

    def recount(self) -> None:
        """Set the counts to what the registered holders hold."""
        with self.lock:
            self.holder_gone = False  # a finalizer that runs from here on has it counted once more
            self._registered = len(self.holders)
            counts = Counter(page for held in self._held() for page in held)
            size = max(len(self._counts), max(counts, default=-1) + 1)
            in_order = dict.fromkeys(page for page in self._free if page < size)
            free = [page for page in in_order if not counts[page]]
            free += [page for page in range(size) if not counts[page] and page not in in_order]
            self._counts = [counts[page] for page in range(size)]
            self._free = free

    def _held(self) -> list[Iterable[int]]:
        return [pages for holder in list(self.holders) for pages in holder.held_pages()]

    # -- counting --------------------------------------------------------------------------------------------

    def check_room(self, count: int) -> None:
        """Raise PagePoolExhaustedError if `count` more pages would pass `max_pages`."""
        held = self.num_held
        if self.max_pages is not None and held + count > self.max_pages:
            raise PagePoolExhaustedError(
                f"max_pages={self.max_pages} is reached: {held} pages are held and {count} more are "
                "needed; the cache is unchanged. Raise max_pages, use a smaller batch or shorter text"
            )

    def allocate(self, count: int) -> list[int]:
        """Return `count` page ids with reference count 1; all or none."""
        if not count:
            return []
        with self.lock:
            self.check_room(count)
            ids = [self._free.pop() for _ in range(min(count, len(self._free)))]
            for page in ids:
                self._counts[page] = 1
            fresh = range(len(self._counts), len(self._counts) + count - len(ids))
            self._counts.extend(1 for _ in fresh)
            return ids + list(fresh)

    def ids_with(self, count: int) -> int:
        """Return `num_ids` as it will be when `count` more pages are handed out."""
        return len(self._counts) + max(0, count - len(self._free))

    def share(self, pages: Iterable[int]) -> None:
        """Add one holder to each page."""
        with self.lock:
            for page in pages:
                if not self._counts[page]:
                    raise ValueError(f"page {page} is free and cannot be shared")
                self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one holder from each page; a page without holders is free."""
        with self.lock:
            for page in pages:
                if not self._counts[page]:
                    raise ValueError(f"page {page} is free and cannot be released")
                self._counts[page] -= 1
                if not self._counts[page]:
                    self._free.append(page)

    def clear(self) -> None:
        """Forget all ids. Nobody may hold one."""
        with self.lock:
            if held := self.num_held:
                raise ValueError(f"{held} pages are held and cannot be forgotten")
            self._free.clear()
            self._counts.clear()

    def count(self, page: int) -> int:
        """Return the number of holders of `page`."""
        return self._counts[page]

    def check_integrity(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Raise ValueError unless the counts equal what is held.

        Args:
            holders: lists of page ids; None asks the registered holders.
        """
        with self.lock:
            self._follow_holders()
            held = self._held() if holders is None else holders
            expected = Counter(page for pages in held for page in pages)
            for page, count in enumerate(self._counts):
                if count != expected[page]:
                    raise ValueError(f"page {page} has count {count} but {expected[page]} holders")
            if sorted(self._free) != [page for page, count in enumerate(self._counts) if not count]:
                raise ValueError("the list of free pages differs from the pages with count 0")
