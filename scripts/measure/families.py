"""Walk a family of transformers through all operations with DynamicCache and with pages, and say in a word what that means."""

import resource
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import transformers

import kv_hf
from kv_hf.evaluation.rows import commit, versions
from measure.family_models import ROLES, families
from measure.family_operations import (
    OPERATIONS,
    NotOffered,
    Outcome,
    Subject,
    build_subject,
    new_cache,
)
from measure.runner import workload

# of the largest logit; other kernels sum in another order, which is 1e-5 at most
TOLERANCE = 1e-4
# of the largest logit: with less, other tokens in the context change nothing, and "equal" says little
BLUNT = 20 * TOLERANCE
PAGED, QUANTIZED = "paged_exact", "paged_int8"
QUANTIZED_TOLERANCE = 0.15  # relative error of all logits; random weights are the hardest there are
# worst first: what a family is called after its operations
ORDER = ("ERROR", "DIFFERS", "broken", "refused", "equal", "impossible", "absent")
MEMORY = 12 << 30  # bytes of address space: a family whose sizes nobody shrank ends with an error
Found = dict[str, Any]


def of_this_code(config: Found) -> object:
    """Return what a row is of, beside its family."""
    return commit(), versions()


@workload(
    "model_families",
    grid=[{"role": [role], "family": list(families(role))} for role in ROLES],
    columns="verdict attention pages",
    state=of_this_code,
    limit=180,
    timed=False,
)
def model_families(
    device: torch.device, role: str, family: str, operations: list[str] | None = None
) -> Iterator[Found]:
    """Compare paged caches with DynamicCache on a tiny random model of a family, in twelve operations."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield {"weights": "random", **summary(examine(family, role, operations))}


def examine(family: str, role: str = "causal", operations: list[str] | None = None) -> Found:
    """Return the verdict on a family, with a line per operation.

    Args:
        family: model_type, as families() lists them.
        operations: names of OPERATIONS, or None for all of them and the quantized one.
    """
    started = time.monotonic()
    row: Found = {"family": family, "role": role}
    try:
        subject = build_subject(family, role)
    except Exception as error:
        return {**row, "verdict": "not built", "message": words(error), "operations": {}}
    found = {name: compare(subject, name) for name in operations or OPERATIONS}
    if operations is None:
        found["quantized"] = quantized(subject, found["forwards"])
    worst = min(found.values(), key=lambda one: ORDER.index(one["verdict"]))
    return {
        **row,
        "verdict": worst["verdict"],
        "message": worst.get("message", ""),
        "model": type(subject.model).__name__,
        "attention": attention_of(subject.model),
        "pages": max((one.get("pages", 0) for one in found.values()), default=0),
        "sensitivity": sensitivity(subject),
        "layers_with_keys": layers_with_keys(subject),
        "operations": found,
        "seconds": round(time.monotonic() - started, 1),
    }


def summary(row: Found) -> Found:
    """Return a family's row without what says nothing: of equal operations the names and the largest distance."""
    found = row.pop("operations")
    equal = [name for name, one in found.items() if one["verdict"] == "equal"]
    others = {
        name: {key: float(f"{x:.3g}") if isinstance(x, float) else x for key, x in one.items()}
        for name, one in found.items()
        if one["verdict"] not in ("equal", "absent")
    }
    far = [found[name].get("distance", 0.0) for name in equal if name != "quantized"]
    return {**row, "equal": equal, "others": others, "distance": max(far, default=None)}


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
    for name in expected.keys() - {"tokens", "pages"}:
        a, b = expected[name], found.get(name)
        if b is None or a.shape != b.shape:
            return float("inf")
        alike = torch.ones((), dtype=torch.bool)
        tokens = expected.get("tokens")
        if name == "logits" and tokens is not None and tokens.shape == found["tokens"].shape:
            differs = (tokens != found["tokens"])[:, -a.shape[1] :].long().cumsum(1) > 0
            before = torch.cat([torch.zeros_like(differs[:, :1]), differs[:, :-1]], 1)
            alike = ~before[..., None]
        finite = torch.isfinite(a) & alike
        if not torch.equal(finite, torch.isfinite(b) & alike):
            return float("inf")
        if finite.any():
            scale = a[finite].abs().max().clamp(min=1e-6)
            worst = max(worst, float((a[finite] - b[finite]).abs().max() / scale))
    return worst


def same_tokens(expected: Outcome, found: Outcome) -> bool:
    """Say whether both have the same tokens, or no tokens."""
    return "tokens" not in expected or torch.equal(expected["tokens"], found["tokens"])


def _alike(expected: Outcome, found: Outcome) -> bool:
    return distance(expected, found) <= TOLERANCE and same_tokens(expected, found)


