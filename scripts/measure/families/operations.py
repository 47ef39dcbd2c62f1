"""What is compared on each family: one function per operation, run once with each kind of cache.

An operation returns tensors by name: tokens are compared exactly, the others within a tolerance.
"""

from collections.abc import Callable
from typing import Any

import torch

from measure.families.subject import NEW_TOKENS, STOCK, Subject, new_cache, options

Outcome = dict[str, torch.Tensor]
PARTS = [
    (110, 0),
    (5, 0),
    (21, 0),
    (1, 0),
]  # tokens of each forward, and how many logits are kept (0: all)
SHOW = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}


def generated(
    model: Any, inputs: dict[str, Any], new_tokens: int = NEW_TOKENS, **more: Any
) -> Outcome:
    """Generate and return the sequences, and the logits [rows, steps, vocabulary] where there are any."""
    out = model.generate(**inputs, max_new_tokens=new_tokens, **{**SHOW, **more})
    found = {"tokens": out.sequences}
    if getattr(out, "logits", None):
        found["logits"] = torch.stack([logits.float() for logits in out.logits], 1)
    found["pages"] = torch.tensor(pages_held(getattr(out, "past_key_values", None)))
    if getattr(out, "sequences_scores", None) is not None:
        found["scores"] = out.sequences_scores
    return found


def pages_held(cache: Any) -> int:
    """Return the number of sealed pages of a cache; 0 of caches that have none."""
    report = getattr(cache, "memory", None)
    return report().pages_held if callable(report) else 0


def greedy(subject: Subject, kind: str) -> Outcome:
    """Two rows of one length."""
    return generated(subject.of(kind), subject.inputs(subject.text()), **options(kind))


def padded(subject: Subject, kind: str) -> Outcome:
    """Three rows of different lengths, padded on the left."""
    return generated(subject.of(kind), subject.padded(), **options(kind))


def beams(subject: Subject, kind: str) -> Outcome:
    """Three beams for each of two rows."""
    inputs = subject.inputs(subject.text(length=93))
    return generated(
        subject.of(kind),
        inputs,
        num_beams=3,
        output_scores=True,
        output_logits=False,
        **options(kind),
    )


def lookup(subject: Subject, kind: str) -> Outcome:
    """Candidates found in the prompt."""
    inputs = subject.inputs(subject.repetitive())
    more = {} if kind == "none" else {"prompt_lookup_num_tokens": 5}
    return generated(subject.of(kind), inputs, 20, **more, **options(kind))


def assisted(subject: Subject, kind: str) -> Outcome:
    """Candidates of a draft model that is right often, not always."""
    inputs = subject.inputs(subject.text(1))
    more = {} if kind == "none" else {"assistant_model": subject.assistant()}
    return generated(subject.of(kind), inputs, 20, **more, **options(kind))


def logits_to_keep(subject: Subject, kind: str) -> Outcome:
    """Forwards of several tokens behind a filled cache, of which only the last logits are asked for."""
    if not subject.takes("logits_to_keep"):
        raise NotOffered("forward() has no logits_to_keep")
    return _forwards(subject, kind, [(110, 1), (5, 1), (7, 2), (9, 3), (1, 1)], keep=True)


def forwards(subject: Subject, kind: str) -> Outcome:
    """Forwards of several tokens behind a filled cache, with all logits."""
    return _forwards(subject, kind, PARTS, keep=False)


def after(subject: Subject, kind: str) -> Outcome:
    """The model that attended over pages before, with DynamicCache again: nothing of the switch may be left to see."""
    if kind in STOCK:
        return forwards(subject, kind)
    return _forwards(subject, "dynamic", PARTS, keep=False, model=subject.model)


def _forwards(
    subject: Subject, kind: str, parts: list[tuple[int, int]], keep: bool, model: Any = None
) -> Outcome:
    model = subject.of(kind) if model is None else model
    ids = subject.text(length=sum(count for count, _ in parts))
    cache = new_cache(model, kind) if kind != "none" else None
    found, start = [], 0
    for count, kept in parts:
        first = 0 if cache is None else start
        inputs = subject.inputs(ids[:, first : start + count])
        more: dict[str, Any] = {"logits_to_keep": kept} if keep else {}
        more |= {"use_cache": False} if cache is None else {"past_key_values": cache}
        with torch.no_grad():
            out = model(**inputs, **more)
        found.append(out.logits[:, -(kept or count) :].float())
        start += count
    return {"logits": torch.cat(found, 1), "pages": torch.tensor(pages_held(cache))}


def keep(subject: Subject, kind: str) -> Outcome:
    """A model whose attention stays as it is: pages are written out for it."""
    stock = kind in STOCK
    more = options(kind) if stock else options(kind, attention="keep")
    model = subject.of(kind) if stock else subject.kept
    return generated(model, subject.inputs(subject.text()), **more)


def chunked(subject: Subject, kind: str) -> Outcome:
    """A prompt that goes in chunks."""
    inputs = subject.inputs(subject.text())
    if kind == "none":
        return generated(subject.of(kind), inputs, **options(kind))
    return generated(subject.of(kind), inputs, prefill_chunk_size=40, **options(kind))


def two_turns(subject: Subject, kind: str) -> Outcome:
    """One cache for a text and for a longer one that begins with it."""
    first, more = subject.text(length=90), subject.text(length=30, seed=1)
    cache = {} if kind == "none" else {"past_key_values": new_cache(subject.of(kind), kind)}
    cache = cache or {"use_cache": False}
    one = generated(subject.of(kind), subject.inputs(first), 10, **cache)
    whole = torch.cat([one["tokens"], more], 1)
    two = generated(subject.of(kind), subject.inputs(whole), 10, **cache)
    return {"tokens": two["tokens"], "logits": torch.cat([one["logits"], two["logits"]], 1)}


class NotOffered(Exception):
    """The model has no such operation, whatever its cache."""


OPERATIONS: dict[str, Callable[[Subject, str], Outcome]] = {
    "keep": keep,
    "greedy": greedy,
    "padded": padded,
    "beams": beams,
    "lookup": lookup,
    "assisted": assisted,
    "forwards": forwards,
    "logits_to_keep": logits_to_keep,
    "chunked": chunked,
    "two_turns": two_turns,
    "after": after,
}
