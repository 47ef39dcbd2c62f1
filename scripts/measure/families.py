"""Walk a family of transformers through all operations with DynamicCache and with pages, and say in a word what that means."""

import resource
import time
import warnings
from collections import Counter
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
    kernel_calls,
)
from measure.runner import workload

# of the largest logit; other kernels sum in another order, which is 1e-5 at most
TOLERANCE = 1e-4
# of the largest logit: with less, other tokens in the context change too little for "equal" to say much
SENSITIVE = 0.01
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
    columns="verdict reads pages",
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
        yield {"weights": "random", **examine(family, role, operations)}


def examine(family: str, role: str = "causal", operations: list[str] | None = None) -> Found:
    """Return a family's row: its verdict, what reads its pages, and the operations that are not equal.

    Args:
        family: model_type, as families() lists them.
        operations: names of OPERATIONS, or None for all of them and the quantized one.
    """
    started = time.monotonic()
    row: Found = {"family": family, "role": role}
    try:
        subject = build_subject(family, role)
    except Exception as error:
        none: Found = {"equal": [], "others": {}}
        return {**row, "verdict": "not built", "message": words(error), **none}
    found = {name: compare(subject, name) for name in operations or OPERATIONS}
    if operations is None:
        found["quantized"] = quantized(subject, found["forwards"])
    calls = {name: made for name, one in found.items() if (made := one.pop("calls", None))}
    pages = max([one.pop("pages") for one in found.values() if "pages" in one], default=0)
    equal = [name for name, one in found.items() if one["verdict"] == "equal"]
    others = {
        name: {key: float(f"{x:.3g}") if isinstance(x, float) else x for key, x in one.items()}
        for name, one in found.items()
        if one["verdict"] not in ("equal", "absent")
    }
    far = [found[name]["distance"] for name in equal if name != "quantized"]
    moved = sensitivity(subject)
    return {
        **row,
        **judged(found, moved, pages),
        "model": type(subject.model).__name__,
        "reads": reads(calls),
        "pages": pages,
        "sensitivity": moved,
        "equal": equal,
        "others": others,
        "distance": max(far, default=None),
        "calls": calls,
        "seconds": round(time.monotonic() - started, 1),
    }


def judged(found: dict[str, Found], moved: float | None, pages: int) -> Found:
    """Return a family's verdict and message: those of its worst operation, where equal ones say something."""
    worst = min(found.values(), key=lambda one: ORDER.index(one["verdict"]))
    if worst["verdict"] == "equal":
        worst = found.get("greedy", worst)
    verdict, message = worst["verdict"], worst.get("message", "")
    if verdict == "equal" and not pages:
        verdict, message = "no pages", "no page was sealed: the model keeps a cache of its own"
    elif verdict == "equal" and (moved or 0) < SENSITIVE:
        verdict, message = "blunt", f"other tokens move the last logits by {moved or 0:.2g}"
    return {"verdict": verdict, "message": message}


def reads(calls: dict[str, Found]) -> float | None:
    """Return the part of the layers' reads that kernels made, the others being written out; None where nothing was read.

    In `keep` the model's own attention is asked for.
    """
    total: Counter[str] = Counter()
    for name, one in calls.items():
        total.update({} if name == "keep" else one)
    kernels = total["decode"] + total["several"]
    return round(kernels / total.total(), 3) if total else None


def outcome(subject: Subject, operation: str, kind: str) -> Outcome | Exception:
    """Run an operation; return what it gave with the calls of kernels that it made, or the exception."""
    try:
        with warnings.catch_warnings(), kernel_calls() as calls:
            warnings.simplefilter("ignore")
            torch.manual_seed(0)  # families that draw random numbers draw the same ones
            return {**OPERATIONS[operation](subject, kind), "calls": calls}
    except Exception as error:
        return error


