"""Attention of the newest queries to all tokens before them, by torch's fused kernels and without a mask.

SDPA calls causal what begins at the first key. A mask for the newest queries keeps it from flash attention, and makes it
repeat keys and values for the query heads that share them. Knows nothing of pages.
"""

import torch
from torch.backends.cuda import (
    SDPAParams,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from ..notices import warn_once


def takes_bias(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Say whether torch's fused kernels may begin causality at the last key for these [batch, heads, tokens, channels].

    Those for NVIDIA do. Elsewhere torch makes a mask of the bias in every layer (CPU), or hands it to kernels that align
    causality to the first key (flash attention on ROCm): there one mask for all layers is better. Autocast, which does
    not see the bias, has to have nothing left to do.
    """
    kind = query.device.type
    if kind != "cuda" or torch.version.hip is not None:
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
    try:
        bias = causal_lower_right(query.shape[2], key.shape[2])
    except RuntimeError:  # torch makes none while a dispatch mode watches all operators
        warn_once(
            "causal bias",
            "Long chunks take a mask of queries x keys, because torch makes no causal bias under a TorchDispatchMode (a "
            "counter of operations, for example): under such a mode they are slower than without it",
        )
        return None
    heads, shared = query.shape[1], key.shape[1]
    flash = can_use_flash_attention(
        SDPAParams(query, key, value, None, dropout, False, heads != shared)
    )
    if not flash:
        # memory-efficient attention takes as many keys as query heads; whether it takes the rest is asked before the copy
        first = query[:, :shared]
        if not can_use_efficient_attention(
            SDPAParams(first, key, value, None, dropout, False, False)
        ):
            return None
        key, value = (x.repeat_interleave(heads // shared, 1) for x in (key, value))
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=bias,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=heads != key.shape[1],
    )
    return out.transpose(1, 2).contiguous()
