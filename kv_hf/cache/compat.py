"""What differs between the transformers versions that the cache supports, each with where it was read."""

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


def is_dummy(layer: Any) -> bool:
    """Say whether a layer of a cache holds nothing; the class came after 5.17 (read in 5.23 cache_utils)."""
    return type(layer).__name__ == "DummyLayer"
