"""One call of generate() as a whole: what is said while it streams waits, and the tokens that it made are noted and kept."""

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from ..bridge.masks import within_generate
from ..notices import held_back
from .asked import with_hint

# of the call that runs: caches that it fills, the columns in front of its text, and whether a store keeps its answer
_filled: ContextVar[list[tuple[Any, int, bool]] | None] = ContextVar("kv_hf_filled", default=None)


def note_at_end(cache: Any, columns_in_front: int, kept: bool = False) -> None:
    """Have the call of generate() that runs now note the tokens that it makes in `cache`.

    Args:
        columns_in_front: of the text that the call is given.
        kept: whether the tokens go into the cache's store too.
    """
    filled = _filled.get()
    if filled is not None:
        filled.append((cache, columns_in_front, kept))


def around_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap GenerationMixin.generate."""
    place = list(inspect.signature(original).parameters).index("streamer") - 1

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        streamer = args[place] if len(args) > place else kwargs.get("streamer")
        filled: list[tuple[Any, int, bool]] = []
        before = _filled.set(filled)
        try:
            with nullcontext() if streamer is None else held_back(), within_generate():
                result = original(self, *args, **kwargs)
        except ValueError as error:
            told = with_hint(error)
            if told is error:
                raise
            raise told from error
        finally:
            _filled.reset(before)
        made = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
        # what code of others made of a text is not taken for what it is
        if isinstance(made, torch.Tensor) and kwargs.get("custom_generate") is None:
            for cache, front, kept in filled:
                if made.ndim == 2 and made.shape[0] == cache.num_rows:
                    cache.note_text(made, front, cache.get_seq_length())
                    if kept:
                        _keep(cache)
        return result

    return generate


def _keep(cache: Any) -> None:
    """Add the text that a cache holds to its store, where all of it is known."""
    seen = cache.get_seq_length()
    if cache.known_columns == seen:
        rows = zip(cache.token_ids[:, :seen].tolist(), cache.held_rows(), strict=True)
        cache.prefix_store.add(cache, [ids[seen - held.tokens :] for ids, held in rows])
