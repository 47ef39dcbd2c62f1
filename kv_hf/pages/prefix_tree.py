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
        parent: None for a root.
        page: page id, None for a root.
        sinks: of a root: the exact first tokens, as the layers keep them; opaque here.
        states: what layers hold beside pages behind the page's last token, where it is known; opaque here.
        filed: when it was last written to a folder, or found there as used, in seconds.
    """

    parent: "Prefix | None"
    page: int | None = None
    sinks: Any = None
    states: Any = None
    filed: float = float("-inf")


class PrefixTree:
    """Pages by the tokens that they and all before them hold, the least recently used given up first.

    Pages lie in one dictionary, by their parent and tokens: what is found there is held, whatever stops a change in the middle.

    Args:
        pool: the pool of the pages, which are held as long as they are in the tree.
        page_size, sink_tokens: as in CacheConfig.
    """

    def __init__(self, pool: PagePool, page_size: int, sink_tokens: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.sink_tokens = sink_tokens
        self.evictions = 0
        self._roots: dict[Hashable, Prefix] = {}
        # the least recently used first; what follows a node was used before it, or at the same time
        self._nodes: OrderedDict[tuple[Prefix, bytes], Prefix] = OrderedDict()
        pool.register(self)

    def held_pages(self) -> Iterator[tuple[int, ...]]:
        """Yield the page ids that the tree holds."""
        yield from ((node.page,) for node in self._nodes.values() if node.page is not None)

    @property
    def num_pages(self) -> int:
        """Pages that the tree holds."""
        return len(self._nodes)

    @property
    def num_roots(self) -> int:
        """Beginnings whose exact tokens the tree holds."""
        return len(self._roots)

    @property
    def num_states(self) -> int:
        """Pages that the tree knows the states behind."""
        return sum(node.states is not None for node in self._nodes.values())

    @property
    def num_evictable(self) -> int:
        """Pages that nobody but the tree holds; under the pool's lock."""
        others = self.pool.held(besides=self)
        return sum(node.page not in others for node in self._nodes.values())

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
        keys = self.places(tokens)
        root = self._roots.get((space, next(keys)))
        if root is None:
            return []
        found, places = [root], []
        for key in keys:
            node = self._nodes.get((found[-1], key))
            if node is None:
                break
            places.append((found[-1], key))
            found.append(node)
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
        keys = self.places(tokens)
        place = (space, next(keys))
        if place not in self._roots:
            self._roots[place] = Prefix(None, sinks=sinks())
        parent = self._roots[place]
        for key, page in zip(keys, pages, strict=False):
            parent = self._nodes.setdefault((parent, key), Prefix(parent, page))
        return self.find(space, tokens)[: len(pages) + 1]

    def evict(self, count: int) -> int:
        """Release up to `count` pages that nobody else holds, the least recently used first; return how many.

        A root goes with the last page behind it.
        """
        others = self.pool.held(besides=self)
        needed: set[Prefix | None] = set()
        gone: list[tuple[Prefix, bytes]] = []
        for place, node in self._nodes.items():
            if len(gone) >= count:
                break
            if node in needed or node.page in others:
                needed.add(node.parent)
            else:
                gone.append(place)
        for place in gone:
            del self._nodes[place]
        self.evictions += len(gone)
        if any(parent.page is None for parent, _ in gone):
            used = {parent for parent, _ in self._nodes}
            self._roots = {key: root for key, root in self._roots.items() if root in used}
        return len(gone)

    def clear(self) -> None:
        """Let go of all pages."""
        self._nodes.clear()
        self._roots.clear()
