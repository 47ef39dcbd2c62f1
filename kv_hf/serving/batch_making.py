"""Make the cache of a manager of continuous batching: formats from a few first tokens, room from its budget."""

from typing import Any

import torch
from transformers.generation.continuous_batching import requests as batching_requests
from transformers.generation.continuous_batching import utils as batching_utils

from ..cache.layer_formats import warn_of_two_bits
from ..cache.paged_cache import PagedCache
from ..cache.prefix_store import PrefixStore
from ..config import CacheConfig, given_options
from ..errors import CacheOptionError
from ..hf.prefix import last_logit
from .batch_cache import BatchCache
from .batch_layers import check_layers, kinds_of, paged_layers
from .batch_room import BatchRoom
from .batch_trial import try_model

BATCH_TOKENS = 8192  # of a forward, where nobody says another number; as transformers
_MEASURE = "get_device_and_memory_breakdown"


def new_cache(model: Any, options: CacheConfig, batching: Any) -> BatchCache:
    """Make the cache of a manager: pages and windows for as many requests as its budget has room for.

    Tokens for two pages go through the model first, so that every layer's keys and values are known as they are: a layer whose
    formats would be too narrow gets wider ones at once.

    Args:
        batching: the resolved ContinuousBatchingConfig.
    Raises: UnsupportedModelError, CacheOptionError; nothing is allocated then.
    """
    template, store = _probed(model, options, batching)
    kinds = kinds_of(template)
    batch_tokens = batching.max_batch_tokens or BATCH_TOKENS
    warn_of_two_bits([layer.formats for layer in paged_layers(template)])
    numbers: dict[str, Any] = {
        "most_rows": min(batching.max_requests_per_batch, batch_tokens),
        "batch_tokens": batch_tokens,
    }
    if options.max_bytes is not None:
        room = BatchRoom.of(kinds, budget=options.max_bytes, **numbers)
    elif None in kinds and options.max_pages is not None:
        room = BatchRoom.of(kinds, pages=options.max_pages, **numbers)
    elif None in kinds and batching.num_blocks is not None:
        tokens = batching.num_blocks * batching.page_size
        room = BatchRoom.of(kinds, pages=-(-tokens // options.page_size), **numbers)
    else:
        room = BatchRoom.of(kinds, budget=_free_bytes(batching.max_memory_percent), **numbers)
    if store is not None and options.prefix_store is None:
        store.max_bytes = max(1, room.pages[None] * kinds[None].page_bytes)
    cache = BatchCache(model, template, room, batch_tokens, store)
    template.reset()
    with torch.no_grad():
        try_model(model, cache)
    if cache.device.type != "cpu":  # forwards to come run on a stream of their own
        torch.get_device_module(cache.device).synchronize(cache.device)
    return cache


def _probed(
    model: Any, options: CacheConfig, batching: Any
) -> tuple[PagedCache, PrefixStore | None]:
    """Return a paged cache that a few tokens have gone through, and the prefix store, if there shall be one."""
    plain = given_options(options)
    for name in ("max_pages", "max_bytes", "prefix_store"):
        plain.pop(name, None)
    plain["cuda_graph"] = "never"
    alone = CacheConfig(**plain)
    empty = _empty(model, alone)
    check_layers(empty)
    sliding = any(getattr(layer, "window", None) is not None for layer in empty.layers)
    if sliding or not batching.allow_block_sharing:
        if options.prefix_store is not None:
            why = "this model has sliding-window layers" if sliding else "allow_block_sharing=False"
            raise CacheOptionError(
                f"prefix_store shares pages between requests, and {why}; leave one of them out"
            )
        return _through(model, alone), None
    store = options.prefix_store or PrefixStore()
    return _through(model, CacheConfig(**plain, prefix_store=store)), store


def _empty(model: Any, options: CacheConfig) -> PagedCache:
    return PagedCache.from_options(model.config.get_text_config(decoder=True), options)


def _through(model: Any, options: CacheConfig) -> PagedCache:
    """Return a cache of these options that tokens for two pages have gone through: layers with keys too large are then wider."""
    cache = _empty(model, options)
    config = model.config.get_text_config(decoder=True)
    count = options.sink_tokens + options.recent_tokens + 2 * options.page_size + 1
    count = min(count, getattr(config, "max_position_embeddings", None) or count)
    tokens = torch.arange(count, device=model.device)[None] * 7919 % config.vocab_size
    with torch.no_grad():
        model(input_ids=tokens, past_key_values=cache, use_cache=True, **last_logit(model))
    return cache


def _free_bytes(part: float) -> int:
    """Return `part` of the memory that is free on the device, as transformers measures it."""
    modules = vars(batching_requests), vars(batching_utils)  # 5.21 moved it
    measure = modules[1].get(_MEASURE) or modules[0][_MEASURE]
    _, total, reserved, allocated = measure()
    return int((total - max(allocated, reserved)) * part)
