"""Attention over dense tensors: sdpa, or a model's own eager function where sdpa lacks what the model asks."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# arguments of attention functions that do not change the result of a forward without gradients
HARMLESS = {
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
    "position_ids",
    "sliding_window",
    "cache_position",
    "position_embeddings",
    "layer_idx",
    "head_mask",
    "past_key_values",
    "logits_to_keep",
    "num_items_in_batch",
    "output_router_logits",
    "token_type_ids",
    "target_dtype",
}


def is_causal(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Say whether a missing mask means causal attention: what the call says, else the module, else yes (as sdpa)."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def unknown_arguments(kwargs: Mapping[str, Any]) -> list[str]:
    """Return the given arguments that may change the result and that paged attention does not know.

    transformers' pipeline parallelism (5.23) hands a model's keyword arguments on as one called "kwargs".
    """
    nested = kwargs.get("kwargs")
    given = {**kwargs, **nested, "kwargs": None} if isinstance(nested, dict) else kwargs
    return sorted(name for name in given if name not in HARMLESS and given[name] is not None)


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend to dense keys and values as sdpa does, or as the model's eager attention does.

    Args:
        query: [batch, num_heads, q_len, head_dim]; key, value: [batch, num_kv_heads, kv_len, ..].
        mask: None, or bool / additive float [batch, 1 or num_heads, q_len, kv_len].
        kwargs: all further arguments of the call (dropout, scaling, position_bias, softcap, ..).
    Returns: (output [batch, q_len, num_heads, value_dim], attention weights or None).
    """
    function = _function(module, kwargs)
    if function is not sdpa_attention_forward:
        mask = _additive(mask, query, key, is_causal(module, kwargs))
    return function(module, query, key, value, mask, **kwargs)


def _function(
    module: torch.nn.Module, kwargs: Mapping[str, Any]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return sdpa, or the model's eager function where that one reads an argument that sdpa ignores."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        return sdpa_attention_forward
    both = {"dropout", "scaling", *_parameters(sdpa_attention_forward)}
    asked = set(unknown_arguments(kwargs)) - both
    if kwargs.get("output_attentions") or asked & {"softcap", "s_aux"}:
        return eager
    return eager if asked & _parameters(eager) else sdpa_attention_forward


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _additive(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal: bool
) -> torch.Tensor | None:
    """Turn sdpa's mask into the additive one of eager attention; sdpa leaves causal masks out."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if mask is None:
        if q_len == 1 or not causal:
            return None
        mask = causal_mask(q_len, kv_len, query.device)
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(
        ~mask, torch.finfo(query.dtype).min
    )


def causal_mask(q_len: int, kv_len: int, device: torch.device) -> torch.Tensor:
    """Return [1, 1, q_len, kv_len], bool: what the newest `q_len` of `kv_len` tokens see."""
    visible = torch.ones(q_len, kv_len, dtype=torch.bool, device=device)
    return visible.tril(kv_len - q_len)[None, None]
