"""The cache of continuous batching: what transformers' scheduler asks of one, over pages of any format."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ..cache.layer import PagedLayer
from ..cache.paged_cache import PagedCache
from ..cache.prefix_store import PrefixStats, PrefixStore, salted
from ..config import CacheConfig
from ..errors import InterruptedForwardError, UnsupportedModelError
from ..pages.step import Row, Step
from ..pages.storage import PageMemory
from .batch_rows import BatchRoom, BatchRows, Forward, Part, kinds_of
from .batch_store import BatchStore, RowStates, stateful

NO_LIMIT = 2**31 - 1
NO_TOKENS = Row(0, (), 0)
KEPT = "continuous batching allocates all pages when it starts, in formats that its first tokens have called for"


class Salted(str):
    """The id of a request, which knows the salt of the prefixes that the request may share."""

    salt: str

    def __new__(cls, name: str, salt: str) -> "Salted":
        """Make the id `name` of a request with this salt."""
        self = super().__new__(cls, name)
        self.salt = salt
        return self

    def __getnewargs__(self) -> Any:
        """Return what a copy is made of: requests that fork are copied."""
        return str(self), self.salt


@dataclass(eq=False)
class Request:
    """What the cache knows of a request.

    Attributes:
        name: its id.
        row: in all layers; None where it holds nothing in them.
        prompt: tokens of its prompt.
        space: of its prefixes: the state of the model in which it began, and its salt; None before, and once the model was changed.
        reserved: pages that it takes in the next forward.
        held, coming: tokens that it holds before the next forward, and that this one adds.
    """

    name: str
    row: int | None = None
    prompt: int = 0
    space: str | None = None
    reserved: int = 0
    held: int = 0
    coming: int = 0


class BatchCache(PagedAttentionCache):
    """Pages and exact windows of requests that come and go, for all layers of a model.

    transformers' continuous batching (generation/continuous_batching, 5.24) asks it for room, for prefixes and for
    copies, as it asks the class that this one stands for; attention over pages calls `attend`. A request has a row in
    every layer; sealed pages may be shared by requests, and with a PrefixStore by calls of generate().

    Args:
        model: the model, whose layers are known from `template`.
        template: a paged cache of the same model and options that one forward has gone through.
        room: rows and pages.
        store: where prefixes are kept and found, or None.
    Attributes:
        known: id -> request, from its first mention to its end.
        requests: those that have a row, in the order of their rows.
        stream: of the forwards, on devices that have streams: all work on the tensors goes there, in order.
        scheduler: transformers' one, once the cache is that of a batch processor.
        requests_evicted: that left a full cache, to be computed anew.
        states: layer -> what it holds beside pages; with any, the parts of a forward go through the model one after the other.
        forward: the planned one, or its part that goes through the model now.
        layers_reached: by it.
        lenders: stores of layers whose keys and values others attend to (Gemma 3n, Gemma 4).
    Raises: UnsupportedModelError for a layer that stored nothing.
    """

    # read by transformers' scheduler and inputs; block tables and indices of tokens are not used
    max_blocks_per_request = 0
    max_decode_fast_path_length = 0
    read_cache_limit = None
    max_tokens_read = NO_LIMIT
    bytes_per_sector = 2**62  # more than cpu_offload_space: transformers says that none is used

    def __init__(
        self, model: Any, template: PagedCache, room: BatchRoom, store: PrefixStore | None
    ) -> None:
        self.model, self.room, self.prefix_store = model, room, store
        self.options: CacheConfig = template.options
        self.max_batch_tokens = room.batch_tokens
        self.cache_allocators: dict[str, Any] = {}
        self.use_prefix_sharing = store is not None
        self.page_memory = template.page_memory if store is not None else PageMemory()
        self.groups = {
            window: BatchRows(kind.sizes, self.page_memory.pool(window))
            for window, kind in kinds_of(template).items()
        }
        layers: Sequence[Any] = template.paged_layers
        self.device: torch.device = layers[0].device
        self.stores = {layer.layer_idx: self._store_of(layer) for layer in layers}
        self.num_layers = len(template.layers)
        self.states = {
            index: RowStates(layer, room.rows) for index, layer in stateful(template.layers).items()
        }
        self.known: dict[str, Request] = {}
        self.requests: list[Request] = []
        self.stream: Any = None
        self.scheduler: Any = None
        self.requests_evicted = 0
        self._space: str | None = None  # the state of the model now; None: not looked yet
        self._next: list[Request] = []  # of the next forward, in its order
        self.forward: Forward | None = None
        self.layers_reached: set[int] = set()
        self.lenders: set[BatchStore] = set()

    def _store_of(self, layer: PagedLayer) -> BatchStore:
        """Make the tensors of a layer, with room for all pages and rows."""
        group, asked = self.groups[layer.window], layer.spec  # what the first tokens called for
        if layer.storage is not None and self.page_memory is layer.page_memory:
            asked = layer.storage.asked  # it is there, and has become what they called for
        assert asked is not None
        pages = self.page_memory.storage(layer.layer_idx, asked, layer.device, group)
        pages.keeps = KEPT
        store = BatchStore(layer, pages, self.room.rows, group.sizes.slots)
        store.make_room(self.room.pages[layer.window])
        return store

    def request(self, request_id: str) -> Request:
        """Return what is known of a request; it is known from now on."""
        return self.known.setdefault(request_id, Request(request_id))

    # -- what fits -------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        """Pages of the full-attention layers, or of the only sliding ones."""
        return self.room.pages.get(None) or next(iter(self.room.pages.values()))

    @property
    def most_tokens(self) -> int:
        """Tokens that a single request may have: prompt and answer."""
        full = self.groups.get(None)
        if full is None:
            return NO_LIMIT
        return self.room.pages[None] * full.sizes.page_size + full.sizes.slots - 1

    def _needed(self, request: Request, tokens: int) -> int:
        """Return the pages of the full-attention layers that a request lacks for `tokens` tokens."""
        full = self.groups.get(None)
        if full is None:
            return 0
        held = 0 if request.row is None else len(full.batch.pages[request.row])
        return max(0, full.sizes.sealed(tokens) - held)

    def _left(self) -> int:
        """Return the pages of the full-attention layers that requests neither hold nor have reserved.

        Those that the prefix store alone holds are among them: they can be evicted. What generate() or another manager holds in a
        shared store comes on top of `room`.
        """
        full = self.groups.get(None)
        if full is None:
            return NO_LIMIT
        reserved = sum(request.reserved for request in self.requests)
        return self.room.pages[None] - len(set().union(*full.batch.pages)) - reserved

    def _make_free(self, pages: int) -> bool:
        """Evict prefixes that no request holds until `pages` pages are free; say whether they are."""
        lacking, store = pages - self._left(), self.prefix_store
        if store is not None and lacking <= 0:
            lacking += store.tree.num_evictable
            lacking -= store.tree.evict(lacking)
        return lacking <= 0

    def can_store_request_tokens(self, state: Any, request_len: int) -> bool:  # type: ignore[override]
        """Say whether `request_len` more tokens of a request have room; if so it is reserved."""
        tokens = state.current_len() + request_len
        request = self.request(state.request_id)
        request.reserved, request.prompt = 0, len(state.initial_tokens)
        needed = self._needed(request, tokens)
        if request.row is None and len(self.requests) >= self.room.rows:
            return False
        if needed and not self._make_free(needed):
            return False
        if request.row is None:
            if self.prefix_store is not None:  # which knows nothing of its prompt
                self.prefix_store.count_prompt(request.prompt, 0)
            self.admit(request)
        request.reserved = needed
        return True

    def count_storable_requests(self, blocks: Any) -> int:
        """Return how many requests of those that found no room would find it now, in order, one after the other."""
        free, starved = self._left(), self.scheduler.starved_requests
        for count, (state, new) in enumerate(starved):
            free -= self._needed(self.known[state.request_id], state.current_len() + new)
            if free < 0:
                return count
        return len(starved)

    def compute_free_capacity(self) -> float:  # type: ignore[override]
        """Return the pages that live requests leave, as a part of all; prefixes that nobody uses count as free."""
        if None not in self.groups:
            return 1 - len(self.requests) / self.room.rows
        return self._left() / self.room.pages[None]

    def evict_cached_blocks(self) -> bool:
        """Say that nothing was given up: prefixes are, one after the other, when a request needs their room."""
        return False

    @property
    def pool(self) -> Any:  # type: ignore[override]
        """What transformers frees sectors of before it asks for room."""
        return self

    def try_to_free_sectors(self) -> None:
        """Do nothing: no memory is kept apart."""

    # -- rows that come, go and change places ------------------------------------------------------------------

    def in_order(self) -> AbstractContextManager[Any]:
        """Return a context in which work on tensors comes behind that of the forwards so far, and before that of the next."""
        if self.stream is None:
            return nullcontext()
        stream: AbstractContextManager[Any] = torch.get_device_module(self.device).stream(
            self.stream
        )
        return stream

    def admit(self, request: Request, row: Row = NO_TOKENS) -> int:
        """Give a request a row behind the others, which shares the pages of `row`; return its number."""
        for group in self.groups.values():
            group.admit(row)
        request.row = len(self.requests)
        self.requests.append(request)
        return request.row

    def _arrange(self, order: Sequence[int], forked: Sequence[Request] = ()) -> None:
        """Let row i continue the former row order[i], the last ones as `forked`; rows that are not named let go of their pages."""
        rest = range(len(order), self.room.rows)
        step = Step(0, 0, self.room.rows, sources=[*order, *rest])
        with self.in_order():
            for store in self.stores.values():
                store.select_rows(step)
            for states in self.states.values():
                states.select(order)
        for group in self.groups.values():
            group.select(order)
        kept = order[: len(order) - len(forked)]
        self.requests = [*(self.requests[source] for source in kept), *forked]
        for row, request in enumerate(self.requests):
            request.row = row

    def _put_first(self, chosen: Sequence[Request]) -> None:
        """Let the rows of `chosen` be the first ones."""
        count = len(chosen)
        rows = {request.row for request in chosen}
        late = [row for row in range(count, len(self.requests)) if row in rows]
        if not late:
            return
        order = list(range(len(self.requests)))
        for target in (row for row in range(count) if row not in rows):
            source = late.pop()
            order[target], order[source] = source, target
        self._arrange(order)

    # -- requests that come and go -----------------------------------------------------------------------------

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Let go of everything that a request holds; its sealed pages stay in the prefix store, if there is one.

        Args:
            no_cache: the request comes back, and is computed anew.
        """
        request = self.known.get(request_id)
        if request is None:
            return
        if no_cache:
            self.requests_evicted += 1
        else:
            del self.known[request_id]
        self._next = [one for one in self._next if one is not request]
        if request.row is not None:  # the last row takes its place
            order = list(range(len(self.requests)))
            order[request.row] = order[-1]
            self._arrange(order[:-1])
            request.row = None
        if not self.requests and self.scheduler is not None:
            # transformers lets waiting requests in where one finishes, and not where the last is cancelled
            self.scheduler.block_new_requests = False

    def free_all_requests(self) -> None:  # type: ignore[override]
        """Let go of all requests."""
        for request_id in list(self.known):
            self.free_blocks(request_id)

    reset = free_all_requests

    def prepare_fork_request(self, state: Any, new_ids: list[str], copies: Any) -> list[str]:
        """Let new requests continue as `state` does, as far as there are rows; they share its pages. Return those.

        Args:
            new_ids: become ids with the salt of `state`: one without a row waits, and shares pages later.
        """
        parent = self.known[state.request_id]
        assert parent.row is not None
        if salt := getattr(parent.name, "salt", ""):
            new_ids[:] = [Salted(name, salt) for name in new_ids]
        forked = [self.request(name) for name in new_ids[: self.room.rows - len(self.requests)]]
        for child in forked:
            child.prompt, child.space = parent.prompt, parent.space
        self._arrange([*range(len(self.requests)), *(parent.row for _ in forked)], forked)
        return [child.name for child in forked]

    def perform_cache_copy(self, copies: Any) -> None:
        """Do nothing: `prepare_fork_request` has copied."""

    # -- prefixes ------------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Compare the model's weights and adapters with those of the prefixes; where they differ, requests that run keep no more pages."""
        store, before = self.prefix_store, self._space
        self._space = None if store is None else store.bind_model(self.model, self.options)
        if self._space != before:
            for request in self.requests:
                request.space = None

    def search_prefix_match(self, request_id: str, prompt_ids: Sequence[int]) -> int:
        """Let a request begin with the pages known of its prompt; return how many of its tokens they hold."""
        store, request = self.prefix_store, self.request(request_id)
        if store is None or request.row is not None or len(self.requests) >= self.room.rows:
            return 0
        if self._space is None:
            self.look_again()
        assert self._space is not None
        # it begins now, whenever it came
        space = request.space = salted(self._space, getattr(request.name, "salt", ""))
        recent = self.options.recent_tokens
        with self.in_order():
            store.take_in(space, prompt_ids, recent, make_free=self._make_free)
        with store.tree.pool.lock:
            found = store.find(space, prompt_ids, recent)
            if not found.pages:
                return 0
            store.count_prompt(len(prompt_ids), found.tokens)
            row = self.admit(request, Row(0, found.pages, store.tree.sink_tokens))
        with self.in_order():
            for one, sinks in zip(self.stores.values(), found.sinks, strict=True):
                one.put_sinks(row, sinks)
        return found.tokens

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        """Return {"pages": n} for the pages that a forward over `request_len` tokens of a request seals."""
        reserved = 0 if self.prefix_store is None else self.known[state.request_id].reserved
        return {"pages": reserved} if reserved else {}

    def mark_complete_blocks(self, state: Any, complete_blocks: Mapping[str, int]) -> None:
        """Keep the sealed pages of a request for others that begin alike; a page that is there already is shared."""
        store = self.prefix_store
        if store is None or not complete_blocks:
            return
        request, group = self.known.get(state.request_id), self.groups[None]
        if request is None or request.row is None or request.space is None:
            return
        row = request.row
        tokens = (state.initial_tokens + state.generated_tokens)[: int(group.lengths()[row])]
        pages = group.batch.pages[row]
        with self.in_order():
            shared = store.keep(request.space, tokens, pages, self.stores.values(), row)
        if shared != pages[: len(shared)]:
            group.replace_pages(row, shared + pages[len(shared) :])

    # -- forwards --------------------------------------------------------------------------------------------------

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        *indices: Any,
        **more: Any,
    ) -> None:
        """Note that the next forward has `query_length` tokens of a request, behind those of the requests before."""
        request = self.known[request_id]
        request.held, request.coming = past_length, query_length
        self._next.append(request)

    def begin(self) -> None:
        """Plan the forward whose requests were noted.

        Raises: InterruptedForwardError where a request holds other tokens than transformers takes it to hold.
        """
        coming, self._next = self._next, []
        for request in self.requests:
            request.reserved = 0
        lengths = next(iter(self.groups.values())).lengths().tolist()
        reads_part = self.options.read is not None
        places: dict[Request, int] = {}
        tokens, single = 0, []
        for request in coming:
            there = 0 if request.row is None else lengths[request.row]
            if request.row is None or there != request.held:
                raise InterruptedForwardError(
                    f"request {request.name!r} has {there} tokens in the cache, and transformers takes it to hold {request.held}"
                )
            places[request], tokens = tokens, tokens + request.coming
            # where steps read a part, the last token of a prompt still reads all of it
            if request.coming == 1 and request.held >= (request.prompt if reads_part else 1):
                single.append(request)
        for group in self.groups.values():
            group.forget_read()
        self._put_first(single)
        parts = []
        if single:
            count = len(single)
            run = self._run_of([places.pop(request) for request in self.requests[:count]])
            parts.append(Part(0, count, 1, run, prompt=False))
        for request, place in places.items():
            if request.coming:
                assert request.row is not None
                there = slice(place, place + request.coming)
                parts.append(Part(request.row, 1, request.coming, there, prompt=True))
        steps = {
            window: [group.grow(part.first, part.first + part.rows, part.q_len) for part in parts]
            for window, group in self.groups.items()
        }
        self.layers_reached = set()
        self.forward = Forward(parts, steps, (1, tokens))

    def _run_of(self, places: list[int]) -> torch.Tensor | slice:
        """Return places in a forward as a slice where they follow each other, else as int64 [n] on the device."""
        first, count = places[0], len(places)
        if places == list(range(first, first + count)):
            return slice(first, first + count)
        found = torch.tensor(places, dtype=torch.int64, device="cpu")
        return found.to(self.device, non_blocking=True)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of this forward as they are: attention stores them."""
        return key_states, value_states

    def attend(
        self, module: torch.nn.Module, states: Sequence[torch.Tensor], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, None]:
        """Append and attend in one layer (BatchStore.attend); the forward hands this cache down to attention as `paged_batch`.

        Args:
            module: the attention module, whose layer_idx says which layer it is.
            states: query [rows, num_heads, tokens, head_dim], key and value [rows, num_kv_heads, tokens, head_dim], of this forward.
            kwargs: all further arguments of the attention function.
        Returns: ([rows, tokens, num_heads, value_dim], None).
        Raises: UnsupportedModelError for a layer without pages, and for a second call in a forward.
        """
        layer: Any = getattr(module, "layer_idx", None)
        store = self.stores.get(layer)
        if store is None:  # of a layer that attends to the keys of another one
            lenders = (one for one in self.stores.values() if one.new is states[1])
            store = next(lenders, None)
            if store is not None:
                self.lenders.add(store)
        elif layer in self.layers_reached:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends twice in layer {layer} of a forward, and continuous batching stores what comes: "
                "use generate()"
            )
        if store is None or self.forward is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends as layer {layer!r}, of which continuous batching has no pages"
            )
        self.layers_reached.add(layer)
        return store.attend(self.forward, module, states, kwargs)

    def finish(self) -> None:
        """End a forward: no layer attends to what another one has brought any more."""
        for store in self.lenders:
            store.finish()

    def keep_lenders(self) -> None:
        """Take the layers to lend their keys that have done so in a first forward."""
        for store in self.stores.values():
            store.finish()
            store.lends = store in self.lenders


@dataclass(frozen=True)
class BatchCounts:
    """The cache of a manager of continuous batching at one moment. Pages are those of the full-attention layers.

    Attributes:
        requests, rows: requests that hold tokens, and how many may at once.
        tokens: that they hold, shared ones as often as they are.
        pages, pages_allocated: pages that requests or the prefix store hold, and pages there are.
        pages_shared: pages that two requests or more hold.
        pages_kept: pages that the prefix store alone holds; they give way to requests.
        bytes_pages, bytes_exact, bytes_states: allocated for sealed pages, for the exact tokens of all rows, and for their states.
        requests_evicted: that left a full cache, to be computed anew.
        prefixes: counts of the prefix store, None without one.
    """

    requests: int
    rows: int
    tokens: int
    pages: int
    pages_allocated: int
    pages_shared: int
    pages_kept: int
    bytes_pages: int
    bytes_exact: int
    bytes_states: int
    requests_evicted: int
    prefixes: PrefixStats | None

    @classmethod
    def of(cls, manager: Any) -> "BatchCounts":
        """Return the counts of a manager that `init_continuous_batching` made with a paged cache, once it has started.

        Raises: UnsupportedModelError for a manager without one.
        """
        cache = getattr(getattr(manager, "batch_processor", None), "cache", None)
        if not isinstance(cache, BatchCache):
            raise UnsupportedModelError(
                "this manager has no paged cache: it has not started, or its generation_config names none"
            )
        group = next(iter(cache.groups.values()))
        with group.pool.lock:
            batch, held = group.batch, group.pool.num_held
        uses = Counter(page for pages in batch.pages for page in pages)
        stores, kept = list(cache.stores.values()), cache.prefix_store
        return cls(
            requests=len(batch),
            rows=cache.room.rows,
            tokens=int(group.lengths(batch).sum()),
            pages=held,
            pages_allocated=cache.num_blocks,
            pages_shared=sum(count > 1 for count in uses.values()),
            pages_kept=max(0, held - len(uses)),
            bytes_pages=sum(one.pages.capacity * one.pages.spec.page_bytes for one in stores),
            bytes_exact=sum(side.tokens.nbytes for one in stores for side in one.windows),
            bytes_states=sum(states.nbytes for states in cache.states.values()),
            requests_evicted=cache.requests_evicted,
            prefixes=None if kept is None else kept.stats(),
        )
