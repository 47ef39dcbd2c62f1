"""Attention over pages, and the masks for it: what transformers' functions are wrapped with (dispatch.py)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..backends.base import AttentionCall
from ..backends.dispatch import paged_attention
from ..bridge.handles import KVView, LazyKV, TracedView, taken, view_of, warn_read_whole
from ..bridge.masks import LazyMask, check_hidden
from ..errors import CacheMismatchError, UnsupportedModelError
from ..notices import warn_once
from ..pages import moved
from .dense import causal_mask, dense_attention, is_causal
from .latent import (
    absorbed_query,
    absorbs,
    expanded,
    from_latent,
    is_latent_attention,
    shrink_of,
)

View = KVView | TracedView


def kv_hf_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    dense: Callable[..., Any] = sdpa_attention_forward,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over pages where `key` and `value` are handles of a paged layer, else by `dense`.

    Args:
        query: [batch, num_heads, q_len, head_dim].
        key, value: handles of a paged layer, or dense [batch, num_kv_heads, kv_len, ..].
        attention_mask: bool / additive float [batch, 1 or num_heads, q_len, kv_len], bool [batch, kv_len] as flash attention
            takes it, or None: over pages a causal module's query then sees all tokens up to its own, as the last q_len of
            kv_len; over dense keys None is what it is to `dense`.
        scaling: factor of the scores; head_dim ** -0.5 when None.
        softcap, s_aux: bound of the scores and learnt sink logits, where the model has them.
        position_bias: [1 or batch, num_heads, q_len, kv_len], added to the scores before the mask (T5).
        indices: [batch, q_len, n], the columns that sparse attention has chosen (DSA), beside the mask.
        dense: what computes with dense keys and values: sdpa, or the eager function of the model's family.
        kwargs: what sdpa reads beside these (is_causal), and what it drops.
    Returns: (output [batch, q_len, num_heads, value_dim], attention weights or None).
    """
    named = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
    batch = kwargs.pop("paged_batch", None)
    if batch is not None:  # continuous batching: the tokens of many requests
        kwargs.update(dropout=dropout, scaling=scaling, dense=dense, indices=indices)
        attended: tuple[torch.Tensor, None] = batch.attend(
            module, (query, key, value), {**kwargs, **named}
        )
        return attended
    view: Any = view_of(key, value) if type(key) is LazyKV else taken(key, value)
    q_len, mask = query.shape[2], attention_mask
    causal = q_len > 1 and is_causal(module, kwargs)
    if type(mask) is LazyMask:
        mask = mask.dense() if mask.read or indices is not None else mask
    elif mask is not None and view is not None:
        mask = _checked_mask(mask, view, query, key.shape[2], causal)
    if indices is not None:
        if mask is None and causal:
            mask = _causal(view, query, key.shape[2])
        mask = _chosen(mask, indices, key.shape[2])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if type(view) is TracedView:
        if position_bias is not None or dropout or kwargs.get("output_attentions"):
            raise UnsupportedModelError(
                "this forward needs a position bias, dropout or attention weights, for which a compiled forward cannot read "
                "pages. Run it without torch.compile"
            )
        if type(mask) is LazyMask:  # pages hide the same by themselves
            mask = None
        elif mask is None and q_len > 1 and not causal:
            mask = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool, device=query.device)
        return view.attend(query, mask, scale, softcap, s_aux), None
    pages, latent, reason = False, False, None
    if view is not None:
        latent = view.kv.spec.is_latent
        if latent:  # other modules' keys merely have the size of latents
            pages = is_latent_attention(module) and absorbs(module, view.layer.latent_decode, query)
        else:
            pages = q_len <= view.kernel.max_queries
        weights = kwargs.get("output_attentions") and dense is not sdpa_attention_forward
        if pages and (dropout or weights or (latent and softcap is not None)):
            pages, reason = False, "no kernel knows a softcap for latents"
            if dropout or weights:
                asked = f"dropout={dropout}" if dropout else "output_attentions=True"
                reason = f"{asked} needs the attention weights"
    if view is None or not pages:
        kwargs.update({name: given for name, given in named.items() if given is not None})
        kwargs.update(dropout=dropout, scaling=scaling)
        if view is not None:
            key, value = _written_out(module, view, reason)
        return dense_attention(dense, module, query, key, value, mask, kwargs)
    if type(mask) is LazyMask:  # pages hide the same by themselves
        mask, causal = None, q_len > 1
    if mask is not None or position_bias is not None or (q_len > 1 and not causal):
        mask = _kernel_mask(mask, view, query, position_bias, causal)
    if latent:  # the query takes the key projection, the result the value projection
        query, scale = absorbed_query(module, query), scale / shrink_of(query)
    call = AttentionCall(query, view.kv, scale, mask, softcap, s_aux, view.sliding_window)
    if latent:
        return from_latent(module, paged_attention(call, view.kernel)), None
    return paged_attention(call, view.kernel).transpose(1, 2).contiguous(), None