def distance(expected: Outcome, found: Outcome) -> float:
    """Return the largest difference of logits or scores, in parts of the largest; inf where it has no number.

    Behind the first token that differs a row's texts are different ones, so that its logits are not compared.
    """
    worst = 0.0
    for name in expected.keys() & {"logits", "scores"}:
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
    """Return the verdict of an operation: one of ORDER, with figures, messages and the calls of kernels."""
    stock = outcome(subject, operation, "dynamic")
    if isinstance(stock, NotOffered):
        return {"verdict": "absent", "message": str(stock)}
    ours = outcome(subject, operation, PAGED)
    if isinstance(ours, Exception):
        if not isinstance(stock, Exception):
            verdict = "refused" if isinstance(ours, kv_hf.KVCacheError) else "ERROR"
            return {"verdict": verdict, "message": words(ours)}
        own = "" if words(ours) == words(stock) else f"; pages: {words(ours)}"
        return {"verdict": "impossible", "message": f"DynamicCache raises {words(stock)}{own}"}
    seen = {"pages": int(ours.get("pages", 0)), "calls": ours["calls"]}
    return {**_of_two(subject, operation, stock, ours), **seen}


def _of_two(subject: Subject, operation: str, stock: Outcome | Exception, ours: Outcome) -> Found:
    """Return the verdict where pages answer. Where they differ, the plainest model decides: eager attention, no cache."""
    if isinstance(stock, dict):
        if _alike(stock, ours):
            return {"verdict": "equal", "distance": distance(stock, ours)}
        again = outcome(subject, operation, "dynamic")
        if isinstance(again, dict) and not _alike(stock, again):
            message = "DynamicCache differs from itself in a second run"
            return {"verdict": "broken", "message": message}
    raised = f"DynamicCache raises {words(stock)}; " if isinstance(stock, Exception) else ""
    plain = outcome(subject, operation, "plain")
    if isinstance(plain, Exception):
        message = f"{raised}without a cache: {words(plain)}"
        return {"verdict": "ERROR" if raised else "DIFFERS", "message": message}
    near = distance(plain, ours)
    if not isinstance(stock, dict):
        message = f"{raised}pages are compared with no cache"
        verdict = "equal" if _alike(plain, ours) else "DIFFERS"
        return {"verdict": verdict, "distance": near, "message": message}
    far = distance(plain, stock)
    # transformers' own cache is off, and pages not much further
    broken = far > max(TOLERANCE, near / 2)
    return {
        "verdict": "broken" if broken else "DIFFERS",
        "distance": distance(stock, ours),
        "same_tokens": same_tokens(stock, ours),
        "stock_to_plain": far,
        "ours_to_plain": near,
    }


def quantized(subject: Subject, exact_pages: Found) -> Found:
    """Return whether the logits of 8-bit pages are finite, and near those of DynamicCache.

    Args:
        exact_pages: the verdict on `forwards`, which is that on quantized pages where exact ones are equal to nothing.
    """
    exact = outcome(subject, "forwards", "dynamic")
    if isinstance(exact, Exception) or exact_pages["verdict"] != "equal":
        return {name: exact_pages[name] for name in ("verdict", "message") if name in exact_pages}
    found = outcome(subject, "forwards", QUANTIZED)
    if isinstance(found, Exception):
        return {"verdict": "ERROR", "message": words(found)}
    error = float((found["logits"] - exact["logits"]).norm() / exact["logits"].norm())
    verdict = "equal" if error <= QUANTIZED_TOLERANCE else "DIFFERS"
    return {"verdict": verdict, "distance": error, "calls": found["calls"]}


def sensitivity(subject: Subject) -> float | None:
    """Return how far other tokens in the context move the last logits, in parts of the largest logit.

    The tokens are those of sealed pages near the end, inside of every sliding window.

    Returns: None where forward() raises.
    """
    ids = subject.text(1)
    other = torch.cat([ids[:, :-30], ids[:, -30:-10].flip(1), ids[:, -10:]], 1)
    model = subject.of("dynamic")
    try:
        with torch.no_grad():
            one, two = (
                model(**subject.inputs(text)).logits[:, -1:].float() for text in (ids, other)
            )
    except Exception:
        return None
    return distance({"logits": one}, {"logits": two})


def words(error: Exception) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
