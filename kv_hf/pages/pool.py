"""Page ids. Knows nothing of rows, layers or tensors.

Nobody counts references: a page is held as long as an owner lists it. When the free ids have run out, those that no
owner lists any more are free again. So a change of rows only has to be right in the rows, and one that stops half-way, or a
cache that is gone, leaves nothing to put in order.
"""

import threading
import weakref
from typing import Any

from ..errors import PagePoolExhaustedError
from ..row_pages import page_capacity


class PagePool:
    """Hands out page ids from 0 up. Safe to be used from several threads.

    Whoever takes ids keeps `lock` until a registered owner lists them, and changes what it lists under `lock` alone.

    Args:
        max_pages: largest number of ids ever held at once, or None for no limit.
    Attributes:
        num_ids: ids ever handed out: storage must have room for this many pages.
        owners: whose pages are held, as long as they live.
    """

    def __init__(self, max_pages: int | None = None) -> None:
        self.max_pages = max_pages
        self.num_ids = 0
        self._prepare()

    def _prepare(self) -> None:
        self._free: list[int] = []  # ids that nobody holds, the next one last; not all of them
        self.lock = threading.RLock()
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        """Numbers alone: who holds pages registers again where the pickle is read."""
        return {"max_pages": self.max_pages, "num_ids": self.num_ids}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._prepare()

    def register(self, owner: Any) -> None:
        """Keep what `owner` holds as long as it lives: the rows of a cache, or a store of prefixes.

        Its `held_pages()` returns the page ids that it holds, as lists; an id as often as it is held.
        """
        with self.lock:
            self.owners.add(owner)

    def held(self, besides: Any = None) -> set[int]:
        """Return the pages that owners hold, but for one of them."""
        with self.lock:
            some = [one for one in list(self.owners) if one is not besides]
            return {page for owner in some for pages in owner.held_pages() for page in pages}

    @property
    def num_held(self) -> int:
        """Pages with at least one owner."""
        return len(self.held())

    def lacking(self, count: int) -> int:
        """Return how many ids are to be made for `count` more pages; those that nobody holds any more are free then.

        Raises: PagePoolExhaustedError where they would pass `max_pages`.
        """
        if count <= len(self._free):
            return 0
        with self.lock:
            held = self.held()
            self._free = [page for page in range(self.num_ids - 1, -1, -1) if page not in held]
        if self.max_pages is not None and len(held) + count > self.max_pages:
            raise PagePoolExhaustedError(
                f"max_pages={self.max_pages} is reached: {len(held)} pages are held and {count} more are "
                "needed; the cache is unchanged. Raise max_pages, use a smaller batch or shorter text"
            )
        return max(0, count - len(self._free))

    def allocate(self, count: int) -> list[int]:
        """Return `count` page ids that nobody holds; all or none. Raises PagePoolExhaustedError at `max_pages`."""
        with self.lock:
            if lacking := self.lacking(count):
                # as many as storage makes room for, so that it is not asked each time who holds what
                room = page_capacity(self.num_ids + lacking)
                most = room if self.max_pages is None else min(room, self.max_pages)
                # counted first: stopped between the two, the new ones are found free later
                first, self.num_ids = self.num_ids, most
                self._free = [*range(most - 1, first - 1, -1), *self._free]
            return [self._free.pop() for _ in range(count)]

    def clear(self) -> None:
        """Forget all ids, none of which anybody holds; under the lock."""
        self.num_ids, self._free = 0, []

    def check_integrity(self) -> None:
        """Raise ValueError where a page that somebody holds could be handed out, or was never handed out."""
        with self.lock:
            every = sorted([*self._free, *self.held()])
            if len({*every}) != len(every) or not {*every} <= {*range(self.num_ids)}:
                raise ValueError(
                    f"of {self.num_ids} pages some are held and free at once, or beyond them: {every[-1]} is the last"
                )