# -- latents, and dense keys and values -----------------------------------------------------------------------------


def _written_out(
    module: Any, view: KVView, reason: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of all tokens, with one warning where a reason made a decode step take this path."""
    if reason is not None:
        warn_once(
            f"dense attention: {reason}",
            f"This decode step writes out each layer's whole cache densely because {reason}",
        )
        warn_read_whole(view, reason)
    key, value = view.dense("keys"), view.dense("values")
    if view.kv.spec.is_latent and is_latent_attention(module):
        return expanded(module, key, value)
    return key, value


# -- masks ----------------------------------------------------------------------------------------------------------


def _checked_mask(
    mask: torch.Tensor, view: View, query: torch.Tensor, kv_len: int, causal: bool
) -> torch.Tensor:
    """Return the mask [batch or 1, heads or 1, q_len or 1, kv_len] that a model or its caller made.

    Raises: CacheMismatchError where it shows left padding, which was not stored.
    """
    group = None if isinstance(view, TracedView) else getattr(view.layer, "group", None)
    flat, end = mask.ndim == 2, kv_len
    if flat:  # the columns, as flash attention takes them
        mask, end = mask[:, None, None, -kv_len:].bool(), 0
    elif group is not None and group.max_length is not None:
        end = group.seen  # no column lies behind it yet
    if end <= mask.shape[-1] < kv_len:
        hidden = False if mask.dtype == torch.bool else -math.inf
        mask = torch.nn.functional.pad(mask, (0, kv_len - mask.shape[-1]), value=hidden)
    if flat and causal:
        mask = mask & _causal(view, query, kv_len)
    # a check waits for the device, which a graph that is recorded cannot: the step before it was checked
    if group is not None and group.batch.padding.any() and not moved.is_recorded(mask.device):
        step = group.step
        if step.checked is not mask:  # once for all layers that get it
            gone = step.view.offset if step.view is not None else 0
            check_hidden((group.batch.padding - gone).clip(0), mask, group.seen - gone)
            step.checked = mask
    return mask


def _causal(view: View | None, query: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Return [1, 1, q_len, kv_len], bool: what the newest queries see; a cache with max_length has room for more columns."""
    group = getattr(getattr(view, "layer", None), "group", None)
    end = kv_len
    if group is not None and group.max_length is not None:
        end = int(group.seen)
    return causal_mask(query.shape[2], kv_len, end, query.device)


def _chosen(mask: torch.Tensor | None, indices: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Hide from `mask` all columns but those of `indices` [batch, q_len, n]; negative ones choose nothing."""
    shape = *indices.shape[:2], kv_len + 1
    chosen = torch.zeros(shape, dtype=torch.bool, device=indices.device)
    chosen.scatter_(-1, indices.long().masked_fill(indices < 0, kv_len), True)
    chosen = chosen[:, None, :, :kv_len]
    if mask is None:
        return chosen
    mask = mask[..., :kv_len]
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _kernel_mask(
    mask: torch.Tensor | None,
    view: KVView,
    query: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
) -> torch.Tensor | None:
    """Return the mask of a kernel, to which no mask means causal: [batch or 1, num_heads or 1, q_len, kv_len].

    A position bias becomes an additive mask per head; -inf hides what the mask hides, so that the weights of
    visible tokens are those of the model's own attention.

    Raises: CacheMismatchError where the columns are not those that a sliding layer still has.
    """
    q_len, kv_len = query.shape[2], view.kv.seen
    if mask is not None and view.sliding_window is not None and mask.shape[-1] != kv_len:
        raise CacheMismatchError(
            f"attention_mask has {mask.shape[-1]} columns, and this sliding-window layer offers {kv_len}: pass the 2D mask "
            "[batch, columns], from which the model makes the one that fits"
        )
    if mask is None and q_len > 1:
        if not causal:
            mask = torch.ones(1, 1, 1, kv_len, dtype=torch.bool, device=query.device)
        elif bias is not None:
            mask = _causal(view, query, kv_len)
    if bias is None or mask is None:
        return mask if bias is None else bias
    mask = mask[..., : bias.shape[-1]]
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return bias + mask
