"""The cache of continuous batching: what transformers' scheduler asks of one, over pages of any format."""

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from ..cache.layer import PagedLayer
from ..cache.paged_cache import PagedCache
from ..cache.prefix_store import PrefixStats, PrefixStore, salted
from ..config import CacheConfig
from ..errors import InterruptedForwardError, UnsupportedModelError
from ..pages.step import Row, Step
from ..pages.storage import PageArena
from .batch_rows import BatchRoom, BatchRows, Forward, Part, kinds_of
from .batch_store import BatchStore, HostLayer

NO_LIMIT = 2**31 - 1
NO_TOKENS = Row(0, (), 0)
NO_STATS = PrefixStats(0, 0, 0, 0, 0, 0, 0)
KEPT = "continuous batching allocates all pages when it starts, in formats that its first tokens have called for"


class HostRows(NamedTuple):
    """What a request holds on the host: its row in each window, and the tensors of it in each layer, of `nbytes` bytes."""

    rows: Mapping[int | None, Row]
    layers: Sequence[HostLayer]
    nbytes: int


class Salted(str):
    """The id of a request, which knows the salt of the prefixes that the request may share."""

    salt: str

    def __new__(cls, name: str, salt: str = "") -> "Salted":
        """Make the id `name` of a request with this salt."""
        self = super().__new__(cls, name)
        self.salt = salt
        return self


@dataclass(eq=False)
class Request:
    """What the cache knows of a request.

    Attributes:
        name: its id.
        salt: of the prefixes that it may share.
        row: in all layers; None where it holds nothing in them.
        prompt: tokens of its prompt.
        space: the state of the model in which it began, which its prefixes depend on; None before.
        promised: pages that it takes in the next forward.
        held, coming: tokens that it holds before the next forward, and that this one adds.
        host: what it holds on the host.
    """

    name: str
    salt: str = ""
    row: int | None = None
    prompt: int = 0
    space: str | None = None
    promised: int = 0
    held: int = 0
    coming: int = 0
    host: HostRows | None = None


