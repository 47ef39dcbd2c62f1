"""Page ids and their reference counts. Knows nothing of rows, layers or tensors."""

from collections import Counter
from collections.abc import Iterable

from ..errors import PagePoolExhaustedError


class PagePool:
    """Hands out page ids from 0 up and counts who holds them.

    An id is free (count 0) or held (count >= 1). Freed ids are handed out again, the last freed first.

    Args:
        max_pages: largest number of ids ever held at once, or None for no limit.
    """

    def __init__(self, max_pages: int | None = None) -> None:
        self.max_pages = max_pages
        self._counts: list[int] = []
        self._free: list[int] = []

    @property
    def num_ids(self) -> int:
        """Ids ever handed out: storage must have room for this many pages."""
        return len(self._counts)

    @property
    def num_held(self) -> int:
        """Pages with at least one holder."""
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
        self.check_room(count)
        ids = [self._free.pop() for _ in range(min(count, len(self._free)))]
        for page in ids:
            self._counts[page] = 1
        fresh = range(len(self._counts), len(self._counts) + count - len(ids))
        self._counts.extend(1 for _ in fresh)
        return ids + list(fresh)

    def share(self, pages: Iterable[int]) -> None:
        """Add one holder to each page."""
        for page in pages:
            if not self._counts[page]:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take one holder from each page; a page without holders is free."""
        for page in pages:
            if not self._counts[page]:
                raise ValueError(f"page {page} is free and cannot be released")
            self._counts[page] -= 1
            if not self._counts[page]:
                self._free.append(page)

    def count(self, page: int) -> int:
        """Return the number of holders of `page`."""
        return self._counts[page]

    def check_integrity(self, holders: Iterable[Iterable[int]]) -> None:
        """Raise ValueError unless the counts equal what `holders` (lists of page ids) hold."""
        expected = Counter(page for pages in holders for page in pages)
        for page, count in enumerate(self._counts):
            if count != expected[page]:
                raise ValueError(f"page {page} has count {count} but {expected[page]} holders")
        if sorted(self._free) != [page for page, count in enumerate(self._counts) if not count]:
            raise ValueError("the list of free pages differs from the pages with count 0")
