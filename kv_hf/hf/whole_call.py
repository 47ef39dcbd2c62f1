"""One call of generate() as a whole: what is said while it streams waits, and the tokens that it made are noted."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ..cache.encoder_decoder import paged_halves
from ..notices import held_back


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
    result = original(model, *args, **kwargs)
    made = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
    given = kwargs.get("past_key_values")
    cache = getattr(result, "past_key_values", None) if given is None else given
    own, _ = paged_halves(cache)
    if own is not None:
        # what code of others made of a text is not taken for what it is
        told = None if kwargs.get("custom_generate") is not None else made
        held = 0 if own.token_ids is None else int(own.get_seq_length())  # may wait for the device
        own.note_generated(told, held)
    return result
