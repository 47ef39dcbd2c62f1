"""Give a config another number of key/value heads: what a model would cache with fewer of them."""

import copy
from collections.abc import Mapping
from typing import Any

from ..cache.model_shape import decoder_config, latent_rank
from ..errors import PlanError
from ..field_names import HEADS, KV_HEADS, first, read
from .fields import TEXT_PARTS


def replace_kv_heads(config: Any, kv_heads: int, name: str) -> Any:
    """Return a copy of a transformers config with `kv_heads` key/value heads in its decoder.

    Raises: PlanError where they do not divide the query heads, or the config has no number of them.
    """
    own = copy.deepcopy(config)
    text = decoder_config(own)
    if latent_rank(text) is not None:
        raise PlanError(f"kv_heads={kv_heads}: {name} caches latents (MLA), which have no heads")
    key = next((key for key in KV_HEADS if read(text, key) is not None), None)
    _check(kv_heads, first(text, HEADS), key, name)
    assert key is not None
    setattr(text, key, kv_heads)
    return own


def replace_named_kv_heads(config: Mapping[str, Any], kv_heads: int, name: str) -> dict[str, Any]:
    """Return a copy of a config.json with `kv_heads` key/value heads in its language model. Raises as above."""
    own = copy.deepcopy(dict(config))
    text = next((own[key] for key in TEXT_PARTS if isinstance(own.get(key), dict)), own)
    if text.get("kv_lora_rank"):
        raise PlanError(f"kv_heads={kv_heads}: {name} caches latents (MLA), which have no heads")
    key = next((key for key in KV_HEADS if isinstance(text.get(key), int)), KV_HEADS[0])
    _check(kv_heads, first(text, HEADS), key, name)
    text[key] = kv_heads
    return own


def _check(kv_heads: int, heads: int | None, key: str | None, name: str) -> None:
    if heads is None or key is None:
        raise PlanError(
            f"kv_heads={kv_heads}: the config of {name} has no number of key/value heads to replace"
        )
    if (
        isinstance(kv_heads, bool)
        or not isinstance(kv_heads, int)
        or kv_heads < 1
        or heads % kv_heads
    ):
        divisors = ", ".join(str(count) for count in range(1, heads + 1) if not heads % count)
        raise PlanError(
            f"kv_heads must divide the {heads} query heads of {name} ({divisors}), got {kv_heads!r}"
        )
