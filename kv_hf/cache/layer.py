"""One attention layer's paged cache: storage and window, following the steps of its group, and handles of them."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from transformers.cache_utils import DynamicLayer

from ..backends.base import PagedKV
from ..bridge.handles import KVView, LayerView, LazyKV, check_unchanged, warn_dense, warn_gradients
from ..errors import CacheOptionError, InterruptedForwardError
from ..pages.forward import Forward
from ..pages.rows import Rows
from ..pages.step import Step
from ..pages.storage import PageMemory, PageStorage, Pair
from ..spec import PageSpec
from .layer_formats import LayerFormats
from .store import LayerStore, Residual


def _refused(self: Any, *args: Any, **kwargs: Any) -> None:
    """Raise CacheOptionError: this is done to the whole cache."""
    raise CacheOptionError(
        "layers of a paged cache share their rows and their memory: call this method of the cache; pages leave the device "
        "where it is made with offload='cpu' or offload='disk'"
    )


def _side(side: str, channels: str) -> Any:
    """Return the property of a layer that gives its keys or its values."""
    return property(
        lambda self: self._read(side),
        lambda self, value: check_unchanged(side, self._dense(side), value),
        doc=f"""All {side} [batch, num_kv_heads, seen, {channels}], or None before the first; nobody can write to them.

        A sliding layer gives the last window - 1 tokens, as transformers' layer does.
        """,
    )


class PagedLayer(DynamicLayer):
    """An attention layer whose tokens live in pages: full attention, or a sliding window.

    Args:
        layer_idx: position in the model, for messages.
        group: rows and lengths, shared with the other paged layers of the same window.
        forward: the forward in progress, shared with all layers of the cache.
        page_memory: where the sealed pages live.
        formats: of this layer, and the options of the cache.
        window: tokens that a query of this layer sees, itself included; None for all.
    Attributes:
        seen: columns that the layer has taken in, padding included.
        revision: another number after every change, by which handles know that they are stale.
    """

    is_croppable = True

    def __init__(
        self,
        layer_idx: int,
        group: Rows,
        forward: Forward,
        page_memory: PageMemory,
        formats: LayerFormats,
        window: int | None = None,
    ) -> None:
        self.layer_idx = layer_idx
        self.window = window
        if window is not None:  # code asks layers whether they have this at all
            self.sliding_window = window
        self.is_sliding = window is not None
        self.is_compileable = group.max_length is not None
        self.group = group
        self.forward = forward
        self.page_memory = page_memory
        self.formats = formats
        self.revision = 0  # never goes down: a handle of an earlier text must not fit again
        self.store: LayerStore | None = None
        super().__init__()
        self.forget()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Follow the tensors to where they were loaded."""
        vars(self).update(state)
        if self.store is not None:
            self.device = self.store.device

    def forget(self) -> None:
        """Hold no tokens and no tensors; what other layers share is the cache's to reset."""
        self.revision += 1
        self.store = None
        self.seen = 0
        self.is_initialized = False

    # -- transformers' interface -------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learn shapes, dtype and device from the first keys and values [rows, num_kv_heads, q_len, head_dim]; check the formats on them."""
        spec = self.formats.spec_of(key_states, value_states)
        self._take(self.page_memory.storage(self.layer_idx, spec, key_states.device, self.group))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values; return what this forward's attention shall read.

        Args:
            key_states: [batch, num_kv_heads, q_len, key_dim].
            value_states: [batch, num_kv_heads, q_len, value_dim].
        Returns: the given tensors themselves on an empty cache (a prefill attends to exact numbers), else a
            pair of handles of shape [batch, num_kv_heads, seen, ..] over pages, window and new tokens.
        Raises: CacheMismatchError for another batch size, shape, dtype or device; PagePoolExhaustedError at
            `max_pages`, with the cache unchanged; InterruptedForwardError after a forward that stopped half-way.
        """
        store = self.store
        if store is None or (self.seen == 0 and not store.fits(key_states, value_states)):
            self.lazy_initialization(key_states, value_states)
            store = self.store
            assert store is not None
        rows, _, q_len, _ = store.check(key_states, value_states)
        step = self.forward.join(self, rows, q_len)
        self.revision += 1
        runs = store.append(step, key_states, value_states, self.group.sizes.slots)
        if step.seen_before == 0:
            # a sliding layer too: the mask hides what its queries must not see
            self.take_part(step)
            return key_states, value_states
        if key_states.requires_grad and torch.is_grad_enabled():
            warn_gradients()
        assert step.view is not None
        kv = store.kv(step.view, *runs, step.columns, step.budget)
        handles = LazyKV.pair(KVView(kv, self, self.revision, store.kernel, self.window))
        self.take_part(step)
        return handles

    def take_part(self, step: Step) -> None:
        """Say that all work on the forward in progress is done: stopped before, this layer lacks it."""
        self.seen = step.seen_after
        self.forward.joined += 1
        self.forward.changing = False

    def get_seq_length(self) -> int:
        """Return the columns seen, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) for the mask of the next `query_length` columns."""
        group = self.group
        if group.max_length is not None:
            return (group.max_length if self.seen else query_length), 0
        offset, step = (0 if group.sizes.window is None else group.offset), group.step
        if step is not None and step.view is not None and self.seen != group.seen:
            offset = step.view.offset  # asked within a forward, before its own update (Inkling)
        return self.seen - offset + query_length, offset

    def get_max_length(self) -> int:
        """Return the tokens that a query sees at most, -1 for all (transformers' convention)."""
        return self.window or self.group.max_length or -1

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = reset = _refused
    offload = prefetch = _refused

    def activate_past_recording(self) -> None:
        """Seal only tokens that a crop has left standing, with room for a page of unconfirmed ones.

        transformers crops after every forward that may be rolled back (by 0 where all is accepted). As long as
        no more than page_size tokens are unconfirmed, a crop then leaves the same bytes as if the removed tokens
        had never been.
        """
        self.group.record_past()

    keys, values = _side("keys", "key_dim"), _side("values", "value_dim")

    # -- beside transformers' interface ------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """Return the kind of the pages, for reports."""
        return "paged"

    @property
    def extra_bytes(self) -> int:
        """Bytes of tensors that are neither pages nor exact tokens."""
        return 0

    @property
    def spec(self) -> PageSpec | None:
        """Shapes and formats of this layer's pages; None before the first keys."""
        return self.store.pages.spec if self.store else None

    @property
    def storage(self) -> PageStorage | None:
        """The tensors of the sealed pages; None before the first keys."""
        return self.store.pages if self.store else None

    @property
    def residuals(self) -> tuple[Residual, Residual] | None:
        """The exact tokens of keys and values; None before the first keys."""
        return self.store.residuals if self.store else None

    def follow(self, step: Step) -> None:
        """Do to the tensors what another order of rows, or a crop, has done to the rows."""
        self.revision += not step.keeps_pages
        if self.store is not None:
            if step.seen_after != step.seen_before:
                self.store.reopen(step)
            else:
                self.store.select_rows(step)
            self.seen = step.seen_after

    def adopt(self, sinks: Sequence[Pair | None], seen: int) -> None:
        """Begin with rows whose pages are in storage already.

        Args:
            sinks: for each row its exact first keys and values [num_kv_heads, sink_tokens, ..]; None: it is empty.
            seen: columns that the layer then has seen.
        """
        self.group.has_storage = True
        store = self._take(self.page_memory.storages[self.layer_idx])
        for window in store.windows:
            window.resize(len(sinks), self.group.sizes.slots)
        for row, first in enumerate(sinks):
            if first is not None:
                store.put_sinks(row, first)
        self.seen = seen

    def current_kv(self) -> PagedKV:
        """Return pages and window as they are now. Raises InterruptedForwardError where it lacks tokens that others hold."""
        group, store = self.group, self.store
        assert store is not None
        if self.seen != group.seen:
            raise InterruptedForwardError(
                f"layer {self.layer_idx} lacks tokens that the other layers hold: read it outside of a forward"
            )
        view, (keys, values) = group.view(), store.windows
        columns = group.max_length or self.seen - view.offset
        return store.kv(view, keys.tokens, values.tokens, columns)

    # -- inside --------------------------------------------------------------------------------------------

    def _take(self, pages: PageStorage) -> LayerStore:
        """Begin to hold tokens in these pages, and in windows beside them."""
        self.dtype, self.device = pages.spec.keys.dtype, pages.device
        self.store = self.group.stores[self.layer_idx] = LayerStore(self, pages)
        self.is_initialized = True
        return self.store

    def _dense(self, side: str) -> torch.Tensor | None:
        """Return one side as a dense tensor, a copy."""
        if self.store is None:
            return None
        if not self.seen:  # a crop took everything: as DynamicCache, tensors without tokens
            window = self.store.residuals[0 if side == "keys" else 1].tokens
            return window[:, :, :0].clone()
        view = KVView(self.current_kv(), self, self.revision, self.store.kernel, self.window)
        dense = view.dense(side)
        if self.group.max_length is not None:
            dense = dense[:, :, : self.seen]
        if self.window is None:
            return dense
        # with past recording transformers' layer keeps the tokens that a crop may take back on top
        unconfirmed = self.seen - self.group.confirmed if self.group.sizes.recording else 0
        return dense[:, :, max(0, dense.shape[2] - self.window + 1 - unconfirmed) :]

    _read = _dense


# (id, revision) of a layer -> the view that its handles share, as long as one of them lives
_views: WeakValueDictionary[tuple[int, int], LayerView] = WeakValueDictionary()


class HandleLayer(PagedLayer):
    """A paged layer that answers `keys` and `values` with a pair of handles, which attention over pages takes."""

    # the config that names the attention by which `keys` and `values` are read
    attention_of: Any = None

    def follow(self, step: Step) -> None:
        """As PagedLayer does; handles of what the layer holds are stale behind any crop."""
        super().follow(step)
        self.revision += 1

    def _read(self, side: str) -> torch.Tensor | None:
        """Return one side as a handle; without tokens as PagedLayer does."""
        if not self.seen:
            return self._dense(side)
        if getattr(self.attention_of, "_attn_implementation", None) == "flex_attention":
            warn_dense("flex_attention")
            return self._dense(side)
        # one for both sides: attention takes a pair of one view only
        view = _views.setdefault((id(self), self.revision), LayerView(self))
        return view.handle(side)
