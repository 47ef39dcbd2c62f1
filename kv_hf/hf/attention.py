"""Attention over pages, and the masks for it: what transformers' functions are wrapped with (dispatch.py)."""

import functools
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..backends.base import AttentionCall, Backend
from ..backends.dispatch import paged_attention
from ..bridge.lazy_kv import KVView, view_behind, warn_read_whole
from ..bridge.lazy_mask import LazyMask
from ..bridge.shown_padding import check_shown, vouch
from ..bridge.traced import TracedView, taken
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


def kv_hf_mask(
    *args: Any, dense: Callable[..., Any] = sdpa_mask, flat: bool = False, **kwargs: Any
) -> torch.Tensor | None:
    """Make the mask of a forward on a paged cache, which has observed the attention_mask.

    Args:
        dense: the mask function that transformers knows by the name of the model's attention. It makes the mask wherever
            something is hidden that kernels do not hide by themselves, and where no tokens are stored yet.
        flat: its masks have two dimensions, so that it makes none behind stored tokens.
    Returns: what `dense` returns; a lazy mask [batch, 1, q_len, kv_len] where the kernels hide by themselves what it would
        hide; None for a single query to which everything is visible.
    """
    length, mask = kwargs["kv_length"], kwargs.get("attention_mask")
    single = kwargs["q_length"] == 1
    kwargs["kv_length"] = int(length)
    hidden = kwargs.get("allow_is_causal_skip", True) and length.needs_no_mask(mask, single)
    if hidden and single and mask is None and kwargs.get("local_size") is None:
        return None
    if length.preallocated and single and not moved.is_host(kwargs["device"]):
        # to find out whether it is needed would wait; _knows_mask leaves it out
        kwargs["allow_is_causal_skip"] = False
    if not hidden and not (flat and length.stored):
        made = dense(*args, **kwargs)
        return made if flat or (single and length.preallocated) else vouch(made)
    shape = (kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"])
    skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    make = functools.partial(sdpa_mask, *args, **{**kwargs, **skip})
    causal = hidden and kwargs.get("local_size") is None and not length.padded
    lazy = LazyMask(shape, torch.device(kwargs.get("device", "cpu")), make, causal)
    if not hidden:
        lazy.writable()  # attention has to read it
    return lazy


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
    batched = getattr(kwargs.get("cache"), "paged_attend", None)
    if batched is not None:  # continuous batching: the tokens of many requests in one row
        given = {
            "softcap": softcap,
            "s_aux": s_aux,
            "position_bias": position_bias,
            "indices": indices,
        }
        kwargs.update(dropout=dropout, scaling=scaling, dense=dense, **given)
        return batched(module, query, key, value, **kwargs)
    traced = taken(key, value)
    view = view_behind(key, value) if traced is None else traced
    weights = kwargs.get("output_attentions") and dense is not sdpa_attention_forward
    route = _route(module, view, query, dropout, softcap, weights)
    if isinstance(attention_mask, LazyMask):
        if attention_mask.changed:
            attention_mask = attention_mask.dense()
    elif attention_mask is not None and attention_mask.ndim == 2 and view is not None:
        causal = is_causal(module, kwargs)
        attention_mask = _of_columns(attention_mask, query, key.shape[2], causal)
    if indices is not None:
        if isinstance(attention_mask, LazyMask):
            attention_mask = attention_mask.dense()
        causal = is_causal(module, kwargs)
        attention_mask = _chosen(attention_mask, indices, query, key.shape[2], causal)
    if isinstance(view, KVView) and not isinstance(attention_mask, LazyMask):
        check_shown(view, attention_mask, query.shape[2])
    if view is None or route.path is Path.DENSE:
        named = {"softcap": softcap, "s_aux": s_aux, "position_bias": position_bias}
        kwargs.update({name: given for name, given in named.items() if given is not None})
        kwargs = {"dropout": dropout, "scaling": scaling, **kwargs}
        if view is not None:
            key, value = _written_out(module, view, route.reason)
        return dense_attention(dense, module, query, key, value, attention_mask, kwargs)
    mask = None
    if attention_mask is not None or position_bias is not None or query.shape[2] > 1:
        mask = _kernel_mask(
            module, view, query, key.shape[2], attention_mask, position_bias, kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(query, view.kv, scale, mask, softcap, s_aux, view.sliding_window)
    if route.path is Path.LATENT:
        return _attend_latent(module, call, view.kernel), None
    return paged_attention(call, view.kernel).transpose(1, 2).contiguous(), None


# -- which path -----------------------------------------------------------------------------------------------------


class Path(Enum):
    """The ways to attend: over pages of keys and values, over pages of latents, over dense keys and values."""

    PAGED = "paged"
    LATENT = "latent"
    DENSE = "dense"


class Route(NamedTuple):
    """The path of one call; `reason`: why pages that could be read are not, or None."""

    path: Path
    reason: str | None = None


def _route(
    module: torch.nn.Module,
    view: KVView | TracedView | None,
    query: torch.Tensor,
    dropout: float,
    softcap: float | None,
    weights: bool | None,
) -> Route:
    """Decide how a call attends; depends on no mask."""
    if view is None:
        return Route(Path.DENSE)
    latent = isinstance(view, KVView) and view.kv.spec.is_latent
    if latent:
        # other modules' keys merely have the size of latents
        if not (is_latent_attention(module) and absorbs(module, view.mla, query)):  # type: ignore[union-attr]
            return Route(Path.DENSE)
    elif query.shape[2] > view.kernel.max_queries:
        return Route(Path.DENSE)
    reason = None
    if dropout:
        reason = f"dropout={dropout} needs the attention weights"
    elif weights:
        reason = "output_attentions=True needs the attention weights"
    elif latent and softcap is not None:
        reason = "no kernel knows a softcap for latents"
    if reason is not None:
        return Route(Path.DENSE, reason)
    return Route(Path.LATENT if latent else Path.PAGED)


# -- latents, and dense keys and values -----------------------------------------------------------------------------


def _attend_latent(module: torch.nn.Module, call: AttentionCall, kernel: Backend) -> torch.Tensor:
    """Attend over pages of latents: the query takes the key projection, the result the value projection."""
    query = absorbed_query(module, call.query)
    scale = call.softmax_scale / shrink_of(call.query)
    return from_latent(
        module, paged_attention(replace(call, query=query, softmax_scale=scale), kernel)
    )


def _written_out(
    module: torch.nn.Module, view: KVView | TracedView, reason: str | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of all tokens, with one warning where a reason made a decode step take this path.

    Raises: UnsupportedModelError in a compiled forward.
    """
    if isinstance(view, TracedView):
        raise UnsupportedModelError(
            f"this forward needs dense keys and values, which a compiled forward cannot write out: {reason}. Run it "
            "without torch.compile"
        )
    if reason is not None:
        warn_once(
            f"dense attention: {reason}",
            f"This decode step writes out each layer's whole cache densely because {reason}",
        )
        warn_read_whole(view, reason)
    key, value = view.dense("keys"), view.dense("values")
    if view.kv.spec.is_latent and is_latent_attention(module):
        key, value = expanded(module, key, value)
    return key, value


# -- masks ----------------------------------------------------------------------------------------------------------


def _knows_mask(view: Any, query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Say whether a preallocated cache knows by itself what `mask` hides from a single query.

    On a device that has to be waited for, and in a compiled step that reads a part of the pages, a mask without heads is
    taken to hide left padding and columns without a token yet; that is compared there, once per step, and a wrong one is
    reported by a later forward.
    """
    if mask is None or query.shape[2] != 1 or mask.dtype != torch.bool or mask.shape[1] != 1:
        return False
    if mask.shape[-1] != view.table.max_length:
        return False
    if moved.is_host(mask.device):
        if view.kv.budget is None:
            return False  # nothing waits: the mask itself is read. A choice of pages has no place for its columns
        if not torch.compiler.is_compiling():
            if view.is_first:
                view.table.compare_mask(mask)
            return bool(view.table.is_mask_known)
    if view.is_first:
        view.table.note_mask(mask)
    return True


def _of_columns(
    columns: torch.Tensor, query: torch.Tensor, kv_len: int, causal: bool
) -> torch.Tensor:
    """Return the mask [batch, 1, 1 or q_len, kv_len] of the mask [batch, columns] that flash attention takes."""
    shown = torch.nn.functional.pad(
        columns[:, -kv_len:].bool(), (0, kv_len - min(kv_len, columns.shape[1]))
    )
    mask, q_len = shown[:, None, None], query.shape[2]
    return mask & causal_mask(q_len, kv_len, query.device) if causal and q_len > 1 else mask


def _chosen(
    mask: torch.Tensor | None,
    indices: torch.Tensor,
    query: torch.Tensor,
    kv_len: int,
    causal: bool,
) -> torch.Tensor:
    """Hide from `mask` all columns but those of `indices` [batch, q_len, n]; negative ones choose nothing."""
    q_len = query.shape[2]
    shape = (indices.shape[0], 1, q_len, kv_len + 1)
    chosen = torch.zeros(shape, dtype=torch.bool, device=query.device)
    columns = indices.long().masked_fill(indices < 0, kv_len)[:, None]
    chosen = chosen.scatter_(-1, columns, True)[..., :kv_len]
    if mask is None:
        hides = causal and q_len > 1
        return chosen & causal_mask(q_len, kv_len, query.device) if hides else chosen
    mask = mask[..., :kv_len]
    if mask.dtype == torch.bool:
        return mask & chosen
    return mask.masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _fitting(mask: torch.Tensor | None, view: Any) -> torch.Tensor | None:
    """Return `mask`. Raises CacheMismatchError where its columns are not those that a sliding layer still has."""
    if mask is not None and view.sliding_window is not None and mask.shape[-1] != view.kv.seen:
        raise CacheMismatchError(
            f"attention_mask has {mask.shape[-1]} columns, and this sliding-window layer offers {view.kv.seen}: pass the 2D "
            "mask [batch, columns], from which the model makes the one that fits"
        )
    return mask


def _kernel_mask(
    module: torch.nn.Module,
    view: KVView | TracedView,
    query: torch.Tensor,
    kv_len: int,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor | None:
    """Return the mask that a kernel needs beside what it hides by itself, or None; see `_paged_mask`."""
    lazy = isinstance(mask, LazyMask)
    if lazy or (view.table is not None and _knows_mask(view, query, mask)):
        mask = None
    return _paged_mask(_fitting(mask, view), bias, query, kv_len, lazy or is_causal(module, kwargs))


def _paged_mask(
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    query: torch.Tensor,
    kv_len: int,
    causal: bool,
) -> torch.Tensor | None:
    """Return the mask of a kernel, to which no mask means causal: [batch or 1, num_heads or 1, q_len, kv_len].

    A position bias becomes an additive mask per head; -inf hides what the mask hides, so that the weights of
    visible tokens are those of the model's own attention.
    """
    q_len = query.shape[2]
    if mask is None and q_len > 1:
        if not causal:
            mask = torch.ones(1, 1, 1, kv_len, dtype=torch.bool, device=query.device)
        elif bias is not None:
            mask = causal_mask(q_len, kv_len, query.device)
    if bias is None or mask is None:
        return mask if bias is None else bias
    mask = mask[..., : bias.shape[-1]]
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return bias + mask
