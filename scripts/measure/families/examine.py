"""Walk one family through all operations, and sum up what it came to."""

import time
from typing import Any

import torch

from measure.families.inputs import build_subject
from measure.families.operations import OPERATIONS
from measure.families.subject import Subject, new_cache
from measure.families.verdict import TOLERANCE, compare, distance, outcome, words

QUANTIZED = "paged_int8"
QUANTIZED_TOLERANCE = 0.15  # relative error of all logits; random weights are the hardest there are
# of the largest logit: with less, other tokens in the context change nothing, and "equal" says little
BLUNT = 20 * TOLERANCE
# worst first: what a family is called after its operations
ORDER = ("ERROR", "DIFFERS", "broken", "refused", "equal", "impossible", "absent")


def examine(
    family: str, role: str = "causal", operations: list[str] | None = None
) -> dict[str, Any]:
    """Return the verdict on a family, with a line per operation.

    Args:
        family: model_type, as build.families() lists them.
        operations: names of OPERATIONS, or None for all of them and the quantized one.
    """
    started = time.monotonic()
    row: dict[str, Any] = {"family": family, "role": role}
    try:
        subject = build_subject(family, role)
    except Exception as error:
        return {**row, "verdict": "not built", "message": words(error), "operations": {}}
    found = {name: compare(subject, name) for name in operations or OPERATIONS}
    if operations is None:
        found["quantized"] = quantized(subject, found["forwards"])
    return {
        **row,
        **verdict(found),
        "model": type(subject.model).__name__,
        "attention": attention(subject),
        "pages": max((one.get("pages", 0) for one in found.values()), default=0),
        "sensitivity": sensitivity(subject),
        "layers_with_keys": layers_with_keys(subject),
        "operations": found,
        "seconds": round(time.monotonic() - started, 1),
    }


def verdict(operations: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a family's verdict and its message, from those of its operations."""
    words_of = [one["verdict"] for one in operations.values()]
    worst = next(word for word in ORDER if word in words_of)
    found = next((one for one in operations.values() if one["verdict"] == worst), {})
    return {"verdict": worst, "message": found.get("message", "")}


def quantized(subject: Subject, exact_pages: dict[str, Any]) -> dict[str, Any]:
    """Return whether the logits of 8-bit pages are finite, and near those of DynamicCache.

    Args:
        exact_pages: the verdict on `forwards`, which is that on quantized pages where exact ones are equal to nothing. Where
            they are equal to eager attention alone, quantized pages are compared with that.
    """
    as_eager = "ours_to_eager" in exact_pages
    exact = outcome(subject, "forwards", "eager" if as_eager else "dynamic")
    if isinstance(exact, Exception) or not (as_eager or exact_pages["verdict"] == "equal"):
        return dict(exact_pages)
    found = outcome(subject, "forwards", QUANTIZED)
    if isinstance(found, Exception):
        return {"verdict": "ERROR", "message": words(found)}
    error = float((found["logits"] - exact["logits"]).norm() / exact["logits"].norm())
    return {"verdict": "equal" if error <= QUANTIZED_TOLERANCE else "DIFFERS", "distance": error}


def attention(subject: Subject) -> str:
    """Return what attention the text model ended with."""
    config = subject.model.config.get_text_config(decoder=True)
    return str(getattr(config, "_attn_implementation", None))


def layers_with_keys(subject: Subject) -> int | None:
    """Return in how many layers transformers' own cache holds a key per token; None where forward() takes no such cache.

    A refusal that speaks of no attention is true only where there is none.
    """
    length = 12  # less than any sliding window
    try:
        cache = new_cache(subject.unswitched, "dynamic")
        with torch.no_grad():
            subject.unswitched(**subject.inputs(subject.text(1, length)), past_key_values=cache)
    except Exception:
        return None
    layers = getattr(cache, "self_attention_cache", cache).layers
    keys = [getattr(layer, "keys", None) for layer in layers]
    return sum(
        isinstance(one, torch.Tensor) and one.ndim > 2 and one.shape[-2] == length for one in keys
    )


def sensitivity(subject: Subject) -> float | None:
    """Return how far other tokens in the context move the last logits, in parts of the largest logit.

    The tokens are those of sealed pages near the end, inside of every sliding window.
    """
    ids = subject.text(1)
    other = ids.clone()
    other[:, -30:-10] = ids[:, -30:-10].flip(1)
    try:
        with torch.no_grad():
            a, b = (
                subject.unswitched(**subject.inputs(one)).logits[:, -1:] for one in (ids, other)
            )
    except Exception:
        return None
    return distance({"logits": a.float()}, {"logits": b.float()})
