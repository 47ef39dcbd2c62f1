"""Prompts that begin alike share their sealed pages: within a batch, and from one call to the next."""

import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..checks import check_int
from ..config import CacheConfig
from ..errors import CacheMismatchError, CacheOptionError
from ..geometry import full_pages, page_start
from ..notices import warn_once
from ..pages.moved import persistent_tensors
from ..pages.prefix_tree import Prefix, PrefixTree
from ..pages.step import Row
from ..pages.storage import PageMemory, PageStorage, Pair
from ..printable import short
from ..units import parse_bytes
from .identity import ModelId, space_of
from .prefix_folder import PrefixFolder, name_of, prefix_names, put_pages
from .report import tensor_bytes
from .saved import VERSION, device_of
from .states import States, restore_rows, states_of_row

SCAN = 64  # tokens that linear attention computes at a time
SALT = " salt "  # between a space and the salt
Sinks = Sequence[Pair]  # of each layer: exact first keys and values
# options that decide the bytes of a page
_FORMAT = (
    "keys", "values", "page_size", "group_size", "sink_tokens", "layers", "latent", "widen",
)  # fmt: skip


@dataclass(frozen=True)
class PrefixStats:
    """The counts and holdings of a store.

    Attributes:
        rows, rows_hit: prompts asked for, and prompts that began with tokens found in the store.
        tokens, tokens_computed: tokens of those prompts, and tokens that went through the model for them.
        pages, bytes: what the store holds now, shared pages once.
        evictions: pages evicted because the store was full.
        pages_read, pages_written, pages_damaged: of the folder, by this store.
    """

    rows: int = 0
    rows_hit: int = 0
    tokens: int = 0
    tokens_computed: int = 0
    pages: int = 0
    bytes: int = 0
    evictions: int = 0
    pages_read: int = 0
    pages_written: int = 0
    pages_damaged: int = 0

    @property
    def skipped(self) -> float:
        """Part of the prompts' tokens that did not go through the model; 0.0 before the first prompt."""
        return 1 - self.tokens_computed / self.tokens if self.tokens else 0.0


@dataclass(frozen=True)
class KnownPrefix:
    """The beginning of a prompt that a store knows.

    Attributes:
        tokens: how many of the prompt's first tokens lie in `pages` and in front of them; 0 without any.
        pages: ids, in order.
        sinks: the exact first tokens, as `sinks_of` of the cache that brought them gave them; None without any.
        states: what layers hold beside pages behind these tokens, as `states_of_row` gave it; empty where they hold nothing.
    """

    tokens: int = 0
    pages: tuple[int, ...] = ()
    sinks: Any = None
    states: States = field(default_factory=dict)


