"""Token prefixes and the pages that hold them: a tree whose edges are pages' worth of tokens. Knows no tensor.

A page's keys and values depend on all tokens before it. So a page is found by walking from the root along the
tokens themselves: a hit has compared every token, there is no hash to collide. The chain of blocks is that of vLLM's
automatic prefix caching (arXiv 2309.06180), the tree that of RadixAttention (arXiv 2312.07104).
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .pool import PagePool


@dataclass(eq=False)
class Prefix:
    """One node: a page after its parent's, or a root with the exact first tokens.

    Attributes:
        page: page id, None for a root.
        sinks: of a root: the exact first tokens, as the layers keep them; opaque here.
        states: what layers hold beside pages behind the page's last token, where it is known; opaque here.
        filed: when it was last written to a folder, or found there as used, in seconds.
    """

    page: int | None
    sinks: Any = None
    states: Any = None
    filed: float = float("-inf")


class PrefixTree:
    """Pages by the tokens that they and all before them hold, the least recently used given up first.

    All nodes lie in one dictionary, by their tokens and what is above them, another node or a root's space. What is found there
    is held, whatever stops a change in the middle.

    Args:
        pool: the pool of the pages, which are held as long as they are in the tree.
        page_size, sink_tokens: as in CacheConfig.
    """

    def __init__(self, pool: PagePool, page_size: int, sink_tokens: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.sink_tokens = sink_tokens
        self.evictions = 0
        # the least recently used first; what follows a node was used before it, or at the same time
        self._nodes: OrderedDict[tuple[Hashable, bytes], Prefix] = OrderedDict()
        pool.register(self)

    def held_pages(self) -> Iterator[tuple[int, ...]]:
        """Yield the page ids that the tree holds."""
        yield from ((node.page,) for node in self._nodes.values() if node.page is not None)

    def counts(self) -> tuple[int, int, int]:
        """Return how many pages the tree holds, how many roots, and how many pages it knows the states behind."""
        nodes = self._nodes.values()
        pages = sum(node.page is not None for node in nodes)
        return pages, len(nodes) - pages, sum(node.states is not None for node in nodes)

    @property
    def num_evictable(self) -> int:
        """Pages that nobody but the tree holds: `evict` releases them."""
        with self.pool.lock:
            own = {node.page for node in self._nodes.values() if node.page is not None}
            return len(own - self.pool.held(besides=self))

    def places(self, tokens: Sequence[int]) -> Iterator[bytes]:
        """Yield the tokens of the root of `tokens`, then those of each whole page behind it, as bytes that any process has."""
        yield array("q", tokens[: self.sink_tokens]).tobytes()
        size = self.page_size
        for start in range(self.sink_tokens, len(tokens) - size + 1, size):
            yield array("q", tokens[start : start + size]).tobytes()

    def find(self, space: Hashable, tokens: Sequence[int]) -> list[Prefix]:
        """Return the nodes of the longest known prefix of `tokens`, the root first; empty without any.

        Args:
            space: what besides tokens the keys and values depend on.
        """
        found: list[Prefix] = []
        places: list[tuple[Hashable, bytes]] = []
        for key in self.places(tokens):
            place = (found[-1] if found else space, key)
            if place not in self._nodes:
                break
            places.append(place)
            found.append(self._nodes[place])
        for place in reversed(places):  # its end first: it is given up before what leads to it
            self._nodes.move_to_end(place)
        return found

    def add(
        self, space: Hashable, tokens: Sequence[int], pages: Sequence[int], sinks: Any
    ) -> list[Prefix]:
        """Keep `pages`, the sealed pages of a row whose tokens begin with `tokens`; return their nodes, the root first.

        A node that is there already keeps its page.

        Args:
            sinks: called without arguments for the exact first tokens where the root is new.
        """
        if not pages or len(tokens) < self.sink_tokens:
            return []
        above = space
        for key, page in zip(self.places(tokens), (None, *pages), strict=False):
            if (above, key) not in self._nodes:
                self._nodes[above, key] = Prefix(page, sinks() if page is None else None)
            above = self._nodes[above, key]
        return self.find(space, tokens)[: len(pages) + 1]

    def evict(self, count: int) -> int:
        """Release up to `count` pages that nobody else holds, the least recently used first; return how many.

        A root goes with the last page behind it.
        """
        released, needed = 0, set[Hashable]()
        with self.pool.lock:
            others = self.pool.held(besides=self)
            for (above, key), node in list(self._nodes.items()):
                is_page = node.page is not None
                if node in needed or node.page in others or (is_page and released >= count):
                    needed.add(above)
                else:
                    del self._nodes[above, key]
                    released += is_page
        self.evictions += released
        return released

    def clear(self) -> None:
        """Let go of all pages."""
        self._nodes.clear()