class BatchCache:
    """Pages and exact windows of requests that come and go, for all layers of a model.

    transformers' continuous batching (generation/continuous_batching, 5.23) asks it for room, for prefixes and for
    copies; attention over pages calls `paged_attend`. A request has a row in every layer; sealed pages may be shared by
    requests, and with a PrefixStore by calls of generate().

    Args:
        model: the model, whose layers are known from `template`.
        template: a paged cache of the same model and options that one forward has gone through.
        room: rows and pages.
        store: where prefixes are kept and found, or None.
    Attributes:
        known: id -> request, from its first mention to its end.
        requests: those that have a row, in the order of their rows.
        stream: of the forwards, on devices that have streams: all work on the tensors goes there, in order.
        requests_evicted, requests_moved: that left a full cache, to be computed anew and for the host.
        layers_reached: by the last forward.
    Raises: UnsupportedModelError for layers that hold more than keys and values in pages.
    """

    # read by transformers' scheduler and inputs; block tables and indices of tokens are not used
    max_blocks_per_request = 0
    max_decode_fast_path_length = 0
    read_cache_limit = None
    max_tokens_read = NO_LIMIT
    bytes_per_sector = 1

    def __init__(
        self, model: Any, template: PagedCache, room: BatchRoom, store: PrefixStore | None
    ) -> None:
        self.model, self.room, self.prefix_store = model, room, store
        self.options: CacheConfig = template.options
        self.max_batch_tokens = room.batch_tokens
        self.cache_allocators: dict[str, Any] = {}
        self.use_prefix_sharing = store is not None
        self.kinds = kinds_of(template)
        self.arena = template.arena if store is not None else PageArena()
        self.groups = {
            window: BatchRows(kind.sizes, self.arena.pool(window))
            for window, kind in self.kinds.items()
        }
        layers: Sequence[Any] = template.layers
        self.device = layers[0].device
        self.stores = {layer.layer_idx: self._store_of(layer) for layer in layers}
        self.known: dict[str, Request] = {}
        self.requests: list[Request] = []
        self.stream: Any = None
        self.requests_evicted = self.requests_moved = 0
        self._promised = 0  # pages, to all requests
        self._space: str | None = None  # the state of the model that prefixes depend on; None: look
        self._next: list[Request] = []  # of the next forward, in its order
        self._forward: Forward | None = None
        self.layers_reached: set[int] = set()

    def _store_of(self, layer: PagedLayer) -> BatchStore:
        """Make the tensors of a layer, with room for all pages and rows."""
        group, asked = self.groups[layer.window], layer.spec  # what the first tokens called for
        if layer.storage is not None and self.arena is layer.arena:
            asked = layer.storage.asked  # it is there, and has become what they called for
        assert asked is not None
        pages = self.arena.storage(layer.layer_idx, asked, layer.device, group)
        pages.keeps = KEPT
        store = BatchStore(layer, pages, self.room.rows, group.sizes.slots)
        store.make_room(self.room.pages[layer.window])
        return store

    def request(self, request_id: str) -> Request:
        """Return what is known of a request; it is known from now on."""
        found = self.known.get(request_id)
        if found is None:
            salt = getattr(request_id, "salt", "")
            found = self.known[request_id] = Request(request_id, salt)
        return found

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
        """Return the pages of the full-attention layers that requests neither hold nor were promised.

        Those that the prefix store alone holds are among them: they give way. What generate() or another manager holds in a
        shared store comes on top of `room`.
        """
        full = self.groups.get(None)
        if full is None:
            return NO_LIMIT
        return self.room.pages[None] - len(set().union(*full.batch.pages)) - self._promised

    def _make_free(self, pages: int) -> bool:
        """Give up prefixes that no request holds until `pages` pages are free; say whether they are."""
        lacking, store = pages - self._left(), self.prefix_store
        if store is not None and lacking <= 0:
            lacking += store.num_spare
            lacking -= store.give_up(lacking)
        return lacking <= 0

    def _promise(self, request: Request, pages: int) -> None:
        self._promised += pages - request.promised
        request.promised = pages

    def can_store_request_tokens(self, state: Any, request_len: int) -> bool:
        """Say whether `request_len` more tokens of a request have room; if so they are promised it."""
        tokens = state.current_len() + request_len
        request = self.request(state.request_id)
        self._promise(request, 0)
        request.prompt = len(state.initial_tokens)
        needed = self._needed(request, tokens)
        if request.row is None and len(self.requests) >= self.room.rows:
            return False
        if needed and not self._make_free(needed):
            return False
        if request.row is None:
            self._come(request)
            needed = self._needed(request, tokens)
        self._promise(request, needed)
        return True

    def count_storable_requests(self, needs: Sequence[tuple[str, int]]) -> int:
        """Return how many of (request, its tokens behind the next forward), in order, would find room one after the other."""
        free = self._left()
        for count, (request_id, tokens) in enumerate(needs):
            free -= self._needed(self.known[request_id], tokens)
            if free < 0:
                return count
        return len(needs)

    def compute_free_capacity(self) -> float:
        """Return the pages that live requests leave, as a part of all; prefixes that nobody uses count as free."""
        if None not in self.groups:
            return 1 - len(self.requests) / self.room.rows
        return self._left() / self.room.pages[None]

    def evict_cached_blocks(self) -> bool:
        """Say that nothing was given up: prefixes are, one after the other, when a request needs their room."""
        return False

    @property
    def pool(self) -> Any:
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

    def _come(self, request: Request) -> None:
        """Give a request a row behind the others, with what it left on the host."""
        held, request.host = request.host, None
        if held is None:
            if self.prefix_store is not None:  # which knows nothing of its prompt
                self.prefix_store.count_prompt(request.prompt, 0)
            self.admit(request)
            return
        row = self.admit(request, held.rows, copied=True)
        with self.in_order():
            for store, layer in zip(self.stores.values(), held.layers, strict=True):
                store.from_host(row, self.groups[store.window].batch.pages[row], layer)

    def admit(
        self,
        request: Request,
        rows: Mapping[int | None, Row] | None = None,
        *,
        copied: bool = False,
    ) -> int:
        """Give a request a row behind the others, with the pages of `rows` or as many of its own; return its number."""
        for window, group in self.groups.items():
            group.admit(NO_TOKENS if rows is None else rows[window], copied=copied)
        request.row = len(self.requests)
        self.requests.append(request)
        return request.row

    def _drop(self, request: Request) -> None:
        """Let go of the row of a request, if it has one; the last row takes its place."""
        self._promise(request, 0)
        if request.row is not None:
            order = list(range(len(self.requests)))
            order[request.row] = order[-1]
            self._arrange(order[:-1])
            request.row = None

    def _arrange(self, order: Sequence[int], forked: Sequence[Request] = ()) -> None:
        """Let row i continue the former row order[i], the last ones as `forked`; rows that are not named let go of their pages."""
        rest = range(len(order), self.room.rows)
        step = Step(0, 0, self.room.rows, sources=[*order, *rest])
        with self.in_order():
            for store in self.stores.values():
                store.select_rows(step)
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
        """Let go of everything that a request holds; its sealed pages stay in the prefix store, if there is one."""
        request = self.known.pop(request_id, None)
        if request is not None:
            self._drop(request)
            self._next = [one for one in self._next if one is not request]

    def free_all_requests(self) -> None:
        """Let go of all requests."""
        for request_id in list(self.known):
            self.free_blocks(request_id)

    reset = free_all_requests

    def prepare_fork_request(self, state: Any, new_ids: Sequence[str], copies: Any) -> list[str]:
        """Let new requests continue as `state` does, as far as there are rows; they share its pages. Return those."""
        parent, children = self.known[state.request_id], list(map(self.request, new_ids))
        assert parent.row is not None
        for child in children:
            child.salt = parent.salt  # one without a row waits, and shares pages later
        forked = children[: self.room.rows - len(self.requests)]
        for child in forked:
            child.prompt, child.space = parent.prompt, parent.space
        self._arrange([*range(len(self.requests)), *(parent.row for _ in forked)], forked)
        return [child.name for child in forked]

    def perform_cache_copy(self, copies: Any) -> None:
        """Do nothing: `prepare_fork_request` has copied."""

    # -- requests that wait on the host --------------------------------------------------------------------------

    def bytes_away(self) -> int:
        """Bytes of requests that wait on the host."""
        waiting = [request.host for request in list(self.known.values())]
        return sum(held.nbytes for held in waiting if held is not None)

    def take_away(self, request_id: str, most: int) -> bool:
        """Take its row and its pages from a request, which goes on later; say whether it is moved to the host.

        Args:
            most: bytes that requests may take on the host; without room there the request is to be computed anew.
        """
        request = self.known[request_id]
        assert request.row is not None
        rows = {window: group.rows[request.row] for window, group in self.groups.items()}
        nbytes = sum(
            len(rows[window].pages) * kind.page_bytes + kind.window_bytes
            for window, kind in self.kinds.items()
        )
        moved = self.bytes_away() + nbytes <= most
        if moved:  # its pages stay those of the weights that made them: it keeps its space
            with self.in_order():
                held = [
                    store.to_host(request.row, rows[store.window].pages)
                    for store in self.stores.values()
                ]
            request.host = HostRows(rows, held, nbytes)
        self._drop(request)
        self.requests_moved += moved
        self.requests_evicted += not moved
        return moved

    # -- prefixes ------------------------------------------------------------------------------------------------

    def look_again(self) -> None:
        """Compare the model's weights and adapters with those of the prefixes before the next request begins."""
        self._space = None

    def _space_of(self, request: Request, store: PrefixStore) -> str:
        """Return the space of a request's prefixes: of the model as it was when the request began, and of its salt."""
        if request.space is None:
            if self._space is None:  # pages of other weights are let go of
                self._space = store.bind_model(self.model, self.options)
            request.space = self._space
        return salted(request.space, request.salt)

    def search_prefix_match(self, request_id: str, prompt_ids: Sequence[int]) -> int:
        """Let a request begin with the pages known of its prompt; return how many of its tokens they hold."""
        store, request = self.prefix_store, self.request(request_id)
        if store is None or request.row is not None or len(self.requests) >= self.room.rows:
            return 0
        request.space = None  # it begins now, whenever it came
        with store.tree.pool.lock:
            space, recent = self._space_of(request, store), self.options.recent_tokens
            found = store.find(space, prompt_ids, recent)
            if not found.pages:
                return 0
            store.count_prompt(len(prompt_ids), found.tokens)
            row = self.admit(request, {None: Row(0, found.pages, store.tree.sink_tokens)})
        with self.in_order():
            for one, sinks in zip(self.stores.values(), found.sinks, strict=True):
                one.put_sinks(row, sinks)
        return found.tokens

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        """Return {"pages": n} for the pages that a forward over `request_len` tokens of a request seals."""
        promised = 0 if self.prefix_store is None else self.known[state.request_id].promised
        return {"pages": promised} if promised else {}

    def mark_complete_blocks(self, state: Any, complete_blocks: Mapping[str, int]) -> None:
        """Keep the sealed pages of a request for others that begin alike; a page that is there already is shared."""
        store = self.prefix_store
        if store is None or not complete_blocks:
            return
        request, group = self.known.get(state.request_id), self.groups[None]
        if request is None or request.row is None:
            return
        row = request.row
        tokens = (state.initial_tokens + state.generated_tokens)[: int(group.lengths()[row])]
        pages = group.batch.pages[row]
        space = self._space_of(request, store)
        shared = store.keep(space, tokens, pages, lambda: self._sinks_of(row))
        if shared != pages[: len(shared)]:
            group.replace_pages(row, shared + pages[len(shared) :])

    def _sinks_of(self, row: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return copies of the exact first keys and values of a row, for each layer."""
        with self.in_order():
            return [store.sinks_of(row) for store in self.stores.values()]

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
            request.promised = 0
        self._promised = 0
        lengths = next(iter(self.groups.values())).lengths().tolist()
        reads_part = self.options.reads_part
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
            group.release_read()
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
        self._forward = Forward(parts, steps, tokens)

    def _run_of(self, places: list[int]) -> torch.Tensor | slice:
        """Return places in a forward as a slice where they follow each other, else as int64 [n] on the device."""
        first, count = places[0], len(places)
        if places == list(range(first, first + count)):
            return slice(first, first + count)
        return torch.tensor(places, dtype=torch.int64).to(self.device, non_blocking=True)

    def paged_attend(
        self, module: torch.nn.Module, *states: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Append and attend in one layer (BatchStore.attend).

        Args:
            module: the attention module, whose layer_idx says which layer it is.
            states: query [1, num_heads, tokens, head_dim], key and value [1, num_kv_heads, tokens, head_dim], of this forward.
        Returns: ([1, tokens, num_heads, value_dim], None).
        Raises: UnsupportedModelError for a layer without pages.
        """
        layer: Any = getattr(module, "layer_idx", None)
        store = self.stores.get(layer)
        if store is None or self._forward is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends as layer {layer!r}, of which continuous batching has no pages"
            )
        self.layers_reached.add(layer)
        return store.attend(self._forward, module, states, kwargs)


