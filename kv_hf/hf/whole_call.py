"""One call of generate() as a whole: what is said while it streams waits, and the tokens that it made are noted and kept."""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from ..bridge.masks import within_generate
from ..cache.paged_cache import paged_halves
from ..notices import held_back
from .asked import with_hint


@dataclass(frozen=True)
class Answer:
    """A cache whose generated tokens its prefix store is to keep when the call ends.

    Attributes:
        cache: a PagedCache that began empty in this call.
        padding: columns of left padding of each row.
    """

    cache: Any
    padding: Sequence[int]


_answers: ContextVar[list[Answer] | None] = ContextVar("kv_hf_answers", default=None)


def expect_answer(answer: Answer) -> None:
    """Have the call of generate() that runs now add the tokens that it makes to the store of `answer.cache`."""
    expected = _answers.get()
    if expected is not None:
        expected.append(answer)


def around_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap GenerationMixin.generate."""
    place = list(inspect.signature(original).parameters).index("streamer") - 1

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        streamer = args[place] if len(args) > place else kwargs.get("streamer")
        if streamer is None:
            return _generate(original, self, *args, **kwargs)
        with held_back():
            return _generate(original, self, *args, **kwargs)

    return generate


def _generate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    expected: list[Answer] = []
    before = _answers.set(expected)
    try:
        with within_generate():
            result = original(model, *args, **kwargs)
    except ValueError as error:
        told = with_hint(error)
        if told is error:
            raise
        raise told from error
    finally:
        _answers.reset(before)
    made = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
    given = kwargs.get("past_key_values")
    cache = getattr(result, "past_key_values", None) if given is None else given
    own, _ = paged_halves(cache)
    # what code of others made of a text is not taken for what it is
    known = None if kwargs.get("custom_generate") is not None else made
    if own is not None:
        _note(own, known)
    for answer in expected:
        if answer.cache is not own:
            _note(answer.cache, known)
        _keep(answer)
    return result


def _note(cache: Any, made: torch.Tensor | None) -> None:
    held = 0 if cache.token_ids is None else int(cache.get_seq_length())  # may wait for the device
    cache.note_generated(made, held)


def _keep(answer: Answer) -> None:
    """Add the text that a cache holds to its store, as far as it is known."""
    cache = answer.cache
    if cache.token_ids is None or cache.known_columns < cache.get_seq_length():
        return
    rows = cache.token_ids[:, : cache.known_columns].tolist()
    cache.prefix_store.add(
        cache, [row[start:] for row, start in zip(rows, answer.padding, strict=True)]
    )