def compare(subject: Subject, operation: str) -> Found:
    """Return the verdict of an operation: equal, refused, absent, impossible, broken, DIFFERS or ERROR, with figures and messages."""
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
    if _alike(stock, ours):
        return {"verdict": "equal", "distance": away, "pages": int(ours.get("pages", -1))}
    again = outcome(subject, operation, "dynamic")
    if isinstance(again, dict) and not _alike(stock, again):
        message = "DynamicCache differs from itself in a second run"
        return {"verdict": "broken", "distance": away, "message": message}
    two_answers = against_eager(subject, operation, stock, ours)
    if two_answers is not None:
        return {"verdict": "broken", "distance": away, **two_answers}
    reference = outcome(subject, operation, "none")
    if isinstance(reference, Exception):
        message = f"without a cache: {words(reference)}"
        return {"verdict": "DIFFERS", "distance": away, "message": message}
    found = {
        "distance": away,
        "same_tokens": same_tokens(stock, ours),
        "stock_to_uncached": distance(reference, stock),
        "ours_to_uncached": distance(reference, ours),
    }
    # transformers' own cache is off, and pages not much further
    broken = found["stock_to_uncached"] > max(TOLERANCE, found["ours_to_uncached"] / 2)
    return {"verdict": "broken" if broken else "DIFFERS", **found}


def against_eager(subject: Subject, operation: str, stock: Outcome, ours: Outcome) -> Found | None:
    """Return the evidence where transformers gives one answer with sdpa and another one, which is that of pages, with eager.

    A copy of the model that kv_hf has never touched runs the operation again, with `DynamicCache` and eager attention.
    Returns: figures and a message, or None: nothing of that kind speaks for pages.
    """
    attention = attention_of(subject.unswitched)
    eager = None if attention == "eager" else outcome(subject, operation, "eager")
    if not isinstance(eager, dict) or not _alike(eager, ours):
        return None
    message = f"DynamicCache gives one answer with {attention!r} and another one, which is that of pages, with 'eager'"
    ahead, plain = (looks_ahead(subject, kind) for kind in ("dynamic", "eager"))
    if ahead is not None and plain is not None and ahead > TOLERANCE >= plain:
        message += (
            f"; with {attention!r} later tokens move earlier logits, by {ahead:.2g} of the largest"
        )
    far, near = distance(eager, stock), distance(eager, ours)
    return {"stock_to_eager": far, "ours_to_eager": near, "message": message}


def _stock_raised(
    subject: Subject, operation: str, stock: Exception, ours: Outcome | Exception
) -> Found:
    """Return the verdict where DynamicCache raises: pages have to raise as well, or to be right."""
    message = f"DynamicCache raises {words(stock)}"
    if isinstance(ours, Exception):
        own = "" if words(ours) == words(stock) else f"; pages: {words(ours)}"
        return {"verdict": "impossible", "message": message + own}
    reference = outcome(subject, operation, "none")
    if isinstance(reference, Exception):
        message += f"; pages answer; without a cache: {words(reference)}"
        return {"verdict": "ERROR", "message": message}
    verdict = "equal" if _alike(reference, ours) else "DIFFERS"
    message += "; pages are compared with no cache"
    return {"verdict": verdict, "distance": distance(reference, ours), "message": message}


def quantized(subject: Subject, exact_pages: Found) -> Found:
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


def attention_of(model: Any) -> str:
    """Return what attention the text model has."""
    config = model.config.get_text_config(decoder=True)
    return str(getattr(config, "_attn_implementation", None))


def layers_with_keys(subject: Subject) -> int | None:
    """Return in how many layers transformers' own cache keeps a tensor of keys with one entry per token.

    Returns: None where a forward with a DynamicCache raises.
    """
    length = 12  # less than any sliding window
    try:
        cache = new_cache(subject.unswitched, "dynamic")
        with torch.no_grad():
            subject.unswitched(**subject.inputs(subject.text(1, length)), past_key_values=cache)
    except Exception:
        return None
    keys = [
        getattr(layer, "keys", None)
        for layer in getattr(cache, "self_attention_cache", cache).layers
    ]
    tensors = [one for one in keys if isinstance(one, torch.Tensor) and one.ndim > 2]
    return sum(one.shape[-2] == length for one in tensors)


def sensitivity(subject: Subject) -> float | None:
    """Return how far other tokens in the context move the last logits, in parts of the largest logit.

    The tokens are those of sealed pages near the end, inside of every sliding window.
    """
    ids = subject.text(1)
    other = torch.cat([ids[:, :-30], ids[:, -30:-10].flip(1), ids[:, -10:]], 1)
    return _moved(subject, "dynamic", (ids, other), slice(-1, None))


def looks_ahead(subject: Subject, kind: str) -> float | None:
    """Return how far later tokens move earlier logits, in parts of the largest logit; None where forward() raises.

    In a causal model they do not. One forward without a cache is asked, with the attention of `kind`.
    """
    ids = subject.text(1)
    half = ids.shape[1] // 2
    other = torch.cat([ids[:, :half], ids[:, half:].flip(1)], 1)
    return _moved(subject, kind, (ids, other), slice(half), use_cache=False)


def _moved(
    subject: Subject, kind: str, texts: tuple[torch.Tensor, ...], seen: slice, **more: Any
) -> float | None:
    """Return how far apart the logits of two texts are at the places `seen`; None where forward() raises."""
    try:
        with torch.no_grad():
            logits = [
                subject.of(kind)(**subject.inputs(ids), **more).logits[:, seen].float()
                for ids in texts
            ]
    except Exception:
        return None
    return distance({"logits": logits[0]}, {"logits": logits[1]})


def words(error: Exception) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
