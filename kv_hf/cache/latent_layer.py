"""Paged layers of multi-head latent attention (MLA): latents and RoPE keys in the place of keys and values."""

from collections.abc import Sequence
from typing import Any

import torch

from ..config import CacheConfig
from ..kernels.inputs import PagedKV
from .handle import KVView
from .layer import PagedLayer


class LatentLayer(PagedLayer):
    """A layer whose model caches latents [batch, 1, q_len, kv_lora_rank] and RoPE keys [batch, 1, q_len, rope dim].

    transformers hands them over as keys and values, and calls the attention's `expand_kv` behind the cache, which the
    "kv_hf" attention leaves out where it attends to latents themselves (hf/latent.py). Versions of transformers in which
    a model still caches expanded keys and values give an ordinary layer.

    Args:
        options: as given to the cache; the others are those of PagedLayer.
    """

    def __init__(self, *args: Any, options: CacheConfig) -> None:
        self.mla = options.mla
        super().__init__(*args)

    @property
    def kind(self) -> str:
        """What the layer's pages hold, for reports."""
        expanded = self.spec is not None and not self.spec.is_latent
        return "paged" if expanded else "paged latents"

    def _view_of(self, kv: PagedKV) -> KVView:
        view = super()._view_of(kv)
        view.mla = self.mla
        return view


class IndexedLatentLayer(LatentLayer):
    """A latent layer with the keys of a sparse-attention indexer (DSA: DeepSeek-V3.2, GLM-5 and their kin).

    Indexer keys are scored for all tokens in every step, and choose the tokens that attention reads. They are kept in
    the model's dtype in one tensor with room to grow.
    """

    indexer_position_ids: torch.Tensor | None = None  # of other models' indexers; transformers asks
    _index: torch.Tensor | None
    _indexed: int

    @property
    def kind(self) -> str:
        """What the layer holds, for reports."""
        return f"{super().kind}, indexer keys beside them"

    @property
    def is_indexer_initialized(self) -> bool:
        """Whether indexer keys are held."""
        return self._index is not None

    @property
    def indexer_keys(self) -> torch.Tensor | None:
        """The indexer keys [batch, tokens, index_head_dim], padding included; None before the first."""
        return None if self._index is None else self._index[:, : self._indexed]

    @property
    def extra_bytes(self) -> int:
        """Bytes of the indexer keys, room to grow included."""
        return 0 if self._index is None else self._index.nbytes

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Append indexer keys [batch, q_len, index_head_dim]; return all of them."""
        new = indexer_key_states.detach()
        end = self._indexed + new.shape[1]
        if self._index is None or end > self._index.shape[1]:
            room = end if self._index is None else end + end // 8 + 64
            index = new.new_empty((new.shape[0], room, new.shape[2]))
            if self._index is not None:
                index[:, : self._indexed] = self._index[:, : self._indexed]
            self._index = index
        self._index[:, self._indexed : end] = new
        self._indexed = end
        return self._index[:, :end]

    def select_rows(self, sources: Sequence[int]) -> None:
        """Let row i continue the former row `sources[i]`."""
        super().select_rows(sources)
        if self._index is not None:
            self._index = self._index[list(sources)]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; see `PagedLayer.crop`."""
        super().crop(tokens_to_remove)
        self._indexed = min(self._indexed, self._seen)

    def offload(self) -> None:
        """Move this layer's tensors to the CPU."""
        super().offload()
        self._index = None if self._index is None else self._index.to("cpu")

    def prefetch(self) -> None:
        """Move this layer's tensors back to the layer's device."""
        super().prefetch()
        self._index = None if self._index is None else self._index.to(self.device)

    def _forget(self) -> None:
        super()._forget()
        self._index = None
        self._indexed = 0
