"""Read off what each layer of a cache holds."""

from collections.abc import Iterator
from typing import Any

import torch

from ..cache.compat import is_dummy
from ..cache.model_shape import decoder_config, kept_layers, latent_ranks
from ..errors import UnsupportedModelError
from ..field_names import HEADS, first
from .inventory import CachedLayer, State
from .meta_model import ROWS, TOKENS
from .tracing import Reads

# one vector per token beside keys and values: transformers' DynamicIndexedLayer, and MiniMax-M3's own
_INDEX_KEYS = ("indexer_keys", "idx_keys")
_INDEX_POSITIONS = "indexer_position_ids"
_LINEAR = "LinearAttentionLayer"
_STATES = ("conv_states", "recurrent_states")
# numbers of transformers' own, the same for every model and row
_COUNTERS = ("_sliding_window_tensor", "cumulative_length")


def read_cache(
    cache: Any, reads: Reads, config: Any, *, dtype: torch.dtype
) -> tuple[tuple[CachedLayer, ...], list[str]]:
    """Return the layers of a cache that `meta_model.run` filled, and notes about them.

    `dtype` is the model's: what has it is said to have the dtype of the cache.

    Raises: UnsupportedModelError where a layer holds things that an inventory cannot say.
    """
    own = decoder_config(config)
    ranks = latent_ranks(own, len(cache.layers))
    heads = first(own, HEADS) or 0
    linear = getattr(cache, "linear_cache", [])  # MiniMaxCache
    layers = []
    for index, layer in enumerate(cache.layers):
        at = f"layer {index} of its cache ({type(layer).__name__})"
        extra = linear[index : index + 1]
        _check(layer, at, dtype)
        layers.append(
            _read(
                layer,
                list(reads.modules.get(index, {}).values()),
                ranks[index],
                heads,
                dtype,
                extra,
            )
        )
    return tuple(layers), _notes(cache, layers, own)


def _read(
    layer: Any, readers: list[int], rank: int | None, heads: int, dtype: torch.dtype, linear: Any
) -> CachedLayer:
    name = type(layer).__name__
    if is_dummy(layer):
        return CachedLayer(cache_class=name)
    states = [tensor for _, tensor in _states(layer)]
    states += [tensor for tensor in linear if isinstance(tensor, torch.Tensor)]
    given: dict[str, Any] = {
        "cache_class": name,
        "states": tuple(State(tuple(t.shape[1:]), _dtype(t, dtype)) for t in states),
    }
    keys: Any = getattr(layer, "keys", None)
    values: Any = getattr(layer, "values", None)
    index = next(
        (getattr(layer, n) for n in _INDEX_KEYS if getattr(layer, n, None) is not None), None
    )
    if index is not None:
        given["index_dim"] = index.numel() // (ROWS * TOKENS)
        given["index_dtype"] = _dtype(index, dtype)
        positions: Any = getattr(layer, _INDEX_POSITIONS, None)
        given["index_positions"] = 0 if positions is None else positions.shape[0]
    if keys is None or keys.numel() == 0:
        return CachedLayer(**given)
    return CachedLayer(
        **given,
        kv_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        latent=rank is not None and keys.shape[1] == 1 and keys.shape[3] == rank,
        window=getattr(layer, "sliding_window", None),
        readers=max(1, len(readers)),
        query_heads=max(readers, default=heads),
    )


def _dtype(tensor: torch.Tensor, dtype: torch.dtype) -> str | None:
    return None if tensor.dtype == dtype else str(tensor.dtype).removeprefix("torch.")


def _states(layer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the states of a layer, each with its name."""
    for name in _STATES:
        held = getattr(layer, name, None)
        tensors = list(held.values()) if isinstance(held, dict) else [held]
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                yield name, tensor


def _check(layer: Any, at: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedModelError where a layer holds more than, or not what, a CachedLayer says."""
    known = {"keys", "values", *_STATES, *_INDEX_KEYS, _INDEX_POSITIONS, *_COUNTERS}
    for name, held in vars(layer).items():
        tensors = held.values() if isinstance(held, dict) else [held]
        if name not in known and any(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise UnsupportedModelError(f"{at} holds {name}, whose size a plan does not know")
    for name in ("keys", "values"):
        held = getattr(layer, name, None)
        if held is None or held.numel() == 0:
            continue
        if held.dim() != 4 or (held.shape[0], held.shape[2]) != (ROWS, TOKENS):
            raise UnsupportedModelError(
                f"{at} holds {name} of shape {list(held.shape)} for {ROWS} rows of {TOKENS} tokens; expected "
                f"[{ROWS}, heads, {TOKENS}, head_dim]"
            )
        if held.dtype != dtype:
            raise UnsupportedModelError(
                f"{at} holds {name} as {held.dtype}, whatever the model's dtype"
            )
    for name, tensor in _states(layer):
        if tensor.shape[0] != ROWS:
            raise UnsupportedModelError(
                f"{at} holds {name} of shape {list(tensor.shape)} for {ROWS} rows; rows were expected first"
            )


def _notes(cache: Any, layers: list[CachedLayer], config: Any) -> list[str]:
    notes = []
    linear = sum(layer == CachedLayer(cache_class=_LINEAR) for layer in layers)
    if linear:
        notes.append(
            f"{linear} layers keep their states in the model, not in its cache: not counted"
        )
    for reason in set(kept_layers(config).values()):
        notes.append(f"{len(kept_layers(config))} layers are not counted: {reason}")
    if type(cache).__name__ != "DynamicCache":
        notes.append(f"the model takes no cache but its own {type(cache).__name__}")
    return notes
