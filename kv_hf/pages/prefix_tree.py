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
    """

    parent: "Prefix | None"
    page: int | None = None
    sinks: Any = None


class PrefixTree:
    """Pages by the tokens that they and all before them hold, the least recently used given up first.

    All nodes lie in one dictionary, by parent and tokens: what is found there is held, whatever stops a change in the middle.

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
        self._nodes: OrderedDict[tuple[Prefix | None, Hashable], Prefix] = OrderedDict()
        pool.register(self)

    def held_pages(self) -> list[tuple[int, ...]]:
        """Return the page ids that the tree holds."""
        return [tuple(node.page for node in self._nodes.values() if node.page is not None)]

    @property
    def num_pages(self) -> int:
        """Pages that the tree holds."""
        return len(self.held_pages()[0])

    @property
    def num_roots(self) -> int:
        """Beginnings whose exact tokens the tree holds."""
        return len(self._nodes) - self.num_pages

    @property
    def num_spare(self) -> int:
        """Pages that nobody but the tree holds; under the pool's lock."""
        return len(set(*self.held_pages()) - self.pool.held(besides=self))

    def _keys(self, space: Hashable, tokens: Sequence[int]) -> Iterator[Hashable]:
        sinks, size = self.sink_tokens, self.page_size
        if len(tokens) >= sinks:
            yield space, array("q", tokens[:sinks]).tobytes()
        for start in range(sinks, len(tokens) - size + 1, size):
            yield array("q", tokens[start : start + size]).tobytes()

    def find(self, space: Hashable, tokens: Sequence[int]) -> list[Prefix]:
        """Return the nodes of the longest known prefix of `tokens`, the root first; empty without any.

        Args:
            space: what besides tokens the keys and values depend on.
        """
        places: list[tuple[Prefix | None, Hashable]] = []
        parent = None
        for key in self._keys(space, tokens):
            if (parent, key) not in self._nodes:
                break
            places.append((parent, key))
            parent = self._nodes[parent, key]
        for place in reversed(places):  # its end first: it is given up before what leads to it
            self._nodes.move_to_end(place)
        return [self._nodes[place] for place in places]

    def add(
        self, space: Hashable, tokens: Sequence[int], pages: Sequence[int], sinks: Any
    ) -> list[Prefix]:
        """Keep `pages`, the sealed pages of a row whose tokens begin with `tokens`; return their nodes.

        A node that is there already keeps its page.

        Args:
            sinks: called without arguments for the exact first tokens where the root is new.
        """
        parent = None
        for key, page in zip(
            self._keys(space, tokens), (None, *pages) if pages else (), strict=False
        ):
            if (parent, key) not in self._nodes:
                exact = sinks() if parent is None else None
                self._nodes[parent, key] = Prefix(parent, page, exact)
            parent = self._nodes[parent, key]
        return self.find(space, tokens)[: len(pages) + 1] if pages else []

    def give_up(self, count: int) -> int:
        """Release up to `count` pages that nobody else holds, the least recently used first; return how many.

        A root goes with the last page behind it.
        """
        before, others = self.evictions, self.pool.held(besides=self)
        needed = set()
        for place, node in list(self._nodes.items()):
            given = self.evictions - before
            if node in needed or node.page in others or (node.page is not None and given >= count):
                needed.add(node.parent)
                continue
            del self._nodes[place]
            self.evictions += node.page is not None
        return self.evictions - before

    def clear(self) -> None:
        """Let go of all pages."""
        self._nodes.clear()
