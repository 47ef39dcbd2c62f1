"""Paged layers with a linear-attention state beside their keys and values (Falcon-H1, Zamba2, Zaya, Inkling2).

The state does not grow with the text: transformers' own code keeps it, in the model's dtype. Pages hold the rest.
"""

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from .layer import PagedLayer
from .report import tensor_bytes


class HybridLayer(PagedLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A layer of attention and linear attention together, of which transformers has one class with keys and values.

    Args:
        number_of_states: as transformers' layer has it; the others are those of PagedLayer.
    """

    is_compileable = False

    def __init__(self, layer_idx: int, *args: Any, number_of_states: int = 1) -> None:
        super().__init__(layer_idx, *args)
        self._forget_state(number_of_states)

    @property
    def kind(self) -> str:
        """Return the kind of the layer, for reports."""
        return super().kind + ", linear-attention state beside them"

    @property
    def extra_bytes(self) -> int:
        """Bytes of the state."""
        return tensor_bytes(self.conv_states) + tensor_bytes(self.recurrent_states)

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Return whether a crop leaves no trace: a recurrent state cannot be rolled back."""
        return bool(LinearAttentionCacheLayerMixin.is_croppable.fget(self))  # type: ignore[attr-defined]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Learn about keys and values (two positional arguments), or make a state (keyword arguments)."""
        if args:
            PagedLayer.lazy_initialization(self, *args)
            return
        # the state's device and dtype stand in the attributes that those of the pages share
        LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def select_rows(self, sources: Sequence[int]) -> None:
        """Let row i continue the former row `sources[i]`."""
        super().select_rows(sources)
        rows = list(sources)
        for states in (self.conv_states, self.recurrent_states):
            for index, state in states.items():
                if state is not None:
                    states[index] = state[rows]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; see `PagedLayer.crop`. Raises RuntimeError where the state keeps no past."""
        if int(tokens_to_remove) or self.record_past:
            LinearAttentionLayer.crop(self, tokens_to_remove)
        super().crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Let pages and convolution states keep what a crop may take back."""
        LinearAttentionLayer.activate_past_recording(self)
        super().activate_past_recording()

    def offload(self) -> None:
        """Move this layer's tensors to the CPU."""
        super().offload()
        LinearAttentionLayer.offload(self)

    def prefetch(self) -> None:
        """Move this layer's tensors back to the layer's device."""
        super().prefetch()
        LinearAttentionLayer.prefetch(self)

    def reset(self) -> None:
        """Forget all tokens of the whole cache and this layer's state; afterwards any batch size fits."""
        super().reset()
        self._forget_state(self.number_of_states)

    def _forget_state(self, number: int) -> None:
        LinearAttentionCacheLayerMixin.__init__(self, number)
