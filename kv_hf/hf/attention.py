"""The attention function and the mask function that transformers calls under the name "kv_hf"."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..cache.handle import view_behind
from ..cache.paged_cache import MaskLength
from ..cache.traced import TracedView, taken
from ..errors import UnsupportedModelError
from ..kernels.ops import MAX_DECODE_QUERIES, paged_attention
from ..notices import warn_once

# arguments of attention functions that do not change the result of a forward without gradients
_HARMLESS = {
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


def kv_hf_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """Make the mask that sdpa would get, and tell the cache which columns are left padding.

    The cache cannot see the 2D mask by itself: `update()` gets keys and values only. The kv_length that a
    paged layer returns knows its group, and reaches this function before any layer runs.
    """
    length, mask = kwargs.get("kv_length"), kwargs.get("attention_mask")
    if isinstance(length, MaskLength):
        if mask is None:
            length.group.forget_padding()
        else:
            length.group.observe_padding(mask)
        kwargs["kv_length"] = int(length)
    return sdpa_mask(*args, **kwargs)


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
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over pages where `key` and `value` are handles of a paged layer, else as sdpa does.

    Args:
        query: [batch, num_heads, q_len, head_dim].
        key, value: handles of a paged layer, or dense [batch, num_kv_heads, kv_len, ..].
        attention_mask: None, or bool / additive float [batch, 1 or num_heads, q_len, kv_len].
        scaling: factor of the scores; head_dim ** -0.5 when None.
        softcap, s_aux: bound of the scores and learnt sink logits, where the model has them.
    Returns: (output [batch, q_len, num_heads, value_dim], attention weights or None).
    """
    traced = taken(key, value)
    view = view_behind(key, value) if traced is None else traced
    reason = None
    if view is not None and query.shape[2] <= MAX_DECODE_QUERIES:
        unknown = [name for name in kwargs if name not in _HARMLESS and kwargs[name] is not None]
        if dropout:
            reason = f"dropout={dropout} needs the attention weights"
        elif kwargs.get("output_attentions"):
            reason = "output_attentions=True needs the attention weights"
        elif kwargs.get("is_causal") is False and query.shape[2] > 1 and attention_mask is None:
            reason = "the model asks for attention that is not causal"
        elif unknown:
            reason = f"the model passes {', '.join(sorted(unknown))}, which paged attention does not know"
        else:
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            out = paged_attention(
                query,
                view.kv,
                softmax_scale=scale,
                mask=attention_mask,
                softcap=softcap,
                sink_logits=s_aux,
                kernel=view.kernel,
            )
            return out.transpose(1, 2).contiguous(), None
        if traced is None:
            warn_once(
                f"dense attention: {reason}",
                f"This decode step writes out each layer's whole cache densely because {reason}",
            )
    if isinstance(view, TracedView):
        raise UnsupportedModelError(
            f"a compiled forward cannot write out the cache densely, which this one needs: {reason}. Run it without "
            "torch.compile"
        )
    if view is not None:
        key, value = view.dense("keys"), view.dense("values")
    dense = _dense_attention(module, softcap, s_aux, kwargs)
    extra = {"softcap": softcap, "s_aux": s_aux}
    kwargs.update({name: given for name, given in extra.items() if given is not None})
    if dense is not sdpa_attention_forward:
        attention_mask = _additive(attention_mask, query, key)
    return dense(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _dense_attention(
    module: torch.nn.Module, softcap: float | None, s_aux: torch.Tensor | None, kwargs: Any
) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """Return sdpa, or the model's own eager function where sdpa cannot express what the model asks."""
    if softcap is None and s_aux is None and not kwargs.get("output_attentions"):
        return sdpa_attention_forward
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return sdpa_attention_forward if eager is None else eager


def _additive(
    mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor | None:
    """Turn sdpa's mask into the additive one of eager attention; sdpa leaves causal masks out."""
    q_len, kv_len = query.shape[2], key.shape[2]
    if mask is None:
        if q_len == 1:
            return None
        mask = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device)
        mask = mask.tril(kv_len - q_len)[None, None]
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill(
        ~mask, torch.finfo(query.dtype).min
    )
