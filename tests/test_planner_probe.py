"""The planner's probe against real models: what a DynamicCache holds after a real forward, byte for byte."""

import copy
import inspect
import json
import math

import planned_models
import pytest
import tiny_latent
import tiny_models
import torch
from tiny_models import tokens
from transformers import DynamicCache

from kv_hf.planner.inventory import Inventory
from kv_hf.planner.meta_model import model_kind
from kv_hf.planner.probe import probe

ROWS, PROMPT = 3, 9
PLAIN = [("plain", family) for family in tiny_models.FAMILIES]
LATENT = [("latent", family) for family in tiny_latent.FAMILIES]
OTHER = [("other", family) for family in planned_models.ALL]
MAKERS = {"plain": tiny_models, "latent": tiny_latent, "other": planned_models}
COUNTERS = ("_sliding_window_tensor",)


def config_of(kind, family):
    if kind != "plain" and not MAKERS[kind].is_there(family):
        pytest.skip(f"this transformers has no {family}")
    return MAKERS[kind].make_config(family)


def look(config, **options):
    return probe(config, **{"name": "tiny", "source": "a test", "dtype": "bfloat16", **options})


def real_model(config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return model_kind(config).from_config(copy.deepcopy(config), dtype=dtype).eval()


def real_cache(model):
    """Return the cache after a prompt of 9 tokens and one more, in 3 rows."""
    takes = inspect.signature(model.forward).parameters
    name = "past_key_values" if "past_key_values" in takes else "cache_params"
    cache = DynamicCache(config=model.config)
    if model.config.model_type == "minimax":
        cache = None
    ids = tokens(ROWS, PROMPT + 1)
    with torch.no_grad():
        for part in (ids[:, :PROMPT], ids[:, PROMPT:]):
            cache = getattr(model(input_ids=part, use_cache=True, **{name: cache}), name)
    return cache


def held(layer):
    """Return name -> tensor of everything that a layer of a cache holds."""
    found = {}
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and name not in COUNTERS:
            found[name] = value
        elif isinstance(value, dict):
            found |= {
                f"{name}.{key}": part
                for key, part in value.items()
                if isinstance(part, torch.Tensor)
            }
    return found


def planned_bytes(layer, rows, count, dtype):
    """Return the bytes of a CachedLayer in a DynamicCache that holds `count` tokens of each row."""
    index = dtype if layer.index_dtype is None else getattr(torch, layer.index_dtype)
    kept = count if layer.window is None else min(count, layer.window - 1)
    per_row = kept * layer.elements * dtype.itemsize + count * layer.index_dim * index.itemsize
    per_row += count * layer.index_positions * torch.long.itemsize
    return rows * (per_row + sum(state.nbytes(dtype) for state in layer.states))


def check_layer(planned, layer, count, dtype, linear=None):
    assert planned.cache_class == type(layer).__name__
    tensors = held(layer) | ({} if linear is None else {"linear": linear})
    assert planned_bytes(planned, ROWS, count, dtype) == sum(t.nbytes for t in tensors.values())
    assert planned.window == getattr(layer, "sliding_window", None) or not planned.elements
    if planned.elements:
        kept = layer.keys.shape[2]
        assert layer.keys.shape == (ROWS, planned.kv_heads, kept, planned.key_dim)
        assert layer.values.shape == (ROWS, planned.kv_heads, kept, planned.value_dim)
    else:
        assert layer.__dict__.get("keys") is None
    states = [t for name, t in tensors.items() if name.split(".")[0] not in ("keys", "values")]
    states = [t for t in states if math.prod(t.shape[1:]) and not planned.index_dim]
    assert [(s.shape, s.dtype or "bfloat16") for s in planned.states] == [
        (tuple(t.shape[1:]), str(t.dtype)[6:]) for t in states
    ]


@pytest.mark.parametrize(("kind", "family"), PLAIN + LATENT + OTHER)
def test_probe_equals_a_real_cache(kind, family):
    config = config_of(kind, family)
    planned = look(config)
    assert planned.how == "meta"
    model = real_model(config)
    cache = real_cache(model)
    assert planned.parameters == sum(p.numel() for p in model.parameters())
    linear = getattr(cache, "linear_cache", [])
    assert len(planned.layers) == len(cache)
    for index, layer in enumerate(cache.layers):
        state = linear[index] if index < len(linear) and len(linear[index]) else None
        check_layer(planned.layers[index], layer, PROMPT + 1, torch.bfloat16, state)
    assert Inventory.from_dict(json.loads(json.dumps(planned.as_dict()))) == planned
