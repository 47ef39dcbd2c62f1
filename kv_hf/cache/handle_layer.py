"""Paged layers whose `keys` and `values` are handles: for models that read these attributes during a forward."""

from typing import Any

import torch

from ..bridge.lazy_kv import LayerView, LazyKV, warn_dense
from ..pages.step import Step
from .layer import PagedLayer


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
        return LazyKV(self._view, side)

    def _joined(self, step: Step) -> None:
        self._view = None
        super()._joined(step)

    def _forget(self) -> None:
        self._view = None
        super()._forget()
