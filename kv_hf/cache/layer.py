"""One attention layer's paged cache: storage and window, following the steps of its group, and handles of them."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ..backends.inputs import PagedKV
from ..bridge.handles import KVView, LayerView, LazyKV, check_unchanged, warn_dense, warn_gradients
from ..errors import InterruptedForwardError
from ..pages.arena import PageArena
from ..pages.group import PageGroup
from ..pages.step import Step
from ..pages.storage import PageStorage
from ..spec import PageSpec
from .layer_formats import LayerFormats
from .model_shape import removed_by_crop
from .state import LayerState, StateTensors
from .store import LayerStore, Residual, chosen_rows


def before_step(layer: Any) -> PagedKV | None:
    """Return pages and window of a paged layer that has not joined the running forward yet; None where they do not show it.

    Left padding that was not stored would be read as zeros, where DynamicCache has numbers: nothing is returned then.
    """
    group, store = layer.group, layer.store
    step = group.tracker.step
    behind = layer._epoch == group.epoch - 1 and not group.tracker.opening
    if store is None or step is None or not behind or layer.layer_idx in group.tracker.begun:
        return None
    if layer.window is not None or group.batch.padding.any():
        return None
    if step.view is None or step.view.starts is None or step.seal_first is not None:
        return None
    seen = layer.get_seq_length()
    kv: PagedKV = store.kv(
        step.view.before(seen), *(window.tokens for window in store.residuals), seen
    )
    return kv


class PagedLayer(DynamicLayer):
    """An attention layer whose tokens live in pages: full attention, or a sliding window.

    Args:
        layer_idx: position in the model, for messages.
        group: bookkeeping shared with the other paged layers of the same window.
        arena: where the sealed pages live.
        formats: of this layer.
        kernel: CacheConfig.kernel.
        window: tokens that a query of this layer sees, itself included; None for all.
    """

    is_croppable = True
    is_compileable = False

    def __init__(
        self,
        layer_idx: int,
        group: PageGroup,
        arena: PageArena,
        formats: LayerFormats,
        kernel: str = "auto",
        window: int | None = None,
    ) -> None:
        self.layer_idx = layer_idx
        self.window = window
        if window is not None:  # code asks layers whether they have this at all
            self.sliding_window = window
        self.is_sliding = window is not None
        self.kernel = kernel
        self.group = group
        self.arena = arena
        self.formats = formats
        self.revision = 0  # never goes down: a handle of an earlier text must not fit again
        self._forget()
        super().__init__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Follow the tensors to where they were loaded."""
        vars(self).update(state)
        if self.store is not None:
            self.device = self.store.device

    def _forget(self) -> None:
        self.revision += 1
        self.store: LayerStore | None = None
        self._seen = 0
        self._epoch = 0
        self.is_initialized = False

    # -- transformers' interface -------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learn shapes, dtype and device from the first keys and values [rows, num_kv_heads, q_len, head_dim]; check the formats on them."""
        self.dtype, self.device = key_states.dtype, key_states.device
        spec = self.formats.spec_of(key_states, value_states)
        pages = self.arena.storage(self.layer_idx, spec, self.device, self.group)
        store = LayerStore.of(self, pages)
        self.is_initialized = True
        self._take(store)

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
        if self.store is None or (
            self._seen == 0 and not self.store.fits(key_states, value_states)
        ):
            self.lazy_initialization(key_states, value_states)
        store = self.store
        assert store is not None
        rows, _, q_len, _ = store.check(key_states, value_states)
        step = self.group.append(self.layer_idx, self._epoch, rows, q_len)
        self.revision += 1
        runs = store.append(step, key_states, value_states, self.group.slots)
        if step.seen_before == 0:
            # a sliding layer too: the mask hides what its queries must not see
            self._joined(step)
            return key_states, value_states
        if key_states.requires_grad and torch.is_grad_enabled():
            warn_gradients()
        assert step.view is not None
        kv = store.kv(step.view, *runs, step.seen_after, self.group.reading.budget)
        handles = LazyKV.pair(KVView(kv, self, self.revision, store.kernel, self.window))
        self._joined(step)
        return handles

    def get_seq_length(self) -> int:
        """Return the columns seen, padding included."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) for the mask of the next `query_length` columns."""
        offset, running = self.group.offset, self.group.tracker.step
        if running is not None and running.view is not None and self._epoch == self.group.epoch - 1:
            offset = running.view.offset  # asked within a forward, before its own update (Inkling)
        return self._seen - offset + query_length, offset

    def get_max_length(self) -> int:
        """Return the tokens that a query sees at most, -1 for all (transformers' convention)."""
        return self.window or -1

    def reset(self) -> None:
        """Forget all tokens of the whole cache and give the memory back, unless another cache shares it."""
        self.group.reset()
        self.arena.clear()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens: `-n` removes n; before transformers 5.18 also `n` keeps n.

        A crop that ends inside a sealed page decodes that page back into the window: exact pages lose nothing,
        encoded ones keep their rounding (said once). With past recording on, what is left stands confirmed,
        also by a crop of 0, and may be sealed from the next forward on.
        """
        count = removed_by_crop(tokens_to_remove, self._seen)
        if count == 0:
            self.group.confirm()
        if count == 0 or self.store is None:
            return
        step = self.group.crop(self.layer_idx, self._epoch, count)
        self.revision += 1
        self._cut(step)
        self._joined(step)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue the former row beam_idx[i]; sealed pages are shared, not copied."""
        self.select_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.select_rows([row for row in range(self.rows_held) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (numbers [n] or a bool mask [rows])."""
        self.select_rows(chosen_rows(indices, self.rows_held))

    def activate_past_recording(self) -> None:
        """Seal only tokens that a crop has left standing, with room for a page of doubtful ones.

        transformers crops behind every forward that may be rolled back (by 0 where all is accepted). As long as
        no more than page_size tokens are doubtful, a crop then leaves the same bytes as if the removed tokens
        had never been.
        """
        self.group.record_past()

    def offload(self) -> None:
        """Move this layer's tensors to the CPU."""
        if self.store is not None:
            self.store.to(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move this layer's tensors back to the layer's device."""
        if self.store is not None:
            self.store.to(self.device)

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys as a dense tensor [batch, num_kv_heads, seen, key_dim] (a copy), or None before the first.

        A sliding layer gives the last window - 1 tokens, as transformers' layer does.
        """
        return self._dense("keys")

    @keys.setter
    def keys(self, value: Any) -> None:
        self._check_unchanged("keys", value)

    @property
    def values(self) -> torch.Tensor | None:
        """All values as a dense tensor [batch, num_kv_heads, seen, value_dim] (a copy), or None."""
        return self._dense("values")

    @values.setter
    def values(self, value: Any) -> None:
        self._check_unchanged("values", value)

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

    @property
    def rows_held(self) -> int:
        """Rows that this layer holds (0 before the first update)."""
        return self.store.residuals[0].tokens.shape[0] if self.store else 0

    def select_rows(self, sources: Sequence[int]) -> None:
        """Let row i continue the former row `sources[i]`."""
        if self.store is None or not self._seen:
            return
        step = self.group.select_rows(self.layer_idx, self._epoch, sources)
        self.revision += 1
        self._follow_rows(step, sources)
        self._joined(step)

    def adopt(self, sinks: Sequence[tuple[torch.Tensor, torch.Tensor] | None], seen: int) -> None:
        """Begin with rows whose pages are in storage already.

        Args:
            sinks: for each row its exact first keys and values [num_kv_heads, sink_tokens, ..]; None: it is empty.
            seen: columns that the layer then has seen.
        """
        self.group.touch()
        pages = self.arena.storages[self.layer_idx].newest
        self.dtype, self.device = pages.spec.keys.dtype, pages.device
        store = LayerStore.of(self, pages)
        for side, window in enumerate(store.residuals):
            window.begin([None if one is None else one[side] for one in sinks], self.group.slots)
        self.is_initialized = True
        self._take(store)
        self._seen = seen

    def sinks_of(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the exact first keys and values of a row, [num_kv_heads, sink_tokens, ..]."""
        assert self.store is not None
        keys, values = (
            window.tokens[row, :, : self.group.sink_tokens].clone()
            for window in self.store.residuals
        )
        return keys, values

    def outdate(self) -> None:
        """Make the handles of before stale."""
        self.revision += 1

    def resume(self, state: LayerState, tensors: StateTensors, num_pages: int) -> None:
        """Take over what another layer left, and stand where the group stands, which was restored before.

        Args:
            num_pages: pages that the group holds.
        """
        self.lazy_initialization(*state.empty())
        assert self.store is not None
        self.store.fill(tensors, num_pages)
        self._seen, self._epoch = self.group.seen, self.group.epoch
        self.revision += 1

    @property
    def is_up_to_date(self) -> bool:
        """Return whether this layer has taken part in all steps of its group."""
        return self._epoch == self.group.epoch and not self.group.tracker.opening

    def current_kv(self) -> PagedKV:
        """Return pages and window as they are now. Raises InterruptedForwardError when they are behind."""
        group = self.group
        if not self.is_up_to_date or self.store is None:
            raise InterruptedForwardError(
                f"layer {self.layer_idx} is behind the other layers: read it outside of a forward"
            )
        keys, values = (window.tokens for window in self.store.residuals)
        return self.store.kv(group.view(), keys, values, self._seen)

    # -- inside --------------------------------------------------------------------------------------------

    def _take(self, store: LayerStore) -> None:
        self.group.join(self.layer_idx, store)
        self.store = store

    def _cut(self, step: Step) -> None:
        """Do a crop's work on the tensors."""
        assert self.store is not None
        self.store.reopen(step)

    def _follow_rows(self, step: Step, sources: Sequence[int]) -> None:
        """Do the work of a new order of rows on the tensors."""
        assert self.store is not None
        self.store.select_rows(step)

    def _joined(self, step: Step) -> None:
        """Say that all work on `step` is done: stopped before, this layer is behind."""
        self._seen = step.seen_after
        self._epoch += 1
        self.group.tracker.done(self.layer_idx)

    def _dense(self, side: str) -> torch.Tensor | None:
        if self.store is None:
            return None
        if not self._seen:  # a crop took everything: as DynamicCache, tensors without tokens
            window = self.store.residuals[0 if side == "keys" else 1].tokens
            return window[:, :, :0].clone()
        dense = self._view_of(before_step(self) or self.current_kv()).dense(side)
        if self.window is None:
            return dense
        # with past recording transformers' layer keeps the tokens that a crop may take back on top
        doubtful = self._seen - self.group.confirmed if self.group.recording else 0
        return dense[:, :, max(0, dense.shape[2] - self.window + 1 - doubtful) :]

    def _view_of(self, kv: PagedKV) -> KVView:
        assert self.store is not None
        return KVView(kv, self, self.revision, self.store.kernel, self.window)

    def _check_unchanged(self, side: str, value: Any) -> None:
        if value is not None:
            check_unchanged(side, self._dense(side), value)


class HandleLayer(PagedLayer):
    """A paged layer that answers `keys` and `values` with a pair of handles, which attention over pages takes."""

    attention_of: Any = None  # the config that names the model's attention
    _view: LayerView | None = None

    def read_by(self, config: Any) -> None:
        """Note the `config` that names the attention by which `keys` and `values` are read."""
        self.attention_of = config

    def __getstate__(self) -> dict[str, Any]:
        """Leave the view out: it refers to tensors and a kernel of this process."""
        return {name: value for name, value in vars(self).items() if name != "_view"}

    @property
    def keys(self) -> torch.Tensor | None:
        """All keys [batch, num_kv_heads, seen, key_dim] as a handle, or None when empty."""
        return self._read("keys")

    @keys.setter
    def keys(self, value: Any) -> None:
        self._check_unchanged("keys", value)

    @property
    def values(self) -> torch.Tensor | None:
        """All values [batch, num_kv_heads, seen, value_dim] as a handle, or None when empty."""
        return self._read("values")

    @values.setter
    def values(self, value: Any) -> None:
        self._check_unchanged("values", value)

    def offload(self) -> None:
        """Move this layer's tensors to the CPU."""
        self._view = None
        super().offload()

    def prefetch(self) -> None:
        """Move this layer's tensors back to the layer's device."""
        self._view = None
        super().prefetch()

    def _read(self, side: str) -> torch.Tensor | None:
        if self.store is None or not self._seen:
            return None
        if self._view is None:  # one view for both sides: attention takes a pair of one view only
            self._view = LayerView(self)
        if getattr(self.attention_of, "_attn_implementation", None) == "flex_attention":
            warn_dense("flex_attention")
            return self._view.dense(side)
        return self._view.handle(side)

    def _joined(self, step: Step) -> None:
        self._view = None
        super()._joined(step)

    def _forget(self) -> None:
        self._view = None
        super()._forget()
