"""Differences between the transformers versions that the cache supports, each with the place where it was read."""

from typing import Any

import transformers
from packaging.version import Version

MINIMUM = "5.17.0"
VERSION = Version(transformers.__version__)

if Version(MINIMUM) > VERSION:
    raise ImportError(
        f"kv_hf needs transformers {MINIMUM} or newer, found {transformers.__version__}"
    )

# 5.17 cache_utils: crop(n > 0) means "keep n tokens"; from 5.18 on a positive number raises
CROP_TAKES_LENGTHS = Version("5.18.0.dev0") > VERSION

# 5.17 generation/utils.py: _prefill counts the columns of its chunks from 0, whatever the cache holds (5.23: from there on)
CHUNKS_BEHIND_A_CACHE = Version("5.23.0.dev0") <= VERSION

# 5.17 modeling_deepseek_v32.py and its kin: models with sparse attention cache expanded keys; 5.23: latents, as all others
SPARSE_MODELS_CACHE_LATENTS = Version("5.18.0.dev0") <= VERSION


def removed_by_crop(tokens_to_remove: int, seen: int) -> int:
    """Return how many of the newest tokens `crop(tokens_to_remove)` removes of `seen`: n for -n.

    Before 5.18 a positive number says how many are kept instead. Raises ValueError for one from there on.
    """
    count = int(tokens_to_remove)
    if count <= 0:
        return -count
    if not CROP_TAKES_LENGTHS:
        raise ValueError(
            f"tokens_to_remove must be 0 or negative (-n removes the last n tokens), got {count}"
        )
    return max(0, seen - count)


def forget_tokens(layer: Any) -> None:
    """Drop the tensors of a DynamicLayer of transformers that was reset.

    5.17 zeroes them, so that the next update would append to zeros (cache_utils, DynamicLayer.reset).
    """
    layer.keys = layer.values = None
    layer.is_initialized = False


def is_dummy(layer: Any) -> bool:
    """Say whether a layer of a cache holds nothing; the class came after 5.17 (read in 5.23 cache_utils)."""
    return type(layer).__name__ == "DummyLayer"