class PrefixStore:
    """Sealed pages of earlier prompts of one model, found by their tokens.

        store = kv_hf.PrefixStore(max_bytes="1GiB")
        model.generate(**inputs, cache_implementation="paged_int4", cache_config={"prefix_store": store})

    A store belongs to the first model and formats that use it; each state of its adapters has prefixes of its own.
    Several caches may use it at once, in several threads too. Pages are given up least recently used first, never while a cache holds them.

    With a folder the pages outlive the process, and other processes of this machine find them: of a model with the same weights,
    adapters and formats. They are written behind the forwards, by a thread.

    Of a model whose layers hold states beside pages (linear attention, Mamba, convolutions) prompts are computed in parts, and the
    states behind each part are kept with its last page. A prompt goes on behind the last part that is known. Answers are
    not kept there.

    Args:
        max_bytes: bound of the pages that the store keeps, of the exact tokens in front of them and of states, over all
            layers: a number or "2GiB".
        keep_answers: keep the pages of the text that generate() writes too, for the next turn of a chat.
        folder: where pages are written to and looked for too; None: in memory alone.
        folder_bytes: bound of the files of all models in it.
        snapshot_tokens: tokens between two places where states are kept, a multiple of 64 and of page_size; the last whole
            page of a prompt is one, too.
    Raises: CacheOptionError for a bound that is no size, a `folder` that is no path, a `keep_answers` that is neither True nor
        False, and other `snapshot_tokens`.
    """

    def __init__(
        self,
        max_bytes: int | str = 2**30,
        *,
        keep_answers: bool = False,
        folder: str | os.PathLike[str] | None = None,
        folder_bytes: int | str = 2**34,
        snapshot_tokens: int = 1024,
    ) -> None:
        self.max_bytes = parse_bytes("max_bytes", max_bytes)
        if not isinstance(keep_answers, bool):
            raise CacheOptionError(f"keep_answers must be True or False, got {short(keep_answers)}")
        self.keep_answers = keep_answers
        check_int("snapshot_tokens", snapshot_tokens, SCAN)
        self.snapshot_tokens = snapshot_tokens
        self.has_states = False  # of the model's layers
        self._state_bytes = 0  # of one snapshot of them
        room = parse_bytes("folder_bytes", folder_bytes)
        self.folder = None if folder is None else PrefixFolder(folder, room)
        self._states: dict[str, str | None] = {}  # space -> name of the model's state in the folder
        self.page_memory = PageMemory()
        self._bound: dict[str, Any] = {}  # options and sizes of the model
        self._model: Callable[[], Any] = _no_model
        self._binding = threading.Lock()
        self._tree: PrefixTree | None = None
        self._counts: Counter[str] = Counter()  # of prompts, by their names in PrefixStats

    def __deepcopy__(self, memo: dict[int, Any]) -> "PrefixStore":
        """Return the store itself: generate() copies its options, and the copy must share the same pages."""
        return self

    def __reduce__(self) -> str:
        raise TypeError("a PrefixStore cannot be pickled; save single caches with cache.save()")

    def for_tenant(self, salt: str) -> "PrefixStore":
        """Return this store as one tenant uses it: the same pages, bound and counts, but prefixes of its own.

        Prompts find the pages of prompts with the same salt alone, so that nobody learns from the time of a prefill what
        another tenant has sent.

        Args:
            salt: any text; "" is what the store itself uses.
        Raises: CacheOptionError for anything but text.
        """
        if not isinstance(salt, str):
            raise CacheOptionError(f"salt must be a string, got {short(salt)}")
        return _TenantStore(self, salt) if salt else self

    # -- whose pages these are ---------------------------------------------------------------------------

    def bind(self, options: CacheConfig, signature: dict[str, Any], has_states: bool) -> PageMemory:
        """Return the memory of pages for caches of these options and of a model of these sizes.

        Args:
            has_states: whether layers of the model hold states beside pages.
        Raises: CacheOptionError where the store holds pages of others, and for `snapshot_tokens` that do not end with a page.
        """
        if has_states and self.snapshot_tokens % max(SCAN, options.page_size):
            raise CacheOptionError(
                f"snapshot_tokens must be a multiple of {SCAN} and of page_size={options.page_size}, got {self.snapshot_tokens}"
            )
        asked = {**{name: getattr(options, name) for name in _FORMAT}, **signature}
        with self._binding:
            if self._tree is None:
                self._bound, self.has_states = asked, has_states
                pool = self.page_memory.pool(None)
                self._tree = PrefixTree(pool, options.page_size, options.sink_tokens)
                if self.folder is not None:
                    pool.register(self.folder)
        for name, value in self._bound.items():
            if asked[name] != value:
                raise CacheOptionError(
                    f"prefix_store holds pages of {name}={value!r}, this cache has {name}={asked[name]!r}; use "
                    "one store per model and format"
                )
        return self.page_memory

    def bind_model(self, model: Any, options: CacheConfig | None = None) -> str:
        """Remember the model, and return the space of prefixes that its state has now.

        Each state of weights, adapters (active, scaling, merged, disabled), hooks and autocast has a space of its own.

        Args:
            options: of a cache whose answers are kept too. Steps that read a part of the text before them compute other
                keys than a prompt that reads everything: those of equal read_* options have a space of their own.
        Raises: CacheMismatchError for another model: equal tokens have other keys there.
        """
        space = space_of(model) + _reads(options)
        with self._binding:
            if self._model is _no_model:
                self._model = weakref.ref(model)
            elif self._model() is not model:
                raise CacheMismatchError(
                    f"prefix_store holds keys and values of another {type(model).__name__}; use one store per model"
                )
            if self.folder is not None and space not in self._states:
                self._states[space] = self._lasting(model, options)
        return space

    def _lasting(self, model: Any, options: CacheConfig | None) -> str | None:
        """Return what the folder calls the state of the model and its options."""
        found = ModelId.lasting(model)
        if found is not None:
            return name_of(
                VERSION, sorted(found.items()), sorted(self._bound.items()), _reads(options)
            )
        warn_once(
            "prefix_store folder",
            "The folder of a prefix_store is not used for a state of the model that other processes cannot know: hooks, adapters "
            "chosen by row, dropout, or weights that are not in memory",
        )
        return None

    @property
    def tree(self) -> PrefixTree:
        """The pages by their tokens. Raises CacheOptionError before a cache uses the store."""
        if self._tree is None:
            raise CacheOptionError("prefix_store is not used by any cache yet")
        return self._tree

    # -- sharing -----------------------------------------------------------------------------------------

    def find(self, space: Hashable, tokens: Sequence[int], recent_tokens: int = 0) -> KnownPrefix:
        """Return what is known of a prompt, without its last tokens; whoever goes on with its pages holds the pool's lock.

        Args:
            space: what besides tokens the keys and values depend on.
            recent_tokens: of the cache: these stay exact, so that they are computed, and one token at least.
        """
        with self.tree.pool.lock:
            return self._prefix(self._nodes(space, tokens, recent_tokens))

    def _nodes(self, space: Hashable, tokens: Sequence[int], recent_tokens: int) -> list[Prefix]:
        return self._known(self.tree.find(space, _sought(tokens, recent_tokens)))

    def _known(self, nodes: list[Prefix]) -> list[Prefix]:
        """Return the first of `nodes`, up to the last one behind which a text can go on."""
        while self.has_states and nodes and nodes[-1].states is None:
            nodes = nodes[:-1]
        return nodes

    def _prefix(self, nodes: Sequence[Prefix]) -> KnownPrefix:
        tree, pages = self.tree, _pages_of(nodes)
        if not pages:
            return KnownPrefix()
        tokens = page_start(len(pages), page_size=tree.page_size, sink_tokens=tree.sink_tokens)
        return KnownPrefix(tokens, pages, nodes[0].sinks, nodes[-1].states or {})

    def ends(self, begin: int, end: int) -> list[int]:
        """Return the places behind `begin`, up to `end`, where the computing of a prompt stops for `add`."""
        first, step = self.tree.sink_tokens, self.snapshot_tokens
        places = range(first + step, end, step) if self.has_states else ()
        return [place for place in (*places, end) if place > begin]

    def take_in(
        self,
        space: Hashable,
        tokens: Sequence[int],
        recent_tokens: int,
        layers: Sequence[Any] = (),
        make_free: Callable[[int], bool] = lambda pages: True,
    ) -> None:
        """Bring what the folder has of a prompt, and memory has not, into memory. The pool's lock is not held while files are read.

        Args:
            space, recent_tokens: as of `find`.
            layers: of the cache that asks; where the store has no storage yet, it gets it for them.
            make_free: called with a number of pages before they are taken; says whether there is room.
        """
        folder, tree, state = self.folder, self.tree, self._state_of(space)
        if folder is None or state is None:
            return
        with tree.pool.lock:
            known = self._nodes(space, tokens, recent_tokens)
        sought = _sought(tokens, recent_tokens)
        names = prefix_names(tree.places(sought))
        if len(known) >= len(names):
            return
        sinks: Any = known[0].sinks if known else folder.first_tokens(state, names[0])
        if sinks is None:
            return
        self._make_storages(layers, sinks)
        storages = self._storages()
        if not storages or len(storages) != len(sinks):
            return
        specs = [one.spec for one in storages]
        room = self.max_bytes // sum(spec.page_bytes for spec in specs)
        names = names[max(1, len(known)) :][:room]
        pages, states = folder.pages(state, names, specs, self.has_states)
        with tree.pool.lock, persistent_tensors():
            held, storages = self._nodes(space, tokens, recent_tokens), self._storages()
            # another thread may have brought or given up pages meanwhile, or made them wider
            same = len(held) == len(known) and [one.spec for one in storages] == specs
            if not (pages and same and make_free(len(pages))):
                return
            ids = tree.pool.allocate(len(pages))
            with self.page_memory.lock:
                put_pages(ids, pages, storages)
            added = tree.add(space, sought, (*_pages_of(held), *ids), lambda: sinks)
            if states:
                model = self._model()
                on = {name: device_of(model, int(name.partition(".")[0])) for name in states}
                self._hold(added[-1], {name: one.to(on[name]) for name, one in states.items()})
            self._make_room()

    def _make_storages(self, layers: Sequence[Any], sinks: Sinks) -> None:
        """Make the storage of layers with first tokens of these sizes, where no forward has made it yet."""
        memory, model = self.page_memory, self._model()
        for layer, (keys, values) in zip(layers, sinks, strict=False):
            if layer.layer_idx not in memory.storages and model is not None:
                device = device_of(model, layer.layer_idx)
                spec = layer.formats.spec_of(keys[None].to(device), values[None].to(device))
                memory.storage(layer.layer_idx, spec, device, layer.group)

    def _storages(self) -> list[PageStorage]:
        """Return the storage of all layers that have one, in order."""
        return [one for _, one in sorted(self.page_memory.storages.items())]

    def _state_of(self, space: Hashable) -> str | None:
        """Return the name of a space in the folder; None where it is of this process alone."""
        own, _, salt = space.partition(SALT) if isinstance(space, str) else ("", "", "")
        state = self._states.get(own)
        return name_of(state, salt) if state and salt else state

    def attach(
        self,
        cache: Any,
        space: Hashable,
        rows: Sequence[Sequence[int]],
        padding: Sequence[int],
        chunk: int | None = None,
        computed: int | None = 0,
    ) -> int:
        """Let an empty cache begin with the pages known of its rows; return the columns that it has then seen.

        All rows begin at one column, that of the row with the least. A row that has more computes some tokens once
        more; they are not stored again. Where layers hold states, rows begin at a column that all of them have states of.

        Args:
            space: what besides tokens the keys and values depend on.
            rows: the tokens of each row, without padding.
            padding: columns of left padding of each row.
            chunk: columns of the first forward, where that is not all of them.
            computed: tokens of them that went through the model for the store just before; None: the rows do not count in `stats`.
        Raises: CacheMismatchError where the cache is not empty; InterruptedForwardError where an earlier call stopped
            half-way.
        """
        tree, recent = self.tree, cache.options.recent_tokens
        cache.forward.check()
        if cache.get_seq_length():
            raise CacheMismatchError(
                f"a prefix begins an empty cache, and this one has seen {cache.get_seq_length()} columns; call reset() first"
            )
        for tokens in rows:
            self.take_in(space, tokens, recent, cache.paged_layers)
        with tree.pool.lock:
            found = [self._nodes(space, tokens, recent) for tokens in rows]
            seen = self._first_column(found, padding, chunk)
            if computed is not None:
                self._counts["tokens_computed"] += computed
                for tokens, columns in zip(rows, padding, strict=True):
                    self.count_prompt(len(tokens), max(0, seen - columns), computed)
            if seen:
                known, sinks = [self._prefix(nodes) for nodes in found], tree.sink_tokens
                adopted = [
                    Row(columns, one.pages, sinks, unseen=columns + one.tokens - seen)
                    if one.pages
                    else Row(columns, (), 0)
                    for one, columns in zip(known, padding, strict=True)
                ]
                _begin(cache, adopted, known, seen)
        return seen

    def _first_column(
        self, found: list[list[Prefix]], padding: Sequence[int], chunk: int | None
    ) -> int:
        """Return the column to begin at, 0 for none; shorten `found` so that no row is a whole chunk ahead of it.

        Where layers hold states, no row is ahead of it at all, and all have begun.
        """
        chunk, begun = (1, max(padding)) if self.has_states else (chunk, min(padding))
        while True:
            held = [self._prefix(nodes).tokens for nodes in found]
            ends = [columns + tokens for columns, tokens in zip(padding, held, strict=True)]
            seen = min(ends)
            if seen <= begun:
                return 0
            late = [
                i for i, tokens in enumerate(held) if chunk and tokens and ends[i] - seen >= chunk
            ]
            if not late:
                return seen
            for index in late:
                found[index] = self._known(found[index][:-1])

    def add(
        self,
        cache: Any,
        rows: Sequence[Sequence[int]],
        space: Hashable | None = None,
    ) -> None:
        """Keep the sealed pages of `cache`, whose rows begin with the tokens `rows`.

        Rows that hold pages of the same tokens twice let go of theirs and share the store's. Where layers hold states, a row is kept
        that ends with a page: nothing can go on behind others.

        Args:
            cache: one that uses this store.
            rows: for each row of the cache its token ids without padding, no more than it holds.
            space: what `bind_model` returned when the rows were computed; None: what generate() noted of the cache,
                else the state of the store's model now.
        Raises: CacheMismatchError for another cache, rows that it does not hold, or a cache whose tokens were computed
            in more than one state of the model, or from more than tokens;
            InterruptedForwardError after a forward that stopped half-way.
        """
        if getattr(getattr(cache, "options", None), "prefix_store", None) is not self:
            raise CacheMismatchError(
                f"cache must be a PagedCache made with this prefix_store, got {type(cache).__name__}"
            )
        space = self._space_of(cache) if space is None else space
        tree, held_rows = self.tree, cache._held_rows()
        held = [count for count, _ in held_rows]
        lengths = [len(row) if isinstance(row, Sequence) else -1 for row in rows]
        pairs = zip(lengths, held, strict=False)
        if len(lengths) != len(held) or not all(0 <= length <= most for length, most in pairs):
            raise CacheMismatchError(
                f"rows must be a list of token ids for each row of the cache, which hold {held} tokens; got "
                f"{['no list' if length < 0 else length for length in lengths]}"
            )
        with tree.pool.lock:
            for index, tokens in enumerate(rows):
                count, pages = held_rows[index]
                states = None
                if self.has_states:
                    sizes = {"page_size": tree.page_size, "sink_tokens": tree.sink_tokens}
                    if not len(tokens) == count == page_start(len(pages), **sizes):
                        self._make_room()  # caches that held others' pages may be gone
                        continue
                    states = states_of_row(cache.layers, index)
                stores = [layer.store for layer in cache.paged_layers]
                shared = self.keep(space, tokens, pages, stores, index, states)
                if shared != pages[: len(shared)]:
                    _replace_pages(cache, index, shared + pages[len(shared) :])

    def keep(
        self,
        space: Hashable,
        tokens: Sequence[int],
        pages: tuple[int, ...],
        stores: Collection[Any],
        row: int,
        states: States | None = None,
    ) -> tuple[int, ...]:
        """Keep the sealed pages of a row that begins with `tokens`; return the pages of the same tokens that the store then has.

        Args:
            stores: LayerStore of all layers, which hold the exact first tokens of the row.
            row: its number.
            states: of all layers behind the last page; None where they hold none.
        """
        with self.tree.pool.lock:
            added = self.tree.add(
                space, tokens, pages, lambda: [one.sinks_of(row) for one in stores]
            )
            if states is not None and added and added[-1].states is None:
                self._hold(added[-1], states)
            self._make_room()
            nodes = self.tree.find(space, tokens)[: len(added)]  # those that are left
            state = self._state_of(space)
            if self.folder is not None and state is not None and nodes:
                self.folder.keep(state, nodes, self.tree.places(tokens), self._storages())
        return _pages_of(nodes)

    def _hold(self, node: Prefix, states: States) -> None:
        """Keep the states behind a page, which a folder then has to write."""
        node.states, node.filed = states, float("-inf")
        self._state_bytes = tensor_bytes(states)

    def _make_room(self) -> None:
        """Give up pages beyond `max_bytes`."""
        while (excess := self._held_bytes() - self.max_bytes) > 0:
            # the last page of a beginning takes its exact tokens along
            if not self.tree.evict(max(1, excess // max(1, sum(self._bytes_each())))):
                break

    def _bytes_each(self) -> tuple[int, int, int]:
        """Return the bytes of a page, of the exact tokens in front of a beginning, and of states behind a page, over all layers."""
        specs, sinks = [one.spec for one in self._storages()], self.tree.sink_tokens
        pages = sum(spec.page_bytes for spec in specs)
        return pages, sum(spec.window_bytes(1, sinks) for spec in specs), self._state_bytes

    def _held_bytes(self) -> int:
        counts = zip(self.tree.counts(), self._bytes_each(), strict=True)
        return sum(count * size for count, size in counts)

    def count_prompt(self, tokens: int, found: int, computed: int = 0) -> None:
        """Count a prompt of `tokens` tokens; `found` need no forward, `computed` of which had one just before."""
        self._counts.update(
            rows=1, rows_hit=int(found > computed), tokens=tokens, tokens_computed=tokens - found
        )

    def _space_of(self, cache: Any) -> Hashable:
        """Return the one space whose tokens `cache` holds."""
        spaces = cache.origin.prefix_spaces
        if len(spaces) > 1:
            adapters = ", then ".join(map(str, cache.origin.computed_by))
            raise CacheMismatchError(
                "this cache holds tokens that were computed in more than one state of the model, by adapters, hooks or weights "
                f"({adapters}); a prefix_store keeps tokens of a single state"
            )
        if spaces and spaces[0] is None:
            raise CacheMismatchError(
                "this cache holds keys and values that do not follow from its tokens alone; a prefix_store cannot find them"
            )
        model = self._model()
        return spaces[0] if spaces else () if model is None else self.bind_model(model)

    # -- what it holds -----------------------------------------------------------------------------------

    def stats(self) -> PrefixStats:
        """Return what the store has done so far and holds now."""
        counts = {**self._counts, **(self.folder.counts if self.folder is not None else {})}
        if self._tree is not None:
            with self._tree.pool.lock:
                counts["pages"], counts["bytes"] = self._tree.counts()[0], self._held_bytes()
                counts["evictions"] = self._tree.evictions
        return PrefixStats(**counts)

    def flush(self) -> None:
        """Wait until the folder has all pages that were kept; a process that ends waits by itself."""
        if self.folder is not None:
            self.folder.flush()

    def clear(self) -> None:
        """Let go of all pages, and remove those of this model from the folder; caches that hold some keep them.

        Call it after changes that cannot be seen: less than a row or column of a large weight written through `.data`, and code
        or attributes of the model that are replaced.
        """
        if self.folder is not None:
            self.folder.clear()
        if self._tree is not None:
            with self._tree.pool.lock:
                self._tree.clear()
                self.page_memory.clear()

    def __repr__(self) -> str:
        stats = self.stats()
        return f"PrefixStore(max_bytes={self.max_bytes}, pages={stats.pages}, bytes={stats.bytes})"


class _TenantStore(PrefixStore):
    """A store whose spaces carry a salt. Everything else is the state of the store that it was made from, itself."""

    __slots__ = ("_salt",)

    def __init__(self, store: PrefixStore, salt: str) -> None:
        self.__dict__ = store.__dict__
        self._salt = salt

    def bind_model(self, model: Any, options: CacheConfig | None = None) -> str:
        """Return the tenant's own space of prefixes for the model's state now; see PrefixStore.bind_model."""
        return salted(super().bind_model(model, options), self._salt)


def _no_model() -> None: ...


def _pages_of(nodes: Sequence[Prefix]) -> tuple[int, ...]:
    return tuple(node.page for node in nodes if node.page is not None)


def common_tokens(rows: list[list[int]], page_size: int, sink_tokens: int) -> list[int]:
    """Return the longest common prefix of all rows that fills whole pages and leaves each row a token to compute."""
    first, last = min(rows), max(rows)  # all others lie between them
    most = min(map(len, rows)) - 1
    alike = next((place for place in range(most) if first[place] != last[place]), most)
    pages = full_pages(alike - sink_tokens, page_size)
    end = page_start(pages, page_size=page_size, sink_tokens=sink_tokens)
    return first[:end] if pages else []


def _reads(options: CacheConfig | None) -> str:
    """Return what tells apart caches whose steps read different parts of a text; "" where they read everything."""
    return "" if options is None or options.budget is None else f" reads {options.budget}"


def _sought(tokens: Sequence[int], recent_tokens: int) -> Sequence[int]:
    """Return the tokens of a prompt that may come from pages: all but those that stay exact, and one at least is computed."""
    return tokens[: max(0, len(tokens) - max(1, recent_tokens))]


def salted(space: str, salt: str) -> str:
    """Return the space of prefixes that requests of one salt share; "" is `space` itself."""
    return f"{space}{SALT}{salt}" if salt else space


def _begin(cache: Any, rows: Sequence[Row], known: Sequence[KnownPrefix], seen: int) -> None:
    """Let an empty cache begin with `rows`, whose pages are in its storage, and have seen `seen` columns.

    Stopped half-way, by whatever exception, it holds no more pages than its rows do, and asks for reset().

    Args:
        known: of each row: its exact first keys and values, and its states, of which the layers get copies.
    """
    sinks = [one.sinks for one in known]
    with cache.forward.change():
        cache._group.adopt(rows, seen)
        for place, layer in enumerate(cache.paged_layers):
            layer.adopt([None if one is None else one[place] for one in sinks], seen)
        restore_rows(cache.layers, [one.states for one in known])
    cache._tokens_on = cache.paged_layers[0].device


def _replace_pages(cache: Any, row: int, pages: tuple[int, ...]) -> None:
    """Let a row hold `pages`, which contain the same tokens, in place of its own; between two forwards.

    Handles of before become stale first, as they know the pages that the row lets go of.
    """
    with cache.forward.change():
        for layer in cache.paged_layers:
            layer.revision += 1
        cache._group.replace_pages(row, pages)
