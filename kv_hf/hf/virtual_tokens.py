"""Prefix tuning: peft brings keys and values of virtual tokens as a cache of its own; they go into the pages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Cache

from ..cache.encoder_decoder import paged_halves
from ..cache.identity import virtual_owner
from ..errors import UnsupportedModelError


@contextmanager
def virtual_tokens_in_pages(model: Any, cache: Any) -> Iterator[None]:
    """Within this block, let `cache` take the virtual tokens that peft would put in its place.

    peft prepares the inputs of generate() in place of the model, and hands on a cache of virtual tokens where it finds
    an empty one.

    Args:
        cache: a PagedCache, or an EncoderDecoderCache with one.
    Raises: UnsupportedModelError for a preallocated cache, whose masks peft cannot lengthen.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is None or virtual_owner(model) is None:
        yield
        return
    if getattr(cache, "max_length", None) is not None:
        raise UnsupportedModelError(
            "peft puts no virtual tokens in front of prompts of a preallocated cache (it fails on the mask, with transformers' "
            "own preallocated caches too); leave max_length out of cache_config"
        )

    def with_pages(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        brought = inputs.get("past_key_values")
        if isinstance(brought, Cache) and brought is not cache:
            _move(getattr(brought, "self_attention_cache", brought), cache)
            inputs["past_key_values"] = cache
        return inputs

    model.prepare_inputs_for_generation = with_pages
    try:
        yield
    finally:
        model.prepare_inputs_for_generation = prepare


def _move(brought: Any, cache: Any) -> None:
    """Append the keys and values of `brought` to `cache` if it is empty. All are real: padding comes after them."""
    own, _ = paged_halves(cache)
    assert own is not None
    if own.get_seq_length():
        return
    for group in own.groups:
        group.forget_padding()
    for index, layer in enumerate(brought.layers):
        if layer.is_initialized:
            own.update(layer.keys, layer.values, index)
