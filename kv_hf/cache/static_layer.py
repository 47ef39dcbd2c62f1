"""One attention layer of a preallocated cache, which torch.compile can trace.

Decides nothing that depends on data: lengths and tokens are changed on their device, by operators that a trace
takes as they are. What a forward needs of Python (is the cache empty?) changes once, at the prompt.
"""

import functools
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..backends.dispatch import MAX_DECODE_QUERIES
from ..backends.inputs import PagedKV
from ..bridge.lazy_kv import KVView, LazyKV
from ..bridge.traced import forget, hand_over
from ..errors import CacheMismatchError, CacheOptionError, InterruptedForwardError
from ..formats import ATTENTION_NAME
from ..pages import moved
from ..pages.group_state import GroupState
from ..pages.persistent import persistent_tensors
from ..pages.static_table import WORKING, StaticTable
from ..pages.storage import PageStorage
from ..pages.widened import Wider
from ..spec import PageSpec
from .layer_formats import LayerFormats
from .residual import Residual
from .state import LayerState, StateTensors
from .static_store import StaticStore
from .widening import NO_MEMORY, say_kept, say_widened, wider_for_prompt

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
        keep_uncompiled()
        super().__init__()

    # -- transformers' interface -------------------------------------------------------------------------

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
        if current != ATTENTION_NAME:
            raise CacheOptionError(
                f"a compiled forward reads pages through the attention implementation {ATTENTION_NAME!r} only, and this "
                f"model's is {current!r}: call model.set_attn_implementation('kv_hf')"
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


@functools.cache
def keep_uncompiled() -> None:
    """Have torch.compile run `lazy_initialization` as it is. Done for the first layer, as it imports torch._dynamo (1.6 s)."""
    made: Any = torch.compiler.disable(StaticPagedLayer.lazy_initialization, reason=MAKES_TENSORS)
    StaticPagedLayer.lazy_initialization = made  # type: ignore[method-assign]
