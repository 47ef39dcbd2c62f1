"""Compare what an operation gave with each kind of cache, and say in a word what that means."""

import warnings
from typing import Any

import torch

import kv_hf
from measure.families.operations import OPERATIONS, NotOffered, Outcome
from measure.families.subject import Subject

# of the largest logit; other kernels sum in another order, which is 1e-5 at most
TOLERANCE = 1e-4
PAGED = "paged_exact"


def outcome(subject: Subject, operation: str, kind: str) -> Outcome | Exception:
    """Run an operation; return what it gave, or the exception."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)  # families that draw random numbers draw the same ones
            return OPERATIONS[operation](subject, kind)
    except Exception as error:
        return error


def distance(expected: Outcome, found: Outcome) -> float:
    """Return the largest difference of logits or scores, in parts of the largest; inf where it has no number.

    Behind the first token that differs a row's texts are different ones, so that its logits are not compared.
    """
    worst = 0.0
    for name, a in expected.items():
        b = found.get(name)
        if name in ("tokens", "pages"):
            continue
        if b is None or a.shape != b.shape:
            return float("inf")
        alike = _alike(expected, found, name)
        finite = torch.isfinite(a) & alike
        if not torch.equal(finite, torch.isfinite(b) & alike):
            return float("inf")
        if finite.any():
            scale = a[finite].abs().max().clamp(min=1e-6)
            worst = max(worst, float((a[finite] - b[finite]).abs().max() / scale))
    return worst


def _alike(expected: Outcome, found: Outcome, name: str) -> torch.Tensor:
    """Return which logits belong to the same text in both: [rows, steps, 1]."""
    a, tokens = expected[name], expected.get("tokens")
    if name != "logits" or tokens is None or tokens.shape != found["tokens"].shape:
        return torch.ones((), dtype=torch.bool)
    steps = a.shape[1]
    differs = (tokens != found["tokens"])[:, -steps:].long().cumsum(1) > 0
    before = torch.cat([torch.zeros_like(differs[:, :1]), differs[:, :-1]], 1)
    return ~before[..., None]


def same_tokens(expected: Outcome, found: Outcome) -> bool:
    """Say whether both have the same tokens, or no tokens."""
    return "tokens" not in expected or torch.equal(expected["tokens"], found["tokens"])


def compare(subject: Subject, operation: str) -> dict[str, Any]:
    """Return the verdict of an operation: equal, refused, absent, broken, DIFFERS or ERROR, with figures and messages."""
    stock = outcome(subject, operation, "dynamic")
    if isinstance(stock, NotOffered):
        return {"verdict": "absent", "message": str(stock)}
    ours = outcome(subject, operation, PAGED)
    if isinstance(stock, Exception):
        return _stock_raised(subject, operation, stock, ours)
    if isinstance(ours, Exception):
        verdict = "refused" if isinstance(ours, kv_hf.KVCacheError) else "ERROR"
        return {"verdict": verdict, "message": words(ours)}
    away = distance(stock, ours)
    if away <= TOLERANCE and same_tokens(stock, ours):
        return {"verdict": "equal", "distance": away, "pages": int(ours.get("pages", -1))}
    again = outcome(subject, operation, "dynamic")
    if isinstance(again, dict) and (
        distance(stock, again) > TOLERANCE or not same_tokens(stock, again)
    ):
        return {
            "verdict": "broken",
            "distance": away,
            "message": "DynamicCache differs from itself in a second run",
        }
    two_answers = against_eager(subject, operation, stock, ours)
    if two_answers is not None:
        return {"verdict": "broken", "distance": away, **two_answers}
    reference = outcome(subject, operation, "none")
    if isinstance(reference, Exception):
        return {
            "verdict": "DIFFERS",
            "distance": away,
            "message": f"without a cache: {words(reference)}",
        }
    found = {
        "distance": away,
        "same_tokens": same_tokens(stock, ours),
        "stock_to_uncached": distance(reference, stock),
        "ours_to_uncached": distance(reference, ours),
    }
    # transformers' own cache is off, and pages not much further
    broken = found["stock_to_uncached"] > max(TOLERANCE, found["ours_to_uncached"] / 2)
    return {"verdict": "broken" if broken else "DIFFERS", **found}


def against_eager(
    subject: Subject, operation: str, stock: Outcome, ours: Outcome
) -> dict[str, Any] | None:
    """Return the evidence where transformers gives one answer with sdpa and another one, which is that of pages, with eager.

    A copy of the model that kv_hf has never touched runs the operation again, with `DynamicCache` and eager attention.
    Returns: figures and a message, or None: nothing of that kind speaks for pages.
    """
    attention = subject.unswitched.config.get_text_config(decoder=True)._attn_implementation
    eager = None if attention == "eager" else outcome(subject, operation, "eager")
    if eager is None or isinstance(eager, Exception):
        return None
    near, far = distance(eager, ours), distance(eager, stock)
    if near > TOLERANCE or not same_tokens(eager, ours):
        return None
    message = f"DynamicCache gives one answer with {attention!r} and another one, which is that of pages, with 'eager'"
    ahead, plain = (looks_ahead(subject, kind) for kind in ("dynamic", "eager"))
    if ahead is not None and plain is not None and ahead > TOLERANCE >= plain:
        message += (
            f"; with {attention!r} later tokens move earlier logits, by {ahead:.2g} of the largest"
        )
    return {"stock_to_eager": far, "ours_to_eager": near, "message": message}


def looks_ahead(subject: Subject, kind: str) -> float | None:
    """Return how far later tokens move earlier logits, in parts of the largest logit; None where forward() raises.

    In a causal model they do not. One forward without a cache is asked, with the attention of `kind`.
    """
    ids = subject.text(1)
    half = ids.shape[1] // 2
    other = torch.cat([ids[:, :half], ids[:, half:].flip(1)], 1)
    try:
        with torch.no_grad():
            a, b = (
                subject.of(kind)(**subject.inputs(one), use_cache=False).logits[:, :half].float()
                for one in (ids, other)
            )
    except Exception:
        return None
    return distance({"logits": a}, {"logits": b})


def _stock_raised(
    subject: Subject, operation: str, stock: Exception, ours: Outcome | Exception
) -> dict[str, Any]:
    """Return the verdict where DynamicCache raises: pages have to raise as well, or to be right."""
    message = f"DynamicCache raises {words(stock)}"
    if isinstance(ours, Exception):
        own = "" if words(ours) == words(stock) else f"; pages: {words(ours)}"
        return {"verdict": "impossible", "message": message + own}
    reference = outcome(subject, operation, "none")
    if isinstance(reference, Exception):
        return {
            "verdict": "ERROR",
            "message": f"{message}; pages answer; without a cache: {words(reference)}",
        }
    away = distance(reference, ours)
    alike = away <= TOLERANCE and same_tokens(reference, ours)
    return {
        "verdict": "equal" if alike else "DIFFERS",
        "distance": away,
        "message": f"{message}; pages are compared with no cache",
    }


def words(error: Exception) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
