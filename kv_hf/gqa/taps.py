"""An attention function for calibration: transformers' own eager attention, and a record of what went in.

What reaches it is what every family agrees on: queries and keys behind their rotation and norm, values, the mask. It
refuses models whose attention does not go through transformers' attention interface.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import ConversionError

NAME = "kv_hf_calibration"
OFF = 1e-4  # that a context may be off the weighted sum of values, as a part of the sum of sizes
_last: list["Tap"] = []
_looking: list[bool] = []


class Enough(Exception):
    """Ends a run of a layer of which no more is needed."""


@contextmanager
def looking() -> Iterator[None]:
    """End every run at attention: for questions to what it gets, not to what it gives."""
    _looking.append(True)
    try:
        yield
    finally:
        _looking.pop()


@dataclass(frozen=True)
class Tap:
    """One call of attention.

    Attributes:
        query: [batch, num_heads, tokens, head_dim], rotated and normed.
        key, value: [batch, num_kv_heads, tokens, head_dim].
        context: [batch, tokens, num_heads, value_dim].
        weights: [batch, num_heads, tokens, tokens], what each value counts for in `context`: the probabilities, times
            whatever attention scales a token's context of a head by.
        scaling: of the scores.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    context: torch.Tensor
    weights: torch.Tensor
    scaling: float


def take() -> Tap:
    """Return the last call of attention and forget it. Raises ConversionError where there was none."""
    if not _last:
        raise ConversionError(
            "the attention of this model does not go through transformers' attention interface, so that it cannot be "
            'calibrated; use method="mean"'
        )
    found = _last.pop()
    _last.clear()
    return found


def tapped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as the module's own eager attention does, and remember the call.

    Args:
        query: [rows, heads, tokens, head_dim]; key, value: [rows, kv heads, tokens, ..].
    Returns: the context [rows, tokens, heads, value_dim] and the probabilities [rows, heads, tokens, tokens].
    """
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ConversionError(
            f"{type(module).__name__} has no eager attention, so that it cannot be calibrated"
        )

    if _looking:
        _last[:] = [Tap(query, key, value, query, query, 1.0)]
        raise Enough
    context, weights = eager(module, query, key, value, attention_mask, **kwargs)
    scaling = kwargs.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    read = read_weights(weights, value, context)
    if read is None:
        raise ConversionError(
            f"{type(module).__name__} makes something else of its values than sums weighted by probabilities, so that it "
            'cannot be calibrated; use method="mean"'
        )
    _last[:] = [Tap(query, key, value, context, read, scaling)]
    return context, weights


def read_weights(
    weights: torch.Tensor | None, value: torch.Tensor, context: torch.Tensor
) -> torch.Tensor | None:
    """Return `weights` [rows, heads, tokens, tokens], or a multiple for each token and head, with which values sum up to `context`.

    Attention with sinks may scale its contexts behind the sum. Shapes as in Tap. None where there are no such weights.
    """
    if weights is None or weights.dim() != 4 or weights.shape[1] % value.shape[1]:
        return None
    each = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
    wanted = context.transpose(1, 2)
    if weights.shape[3] != each.shape[2] or wanted.shape[:3] != weights.shape[:3]:
        return None
    if wanted.shape[3] != each.shape[3]:
        return None
    plain = weights @ each
    if torch.equal(plain, wanted) or not wanted.isfinite().all():
        return weights  # what is not finite is an error of its own
    room = OFF * (weights @ each.abs())  # of rounding
    if bool(((plain - wanted).abs() <= room).all()):
        return weights
    scale = (plain * wanted).sum(-1, keepdim=True)
    scale = scale / plain.square().sum(-1, keepdim=True).clamp(min=1e-30)
    if bool(((scale * plain - wanted).abs() <= room * scale.abs().clamp(min=1)).all()):
        return scale * weights
    return None


def tap_model(model: torch.nn.Module) -> None:
    """Have every attention layer of `model` attend through `tapped_attention`."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, tapped_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            config._attn_implementation_internal = NAME
