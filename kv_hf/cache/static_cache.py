"""The preallocated paged cache: `max_length` columns per row, made at the first forward, which torch.compile can trace.

Its layers decide nothing that depends on data: lengths and tokens are changed on their device, by operators that a trace
takes as they are. What a forward needs of Python (is the cache empty?) changes once, at the prompt.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..backends.base import Backend
from ..backends.dispatch import MAX_DECODE_QUERIES
from ..backends.inputs import PagedKV
from ..backends.registry import choose, without_waiting
from ..backends.torch_ops import spec_name, traceable, write_pair
from ..bridge.lazy_kv import KVView, LazyKV
from ..bridge.mask_length import MaskLength, check_padding_mask, takes_length
from ..bridge.traced import TracedView, check_taken, forget, hand_over
from ..config import CacheConfig
from ..errors import (
    CacheMismatchError,
    CacheOptionError,
    InterruptedForwardError,
    UnsupportedModelError,
)
from ..formats import ATTENTION_NAME
from ..pages import moved
from ..pages.group_state import GroupState
from ..pages.moved import persistent_tensors
from ..pages.static_table import WORKING, StaticStep, StaticTable
from ..pages.storage import PageArena, PageStorage, Pair, Wider
from ..spec import MemoryReport, PageSpec
from .base import CacheBase
from .layer_formats import LayerFormats, planned_specs
from .model_shape import kept_layers, latent_rank, page_sizes
from .report import LayerReport, held_formats, in_lines, one_line
from .state import (
    CacheState,
    LayerPages,
    LayerState,
    LiveTensors,
    StateTensors,
    field_from_rows,
    portable,
    with_wider,
)
from .store import LayerStore, Residual
from .widening import NO_MEMORY, say_kept, say_widened, wider_for_prompt


def check_static_kernel(kernel: Backend, device: torch.device, spec: PageSpec) -> None:
    """Raise CacheOptionError where a step by `kernel` over such pages would wait for the device."""
    if device.type == "cpu" or not kernel.waits:
        return
    able, reasons = without_waiting(device, spec)
    if able:
        names = " or ".join(f"kernel={name!r}" for name in able)
        remedy = f"take {names}, which never waits here, or leave max_length out"
    else:
        others = "".join(f" {name!r} cannot run: {reason}." for name, reason in reasons.items())
        remedy = f"every backend that can run here does so.{others} Leave max_length out"
    raise CacheOptionError(
        f"max_length on {device} needs a backend whose steps never wait for the device, and kernel {kernel.name!r} reads "
        f"numbers from it at every step; {remedy}"
    )


class StaticStore:
    """Pages and windows of one layer with room for all of `table.max_length` columns.

    Args:
        layer_idx: position in the model, for messages.
        spec: shapes and formats of both sides.
        table: rows and lengths, allocated.
        kernel: CacheConfig.kernel. Raises CacheOptionError when that one cannot run on these pages.
    Attributes:
        base: the pages and windows themselves, and their checks.
        hollow: two scalars of nan; expanded, they stand for keys and values while a forward is traced.
    """

    def __init__(self, layer_idx: int, spec: PageSpec, table: StaticTable, kernel: str) -> None:
        self.table = table
        device = table.seen.device
        with persistent_tensors():
            pages = PageStorage(spec, device)
        self.base = LayerStore(layer_idx, pages, table.sink_tokens, kernel)
        check_static_kernel(self.base.kernel, device, spec)
        with persistent_tensors():
            self.base.pages.grow(table.rows * table.pages_per_row)
            for window in self.base.residuals:
                window.fit(table.rows, table.slots)
            self.hollow = tuple(
                torch.full((), float("nan"), dtype=side.dtype, device=device) for side in spec.sides
            )
        self.damaged = self.base.damaged
        self.name = spec_name(spec)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of this layer: fields [pages, ..], windows [rows, num_kv_heads, slots, head_dim], and scalars."""
        found = [t for side in self.base.pages.sides for t in side.fields.values()]
        found += [window.tokens for window in self.base.residuals]
        return [*found, *self.hollow, self.damaged]

    def append(
        self, step: StaticStep, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens and seal the pages that they fill; return, per side, the exact tokens to be read now.

        Args:
            keys, values: [rows, num_kv_heads, q_len, head_dim], padding columns included.
        """
        new, q_len = (keys.detach(), values.detach()), keys.shape[2]
        own_keys, own_values = self.base.residuals
        if q_len == 1:
            # one that fills its page leaves an empty tail: the next one is written over it
            runs = own_keys.tokens, own_values.tokens
        else:
            runs = (
                self._with_room(own_keys.tokens, q_len),
                self._with_room(own_values.tokens, q_len),
            )
        self._write(runs, new, step)
        if q_len > 1:
            for window, run in zip(self.base.residuals, runs, strict=True):
                window.tokens.copy_(self._rest(run, step))
        return runs

    def _write(self, runs: Pair, new: Pair, step: StaticStep) -> None:
        """Append `new` to `runs` and seal what is full: by one operator where a forward is traced."""
        base = self.base
        fields = base.pages.keys.fields, base.pages.values.fields
        if torch.compiler.is_compiling():
            write_pair(
                base.kernel.name, self.name, runs, new, step.starts, step.skips, step.jobs, fields, self.damaged
            )  # fmt: skip
            return
        base.kernel.write_pair(
            runs, new, step.starts, step.skips, step.jobs, fields, base.spec, self.damaged, base.launches
        )  # fmt: skip

    @staticmethod
    def _with_room(window: torch.Tensor, q_len: int) -> torch.Tensor:
        """Return the window with room for `q_len` tokens behind it."""
        rows, heads, _, dim = window.shape
        return torch.cat([window, window.new_zeros(rows, heads, q_len, dim)], 2)

    def _rest(self, run: torch.Tensor, step: StaticStep) -> torch.Tensor:
        """Return what stays exact of `run`: the sinks, and the tail behind the pages that were sealed."""
        table = self.table
        slot = torch.arange(table.slots, device=run.device)
        gone = step.full.long()[:, None] * table.page_size * (slot >= table.sink_tokens)
        index = (slot + gone).clamp(max=run.shape[2] - 1)[:, None, :, None]
        return run.gather(2, index.expand(-1, run.shape[1], -1, run.shape[3]))

    def kv(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        num_pages: torch.Tensor,
        exact_lens: torch.Tensor,
    ) -> PagedKV:
        """Return the input of a kernel: the layer's pages and the given exact tokens.

        Args:
            keys, values: [rows, num_kv_heads, slots, head_dim], the model's dtype.
            num_pages, exact_lens: [rows], int32: sealed pages, and tokens in the window.
        """
        return PagedKV(
            key_pages=self.base.pages.keys.fields,
            value_pages=self.base.pages.values.fields,
            spec=self.base.spec,
            block_table=self.table.block_table,
            num_pages=num_pages,
            residual_keys=keys,
            residual_values=values,
            exact_lens=exact_lens,
            padding=self.table.padding,
            seen=self.table.max_length,
            sink_tokens=self.table.sink_tokens,
            launches=self.base.launches,
            budget=self.table.reading.budget,
        )

    def traced(self, kv: PagedKV) -> TracedView:
        """Return `kv` with the pair of hollow tensors that stands for it."""
        shapes = [(kv.rows, side.num_kv_heads, kv.seen, side.head_dim) for side in kv.spec.sides]
        keys, values = (
            scalar.expand(shape) for scalar, shape in zip(self.hollow, shapes, strict=True)
        )
        first = self.base.layer_idx == 0
        return TracedView(
            kv, traceable(self.base.kernel, self.name), keys, values, self.table, first
        )

    def fill(self, tensors: StateTensors, group: GroupState) -> None:
        """Take over the pages and the exact tokens that another layer left; rows that shared a page get one each."""
        places = self.table.places(group)
        for side, window in zip(self.base.pages.sides, self.base.residuals, strict=True):
            name = side.spec.side
            for field in side.fields:
                for first, piece in tensors.pages(self.base.layer_idx, name, field):
                    side.spread(first, field, field_from_rows(field, piece, side.spec), places)
            held = tensors.window(self.base.layer_idx, name)[:, :, : group.longest]
            window.tokens[:, :, : group.longest] = held.to(window.tokens.device)

    def reorder(self, sources: torch.Tensor) -> None:
        """Let row i continue the former row sources[i]: pages and windows are copied, in place."""
        for side, window in zip(self.base.pages.sides, self.base.residuals, strict=True):
            for field in side.fields.values():
                if field.shape[0]:
                    rows = field.view(self.table.rows, self.table.pages_per_row, *field.shape[1:])
                    rows.copy_(rows.index_select(0, sources))
            window.tokens.copy_(window.tokens.index_select(0, sources))


MAKES_TENSORS = (
    "the first forward of a cache with max_length makes its tensors: run the prompt without torch.compile, or call "
    "cache.early_initialization(..) before it"
)


def refused(what: str) -> CacheOptionError:
    """Return the error for what only a growing cache can do."""
    return CacheOptionError(
        f"a cache with max_length cannot {what}; leave max_length out of its options"
    )


class StaticPagedLayer(CacheLayerMixin):
    """A full-attention layer whose storage is made once, for `table.max_length` columns.

    Args:
        layer_idx: position in the model; layer 0 begins the table's steps, the last one finishes them.
        is_last: whether it is the last layer.
        table: lengths shared with the other layers of the cache.
        formats: of this layer.
        config: the model's, for the name of its attention implementation.
        kernel: CacheConfig.kernel.
    """

    is_sliding = False
    is_croppable = False
    is_compileable = True

    def __init__(
        self,
        layer_idx: int,
        is_last: bool,
        table: StaticTable,
        formats: LayerFormats,
        config: Any,
        kernel: str = "auto",
    ) -> None:
        self.config = config
        self.layer_idx = layer_idx
        self.is_last = is_last
        self.table = table
        self.formats = formats
        self.kernel = kernel
        self.store: StaticStore | None = None
        self._changes = 0
        super().__init__()

    # -- transformers' interface -------------------------------------------------------------------------

    @torch.compiler.disable(reason=MAKES_TENSORS)
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make all tensors, for the shapes, dtypes and device of the first keys and values.

        Args:
            key_states, value_states: [rows, num_kv_heads, q_len, head_dim]; q_len may be 0.
        Raises: CacheMismatchError on another device than layer 0's; CacheOptionError where the backend cannot run there.
        """
        rows, device = key_states.shape[0], key_states.device
        self.store = None  # of another batch size than the table, should this be stopped half-way
        spec = self.formats.spec_of(key_states, value_states)
        wider = wider_for_prompt(self.formats, self.kernel, spec, (key_states, value_states))
        if self.layer_idx == 0:
            with persistent_tensors():
                self.table.allocate(rows, device)
        if device != self.table.seen.device:
            raise CacheMismatchError(
                f"a cache with max_length lives on one device; layer 0 is on {self.table.seen.device}, layer "
                f"{self.layer_idx} on {device}"
            )
        store = self._new_store(spec, wider)
        self.dtype, self.device, self.batch_size = key_states.dtype, device, rows
        shared = (*self.table.tensors, self.table.flag.tensor) if self.layer_idx == 0 else ()
        for tensor in (*store.tensors, *shared):
            torch._dynamo.mark_static_address(tensor)
        self.is_initialized = True
        self.store = store

    def _new_store(self, spec: PageSpec, wider: Wider | None) -> StaticStore:
        """Make the tensors for pages of `spec`, or of the formats of `wider` where there is memory for them."""
        if wider is not None:
            wide = self.formats.widened_spec(wider.formats, spec, spec.keys.layout)
            try:
                store = StaticStore(self.layer_idx, wide, self.table, self.kernel)
            except (torch.OutOfMemoryError, MemoryError):
                say_kept(self.layer_idx, wider, NO_MEMORY)
            else:
                store.base.pages.became(spec, wider)
                say_widened(self.layer_idx, wider)
                return store
        return StaticStore(self.layer_idx, spec, self.table, self.kernel)

    def _check_prompt(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Say where pages that were made before the first prompt are too narrow for it: their addresses are fixed."""
        assert self.store is not None
        spec = self.store.base.spec
        wider = wider_for_prompt(self.formats, self.kernel, spec, (keys, values))
        if wider is not None:
            say_kept(
                self.layer_idx,
                wider,
                "its tensors were made before the text came, and stay where they are",
            )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; return what this forward's attention shall read.

        Args:
            key_states: [batch, num_kv_heads, q_len, key_dim].
            value_states: [batch, num_kv_heads, q_len, value_dim].
        Returns: the given tensors on an empty cache; else a pair of shape [batch, num_kv_heads, max_length, ..]:
            handles, or while a forward is traced hollow tensors (traced.py).
        Raises: CacheMismatchError for another batch size, shape, dtype or device, or past `max_length`, with the
            cache unchanged; InterruptedForwardError after a forward that stopped half-way.
        """
        compiling = torch.compiler.is_compiling()
        if compiling:
            if self.layer_idx:
                check_taken()
            self._check_traceable(key_states)
        if self.store is None or (not compiling and self._outgrown(key_states, value_states)):
            self.lazy_initialization(key_states, value_states)
        elif not compiling and self._holds_nothing:
            self._check_prompt(key_states, value_states)
        store, table = self.store, self.table
        assert store is not None
        store.base.check(key_states, value_states)
        if self.layer_idx == 0:
            table.check_turn(0)
            table.begin(key_states.shape[0], key_states.shape[2])
        else:
            table.take_turn(self.layer_idx)
        step = table.step
        assert step is not None
        if not compiling:
            forget()
            self._changes += 1
        runs = store.append(step, key_states, value_states)
        if not compiling and moved.is_host(self.device):
            store.base.report_damage()
        read = (key_states, value_states)
        if not table.was_empty:
            read = self._read(store.kv(*runs, step.num_pages, step.exact_lens), compiling)
        self._joined()
        return read

    def _read(self, kv: PagedKV, compiling: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pair that stands for `kv`."""
        assert self.store is not None
        if compiling:
            return hand_over(self.store.traced(kv))
        view = KVView(kv, self, self.revision, self.store.base.kernel)
        view.table, view.is_first = self.table, self.layer_idx == 0
        return LazyKV.pair(view)

    def _joined(self) -> None:
        """Say that all work on the step is done: stopped before, the cache is of no use until reset()."""
        if self.is_last:
            self.table.finish()
        else:
            self.table.give_turn(self.layer_idx + 1)

    def get_seq_length(self) -> Any:
        """Return the columns seen, padding included: 0, or once there are some a scalar tensor on the device."""
        return self.table.seen if self.table.started else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) of the next forward's mask, the shape of what update() will return."""
        return (self.table.max_length if self.table.started else query_length), 0

    def get_max_length(self) -> int:
        """Return max_length."""
        return self.table.max_length

    def get_max_cache_shape(self) -> int:
        """Return max_length, under its older name."""
        return self.table.max_length

    def reset(self) -> None:
        """Forget all tokens of the whole cache; the tensors stay, so that compiled code stays valid."""
        self._changes += 1
        self.table.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue the former row beam_idx[i]: this layer's pages and windows are copied, in place.

        The lengths are shared by all layers: layer 0 reorders them.
        """
        if self.store is None:
            return
        sources = beam_idx.to(self.device)
        self._changes += 1
        if self.layer_idx == 0:
            self.table.reorder(sources)
        self.store.reorder(sources)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise CacheOptionError, unless there is nothing to remove."""
        if int(tokens_to_remove):
            raise refused("give tokens back (crop)")

    def activate_past_recording(self) -> None:
        """Raise CacheOptionError: nothing can be rolled back."""
        raise refused("roll tokens back (assisted decoding)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise CacheOptionError: the number of rows is fixed."""
        raise refused("change its number of rows")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Raise CacheOptionError for any choice of rows `indices` [n]: the number of rows is fixed."""
        raise refused("change its number of rows")

    def offload(self) -> None:
        """Raise CacheOptionError: addresses are fixed."""
        raise refused("be offloaded")

    def prefetch(self) -> None:
        """Raise CacheOptionError: addresses are fixed."""
        raise refused("be offloaded")

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys as a dense tensor [batch, num_kv_heads, seen, key_dim] (a copy), or None when empty."""
        return self._dense("keys")

    @keys.setter
    def keys(self, value: Any) -> None:
        self._refuse(value)

    @property
    def values(self) -> torch.Tensor | None:
        """All values as a dense tensor [batch, num_kv_heads, seen, value_dim] (a copy), or None."""
        return self._dense("values")

    @values.setter
    def values(self, value: Any) -> None:
        self._refuse(value)

    # -- inside --------------------------------------------------------------------------------------------

    @property
    def spec(self) -> PageSpec | None:
        """Shapes and formats of this layer's pages; None before the first keys."""
        return self.store.base.spec if self.store else None

    @property
    def storage(self) -> PageStorage | None:
        """The tensors of the sealed pages; None before the first keys."""
        return self.store.base.pages if self.store else None

    @property
    def residuals(self) -> tuple[Residual, Residual] | None:
        """The exact tokens of keys and values; None before the first keys."""
        return self.store.base.residuals if self.store else None

    def resume(self, state: LayerState, tensors: StateTensors, group: GroupState) -> None:
        """Take over what another layer left; the table is restored behind the last layer."""
        empty = (one.expand(len(group.rows), -1, -1, -1) for one in state.empty())
        self.lazy_initialization(*empty)
        assert self.store is not None
        self.store.fill(tensors, group)
        self._changes += 1

    @property
    def revision(self) -> object:
        """Return a value that differs after every change of this layer; a compiled step changes the length that Python knows."""
        return self._changes, self.table.known_columns

    @property
    def _holds_nothing(self) -> bool:
        """Whether no text has come, or its first tokens come now: behind layer 0 the step in progress has started the table."""
        return not self.table.started or (self.layer_idx > 0 and self.table.was_empty)

    def _outgrown(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Say whether an empty layer must make its tensors anew: a reset cache takes any batch."""
        assert self.store is not None
        fits = self.batch_size == keys.shape[0] and self.store.base.fits(keys, values)
        return self._holds_nothing and not fits

    def _check_traceable(self, keys: torch.Tensor) -> None:
        """Raise CacheOptionError where attention could not read hollow tensors.

        Under fullgraph=True that is an error; otherwise torch runs this call uncompiled, where handles do.
        """
        table, q_len = self.table, keys.shape[2]
        holds = table.started if self.layer_idx == 0 else not table.was_empty
        current = self.config._attn_implementation
        if current not in ("sdpa", ATTENTION_NAME):
            raise CacheOptionError(
                f"a compiled forward reads pages by the attention 'sdpa', and this model's is {current!r}: call "
                "model.set_attn_implementation('sdpa'), or leave max_length out where the model has no sdpa"
            )
        if holds and q_len > MAX_DECODE_QUERIES:
            raise CacheOptionError(
                f"a compiled forward on a cache that holds some takes at most {MAX_DECODE_QUERIES} tokens, got {q_len}"
            )
        if holds and keys.requires_grad and torch.is_grad_enabled():
            raise CacheOptionError("a compiled forward has no backward pass: use torch.no_grad()")

    def _dense(self, side: str) -> torch.Tensor | None:
        store, table = self.store, self.table
        if store is None or not table.started:
            return None
        if table.turn == WORKING or (table.step is not None and self.layer_idx >= table.turn):
            raise InterruptedForwardError(
                f"layer {self.layer_idx} is behind the lengths of this cache: a forward is going on, or stopped half-way; "
                "read it between two forwards, or call reset()"
            )
        keys, values = (window.tokens for window in store.base.residuals)
        kv = store.kv(keys, values, table.num_pages, table.exact_lens)
        view = KVView(kv, self, self.revision, store.base.kernel)
        return view.dense(side)[:, :, : table.columns()]

    def _refuse(self, value: Any) -> None:
        if value is not None:
            raise AttributeError(
                "keys and values of a paged layer are read-only views; use update() to append tokens"
            )


HEAD_COUNTS = ("num_key_value_heads", "num_attention_heads")


class StaticPagedCache(CacheBase):
    """A paged cache whose tensors never move, so that torch.compile and CUDA graphs can hold a decode step.

    Made by `PagedCache(config, .., max_length=N)` and `cache_config={"max_length": N}`.
    """

    def _build(self, config: Any, options: CacheConfig) -> None:
        if options.max_length is None:
            raise CacheOptionError("StaticPagedCache needs max_length; use PagedCache without it")
        decoder = self._describe(config, options)
        self.arena = PageArena()  # of nobody's use: each layer has storage of its own
        self.captured = False  # whether generate() runs its decode steps as a CUDA graph
        others = sorted({type(layer).__name__ for layer in self.layers} - {DynamicLayer.__name__})
        kept = kept_layers(decoder)  # their tokens are not the text's, nor as many
        if others or kept or not self.layers or latent_rank(decoder) is not None:
            inside = "cross-attention to images" if kept else "latent attention"
            kind = ", ".join(others) or inside
            raise UnsupportedModelError(
                f"max_length={options.max_length}: {getattr(config, 'model_type', config)!r} has layers ({kind}) that a "
                "preallocated cache cannot hold; leave max_length out"
            )
        kind = getattr(config, "model_type", config)
        budget = options.budget_of(kind, [None] * len(self.layers), False)
        sizes = options.page_size, options.sink_tokens, options.max_length
        self.groups = (StaticTable(*sizes, budget),)
        count = len(self.layers)
        formats = [LayerFormats.of(options, index, count) for index in range(count)]
        planned_specs(page_sizes(decoder), formats)
        for index, own in enumerate(formats):
            self.layers[index] = StaticPagedLayer(
                index, index == count - 1, self.table, own, decoder, options.kernel
            )

    @property
    def table(self) -> StaticTable:
        """Rows and lengths, shared by all layers."""
        table: StaticTable = self.groups[0]
        return table

    def __deepcopy__(self, memo: dict[int, Any]) -> "StaticPagedCache":
        """Return an independent cache with tensors of its own, which nobody else ever shares here."""
        memo.update((id(part), part) for part in (self._config, self._attention_config))
        copied: Any = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __copy__(self) -> "StaticPagedCache":
        return copy.deepcopy(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise CacheOptionError, unless there is nothing to remove."""
        for layer in self.paged_layers:
            layer.crop(tokens_to_remove)

    def state(self) -> CacheState:
        """Return what this cache holds, for a file or another cache; waits for the device.

        Raises: CacheMismatchError for an empty cache, InterruptedForwardError after a forward that stopped half-way.
        """
        table, layers = self.table, {layer.layer_idx: layer for layer in self.paged_layers}
        if not table.started:
            raise CacheMismatchError("this cache is empty: there is nothing to save")
        self.check_integrity()
        ids = [
            page
            for row, held in enumerate(table.num_pages.tolist())
            for page in table.block_table[row, :held].tolist()
        ]
        return CacheState(
            with_wider(portable(self.options), self.paged_layers),
            self.model_signature,
            (table.state(),),
            tuple(
                LayerState.of(index, layer.store.base.spec, 0, layer.device)
                for index, layer in layers.items()
                if layer.store is not None
            ),
            LiveTensors(layers, dict.fromkeys(layers, ids)),
            self.computed_by,
        )

    def _take_over(self, state: CacheState, pages: Mapping[int, LayerPages]) -> None:
        (group,) = state.groups
        if len(pages) != len(self.layers):
            raise CacheMismatchError(
                f"this state is of layers {sorted(pages)} alone; a preallocated cache holds all {len(self.layers)}"
            )
        self.table.check_state(group)
        for one in sorted(state.layers, key=lambda one: one.layer):
            self.paged_layers[one.layer].resume(one, state.tensors, group)
        self.table.restore(group)
        self.check_integrity()

    def _check_padding(self, mask: Any) -> None:
        check_padding_mask(mask, self.table.rows if self.table.started else 0, False)

    def expect_length(self, end: int, prompt: int = 0) -> None:
        """Nothing: all room is made at the first forward."""

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the columns seen, padding included; on the device once there are some."""
        return self.paged_layers[0].get_seq_length()

    @property
    def max_length(self) -> int:
        """Columns (padding included) that a row has room for."""
        return self.table.max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) for the mask of the next `query_length` columns of a layer."""
        if not torch.compiler.is_compiling():
            self.table.check_flag()
        length, offset = self.paged_layers[layer_idx].get_mask_sizes(query_length)
        if torch.compiler.is_compiling():
            return length, offset
        # a single token comes after the prompt, whose mask has said it all
        learns = query_length > 1 or not self.table.started
        known = learns or not moved.is_host(self.table.seen.device)
        if known and takes_length(self._attention_config._attn_implementation):
            return MaskLength(length, self.groups if learns else (), False, self._watch), offset
        return length, offset

    @property
    def paged_layers(self) -> list[StaticPagedLayer]:
        """All layers."""
        return [layer for layer in self.layers if isinstance(layer, StaticPagedLayer)]

    def reset(self) -> None:
        """Forget all tokens; the tensors stay, so that the same batch size runs the same compiled code."""
        self.forget_origin()
        for layer in self.paged_layers:
            layer.reset()
        if self.halfway:  # else it stays an attribute of the class, and compiled code stays valid
            del self.halfway

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue the former row beam_idx[i]; pages are copied, one tensor at a time."""
        self.table.take_turn(0)
        for layer in self.paged_layers:
            layer.reorder_cache(beam_idx)
        self.table.give_turn(0)
        if self.token_ids is not None:
            self.select_tokens(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise CacheOptionError: the number of rows is fixed."""
        raise refused("change its number of rows")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Raise CacheOptionError for any choice of rows `indices` [n]: the number of rows is fixed."""
        raise refused("change its number of rows")

    # -- what transformers does not ask for ----------------------------------------------------------------

    def check_kernel(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise CacheOptionError when the kernel that such a model gets cannot run, or waits for the device."""
        super().check_kernel(device, dtype)
        if device.type != "cpu":
            formats = [layer.formats for layer in self.paged_layers]
            for spec in planned_specs(page_sizes(self._config), formats, dtype):
                check_static_kernel(choose(self.options.kernel, device, spec), device, spec)

    def bytes_of(self, rows: int, dtype: torch.dtype) -> int | None:
        """Return the most bytes that pages and exact windows of a batch of `rows` take; None where the config does not say."""
        formats = [layer.formats for layer in self.paged_layers]
        specs = planned_specs(page_sizes(self._config), formats, dtype)  # of one head
        named = (self.model_signature.get(name) for name in HEAD_COUNTS)
        heads = next((count for count in named if isinstance(count, int)), None)
        if not specs or heads is None:
            return None
        pages, slots = rows * self.table.pages_per_row, self.table.slots
        return heads * sum(pages * one.page_bytes + one.window_bytes(rows, slots) for one in specs)

    def memory(self) -> MemoryReport:
        """Return the bytes of all tensors that this cache holds, by part; waits for the device."""
        stores = [layer.store for layer in self.paged_layers if layer.store is not None]
        table = self.table
        if not stores:
            return MemoryReport(0, 0, 0, 0, 0, 0, 0, 0)
        sides = [side for store in stores for side in store.base.pages.sides]
        payload = sum(side.nbytes["codes"] for side in sides)
        for store in stores:
            store.base.report_damage()
        pages = int(table.num_pages.sum())
        return MemoryReport(
            payload=payload,
            scales=sum(sum(side.nbytes.values()) for side in sides) - payload,
            tail=sum(window.tokens.nbytes for store in stores for window in store.base.residuals),
            tables=sum(tensor.nbytes for tensor in table.tensors),
            other=0,
            pages_held=pages,
            pages_allocated=table.rows * table.pages_per_row,
            tokens=pages * table.page_size + int(table.exact_lens.sum()),
        )

    def report(self) -> list[LayerReport]:
        """Return, for each layer, how it is cached."""
        rows = []
        for layer in self.paged_layers:
            rows.append(LayerReport(layer.layer_idx, "paged", *held_formats(layer)))
        return rows

    def check_integrity(self) -> None:
        """Raise ValueError unless lengths add up."""
        self.table.check_integrity()

    @property
    def num_rows(self) -> int:
        """Rows that this cache holds, 0 before the first forward."""
        return self.table.rows if self.table.started else 0

    def __repr__(self) -> str:
        return one_line(self, "PagedCache", self.num_rows)  # what users call, with max_length

    def __str__(self) -> str:
        return in_lines(self, "PagedCache", self.num_rows)
