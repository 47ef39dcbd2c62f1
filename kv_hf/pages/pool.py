"""Page ids and their reference counts. Knows nothing of rows, layers or tensors."""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, Protocol

from ..errors import PagePoolExhaustedError


class PageHolder(Protocol):
    """Whoever holds pages of a pool: a group of rows, or a store of prefixes."""

    def held_pages(self, pool: "PagePool") -> Iterable[Iterable[int]]:
        """Return the page ids of `pool` that it holds, as lists; an id as often as it is held."""
        ...


class PagePool:
    """Hands out page ids from 0 up and counts who holds them. Safe to be used from several threads.

    An id is free (count 0) or held (count >= 1). Freed ids are handed out again, the last freed first.

    Args:
        max_pages: largest number of ids ever held at once, or None for no limit.
    """

    def __init__(self, max_pages: int | None = None) -> None:
        self.max_pages = max_pages
        self._counts: list[int] = []
        self._free: list[int] = []
        self._prepare()

    def _prepare(self) -> None:
        self.lock = threading.RLock()
        self.holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._gone: deque[Iterable[int]] = deque()

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
            self._release_gone()
            return len(self._counts) - len(self._free)

    def check_room(self, count: int) -> None:
        """Raise PagePoolExhaustedError if `count` more pages would pass `max_pages`."""
        if self.max_pages is not None and self.num_held + count > self.max_pages:
            raise PagePoolExhaustedError(
                f"max_pages={self.max_pages} is reached: {self.num_held} pages are held and {count} more are "
                "needed; the cache is unchanged. Raise max_pages, use a smaller batch or shorter text"
            )

    def allocate(self, count: int) -> list[int]:
        """Return `count` page ids with reference count 1; all or none."""
        if not count:
            return []
        with self.lock:
            self._release_gone()
            self.check_room(count)
            ids = [self._free.pop() for _ in range(min(count, len(self._free)))]
            for page in ids:
                self._counts[page] = 1
            fresh = range(len(self._counts), len(self._counts) + count - len(ids))
            self._counts.extend(1 for _ in fresh)
            return ids + list(fresh)

    def ids_after(self, count: int) -> int:
        """Return `num_ids` as it will be when `count` more pages are handed out."""
        with self.lock:
            self._release_gone()
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

    def release_later(self, pages: Iterable[int]) -> None:
        """Release `pages` before the next ids are handed out: for finalizers, which may run at any moment."""
        self._gone.append(pages)

    def _release_gone(self) -> None:
        while self._gone:
            self.release(self._gone.popleft())

    def clear(self) -> None:
        """Forget all ids. Nobody may hold one."""
        with self.lock:
            if self.num_held:
                raise ValueError(f"{self.num_held} pages are held and cannot be forgotten")
            self._counts.clear()
            self._free.clear()

    def count(self, page: int) -> int:
        """Return the number of holders of `page`."""
        return self._counts[page]

    def recount(self) -> None:
        """Set the counts to what the registered holders hold (where a pickle with other holders was read)."""
        with self.lock:
            counts = Counter(page for held in self._held() for page in held)
            self._counts = [counts[page] for page in range(len(self._counts))]
            self._free = [page for page, count in enumerate(self._counts) if not count]

    def _held(self) -> list[Iterable[int]]:
        return [pages for holder in list(self.holders) for pages in holder.held_pages(self)]

    def check_integrity(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Raise ValueError unless the counts equal what is held.

        Args:
            holders: lists of page ids; None asks the registered holders.
        """
        with self.lock:
            self._release_gone()
            held = self._held() if holders is None else holders
            expected = Counter(page for pages in held for page in pages)
            for page, count in enumerate(self._counts):
                if count != expected[page]:
                    raise ValueError(f"page {page} has count {count} but {expected[page]} holders")
            if sorted(self._free) != [page for page, count in enumerate(self._counts) if not count]:
                raise ValueError("the list of free pages differs from the pages with count 0")
