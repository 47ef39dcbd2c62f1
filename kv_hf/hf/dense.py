"""Attention over dense tensors: sdpa, or a model's own eager function where sdpa lacks what the model asks."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..bridge.lazy_kv import plain_tensor
from ..bridge.lazy_mask import LazyMask
from ..errors import UnsupportedModelError
from ..formats import ATTENTION_NAME
from .attention_source import facts_of
from .causal import causal_attention

# Arguments that reach an attention function and do not change the result of a forward without gradients: what a model
# needs elsewhere and hands down with the rest. Read in transformers 5.17 and 5.23, where sdpa reads none of them either.
HARMLESS = frozenset(
    {
        # of the forward as a whole
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("use_cache", "past_key_values", "cache_position", "position_ids", "position_embeddings"),
        *("logits_to_keep", "num_items_in_batch", "head_mask", "layer_idx", "token_type_ids"),
        *("mm_token_type_ids", "target_dtype"),
        # read by other attention implementations: packed sequences, which sdpa tells by its mask
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
        # what generate() is given for its own use and hands down all the same
        *("tokenizer", "assistant_tokenizer"),
        # handled before
        *("is_causal", "sliding_window"),
    }
)

# what every attention function reads; what sdpa cannot do, and the eager function of every model that has it does
_ALL_READ = frozenset({"dropout", "scaling"})
_ASK_FOR_EAGER = frozenset({"softcap", "s_aux"})


def is_causal(module: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Say whether a missing mask means causal attention: what the call says, else the module, else yes (as sdpa)."""
    given = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def unknown_arguments(kwargs: Mapping[str, Any]) -> list[str]:
    """Return the given arguments that paged attention does not know and that may change the result.

    transformers' pipeline parallelism (5.23) hands a model's keyword arguments on as one called "kwargs".
    """
    nested = kwargs.get("kwargs")
    given = {**kwargs, **nested, "kwargs": None} if isinstance(nested, dict) else kwargs
    unknown = [name for name in given if name not in HARMLESS and given[name] is not None]
    return sorted(unknown) if unknown else unknown


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
        mask: None, or bool / additive float [batch, 1 or num_heads, q_len, kv_len]; a lazy one is made only where sdpa
            needs it.
        kwargs: all further arguments of the call (dropout, scaling, position_bias, softcap, ..).
    Returns: (output [batch, q_len, num_heads, value_dim], attention weights or None).
    Raises: UnsupportedModelError for an argument of the model's own that neither function reads.
    """
    function = _function(module, kwargs)
    _check_read(module, kwargs, function)
    key, value = plain_tensor(key), plain_tensor(value)
    if isinstance(mask, LazyMask):
        if function is sdpa_attention_forward and _only_causal(mask, query, key, kwargs):
            dropout, scaling = kwargs.get("dropout", 0.0), kwargs.get("scaling")
            out = causal_attention(query, key, value, dropout=dropout, scaling=scaling)
            if out is not None:
                return out, None
        mask = mask.dense()
    if function is not sdpa_attention_forward:
        mask = _additive(mask, query, key, is_causal(module, kwargs))
    return function(module, query, key, value, mask, **kwargs)


def _only_causal(
    mask: LazyMask, query: torch.Tensor, key: torch.Tensor, kwargs: Mapping[str, Any]
) -> bool:
    """Say whether the newest queries see all tokens up to their own, and nothing else bends the scores."""
    fits = mask.causal and mask.shape[-2:] == (query.shape[2], key.shape[2])
    bent = kwargs.get("output_attentions") or set(unknown_arguments(kwargs)) - _ALL_READ
    return fits and not bent


def _function(
    module: torch.nn.Module, kwargs: Mapping[str, Any]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return sdpa, or the model's eager function where that one reads an argument that sdpa ignores."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        return sdpa_attention_forward
    asked = set(unknown_arguments(kwargs)) - _ALL_READ - parameters(sdpa_attention_forward)
    if kwargs.get("output_attentions") or asked & _ASK_FOR_EAGER:
        return eager
    return eager if asked & parameters(eager) else sdpa_attention_forward


def _check_read(
    module: torch.nn.Module, kwargs: Mapping[str, Any], function: Callable[..., Any]
) -> None:
    """Raise UnsupportedModelError where the attention module itself passes an argument that `function` drops.

    What only comes through from further out is dropped by transformers' functions as well, whatever the cache.
    """
    unknown = set(unknown_arguments(kwargs)) - _ALL_READ - parameters(function)
    if function is not sdpa_attention_forward:
        unknown -= _ASK_FOR_EAGER  # gpt_oss, for one, reads its sinks from the module
    if not unknown:
        return
    kind: Any = type(module)
    facts = facts_of(kind)
    own: frozenset[str] = frozenset() if facts is None else facts.arguments
    if facts is not None and facts.opened and not kind.__module__.startswith("transformers."):
        own |= unknown  # they came in a dict: each may be of the module's own
    lost = sorted(unknown & own)
    lost = [name for name in lost if f'"{name}"' not in _text(function)]
    if lost:
        raise UnsupportedModelError(
            f'{type(module).__name__} passes {", ".join(lost)} to its attention, which neither "{ATTENTION_NAME}" nor '
            f"{function.__name__} reads: the result would differ from the model's own. Use model.set_attn_implementation('sdpa'), and "
            "cache_config={'attention': 'keep'}, with which generate() leaves it there"
        )


@functools.cache
def _text(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


@functools.cache
def parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters of a function."""
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
