"""Prefix tuning: peft brings keys and values of virtual tokens as a cache of its own; they go into the pages."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Cache

from ..cache.adapters import virtual_owner
from ..cache.paged_cache import PagedCache
from ..cache.static_cache import StaticPagedCache
from ..errors import UnsupportedModelError


@contextmanager
def virtual_tokens_in_pages(model: Any, cache: PagedCache) -> Iterator[None]:
    """Within this block, let `cache` take the virtual tokens that peft would put in its place.

    peft prepares the inputs of generate() in place of the model, and hands on a cache of virtual tokens where it finds
    an empty one.

    Raises: UnsupportedModelError for a preallocated cache, from within the block.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is None or virtual_owner(model) is None:
        yield
        return

    def with_pages(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        brought = inputs.get("past_key_values")
        if isinstance(brought, Cache) and brought is not cache:
            _move(brought, cache)
            inputs["past_key_values"] = cache
        return inputs

    model.prepare_inputs_for_generation = with_pages
    try:
        yield
    finally:
        model.prepare_inputs_for_generation = prepare


def _move(brought: Any, cache: PagedCache) -> None:
    """Append the keys and values of `brought` to the empty `cache`. All of them are real: padding comes behind them."""
    if isinstance(cache, StaticPagedCache):
        raise UnsupportedModelError(
            "virtual tokens of prefix tuning do not go into a preallocated cache; leave max_length out of cache_config"
        )
    for group in cache.groups:
        group.forget_padding()
    for index, layer in enumerate(brought.layers):
        if layer.is_initialized:
            cache.update(layer.keys, layer.values, index)