@dataclass(frozen=True)
class BatchCounts:
    """The cache of a manager of continuous batching at one moment. Pages are those of the full-attention layers.

    Attributes:
        requests, rows: requests that hold tokens, and how many may at once.
        tokens: that they hold, shared ones as often as they are.
        pages, pages_allocated: pages that requests or the prefix store hold, and pages there are.
        pages_shared: pages that two requests or more hold.
        pages_kept: pages that the prefix store alone holds; they give way to requests.
        bytes_pages, bytes_exact: allocated for sealed pages, and for the exact tokens of all rows.
        bytes_host: of requests that wait on the host.
        prompts, prompts_hit, prompt_tokens, prompt_tokens_computed: that the prefix store was asked for, those of which it had
            a page, their tokens, and those that went through the model.
        pages_evicted: pages that the prefix store gave up.
        requests_evicted, requests_moved: that left a full cache to be computed anew, and for the host.
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
    bytes_host: int
    prompts: int
    prompts_hit: int
    prompt_tokens: int
    prompt_tokens_computed: int
    pages_evicted: int
    requests_evicted: int
    requests_moved: int

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
        stats = NO_STATS if kept is None else kept.stats()
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
            bytes_host=cache.bytes_away(),
            prompts=stats.rows,
            prompts_hit=stats.rows_hit,
            prompt_tokens=stats.tokens,
            prompt_tokens_computed=stats.tokens_computed,
            pages_evicted=stats.evictions,
            requests_evicted=cache.requests_evicted,
            requests_moved=cache.requests_moved,
        )

    def as_metrics(self) -> dict[str, int]:
        """Return the counts under names for OpenTelemetry or Prometheus: "kv_hf.cache.pages" and so on."""
        return {f"kv_hf.cache.{name}": value for name, value in asdict(self).items()}
