"""Make the cache of a manager of continuous batching: formats from a few first tokens, room from its budget, and a trial."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from transformers.generation.continuous_batching.cache import get_device_and_memory_breakdown

from ..cache.layer_formats import warn_of_two_bits
from ..cache.layer_kinds import LatentLayer
from ..cache.model_shape import CACHE
from ..cache.paged_cache import PagedCache
from ..cache.prefix_store import PrefixStore
from ..cache.report import tensor_bytes
from ..cache.states import states_of_row
from ..config import CacheConfig
from ..errors import CacheOptionError, UnsupportedModelError
from ..hf.latent import passing_new_latents, prepare_latents
from ..hf.prefill import last_logit, why_not_from_states
from .batch_cache import BatchCache
from .batch_rows import BatchRoom, check_layers, kinds_of
from .batch_store import called, stateful

BATCH_TOKENS = 8192  # of a forward, where nobody says another number; as transformers


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
    layers: Any = template.paged_layers
    warn_of_two_bits([layer.formats for layer in layers])
    budget, pages = options.max_bytes, options.max_pages
    if pages is None and batching.num_blocks is not None:
        pages = -(-batching.num_blocks * batching.page_size // options.page_size)
    if budget is not None or None not in kinds:
        pages = None
    if budget is None and pages is None:
        # as transformers measures what is free
        _, total, reserved, allocated = get_device_and_memory_breakdown()
        budget = int((total - max(allocated, reserved)) * batching.max_memory_percent)
    most_rows = min(batching.max_requests_per_batch, batch_tokens)
    state_bytes = tensor_bytes(states_of_row(template.layers, 0))
    room = BatchRoom.of(kinds, state_bytes, most_rows, batch_tokens, budget or 0, pages)
    if store is not None and options.prefix_store is None:
        store.max_bytes = max(1, room.pages[None] * kinds[None].page_bytes)
    cache = BatchCache(model, template, room, store)
    template.reset()
    with torch.no_grad():
        try_model(model, cache)
    if cache.device.type != "cpu":  # forwards to come run on a stream of their own
        torch.get_device_module(cache.device).synchronize(cache.device)
    return cache


def template_of(model: Any, options: CacheConfig, store: PrefixStore | None = None) -> PagedCache:
    """Return an empty paged cache of `options` without the bounds of a batch, with pages in `store` where one is given.

    Raises: UnsupportedModelError for layers or latents that continuous batching cannot have as `options` ask for.
    """
    plain = replace(options, max_pages=None, max_bytes=None, cuda_graph="never", prefix_store=store)
    cache = PagedCache.from_options(model.config.get_text_config(decoder=True), plain)
    check_layers(cache)
    if any(isinstance(layer, LatentLayer) for layer in cache.layers):
        prepare_latents(model, options)
    return cache


def why_not_shared(template: PagedCache) -> str | None:
    """Return the layers of a model whose requests can share no pages in batches, None where there are none."""
    if any(layer.window is not None for layer in template.paged_layers):
        return "sliding windows"
    return "states" if stateful(template.layers) else None


def _probed(
    model: Any, options: CacheConfig, batching: Any
) -> tuple[PagedCache, PrefixStore | None]:
    """Return a paged cache that tokens for two pages have gone through, and the prefix store, if there shall be one."""
    store = options.prefix_store
    config = model.config.get_text_config(decoder=True)
    cache = template_of(model, options)
    if store is not None and not batching.allow_block_sharing:
        raise CacheOptionError(
            "prefix_store shares pages between requests, and allow_block_sharing=False; leave one of them out"
        )
    if batching.allow_block_sharing and why_not_shared(cache) is None:
        store = PrefixStore() if store is None else store
        cache = template_of(model, options, store)
    count = options.sink_tokens + options.recent_tokens + 2 * options.page_size + 1
    count = min(count, getattr(config, "max_position_embeddings", None) or count)
    tokens = torch.arange(count, device=model.device)[None] * 7919 % config.vocab_size
    with torch.no_grad():
        model(input_ids=tokens, **{CACHE: cache}, use_cache=True, **last_logit(model))
        reason = why_not_from_states(model, cache) if stateful(cache.layers) else None
    if reason is not None:
        raise UnsupportedModelError(
            f"continuous batching computes long prompts in several forwards. {reason}; use generate()"
        )
    return cache, store


# -- the trial of a model before it serves -----------------------------------------------------------------------------

_TEXTS = ([1, 4, 2, 5, 3], [3, 5, 1, 2])  # tokens of two requests
# of the logits' standard deviation, root mean square: attention that mixes two requests up is off by 0.5 and more
_MOST = {torch.float64: 0.01, torch.float32: 0.02}
_MOST_OTHERS = 0.2  # half precision rounds in another order


def try_model(model: Any, cache: BatchCache) -> None:
    """Run two small requests through `cache` together, and compare with each alone; the cache is empty again afterwards.

    Raises: UnsupportedModelError where an attention layer did not get the cache, or requests influence each other.
    """
    name = type(model).__name__
    most = model.config.get_text_config(decoder=True).vocab_size - 1
    texts = [[min(token, most) for token in text] for text in _TEXTS[: cache.room.rows]]
    for text in texts:
        request = cache.request(f"trial {len(cache.requests)}")
        cache.admit(request)
        cache.extend_read_and_write_indices(request.name, 0, len(text))
    together = failed = None
    ends = torch.tensor([*itertools.accumulate(map(len, texts))], device=model.device) - 1
    try:
        cache.begin()
        row = _row(model, itertools.chain(*texts))
        with passing_new_latents():
            together = called(model, cache)(
                input_ids=row,
                position_ids=_row(model, itertools.chain(*map(range, map(len, texts)))),
                attention_mask=row.new_zeros((1, 1, row.shape[1], 0), dtype=torch.bool),
                logits_indices=ends,
                use_cache=False,
                cache=cache,
                paged_batch=cache,
            ).logits[0]
    except UnsupportedModelError:
        raise
    except Exception as raised:
        failed = raised
    finally:
        cache.keep_lenders()
        cache.free_all_requests()
    missing = sorted(set(cache.stores) - cache.layers_reached)
    if missing:
        raise UnsupportedModelError(
            f"{name} does not hand continuous batching's cache down to its attention (layers {missing} did not get it), so that "
            "requests would not find their own tokens; use generate()"
        ) from failed
    if failed is not None:
        raise UnsupportedModelError(
            f"{name} cannot take the tokens of several requests in one row, as continuous batching passes them: "
            f"{type(failed).__name__}: {failed}"
        ) from failed
    assert together is not None
    together = together if cache.states else together[ends]
    alone = torch.cat(
        [model(input_ids=_row(model, text), use_cache=False).logits[0, -1:] for text in texts]
    )
    error = (together - alone).float().square().mean().sqrt()
    far = float(error / alone.float().std().clamp(min=1e-6))
    if not far <= _MOST.get(model.dtype, _MOST_OTHERS):
        raise UnsupportedModelError(
            f"{name} computes other numbers for two requests in one row than for each alone (logits differ by {far:.2g} of their "
            "standard deviation): its attention or its positions take the row for one text. Use generate()"
        )


def _row(model: Any, numbers: Iterable[int]) -> torch.Tensor:
    """Return [1, n], int64, on the model's device."""
    return torch.tensor([list(numbers)], device=model.device)
