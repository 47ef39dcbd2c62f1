"""generate() knows how long the text will be: on a GPU, where growing storage is dear, the cache is told."""

from typing import Any

import torch

from ..cache.model_shape import is_encoder_decoder
from ..cache.paged_cache import PagedCache
from .devices import execution_devices


def growth_is_dear(model: torch.nn.Module) -> bool:
    """Say whether growing storage takes calls to a driver; on a CPU the C library gives back what was freed."""
    return any(device.type != "cpu" for device in execution_devices(model))


def expect_length(
    model: Any,
    cache: PagedCache,
    model_kwargs: dict[str, Any],
    generation_config: Any,
    max_cache_length: int,
) -> None:
    """Tell `cache` the columns of the prompt and of the whole text, where it grows on a GPU.

    Args:
        max_cache_length: as transformers hands it to _prepare_cache_for_generation (5.17 to 5.23): the length of input
            and new tokens, less the last one.
    """
    if getattr(generation_config, "is_assistant", False) or not growth_is_dear(model):
        return
    new = generation_config.max_new_tokens
    given = 0 if new is None else max(0, max_cache_length + 1 - new)
    masked = 0 if is_encoder_decoder(model.config) else _masked(model_kwargs, generation_config)
    # new tokens behind a cache come with the mask of the whole text
    behind = 0 if new is None else max(0, masked - given)
    cache.expect_length(max_cache_length + behind, max(given, masked))


def _masked(model_kwargs: dict[str, Any], generation_config: Any) -> int:
    """Return the columns of the mask, 0 where none is known; transformers notes those of one that hides nothing."""
    mask = model_kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor):
        return int(mask.shape[1]) if mask.ndim == 2 else 0
    return max(0, getattr(generation_config, "_mask_length", 0))
