"""An Inventory read from a DynamicCache that a model has filled."""

import torch

from kv_hf.cache.model_shape import latent_ranks
from kv_hf.planner.inventory import CachedLayer, Inventory, State


def inventory_of(model, cache):
    config = model.config.get_text_config(decoder=True)
    dtype = str(model.dtype).removeprefix("torch.")
    ranks = latent_ranks(config, len(cache.layers))
    return Inventory(
        name="tiny",
        model_type=config.model_type,
        dtype=dtype,
        layers=tuple(
            layer_of(layer, rank, model.dtype)
            for layer, rank in zip(cache.layers, ranks, strict=True)
        ),
    )


def layer_of(layer, rank, dtype):
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    index = getattr(layer, "indexer_keys", getattr(layer, "idx_keys", None))
    positions = getattr(layer, "indexer_position_ids", None)
    found = {}
    if keys is not None:
        found = {
            "kv_heads": keys.shape[1],
            "key_dim": keys.shape[-1],
            "value_dim": values.shape[-1],
            "latent": rank is not None and keys.shape[1] == 1 and keys.shape[-1] == rank,
        }
    return CachedLayer(
        cache_class=type(layer).__name__,
        window=getattr(layer, "sliding_window", None),
        index_dim=0
        if index is None
        else index.shape[-1] * (index.shape[1] if index.ndim == 4 else 1),
        index_dtype=None if index is None else named(index.dtype, dtype),
        index_positions=0 if positions is None else len(positions),
        states=states_of(layer, dtype),
        **found,
    )


def states_of(layer, dtype):
    kinds = (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
    return tuple(
        State(
            tuple(state.shape[1:]),
            named(state.dtype, dtype),
        )
        for kind in kinds
        for state in kind.values()
        if isinstance(state, torch.Tensor)
    )


def named(own, dtype):
    return None if own == dtype else str(own).removeprefix("torch.")
