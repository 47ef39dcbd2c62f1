"""Paged layers that hold more than keys and values: latents and RoPE keys (MLA), or a linear-attention state beside them."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from ..errors import InterruptedForwardError
from ..pages.moved import persistent_tensors
from ..pages.step import Step
from .layer import HandleLayer, PagedLayer
from .layer_formats import check_no_latents
from .model_shape import forget_tokens
from .report import tensor_bytes

# called with the decoder's config before the first latents are stored: its classes must take handles of them (hf/latent.py)
before_latents: list[Callable[[Any], None]] = []


class LatentLayer(PagedLayer):
    """A layer whose model caches latents [batch, 1, q_len, kv_lora_rank] and RoPE keys [batch, 1, q_len, rope dim].

    transformers hands them over as keys and values, and calls the attention's `expand_kv` behind the cache, which is
    left out where pages of latents are read themselves (hf/latent.py). Versions of transformers in which
    a model still caches expanded keys and values give an ordinary layer.

    Args:
        config: the decoder's config; the others are those of PagedLayer.
    """

    def __init__(self, layer_idx: int, *args: Any, config: Any) -> None:
        self._decoder_config = config
        super().__init__(layer_idx, *args)
        self.latent_decode = self.formats.options.latent_decode

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Learn shapes, dtype and device, and whether the model caches latents [rows, 1, q_len, rank] or the keys of its heads.

        Raises: CacheOptionError where options about latents were given and there are none.
        """
        if self.formats.spec_of(key_states, value_states).is_latent:
            for tell in before_latents:
                tell(self._decoder_config)
        else:
            check_no_latents(self.formats.options, "this model in this version of transformers")
        super().lazy_initialization(key_states, value_states)

    @property
    def kind(self) -> str:
        """Return the kind of the pages, for reports."""
        return "paged latents" if self.spec is None or self.spec.is_latent else "paged"


class IndexedLatentLayer(LatentLayer, HandleLayer):
    """A latent layer with the keys of a sparse-attention indexer (DSA: DeepSeek-V3.2, GLM-5 and their kin).

    Indexer keys are scored for all tokens in every step, and choose the tokens that attention reads. They are kept in
    the model's dtype in one tensor with room to grow. `keys` and `values` are handles, because glm5_next's indexer
    reads their shape in every forward. A layer that attends to the latents of another one (mistral_large4) may hold
    indexer keys alone.
    """

    indexer_position_ids: torch.Tensor | None = None  # of other models' indexers; transformers asks
    _index: torch.Tensor | None
    _indexed: int

    def __init__(self, layer_idx: int, *args: Any, config: Any) -> None:
        # a "shared" layer reads the choice of another layer's indexer, a "reuse.." layer another layer's latents
        types = getattr(config, "indexer_types", None)
        modes = getattr(config, "kv_sharing_modes", None)
        self.has_index = types is None or types[layer_idx] != "shared"
        self.has_latents = modes is None or not str(modes[layer_idx]).startswith("reuse")
        super().__init__(layer_idx, *args, config=config)

    @property
    def kind(self) -> str:
        """Return the kind of the layer, for reports."""
        if not self.has_latents:
            return "indexer keys, latents of another layer"
        return super().kind + (", indexer keys beside them" if self.has_index else "")

    @property
    def is_indexer_initialized(self) -> bool:
        """Return whether the layer holds indexer keys."""
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
        """Append indexer keys [batch, q_len, index_head_dim]; return all of them, with max_length as many columns as masks have.

        Raises: InterruptedForwardError where an earlier forward has stored tokens without their indexer keys.
        """
        new = indexer_key_states.detach()
        start = self._first_new(new.shape[1])
        end, most = start + new.shape[1], self.group.max_length
        index = self._index if start else new[:, :0]  # an empty one may be of another batch
        assert index is not None
        if end > index.shape[1]:
            room = max(most or (end + end // 8 + 64 if start else end), end)
            with persistent_tensors():
                added = new.new_zeros((new.shape[0], room - start, new.shape[2]))
                index = torch.cat([index[:, :start], added], dim=1)
        index[:, start:end] = new
        self._index, self._indexed = index, end
        return index[:, : most if most is not None and start else end]

    def _first_new(self, q_len: int) -> int:
        """Return the column of the next indexer key: models hand them over behind a layer's latents, or before."""
        if self.store is None or self._indexed in (self.seen, self.seen - q_len):
            return self._indexed
        # of a forward that was refused or stopped before its latents came
        if self._indexed > self.seen:
            return self.seen
        raise InterruptedForwardError(
            f"layer {self.layer_idx} holds {self.seen} latents and {self._indexed} indexer keys: an earlier forward "
            "stopped between them; call reset() and start again"
        )

    def follow(self, step: Step) -> None:
        """Do to the tensors what another order of rows, or a crop, has done to the rows."""
        super().follow(step)
        if self._index is not None:
            if step.seen_after != step.seen_before:
                self._indexed = min(self._indexed, step.seen_after)
            else:
                with persistent_tensors():
                    self._index = self._index[list(step.sources)]

    def forget(self) -> None:
        """Hold no tokens and no tensors."""
        super().forget()
        self._index = None
        self._indexed = 0


class HybridLayer(PagedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer of attention and linear attention together, of which transformers has one class with keys and values.

    Args:
        number_of_states: as transformers' layer has it; the others are those of PagedLayer.
    """

    # a recurrent state cannot be rolled back
    is_croppable = LinearAttentionCacheLayerMixin.is_croppable

    def __init__(self, layer_idx: int, *args: Any, number_of_states: int = 1) -> None:
        super().__init__(layer_idx, *args)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states)

    @property
    def kind(self) -> str:
        """Return the kind of the layer, for reports."""
        return super().kind + ", linear-attention state beside them"

    @property
    def extra_bytes(self) -> int:
        """Bytes of the state."""
        return tensor_bytes(self.conv_states) + tensor_bytes(self.recurrent_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Learn about keys and values (two positional arguments), or make a state (keyword arguments)."""
        if args:
            PagedLayer.lazy_initialization(self, *args)
            return
        # the state's device and dtype stand in the attributes that those of the pages share
        LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def follow(self, step: Step) -> None:
        """Do to the tensors what another order of rows, or a crop, has done to the rows."""
        super().follow(step)
        if step.seen_after == step.seen_before:
            rows: Any = torch.tensor(step.sources, device="cpu")
            LinearAttentionLayer.reorder_cache(self, rows)

    def crop_state(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens from the state. Raises RuntimeError where it keeps no past."""
        if int(tokens_to_remove) or self.record_past:
            LinearAttentionLayer.crop(self, tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Let pages and convolution states keep what a crop may take back."""
        LinearAttentionLayer.activate_past_recording(self)
        super().activate_past_recording()

    def forget(self) -> None:
        """Hold no tokens, no tensors and no state."""
        super().forget()
        forget_tokens(self)
