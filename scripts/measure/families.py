"""Walk a family of transformers through all operations with DynamicCache and with pages, and say in a word what that means."""

import resource
import warnings
from collections.abc import Iterator

import torch
import transformers

import kv_hf
from kv_hf.evaluation.rows import commit, versions
from measure.family_models import ROLES, build_model, families
from measure.family_operations import OPERATIONS, NotOffered, Outcome, Subject, kernel_calls, text
from measure.runner import Device, Fields, WrongResultError, workload

# of the largest logit; other kernels sum in another order, which is 1e-5 at most
TOLERANCE = 1e-4
# of the largest logit: with less, other tokens in the context change too little for "equal" to say much
SENSITIVE = 0.01
PAGED, QUANTIZED = "paged_exact", "paged_int8"
QUANTIZED_TOLERANCE = 0.15  # relative error of all logits; random weights are the hardest there are
# worst first: what a family is called for a single operation; else it is what `greedy` is
BAD = ("ERROR", "DIFFERS", "broken")
MEMORY = 12 << 30  # bytes of address space: a family whose sizes nobody shrank ends with an error


def of_this_code(config: Fields) -> object:
    """Return what a row is of, beside its family."""
    return commit(), versions()


@workload(
    "model_families",
    grid=[{"role": [role], "family": list(families(role))} for role in ROLES],
    columns="verdict reads pages message",
    state=of_this_code,
    limit=180,
    timed=False,
)
def model_families(device: Device, role: str, family: str) -> Iterator[Fields]:
    """Compare paged caches with DynamicCache on a tiny random model of a family, operation by operation.

    Raises: WrongResultError for a family that differs, or ends with an error where DynamicCache does not.
    """
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, most))
    transformers.logging.set_verbosity_error()
    row = examine(family, role)
    if row["verdict"] in BAD[:2]:
        raise WrongResultError(f"{row['verdict']}: {row['others']}")
    yield {"weights": "random", **row}


def examine(family: str, role: str = "causal") -> Fields:
    """Return the row of a family, as families() lists them: verdict, what reads its pages, operations that are not equal."""
    row: Fields = {"family": family, "role": role, "equal": [], "others": {}}
    try:
        subject = Subject(build_model(family, role))
    except Exception as error:
        return {**row, "verdict": "not built", "message": words(error)}
    found = {name: compare(subject, name) for name in OPERATIONS}
    found["quantized"] = quantized(subject, found["forwards"])
    calls = {name: made for name, one in found.items() if (made := one.pop("calls", None))}
    pages = max(one.pop("pages", 0) for one in found.values())
    moved = sensitivity(subject)
    row |= {
        **judged(found, moved, pages),
        "reads": reads(calls.get("greedy", {})),
        "pages": pages,
        "sensitivity": moved,
        "calls": calls,
    }
    for name, one in found.items():
        if one["verdict"] == "equal":
            row["equal"].append(name)
        elif one["verdict"] != "absent":
            row["others"][name] = one
    return row


def judged(found: dict[str, Fields], moved: float | None, pages: int) -> Fields:
    """Return a family's verdict and message: those of its worst operation, or of `greedy`, where that says something."""
    worst = [one for bad in BAD for one in found.values() if one["verdict"] == bad]
    decides = [*worst, found["greedy"]][0]
    verdict, message = decides["verdict"], decides.get("message", "")
    if verdict == "equal" and not pages:
        verdict, message = "no pages", "no page was sealed: the model keeps a cache of its own"
    elif verdict == "equal" and (moved or 0) < SENSITIVE:
        verdict, message = "blunt", f"other tokens move the last logits by {moved or 0:.2g}"
    return {"verdict": verdict, "message": message}


