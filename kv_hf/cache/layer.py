"""One attention layer's paged cache: storage and window, following the steps of its group."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ..errors import CacheMismatchError, InterruptedForwardError
from ..formats import Scheme
from ..kernels.inputs import PagedKV
from ..notices import warn_once
from ..pages.group import PageGroup, Step, TableView
from ..pages.storage import PageStorage
from ..spec import PageSpec, page_capacity
from .compat import CROP_TAKES_LENGTHS
from .handle import KVHandle, KVView
from .window import ExactWindow, seal


def chosen_rows(indices: torch.Tensor, rows: int) -> list[int]:
    """Turn row numbers or a bool mask over `rows` rows into a list of row numbers."""
    return torch.arange(rows)[torch.as_tensor(indices).cpu()].tolist()


class PagedLayer(DynamicLayer):
    """A full-attention layer whose tokens live in pages.

    Args:
        layer_idx: position in the model, for messages.
        group: bookkeeping shared with the other paged layers of the cache.
        key_scheme, value_scheme: formats of this layer.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(
        self, layer_idx: int, group: PageGroup, key_scheme: Scheme, value_scheme: Scheme
    ) -> None:
        self.layer_idx = layer_idx
        self.group = group
        self.schemes = (key_scheme, value_scheme)
        self.spec: PageSpec | None = None
        self._forget()
        super().__init__()

    def _forget(self) -> None:
        self.storage: PageStorage | None = None
        self.windows: tuple[ExactWindow, ExactWindow] | None = None
        self.damaged: torch.Tensor | None = None
        self._seen = 0
        self._epoch = 0
        self.revision = 0
        self.is_initialized = False

    # -- transformers' interface -------------------------------------------------------------------------

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learn shapes, dtype and device from the first keys and values, and check the formats on them."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.spec = PageSpec.build(
            *self.schemes,
            num_kv_heads=key_states.shape[1],
            key_dim=key_states.shape[-1],
            value_dim=value_states.shape[-1],
            page_size=self.group.page_size,
            dtype=key_states.dtype,
        )
        self.storage = PageStorage(self.spec, self.device)
        self.windows = (
            ExactWindow(self.spec.keys, self.device),
            ExactWindow(self.spec.values, self.device),
        )
        self.is_initialized = True

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
            `max_pages`; InterruptedForwardError after a forward that stopped half-way. The cache is unchanged.
        """
        if not self.is_initialized or (
            self._epoch == 0 and not self._fits(key_states, value_states)
        ):
            self.lazy_initialization(key_states, value_states)
        self._check(key_states, value_states)
        step = self.group.append(
            self.layer_idx, self._epoch, key_states.shape[0], key_states.shape[2]
        )
        keys, values = key_states.detach(), value_states.detach()
        runs = self._append(step, keys, values)
        self._joined(step)
        if step.seen_before == 0:
            return key_states, value_states
        if key_states.requires_grad and torch.is_grad_enabled():
            warn_once(
                "gradients",
                "Cached keys and values carry no gradients: a backward pass reaches only the newest tokens. "
                "Use torch.no_grad() for generation, or a DynamicCache for training through the cache",
            )
        assert step.view is not None
        view = KVView(self._kv(step.view, *runs, step.seen_after), self, self.revision)
        return KVHandle(view, "keys"), KVHandle(view, "values")

    def get_seq_length(self) -> int:
        """Return the columns seen, padding included."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) for the mask of the next `query_length` columns."""
        return self._seen + query_length, 0

    def reset(self) -> None:
        """Forget all tokens of the whole cache and give the memory back."""
        self.group.reset()
        self._forget()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens: `-n` removes n; before transformers 5.18 also `n` keeps n.

        A crop that ends inside a sealed page decodes that page back into the window: exact pages lose nothing,
        encoded ones keep their rounding (said once). Past recording keeps a page more out of the pages.
        """
        count = int(tokens_to_remove)
        if count > 0:
            if not CROP_TAKES_LENGTHS:
                raise ValueError(
                    f"tokens_to_remove must be 0 or negative (-n removes the last n tokens), got {count}"
                )
            count = min(0, count - self._seen)
        if count == 0 or not self.is_initialized:
            return
        step = self.group.crop(self.layer_idx, self._epoch, -count)
        for index, row in enumerate(step.rows):
            if row.reopened is not None:
                self._reopen(index, *row.reopened)
        self._joined(step)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue the former row beam_idx[i]; sealed pages are shared, not copied."""
        self.select_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self.select_rows([row for row in range(self.rows_held) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (numbers or a bool mask)."""
        self.select_rows(chosen_rows(indices, self.rows_held))

    def activate_past_recording(self) -> None:
        """Seal only tokens that an earlier forward appended, and keep room for a page of doubtful ones.

        A crop of up to a page right behind a forward then leaves the same bytes as if the removed tokens had
        never been. The first forward after this call should not be a prefill of more than a page.
        """
        self.group.recording = True

    def offload(self) -> None:
        """Move this layer's tensors to the CPU."""
        self._move(torch.device("cpu"))

    def prefetch(self) -> None:
        """Move this layer's tensors back to the layer's device."""
        if self.is_initialized:
            self._move(self.device)

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

    # -- beside transformers' interface ------------------------------------------------------------------

    @property
    def rows_held(self) -> int:
        """Rows that this layer holds (0 before the first update)."""
        return self.windows[0].tokens.shape[0] if self.windows else 0

    def select_rows(self, sources: Sequence[int]) -> None:
        """Let row i continue the former row `sources[i]`."""
        if not self.is_initialized or not self._seen:
            return
        step = self.group.select_rows(self.layer_idx, self._epoch, sources)
        for window in self.windows or ():
            window.select_rows(step)
        self._joined(step)

    def current_kv(self) -> PagedKV:
        """Return pages and window as they are now. Raises InterruptedForwardError when they are behind."""
        group = self.group
        if self._epoch != group.epoch or self.windows is None:
            raise InterruptedForwardError(
                f"layer {self.layer_idx} is behind the other layers: read it outside of a forward"
            )
        view = group.view(group.rows)
        return self._kv(view, self.windows[0].tokens, self.windows[1].tokens, self._seen)

    # -- inside --------------------------------------------------------------------------------------------

    def _fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        assert self.spec is not None
        return (
            keys.shape[1] == values.shape[1] == self.spec.keys.num_kv_heads
            and keys.shape[-1] == self.spec.keys.head_dim
            and values.shape[-1] == self.spec.values.head_dim
            and keys.dtype == values.dtype == self.dtype
            and keys.device == values.device == self.device
        )

    def _check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if not self._fits(keys, values) or keys.shape[:3] != values.shape[:3]:
            assert self.spec is not None
            k, v = self.spec.keys, self.spec.values
            raise CacheMismatchError(
                f"layer {self.layer_idx} of this cache holds {k.num_kv_heads} kv heads of {k.head_dim} (keys) and "
                f"{v.head_dim} (values) in {self.dtype} on {self.device}; got keys {tuple(keys.shape)} and values "
                f"{tuple(values.shape)} in {keys.dtype} on {keys.device}. Use one cache per model"
            )

    def _append(
        self, step: Step, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the tokens and return, per side, the exact tokens that this forward reads."""
        assert self.windows is not None and self.storage is not None
        slots, sinks = self.group.slots, self.group.sink_tokens
        runs = []
        for storage, window, new in zip(
            self.storage.sides, self.windows, (keys, values), strict=True
        ):
            storage.grow(page_capacity(step.num_ids))
            if any(row.sealed_first for row in step.rows):
                pages = [row.sealed_first for row in step.rows]
                self._note_damage(seal(pages, window.tokens, storage, sinks))
                window.drop_pages(pages, sinks)
            if not step.rebuild:
                runs.append(window.append(step, new, slots))
                continue
            run = window.run(step, new)
            self._note_damage(seal([row.sealed for row in step.rows], run, storage, sinks))
            window.keep_rest(step, run, slots, sinks)
            runs.append(run)
        return runs[0], runs[1]

    def _note_damage(self, damaged: torch.Tensor) -> None:
        """Remember that numbers had to be made finite; on the CPU say it at once, elsewhere when asked."""
        self.damaged = damaged if self.damaged is None else self.damaged | damaged
        if damaged.device.type == "cpu":
            self.report_damage()

    def report_damage(self) -> None:
        """Warn once when keys or values of a sealed page were not finite."""
        if self.damaged is not None and bool(self.damaged):
            warn_once(
                "damaged",
                f"Keys or values of layer {self.layer_idx} hold inf, nan or numbers beyond float16's range. They "
                "are stored as the nearest finite number (nan as 0) in the page that they are in; other pages "
                "are not affected. The model itself produced them: look at its inputs and dtype",
            )

    def _reopen(self, index: int, page: int, count: int) -> None:
        assert self.storage is not None and self.windows is not None and self.spec is not None
        if not (self.spec.keys.scheme.is_exact and self.spec.values.scheme.is_exact):
            warn_once(
                "reopened",
                "A crop ended inside a sealed page: its first tokens were decoded back and keep their rounding. "
                "Call cache.activate_past_recording() before the forwards that may be rolled back",
            )
        ids = torch.tensor([page], device=self.device)
        for storage, window in zip(self.storage.sides, self.windows, strict=True):
            tokens = storage.read(ids, storage.spec.dtype)[0, :, :count]
            window.reopen(tokens, index, self.group.sink_tokens)

    def _joined(self, step: Step) -> None:
        self._epoch += 1
        self._seen = step.seen_after
        self.revision += 1

    def _kv(
        self, view: TableView, window_keys: torch.Tensor, window_values: torch.Tensor, seen: int
    ) -> PagedKV:
        assert self.storage is not None and self.spec is not None
        table = view.on(self.device)
        return PagedKV(
            key_pages=self.storage.keys.fields,
            value_pages=self.storage.values.fields,
            spec=self.spec,
            block_table=table.block_table,
            num_pages=table.num_pages,
            window_keys=window_keys,
            window_values=window_values,
            exact_lens=table.exact_lens,
            padding=table.padding,
            seen=seen,
            sink_tokens=self.group.sink_tokens,
        )

    def _dense(self, side: str) -> torch.Tensor | None:
        if not self.is_initialized or not self._seen:
            return None
        return KVView(self.current_kv(), self, self.revision).dense(side)

    def _refuse(self, value: Any) -> None:
        if value is not None:
            raise AttributeError(
                "keys and values of a paged layer are read-only views; use update() to append tokens"
            )

    def _move(self, device: torch.device) -> None:
        if self.storage is not None and self.windows is not None:
            self.storage.to(device)
            for window in self.windows:
                window.tokens = window.tokens.to(device)
