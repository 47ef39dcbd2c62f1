"""Token prefixes and the pages that hold them: a tree whose edges are pages' worth of tokens. Knows no tensor.

A page's keys and values depend on all tokens before it. So a page is found by walking from the root along the
tokens themselves: a hit has compared every token, there is no hash to collide. The chain of blocks is that of vLLM's
automatic prefix caching (arXiv 2309.06180), the tree that of RadixAttention (arXiv 2312.07104).
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from .pool import PagePool


@dataclass(eq=False)
class Prefix:
    """One node: a page after its parent's, or a root with the exact first tokens.

    Attributes:
        parent: None for a root.
        key: what it is found under in its parent.
        page: page id, None for a root.
        sinks: of a root: the exact first tokens, as the layers keep them; opaque here.
    """

    parent: "Prefix | None"
    key: Hashable
    page: int | None = None
    sinks: Any = None
    children: dict[Hashable, "Prefix"] = field(default_factory=dict)


class PrefixTree:
    """Pages by the tokens that they and all before them hold, the least recently used given up first.

    Args:
        pool: the pool of the pages, which are held as long as they are in the tree.
        page_size, sink_tokens: as in CacheConfig.
    """

    def __init__(self, pool: PagePool, page_size: int, sink_tokens: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self.sink_tokens = sink_tokens
        self.evictions = 0
        self.roots: dict[Hashable, Prefix] = {}
        self._used: OrderedDict[Prefix, None] = OrderedDict()  # the least recently used first
        self._changing = False  # without the pool's lock held: a change was interrupted
        pool.register(self)

    def held_pages(self) -> list[tuple[int, ...]]:
        """Return the page ids that the tree holds."""
        return [tuple(node.page for node in self._used if node.page is not None)]

    @property
    def num_pages(self) -> int:
        """Pages that the tree holds."""
        return len(self._used) - len(self.roots)

    @property
    def num_spare(self) -> int:
        """Pages that nobody but the tree holds; under the pool's lock."""
        return len(set(*self.held_pages()) - self.pool.held(besides=self))

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Change what the tree holds; what a change that was interrupted has left is given up, whatever it was."""
        self._forget_interrupted()
        self._changing = True
        yield
        self._changing = False

    def _forget_interrupted(self) -> None:
        if self._changing:
            self.roots.clear()
            self._used.clear()
            self._changing = False

    def _keys(self, space: Hashable, tokens: Sequence[int]) -> list[Hashable]:
        sinks, size = self.sink_tokens, self.page_size
        if len(tokens) < sinks:
            return []
        keys: list[Hashable] = [(space, array("q", tokens[:sinks]).tobytes())]
        for start in range(sinks, len(tokens) - size + 1, size):
            keys.append(array("q", tokens[start : start + size]).tobytes())
        return keys

    def find(self, space: Hashable, tokens: Sequence[int]) -> list[Prefix]:
        """Return the nodes of the longest known prefix of `tokens`, the root first; empty without any.

        Args:
            space: what besides tokens the keys and values depend on.
        """
        self._forget_interrupted()
        found: list[Prefix] = []
        level = self.roots
        for key in self._keys(space, tokens):
            node = level.get(key)
            if node is None:
                break
            found.append(node)
            level = node.children
        self._touch(found)
        return found

    def add(
        self, space: Hashable, tokens: Sequence[int], pages: Sequence[int], sinks: Any
    ) -> list[Prefix]:
        """Keep `pages`, the sealed pages of a row whose tokens begin with `tokens`; return their nodes.

        A node that is there already keeps its page.

        Args:
            sinks: called without arguments for the exact first tokens where the root is new.
        """
        nodes: list[Prefix] = []
        if not pages:
            return nodes
        with self._change():
            level, parent = self.roots, None
            for key, page in zip(self._keys(space, tokens), (None, *pages), strict=False):
                node = level.get(key)
                if node is None:
                    node = Prefix(parent, key, page, sinks() if parent is None else None)
                    self._used[node] = None
                    level[key] = node
                nodes.append(node)
                level, parent = node.children, node
            self._touch(nodes)
        return nodes

    def give_up(self, count: int) -> int:
        """Release up to `count` pages that nobody else holds, the least recently used first; return how many."""
        before, others = self.evictions, self.pool.held(besides=self)
        with self._change():
            for node in list(self._used):
                if self.evictions - before >= count:
                    break
                if node.page is not None and not node.children and node.page not in others:
                    self._remove(node)
        return self.evictions - before

    def _remove(self, node: Prefix) -> None:
        siblings = self.roots if node.parent is None else node.parent.children
        del siblings[node.key]
        del self._used[node]
        if node.page is not None:
            self.evictions += 1
        if node.parent is not None and node.parent.page is None and not siblings:
            self._remove(node.parent)  # a root without pages is of no use

    def _touch(self, nodes: Iterable[Prefix]) -> None:
        """Mark a path as used: its end first, so that a node is never given up before those that follow it."""
        for node in reversed(list(nodes)):
            self._used.move_to_end(node)

    def clear(self) -> None:
        """Let go of all pages."""
        with self._change():
            self.roots.clear()
            self._used.clear()
