"""Attention over dense tensors by a function of transformers, which takes no handles and no lazy masks.

The newest queries attend to all tokens before them by torch's fused kernels, where these can begin causality at the last
key: SDPA calls causal what begins at the first one. A mask of queries x keys keeps it from flash attention, and makes it
repeat keys and values for the query heads that share them.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..bridge.handles import plain_tensor
from ..bridge.masks import LazyMask


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


def causal_mask(q_len: int, kv_len: int, end: int, device: torch.device) -> torch.Tensor:
    """Return [1, 1, q_len, kv_len], bool: what the newest `q_len` of `end` tokens see, which have room for `kv_len`."""
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    return visible.tril(end - q_len)[None, None]


def takes_bias(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Say whether torch's fused kernels may begin causality at the last key for these [batch, heads, tokens, channels].

    Those for NVIDIA do. Elsewhere torch makes a mask of the bias in every layer (CPU), or hands it to kernels that align
    causality to the first key (flash attention on ROCm): there one mask for all layers is better. Autocast, which does
    not see the bias, has to have nothing left to do, and torch makes no bias while a dispatch mode watches all operators.
    """
    kind = query.device.type
    if kind != "cuda" or torch.version.hip is not None or _get_current_dispatch_mode() is not None:
        return False
    wanted = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    return all(x.dtype == wanted for x in (query, key, value))


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> torch.Tensor | None:
    """Attend query i of q_len to all keys but the last q_len - 1 - i.

    Args:
        query: [batch, num_heads, q_len, head_dim].
        key, value: [batch, num_kv_heads, kv_len, ..], kv_len at least q_len; num_kv_heads divides num_heads.
        scaling: factor of the scores; head_dim ** -0.5 when None.
    Returns: [batch, q_len, num_heads, value_dim], contiguous; None where this takes a mask here.
    Source: torch.nn.attention.bias, which has the lower-right triangle that SDPA lacks.
    """
    if not takes_bias(query, key, value):
        return None
    heads, shared = query.shape[1], key.shape[1]
    flash = can_use_flash_attention(
        SDPAParams(query, key, value, None, dropout, False, heads != shared)
    )
    if not flash:
        # memory-efficient attention takes as many keys as query heads
        key, value = (x.repeat_interleave(heads // shared, 1) for x in (key, value))
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=causal_lower_right(query.shape[2], key.shape[2]),
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=heads != key.shape[1],
    )
    return out.transpose(1, 2).contiguous()