def reads(calls: Fields) -> float | None:
    """Return the part of a decode step's layers that kernels read, the others being written out; None where no layer was read.

    Args:
        calls: what an operation called kernels for, which decodes one token at a time.
    """
    total = calls.get("decode", 0) + calls.get("dense", 0)
    return calls.get("decode", 0) / total if total else None


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

    Logits are compared up to the first token that differs: behind it the texts are different ones.
    """
    worst = 0.0
    for name in expected.keys() & {"logits", "scores"}:
        a, b = expected[name], found.get(name)
        if b is None or a.shape != b.shape:
            return float("inf")
        if name == "logits" and "tokens" in expected:
            same = (expected["tokens"] == found["tokens"])[:, -a.shape[1] :].all(0)
            steps = int(same.long().cumprod(0).sum()) + 1
            a, b = a[:, :steps], b[:, :steps]
        finite = torch.isfinite(a)
        if not torch.equal(finite, torch.isfinite(b)):
            return float("inf")
        if finite.any():
            scale = a[finite].abs().max().clamp(min=1e-6)
            worst = max(worst, float((a[finite] - b[finite]).abs().max() / scale))
    return worst


def alike(expected: Outcome, found: Outcome) -> bool:
    """Say whether two outcomes have the same tokens, if any, and logits that differ by no more than the order of sums does."""
    same = "tokens" not in expected or torch.equal(expected["tokens"], found["tokens"])
    return same and distance(expected, found) <= TOLERANCE


def compare(subject: Subject, operation: str) -> Fields:
    """Return the verdict of an operation: one of BAD, equal, refused, impossible or absent, with figures, messages and the calls of kernels."""
    stock, ours = (outcome(subject, operation, kind) for kind in ("dynamic", PAGED))
    if isinstance(stock, NotOffered):
        return {"verdict": "absent", "message": str(stock)}
    if isinstance(ours, Exception):
        if isinstance(stock, Exception):
            own = "" if words(ours) == words(stock) else f"; pages: {words(ours)}"
            return {"verdict": "impossible", "message": f"DynamicCache raises {words(stock)}{own}"}
        verdict = "refused" if isinstance(ours, kv_hf.KVCacheError) else "ERROR"
        return {"verdict": verdict, "message": words(ours)}
    seen = {"pages": ours.get("pages", 0), "calls": ours["calls"]}
    if isinstance(stock, dict) and alike(stock, ours):
        return {"verdict": "equal", "distance": distance(stock, ours), **seen}
    return {**against_plain(stock, ours, outcome(subject, operation, "plain")), **seen}


def against_plain(stock: Outcome | Exception, ours: Outcome, plain: Outcome | Exception) -> Fields:
    """Return the verdict where DynamicCache and pages differ: the plainest model decides, eager attention without a cache."""
    raised = f"DynamicCache raises {words(stock)}; " if isinstance(stock, Exception) else ""
    if isinstance(plain, Exception):
        message = f"{raised}without a cache: {words(plain)}"
        return {"verdict": "ERROR" if raised else "DIFFERS", "message": message}
    near = distance(plain, ours)
    if isinstance(stock, Exception):
        verdict = "equal" if alike(plain, ours) else "DIFFERS"
        message = f"{raised}pages are compared with no cache"
        return {"verdict": verdict, "distance": near, "message": message}
    far = distance(plain, stock)
    # transformers' own cache is off, and pages not much further
    verdict = "broken" if far > max(TOLERANCE, near / 2) else "DIFFERS"
    figures = {"stock_to_plain": far, "ours_to_plain": near, "distance": distance(stock, ours)}
    return {"verdict": verdict, **figures}


def quantized(subject: Subject, exact_pages: Fields) -> Fields:
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
    ids, other = text(1), text(1)
    other[:, -30:-10] = ids[:, -30:-10].flip(1)
    try:
        with torch.no_grad():
            read = [subject.unswitched(**subject.inputs(each)).logits for each in (ids, other)]
    except Exception:
        return None
    one, two = ({"logits": logits[:, -1:].float()} for logits in read)
    return distance(one, two)


def words(error: Exception) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
