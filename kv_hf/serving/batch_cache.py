"""The cache of continuous batching: what transformers' scheduler asks of one, over pages of any format."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..cache.layer import PagedLayer
from ..cache.paged_cache import PagedCache
from ..cache.prefix_store import PrefixStore, salted
from ..config import CacheConfig
from ..errors import InterruptedForwardError, UnsupportedModelError
from ..pages.step import Row
from ..pages.storage import PageArena, rewritten
from ..spec import MemoryReport
from .batch_attention import attend_in_parts
from .batch_forward import Forward, Part, run_of
from .batch_host import HeldRequest
from .batch_layers import kinds_of, paged_layers
from .batch_requests import RequestRows
from .batch_room import BatchRoom
from .batch_rows import BatchRows
from .batch_store import BatchStore, Sinks

NO_LIMIT = 2**31 - 1
KEPT = "continuous batching allocates all pages when it starts, in formats that its first tokens have called for"


class _Sectors:
    """What transformers' scheduler frees before it asks for room; here nothing is kept apart."""

    def try_to_free_sectors(self) -> None:
        """Do nothing."""


class BatchCache:
    """Pages and exact windows of requests that come and go, for all layers of a model.

    transformers' continuous batching (generation/continuous_batching, 5.23) asks it for room, for prefixes and for
    copies; attention over pages calls `paged_attend`. A request has a row in every layer; sealed pages may be shared by
    requests, and with a PrefixStore by calls of generate().

    Args:
        model: the model, whose layers are known from `template`.
        template: a paged cache of the same model and options that one forward has gone through.
        room: rows and pages.
        batch_tokens: most tokens of a forward.
        store: where prefixes are kept and found, or None.
    Raises: UnsupportedModelError for layers that hold more than keys and values in pages.
    """

    # read by transformers' scheduler and inputs; block tables and indices of tokens are not used
    max_blocks_per_request = 0
    max_decode_fast_path_length = 0
    read_cache_limit = None
    max_tokens_read = NO_LIMIT
    bytes_per_sector = 1

    def __init__(
        self,
        model: Any,
        template: PagedCache,
        room: BatchRoom,
        batch_tokens: int,
        store: PrefixStore | None,
    ) -> None:
        self.model, self.room, self.prefix_store = model, room, store
        self.options: CacheConfig = template.options
        self.max_batch_tokens = batch_tokens
        self.cache_allocators: dict[str, Any] = {}
        self.pool = _Sectors()
        self.use_prefix_sharing = self.allow_block_sharing = store is not None
        layers = paged_layers(template)
        self.device = layers[0].device
        self.arena = template.arena if store is not None else PageArena()
        self.kinds = kinds_of(template)
        self.groups = {
            window: BatchRows(kind.sizes, self.arena.pool(window))  # type: ignore[arg-type]
            for window, kind in self.kinds.items()
        }
        self.stores = {layer.layer_idx: self._store_of(layer) for layer in layers}
        # that left a full cache: to be computed anew, and for the host
        self.requests_evicted = self.requests_moved = 0
        self.requests = RequestRows(self.groups, self.stores, self.device)
        self._promised: dict[str, int] = {}  # pages of requests that the next forward takes
        self._asked: dict[str, tuple[int, int]] = {}  # request -> tokens held, tokens to come
        self._prompts: dict[str, int] = {}  # tokens of each request's prompt
        self._away: dict[str, HeldRequest] = {}
        self._salts: dict[str, str] = {}
        self._unknown: dict[str, int] = {}  # tokens of prompts that the store knows nothing of
        self._space = ""  # the state of the model that prefixes depend on
        self._spaces: dict[str, str] = {}  # that in which each request began
        self._looked = False
        self._forward: Forward | None = None
        self.layers_reached: set[int] = set()  # in the last forward

    def _store_of(self, layer: PagedLayer) -> BatchStore:
        """Make the tensors of a layer, with room for all pages and rows."""
        window, group = layer.window, self.groups[layer.window]
        assert layer.spec is not None
        asked = layer.storage.asked if layer.storage is not None else layer.spec
        pages = self.arena.storage(layer.layer_idx, asked, layer.device, group)
        if pages.spec != layer.spec:  # what the first tokens called for, while the storage is empty
            assert layer.storage is not None
            wide = rewritten(pages, layer.spec, layer.storage.wider)
            self.arena.replace(layer.layer_idx, pages, wide)
            pages = wide
        pages.keeps = KEPT
        store = BatchStore(
            layer.layer_idx, layer.formats, self.arena, pages, group.sink_tokens, layer.kernel, window,
            self.room.rows, group.slots, layer.group.reading.budget,
        )  # fmt: skip
        store.make_room(self.room.pages[window])
        return store

    # -- what fits -------------------------------------------------------------------------------------------

    @property
    def num_pages(self) -> int:
        """Pages of the full-attention layers, or of the only sliding ones."""
        return self.room.pages.get(None) or next(iter(self.room.pages.values()))

    @property
    def num_blocks(self) -> int:
        """Pages, for messages of transformers."""
        return self.num_pages

    @property
    def most_tokens(self) -> int:
        """Tokens that a single request may have: prompt and answer."""
        full = self.groups.get(None)
        if full is None:
            return NO_LIMIT
        return self.room.pages[None] * full.page_size + full.sizes.slots - 1

    def _needed(self, request_id: str, tokens: int) -> int:
        """Return the pages of the full-attention layers that a request lacks for `tokens` tokens."""
        full = self.groups.get(None)
        if full is None:
            return 0
        row = self.requests.find(request_id)
        held = 0 if row is None else len(full.batch.pages[row])
        return max(0, full.sizes.sealed(tokens) - held)

    def _free_pages(self) -> int:
        """Return the pages of the full-attention layers that nobody holds or was promised."""
        full = self.groups.get(None)
        if full is None:
            return NO_LIMIT
        held, store = full.pool.num_held, self.options.prefix_store
        if store is not None:
            # what generate() or another manager holds there comes on top of `room`
            with full.pool.lock:
                held = len(set().union(*full.held_pages(full.pool))) + store.num_spare
        return self.room.pages[None] - held - sum(self._promised.values())

    def _kept_pages(self) -> int:
        """Return the pages that the prefix store alone holds, which give way to requests."""
        return 0 if self.prefix_store is None else self.prefix_store.num_spare

    def _make_free(self, pages: int) -> bool:
        """Give up prefixes that no request holds until `pages` pages are free; say whether they are."""
        lacking = pages - self._free_pages()
        if lacking > 0 and self.prefix_store is not None:
            self.prefix_store.give_up(lacking)
            lacking = pages - self._free_pages()
        return lacking <= 0

    def can_store_request_tokens(self, state: Any, request_len: int, dry_run: bool = False) -> bool:
        """Say whether `request_len` more tokens of a request have room; if so they are promised it."""
        request_id, tokens = state.request_id, state.current_len() + request_len
        if dry_run:
            return tokens <= self.most_tokens
        self._promised.pop(request_id, None)
        self._prompts[request_id] = len(state.initial_tokens)
        known = request_id in self.requests
        needed = self._needed(request_id, tokens)
        if (not known and len(self.requests) >= self.room.rows) or not self._make_free(needed):
            return False
        if not known:
            self._come(request_id)
            needed = self._needed(request_id, tokens)
        self._promised[request_id] = needed
        return True

    def count_storable_requests(self, needs: Sequence[tuple[str, int]]) -> int:
        """Return how many of (request, its tokens behind the next forward), in order, would find room one after the other."""
        free = self._free_pages() + self._kept_pages()
        for count, (request_id, tokens) in enumerate(needs):
            free -= self._needed(request_id, tokens)
            if free < 0:
                return count
        return len(needs)

    def compute_free_capacity(self, relative: bool = True) -> float:
        """Return the pages that live requests leave, as a part of all; prefixes that nobody uses count as free."""
        full = self.groups.get(None)
        if full is None:
            free, whole = self.room.rows - len(self.requests), self.room.rows
        else:
            whole = self.room.pages[None]
            free = whole - len(set().union(*full.batch.pages))
        return free / whole if relative else float(free)

    def evict_cached_blocks(self) -> bool:
        """Say that nothing was given up: prefixes are, one after the other, when a request needs their room."""
        return False

    # -- requests that come and go -----------------------------------------------------------------------------

    def _come(self, request_id: str) -> None:
        """Give a request a row behind the others, with what it left on the host."""
        away = self._away.pop(request_id, None)
        if away is None:
            tokens = self._unknown.pop(request_id, None)
            if tokens is not None and self.prefix_store is not None:
                self.prefix_store.count_prompt(tokens, 0)
            self.requests.admit(request_id)
        else:
            away.come_back(self.requests, request_id)

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """Let go of everything that a request holds; its sealed pages stay in the prefix store, if there is one."""
        for kept in (
            self._promised,
            self._asked,
            self._away,
            self._salts,
            self._spaces,
            self._unknown,
            self._prompts,
        ):
            kept.pop(request_id, None)
        if request_id in self.requests:
            self.requests.drop(request_id)

    def free_all_requests(self, clear_ledgers: bool = False) -> None:
        """Let go of all requests, and with `clear_ledgers` of all prefixes."""
        for request_id in (*self.requests.names, *self._away):
            self.free_blocks(request_id)
        if clear_ledgers and self.prefix_store is not None:
            self.prefix_store.clear()

    def reset(self) -> None:
        """Let go of all requests."""
        self.free_all_requests()

    def prepare_fork_request(self, state: Any, new_ids: Sequence[str], copies: Any) -> list[str]:
        """Let new requests continue as `state` does, as far as there are rows; they share its pages. Return those."""
        forked = []
        for new_id in new_ids:
            # a child without a row waits, and shares pages later
            self.salt(new_id, self.salt_of(state.request_id))
            if len(self.requests) < self.room.rows:
                self.requests.copy(state.request_id, new_id)
                self._prompts[new_id] = len(state.initial_tokens)
                if state.request_id in self._spaces:
                    self._spaces[new_id] = self._spaces[state.request_id]
                forked.append(new_id)
        return forked

    def perform_cache_copy(self, copies: Any) -> None:
        """Do nothing: `prepare_fork_request` has copied."""

    # -- requests that wait on the host --------------------------------------------------------------------------

    def bytes_away(self) -> int:
        """Bytes of requests that wait on the host."""
        return sum(one.nbytes for one in list(self._away.values()))

    def request_bytes(self, request_id: str) -> int:
        """Bytes of the pages and exact tokens of a request that has a row."""
        index = self.requests.index_of(request_id)
        return sum(
            len(self.groups[window].batch.pages[index]) * kind.page_bytes + kind.window_bytes
            for window, kind in self.kinds.items()
        )

    def take_away(self, request_id: str) -> None:
        """Move what a request holds to the host; its row and its pages are free afterwards."""
        nbytes, salt = self.request_bytes(request_id), self.salt_of(request_id)
        space = self._spaces.get(request_id)
        away = HeldRequest.of(self.requests, request_id, nbytes)
        self.free_blocks(request_id)
        self._away[request_id] = away
        self.salt(request_id, salt)
        if space is not None:  # its pages stay those of the weights that made them
            self._spaces[request_id] = space

    # -- prefixes ------------------------------------------------------------------------------------------------

    def salt(self, request_id: str, salt: str) -> None:
        """Let a request share prefixes with requests of the same salt alone."""
        self._salts[request_id] = salt

    def salt_of(self, request_id: str) -> str:
        """Return the salt of a request, "" without one."""
        return self._salts.get(request_id, "")

    def look_again(self) -> None:
        """Compare the model's weights and adapters with those of the prefixes before the next request begins."""
        self._looked = False

    def _space_now(self) -> str:
        """Return the space of prefixes of the model's state; pages of other weights are let go of."""
        if not self._looked and self.prefix_store is not None:
            # requests keep what they have written, too
            self._space = self.prefix_store.bind_model(self.model, self.options)
            self._looked = True
        return self._space

    def _space_of(self, request_id: str) -> str:
        space = self._spaces.get(request_id)
        if space is None:
            space = self._spaces[request_id] = self._space_now()
        return salted(space, self.salt_of(request_id))

    def search_prefix_match(self, request_id: str, prompt_ids: Sequence[int]) -> int:
        """Let a request begin with the pages known of its prompt; return how many of its tokens they hold."""
        store = self.prefix_store
        if store is None or request_id in self.requests or len(self.requests) >= self.room.rows:
            return 0
        self._spaces.pop(request_id, None)  # it begins now, whenever it came
        with store.tree.pool.lock:
            found = store.find(self._space_of(request_id), prompt_ids)
            if not found.pages:  # it may be looked for again before it has room
                self._unknown[request_id] = len(prompt_ids)
                return 0
            self._unknown.pop(request_id, None)
            store.count_prompt(len(prompt_ids), found.tokens)
            row = Row(0, found.pages, store.tree.sink_tokens)
            index = self.requests.admit(request_id, {None: row})
        with self.requests.in_order():
            for one, sinks in zip(self.stores.values(), found.sinks, strict=True):
                one.put_sinks(index, sinks)
        return found.tokens

    def count_new_complete_blocks(self, state: Any, request_len: int) -> dict[str, int]:
        """Return {"pages": n} for the pages that a forward over `request_len` tokens of a request seals."""
        if self.prefix_store is None:
            return {}
        sizes, held = self.groups[None].sizes, state.current_len()
        count = sizes.sealed(held + request_len) - sizes.sealed(held)
        return {"pages": int(count)} if count else {}

    def mark_complete_blocks(self, state: Any, complete_blocks: Mapping[str, int]) -> None:
        """Keep the sealed pages of a request for others that begin alike; a page that is there already is shared."""
        store, index = self.prefix_store, self.requests.find(state.request_id)
        if store is None or not complete_blocks or index is None:
            return
        group = self.groups[None]
        tokens = (state.initial_tokens + state.generated_tokens)[: group.length(index)]
        pages = group.batch.pages[index]
        shared = store.keep(
            self._space_of(state.request_id), tokens, pages, lambda: self.sinks_of(index)
        )
        if shared != pages[: len(shared)]:
            group.replace_pages(index, shared + pages[len(shared) :])

    def sinks_of(self, row: int) -> Sinks:
        """Return copies of the exact first keys and values of a row, for each layer."""
        with self.requests.in_order():
            return [store.sinks_of(row) for store in self.stores.values()]

    # -- forwards --------------------------------------------------------------------------------------------------

    def extend_read_and_write_indices(
        self,
        request_id: str,
        past_length: int,
        query_length: int,
        read_index: Any,
        write_index: Any,
    ) -> None:
        """Note that the next forward has `query_length` tokens of a request, behind those of the requests before."""
        self._asked[request_id] = (past_length, query_length)

    def begin(self, tokens: int) -> None:
        """Plan the forward whose requests were noted, which has `tokens` tokens.

        Raises: InterruptedForwardError where a request holds other tokens than transformers takes it to hold.
        """
        asked, self._asked = self._asked, {}
        self._promised.clear()
        self._check(asked, tokens)
        for group in self.groups.values():
            group.release_read()
        one = [
            request_id
            for request_id, (held, count) in asked.items()
            if count == 1 and held and not self._in_prompt(request_id, held)
        ]
        self.requests.side_by_side(one)
        places: dict[str, int] = {}
        first = 0
        for request_id, (_, count) in asked.items():
            places[request_id], first = first, first + count
        parts = []
        if one:
            in_order = [places[request_id] for request_id in self.requests.names[: len(one)]]
            parts.append(Part(0, len(one), 1, run_of(in_order, self.device), prompt=False))
        decoding = set(one)
        for request_id, (_, count) in asked.items():
            if count and request_id not in decoding:
                first = places[request_id]
                row = self.requests.index_of(request_id)
                parts.append(Part(row, 1, count, slice(first, first + count), prompt=True))
        self.layers_reached = set()
        steps = {
            window: [group.grow(part.first, part.first + part.rows, part.q_len) for part in parts]
            for window, group in self.groups.items()
        }
        self._forward = Forward(parts, steps, tokens)

    def _in_prompt(self, request_id: str, held: int) -> bool:
        """Say whether the token behind `held` ones is of the prompt, which reads everything where steps read a part."""
        return self.options.reads_part and held < self._prompts.get(request_id, 0)

    def _check(self, asked: Mapping[str, tuple[int, int]], tokens: int) -> None:
        """Raise InterruptedForwardError unless the requests hold what transformers takes them to hold."""
        if sum(count for _, count in asked.values()) != tokens:
            raise InterruptedForwardError(
                f"a forward of continuous batching has {tokens} tokens, and its requests "
                f"{ {name: count for name, (_, count) in asked.items()} }"
            )
        for request_id, (held, _) in asked.items():
            index = self.requests.find(request_id)
            for group in self.groups.values():
                if index is None or group.length(index) != held:
                    there = "no row" if index is None else f"{group.length(index)} tokens"
                    raise InterruptedForwardError(
                        f"request {request_id!r} has {there} in the cache, and transformers takes it to hold {held} tokens"
                    )

    def paged_attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Append and attend in one layer; see batch_attention.attend_in_parts.

        Args:
            module: the attention module, whose layer_idx says which layer it is.
            query: [1, num_heads, tokens, head_dim].
            key, value: [1, num_kv_heads, tokens, head_dim], of this forward.
        Returns: ([1, tokens, num_heads, value_dim], None).
        Raises: UnsupportedModelError for a layer without pages.
        """
        layer = getattr(module, "layer_idx", None)
        store = self.stores.get(layer)  # type: ignore[arg-type]
        if store is None or self._forward is None:
            raise UnsupportedModelError(
                f"{type(module).__name__} attends as layer {layer!r}, of which continuous batching has no pages"
            )
        self.layers_reached.add(store.layer_idx)
        return attend_in_parts(store, self._forward, module, query, key, value, kwargs)

    # -- what it holds -----------------------------------------------------------------------------------------------

    def memory(self) -> MemoryReport:
        """Return the bytes of all tensors, by part; may be called in any thread.

        "other" are the exact first tokens of the prefixes that a store of the manager's own keeps, which `room` does not count.
        """
        specs = [store.pages.spec for store in self.stores.values()]
        payload = scales = 0
        for store in self.stores.values():
            capacity = store.pages.capacity
            payload += capacity * sum(side.payload_bytes for side in store.pages.spec.sides)
            scales += capacity * sum(side.scale_bytes for side in store.pages.spec.sides)
        tail = sum(one.tokens.nbytes for store in self.stores.values() for one in store.residuals)
        held = sum(group.pool.num_held for group in self.groups.values())
        first = next(iter(self.groups.values()))
        tokens = int(first.lengths().sum())  # one read: a forward changes `batch`
        kept = None if self.prefix_store is None else self.prefix_store.stats()
        other = 0 if kept is None else kept.bytes - kept.pages * self.kinds[None].page_bytes
        assert specs
        return MemoryReport(
            payload=payload, scales=scales, tail=tail, tables=0, other=other, pages_held=held,
            pages_allocated=sum(self.room.pages.values()), tokens=tokens, offloaded=self.bytes_away(),
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raise ValueError unless counts and rows agree."""
        for group in self.groups.values():
            group.pool.check_integrity()
            if len(group) != len(self.requests):
                raise ValueError(f"{len(group)} rows for {len(self.requests)} requests")
        self.requests.check_integrity()
