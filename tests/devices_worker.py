"""What a process with two pretended devices does in test_devices.py: each case writes "ok" or its error.

Layer 0 and the rest of the model lie on one device and layer 1 on the other, moved to by accelerate's own hook.
"""

import copy
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from pretend_devices import FIRST, SECOND, Pretended, move_module, pretended, register
from tiny_models import FAMILIES, left_padded, make_model, tokens

import kv_hf

KERNEL = {"kernel": "reference", "page_size": 16}
HYBRID = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 24}


def split(model: Any) -> Any:
    """Put layer 1 on the second device and everything else on the first."""
    move_module(model, FIRST)
    last = model.model.layers[1]
    move_module(last, SECOND)
    add_hook_to_module(last, AlignDevicesHook(execution_device=SECOND, io_same_device=True))
    return model


def compare(family: str = "llama", name: str = "paged_exact", **options: Any) -> kv_hf.PagedCache:
    """Generate on one device and on two, compare the tokens and where the cache lies; return the cache."""
    batch = left_padded([40, 18])
    options = {
        "cache_implementation": name, "cache_config": KERNEL, "max_new_tokens": 20, "do_sample": False,
        "return_dict_in_generate": True, **options,
    }  # fmt: skip
    attention = options.pop("attention", "sdpa")
    model = make_model(family, attn_implementation=attention)
    torch.manual_seed(3)
    want = model.generate(**batch, **options).sequences
    with pretended():
        model = split(make_model(family, attn_implementation=attention))
        moved = {key: tensor.to(FIRST) for key, tensor in batch.items()}
        torch.manual_seed(3)
        out = model.generate(**moved, **options)
        assert isinstance(out.sequences, Pretended)
        assert torch.equal(out.sequences.held, want), "other tokens"
        cache = out.past_key_values
        if isinstance(cache, kv_hf.PagedCache):
            for layer in cache.paged_layers:
                device = (FIRST, SECOND)[layer.layer_idx]
                parts = [t for side in layer.storage.sides for t in side.fields.values()]
                parts += [window.tokens for window in layer.residuals]
                assert {part.device for part in parts} == {device} == {layer.device}
                assert layer.storage.keys.capacity, "nothing was sealed"
            cache.check_integrity()
    return cache


def greedy_exact() -> None:
    compare()


def greedy_int4() -> None:
    compare(name="paged_int4")


def int8_pages_and_recent_tokens() -> None:
    compare(name="paged_int8", cache_config={**KERNEL, "page_size": 32, "recent_tokens": 3})


def beams() -> None:
    compare(num_beams=3)


def several_return_sequences() -> None:
    compare(do_sample=True, num_return_sequences=2)


def chunked_prefill() -> None:
    compare(name="paged_int8", prefill_chunk_size=17)


def hybrid_beams() -> None:
    """Layer 1 keeps transformers' sliding layer, on the second device."""
    compare("gemma3", num_beams=2)


def dense_attention() -> None:
    compare(cache_config=KERNEL, name="paged_int4", attention="eager")


def crop_select_and_copy() -> None:
    """Row numbers come from the first device, or from the CPU; a crop into a page decodes it where it lies."""
    ids = tokens(2, 50)
    results = []
    with pretended():
        for on_two in (False, True):
            model = make_model("llama")
            model = split(model) if on_two else model
            home = FIRST if on_two else torch.device("cpu")
            cache = kv_hf.PagedCache(model.config, keys="int4", sink_tokens=0, **KERNEL)
            model(ids.to(home), past_key_values=cache)
            cache = copy.deepcopy(cache)
            cache.reorder_cache(torch.tensor([1, 0]).to(home))
            cache.batch_select_indices(torch.tensor([True, False]).to(home))
            cache.batch_repeat_interleave(2)
            cache.crop(-14)
            logits = model(tokens(2, 3, seed=1).to(home), past_key_values=cache).logits
            results.append(getattr(logits, "held", logits))
    assert torch.equal(*results)


def tables_are_counted_on_each_device() -> None:
    cache = compare()
    assert cache.memory().tables == 2 * (
        2 * 3 * 4
    )  # devices x rows x pages of the longer row x int32


def keys_on_another_device_are_refused() -> None:
    """The cache of a model that was split otherwise since."""
    with pretended():
        cache = kv_hf.PagedCache(make_model("llama").config, **KERNEL)
        keys = torch.ones(1, 2, 20, 16)
        cache.update(keys.to(FIRST), keys.to(FIRST), 0)
        cache.update(keys.to(SECOND), keys.to(SECOND), 1)
        with pytest.raises(kv_hf.CacheMismatchError, match=f"on {FIRST}.* on {SECOND}"):
            cache.update(keys.to(SECOND), keys.to(SECOND), 0)


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        greedy_exact, greedy_int4, int8_pages_and_recent_tokens, beams, several_return_sequences,
        chunked_prefill, hybrid_beams, dense_attention, crop_select_and_copy,
        tables_are_counted_on_each_device, keys_on_another_device_are_refused,
    )
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    register()
    FAMILIES["gemma3"] = ("Gemma3TextConfig", {**FAMILIES["gemma"][1], **HYBRID})  # here only
    results = {}
    for name, case in CASES.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case()
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
