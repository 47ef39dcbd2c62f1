"""The prefill of one context, computed once and handed to every cache that is measured."""

import inspect
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

Call = tuple[torch.Tensor, torch.Tensor, int, tuple[Any, ...], dict[str, Any]]


class Recorder(DynamicCache):
    """An exact cache that writes down what a prefill hands to it, to hand it to other caches."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.calls: list[Call] = []

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kw: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values [batch, num_kv_heads, q_len, head_dim] as DynamicCache does, and remember the call."""
        self.calls.append((key_states, value_states, layer_idx, args, kw))
        return super().update(key_states, value_states, layer_idx, *args, **kw)


@torch.no_grad()
def last_logits(model: PreTrainedModel, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Run a forward over ids [rows, tokens] and return the logits of the last position, [rows, vocab]."""
    # logits of a whole context would take more memory than all else
    named = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": 1} if "logits_to_keep" in named else {}
    return model(ids, past_key_values=cache, use_cache=True, **last).logits[:, -1]


class Prefill:
    """The prefill of some contexts of one length, computed once for all caches.

    A prefill on an empty cache attends to its own exact keys and values whatever the cache, so that all caches are
    given the same ones; each stores them in its own way. Models with layers of another kind than attention
    (linear attention, convolutions) keep states that are no keys and values: there each cache has its own prefill.

    Attributes:
        ids: [rows, tokens], int64, on the model's device.
        calls: what the exact cache was given; None where each cache has its own prefill.
    """

    def __init__(self, model: PreTrainedModel, ids: torch.Tensor) -> None:
        self.model, self.ids = model, ids
        self.calls: list[Call] | None = None
        self._logits: torch.Tensor | None = None
        recorder = Recorder(model.config)
        if all(
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in recorder.layers
        ):
            self._logits = last_logits(model, ids, recorder)
            self.calls = recorder.calls

    @torch.no_grad()
    def fill(self, cache: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Let an empty cache hold the context and return the logits behind it, [rows, vocab].

        Args:
            dtype: rounds the keys and values, where they are recorded, so that their bytes are those of another dtype.
        """
        if self.calls is None or self._logits is None:
            return last_logits(self.model, self.ids, cache)
        for keys, values, layer, args, kw in self.calls:
            cache.update(
                keys.to(dtype or keys.dtype), values.to(dtype or values.dtype), layer, *args, **kw
            )
        return self._logits
