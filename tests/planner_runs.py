"""Real caches after real generation beside what the planner says of them."""

import torch
from inventory_of_cache import inventory_of
from tiny_models import left_padded
from transformers import DynamicCache, StaticCache

import kv_hf
from kv_hf.evaluation.caches import PARTS, cache_parts, kept_bytes, leaves
from kv_hf.planner.predict import predict
from kv_hf.spec import LANES

CPU = torch.device("cpu")
ROOM = 5  # columns that a StaticCache has beyond its text


def generated(model, cache, lengths, new):
    """Return the cache after `new` tokens behind left-padded prompts of these lengths."""
    return model.generate(
        **left_padded(list(lengths)),
        max_new_tokens=new,
        do_sample=False,
        past_key_values=cache,
        return_dict_in_generate=True,
    ).past_key_values


def rows_behind(lengths, new):
    """Tokens of each row in a cache behind generate(): the last new one is not in it."""
    return [length + new - 1 for length in lengths]


def parts_of(report):
    return {part: getattr(report, part) for part in PARTS}


def stored_parts(cache):
    """Bytes of the memory that tensors of a cache of transformers keep alive, views or not."""
    found = dict.fromkeys(PARTS, 0)
    for layer in cache.layers:
        for name, value in vars(layer).items():
            part = "payload" if name in ("keys", "values") else "other"
            found[part] += sum(tensor.untyped_storage().nbytes() for _, tensor in leaves(value))
    assert sum(found.values()) == kept_bytes(cache)  # no memory is shared
    return found


def check_transformers_caches(model, lengths, new):
    """Check DynamicCache and StaticCache; return an inventory of the first."""
    rows = rows_behind(lengths, new)
    cache = generated(model, DynamicCache(config=model.config), lengths, new)
    inventory = inventory_of(model, cache)
    found = predict(inventory, "dynamic", row_tokens=rows, prompt=max(lengths))
    assert parts_of(found) == stored_parts(cache)
    assert found.tokens == sum(rows)
    room = max(lengths) + new + ROOM
    cache = generated(model, StaticCache(config=model.config, max_cache_len=room), lengths, new)
    found = predict(inventory, "static", row_tokens=rows, max_length=room)
    assert parts_of(found) == cache_parts(cache, CPU)
    return inventory


def check_paged_cache(model, inventory, lengths, new, **options):
    """Check a PagedCache, part by part, and that no run takes more than is said without a prompt."""
    cache = generated(model, kv_hf.PagedCache(model.config, **options), lengths, new)
    given = {"row_tokens": rows_behind(lengths, new), "layout": LANES}
    found = predict(inventory, "paged", cache.options, prompt=max(lengths), **given)
    assert found == cache.memory()
    if cache.options.offload is None:
        bound = predict(inventory, "paged", cache.options, **given)
        assert all(getattr(bound, part) >= getattr(found, part) for part in PARTS)
        if not any(layer.window or layer.index_dim for layer in inventory.layers):
            assert bound == found
    return cache
