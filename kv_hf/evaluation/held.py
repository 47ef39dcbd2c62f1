"""The bytes that a cache holds for a text, as a model of a given dtype would fill it. Runs no model.

Distances are measured in fp32, where rounding of the model itself does not blur them; people serve in bf16. So the
bytes come from a twin: the same cache, filled with random keys and values in the serving dtype by the same schedule.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from .cache_kinds import CacheKind, cache_kind, held_bytes
from .teacher_forcing import next_chunk

# [kv heads, key dim, value dim] of a layer, or None for a layer that holds no keys and values
LayerShape = tuple[int, int, int] | None


@dataclass(frozen=True)
class Held:
    """The bytes of one row of `tokens` tokens.

    Attributes:
        bytes, bytes_exact: everything that the cache holds (scales, tails and tables too), and DynamicCache.
        bytes_per_token: bytes / tokens.
        stored_bits: bits per number, everything counted: those of the exact dtype times bytes / bytes_exact.
    """

    tokens: int
    bytes: int
    bytes_exact: int
    bytes_per_token: float
    stored_bits: float
    bytes_dtype: str

    def row(self) -> dict[str, Any]:
        """Return the fields as rows of results/ have them, the tokens left out."""
        return {name: value for name, value in asdict(self).items() if name != "tokens"}


def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """Return the shape of every layer's keys and values, found by one forward over two tokens."""
    cache = DynamicCache(config=model.config)
    ids = torch.zeros(1, 2, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    shapes: list[LayerShape] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or not keys.numel():
            shapes.append(None)
        else:
            shapes.append((keys.shape[1], keys.shape[-1], values.shape[-1]))
    return shapes


def measure_held(
    config: Any,
    shapes: Sequence[LayerShape],
    kind: CacheKind,
    tokens: int,
    prompt_tokens: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Held:
    """Return the bytes of a cache behind a prompt of `prompt_tokens` and decoding up to `tokens`.

    Args:
        config: the model's config.
        shapes: of every layer, see `layer_shapes`.
        kind: the cache.
    """
    size = held_bytes(_filled(config, shapes, kind, tokens, prompt_tokens, dtype))
    exact = held_bytes(_filled(config, shapes, cache_kind("dynamic"), tokens, prompt_tokens, dtype))
    return Held(
        tokens=tokens,
        bytes=size,
        bytes_exact=exact,
        bytes_per_token=size / tokens,
        stored_bits=8 * dtype.itemsize * size / exact,
        bytes_dtype=str(dtype).removeprefix("torch."),
    )


def _filled(
    config: Any,
    shapes: Sequence[LayerShape],
    kind: CacheKind,
    tokens: int,
    prompt_tokens: int,
    dtype: torch.dtype,
) -> Cache:
    cache: Cache = kind.make(config, tokens)
    generator = torch.Generator().manual_seed(0)
    position = 0
    while position < tokens:
        chunk = prompt_tokens if position == 0 else next_chunk(cache, position)
        end = min(tokens, position + chunk)
        for layer_idx, shape in enumerate(shapes):
            if shape is None:
                continue
            heads, *dims = shape
            states = [
                torch.randn(1, heads, end - position, dim, generator=generator).to(dtype)
                for dim in dims
            ]
            cache.update(states[0], states[1], layer_idx)
        position = end
    return cache
