"""Bytes of every kind of cache, before there is a model: equal to what the cache then allocates."""

from collections.abc import Sequence

import torch

from ..checks import check_choice, check_int
from ..config import CacheConfig
from ..errors import CacheOptionError
from ..spec import LANES, ROWS, MemoryReport
from .figures import Figures
from .growing import growing
from .inventory import Inventory
from .offloaded import offloaded
from .paged import paged
from .preallocated import preallocated
from .static_pages import static_pages

CACHES = ("dynamic", "static", "paged")


def predict(
    inventory: Inventory,
    cache: str,
    options: CacheConfig | None = None,
    *,
    row_tokens: Sequence[int],
    prompt: int | None = None,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
    layout: str = ROWS,
) -> MemoryReport:
    """Return the bytes that a cache takes whose rows hold `row_tokens` tokens.

    Args:
        inventory: what the model caches.
        cache: "dynamic" or "static" (transformers' DynamicCache and StaticCache: `payload` are keys and values, `other`
            states, indexer keys and counters), or "paged".
        options: of "paged"; None takes the defaults.
        row_tokens: real tokens that the cache holds of each row; shorter rows are padded on the left to the longest.
            Behind generate() that is the prompt's tokens and all new ones but the last.
        prompt: tokens of the longest row that came in the first forward, the others one by one. It decides how many
            pages a sliding window had in use at once, the room of indexer keys, and what an offload has moved. None: the
            most that any prompt leads to, which never falls as rows grow. Where none of these is there the prompt changes
            nothing (beyond 256 pages it may, by less than 1/128, with reserve_tokens). With offload None is a prompt of
            all tokens but the last. A "dynamic" cache has bytes behind a decode step, unless the prompt is all there is:
            right behind a prefill its sliding layers keep the whole prompt alive.
        max_length: columns of a "static" cache; None: as many as the longest row has tokens.
        dtype: of keys and values; None takes the inventory's.
        layout: of pages: ROWS on a GPU, LANES on a CPU. The bytes are the same, but for the buffers of an offload.
    Raises: CacheOptionError, UnsupportedModelError, PagePoolExhaustedError, DeviceBudgetError: what the cache would raise,
        and for what cannot be known without the texts (prefix_store).
    """
    return figures(
        inventory,
        cache,
        options,
        row_tokens=row_tokens,
        prompt=prompt,
        max_length=max_length,
        dtype=dtype,
        layout=layout,
    ).report


def figures(
    inventory: Inventory,
    cache: str,
    options: CacheConfig | None = None,
    *,
    row_tokens: Sequence[int],
    prompt: int | None = None,
    max_length: int | None = None,
    dtype: torch.dtype | None = None,
    layout: str = ROWS,
) -> Figures:
    """Return `predict` of the same arguments, and how many of its bytes hold no token (`waste`)."""
    check_choice("cache", cache, CACHES)
    check_choice("layout", layout, (ROWS, LANES))
    for tokens in set(row_tokens):
        check_int("row_tokens", tokens, 0)
    longest = max(row_tokens, default=0)
    if prompt is not None:
        check_int("prompt", prompt, 1)
        if prompt > longest:
            raise CacheOptionError(
                f"prompt={prompt} is more than the longest row of row_tokens holds, {longest}"
            )
    _check_kind(cache, options, max_length)
    kind = inventory.torch_dtype if dtype is None else dtype
    if cache == "dynamic":
        return growing(inventory, row_tokens, prompt, kind)
    if cache == "static":
        return preallocated(inventory, row_tokens, max_length, kind)
    chosen = CacheConfig() if options is None else options
    if chosen.max_length is not None:
        return static_pages(inventory, chosen, row_tokens, kind, layout)
    if chosen.offload is not None:
        return offloaded(inventory, chosen, row_tokens, prompt, kind, layout)
    return paged(inventory, chosen, row_tokens, prompt, kind, layout)


def _check_kind(cache: str, options: CacheConfig | None, max_length: int | None) -> None:
    """Raise CacheOptionError for an argument that this kind of cache does not read."""
    if cache != "paged" and options is not None:
        raise CacheOptionError(f"options are those of a paged cache, got cache={cache!r}")
    if cache != "static" and max_length is not None:
        raise CacheOptionError(
            f"max_length={max_length} is of cache='static'; for pages give CacheConfig(max_length={max_length})"
        )
    if max_length is not None:
        check_int("max_length", max_length, 1)
