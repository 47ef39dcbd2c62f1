"""Attention over dense tensors by a function of transformers, which takes no handles and no lazy masks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..bridge.lazy_kv import plain_tensor
from ..bridge.lazy_mask import LazyMask
from .causal import causal_attention


def is_causal(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Say whether a missing mask means causal attention: what the call says, else the module, else yes (as sdpa)."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def dense_attention(
    function: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to dense keys and values.

    Args:
        function: sdpa, or the eager function of the module's family.
        query: [batch, num_heads, q_len, head_dim]; key, value: [batch, num_kv_heads, kv_len, ..].
        mask: None, or bool / additive float [batch, 1 or num_heads, q_len, kv_len]; a lazy one is made only where it is needed.
        kwargs: all further arguments of the call (dropout, scaling, position_bias, softcap, ..).
    Returns: (output [batch, q_len, num_heads, value_dim], attention weights or None).
    """
    key, value = plain_tensor(key), plain_tensor(value)
    eager = function is not sdpa_attention_forward
    if isinstance(mask, LazyMask):
        causal = mask.causal and mask.shape[-2:] == (query.shape[2], key.shape[2])
        if causal and not eager and kwargs.get("position_bias") is None:
            if query.shape[2] == key.shape[2]:
                return function(module, query, key, value, None, **{**kwargs, "is_causal": True})
            dropout, scaling = kwargs.get("dropout", 0.0), kwargs.get("scaling")
            out = causal_attention(query, key, value, dropout=dropout, scaling=scaling)
            if out is not None:
                return out, None
        mask = mask.dense()
    if eager and mask is not None and mask.dtype == torch.bool:
        hidden = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, hidden)
    return function(module, query, key, value, mask, **kwargs)


def causal_mask(q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """Return [1, 1, q_len, kv_len], bool: what the newest `q_len` of `kv_len` tokens see."""
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    return visible.tril(kv_len - q_len)[None, None]
