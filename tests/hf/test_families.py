"""paged_exact against DynamicCache on every family: the same tokens and logits, padded or not."""

import pytest
import torch
from beside_stock import compare
from tiny_models import FAMILIES, NO_INTERFACE, left_padded, shared_model, tokens
from transformers import DynamicCache

import kv_hf


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_left_padded_equals_dynamic_cache(family):
    """Two pages of each row are sealed while it grows."""
    compare(shared_model(family), left_padded([70, 9, 40]))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in NO_INTERFACE])
def test_family_with_an_attention_interface_reads_pages(family, recwarn):
    """No dense fallback: neither the handle nor the attention function may have written out a layer."""
    import warnings

    warnings.simplefilter("always", kv_hf.KVCacheWarning)
    model = shared_model(family)
    model.generate(tokens(1, 70), cache_implementation="paged_int4", max_new_tokens=3)
    said = [str(w.message) for w in recwarn if issubclass(w.category, kv_hf.KVCacheWarning)]
    # without a C compiler another kernel reads the pages, and says so
    assert not [message for message in said if "'c' would" not in message]


@pytest.mark.parametrize("family", NO_INTERFACE)
def test_family_without_an_attention_interface_warns_and_works(family):
    model = shared_model(family)
    with pytest.warns(kv_hf.KVCacheWarning, match="does not know kv_hf"):
        model.generate(tokens(1, 70), cache_implementation="paged_int4", max_new_tokens=3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ["paged_fp8", "paged_int8", "paged_int4", "paged_int2"])
def test_quantized_logits_stay_close(family, implementation):
    """Random weights are the hardest input there is, so this only catches collapse and mix-ups."""
    model, ids = shared_model(family), tokens(2, 150)
    cache = kv_hf.PagedCache.from_implementation(model.config, implementation)
    exact = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in (ids[:, :140], *ids[:, 140:].split(1, -1)):
            expected = model(part, past_key_values=exact).logits[:, -1]
            found = model(part, past_key_values=cache).logits[:, -1]
    change = (found - expected).norm() / expected.norm()
    assert change < {"paged_int4": 0.3, "paged_int2": 1.0}.get(implementation, 0.05)
    if family not in ("mpt", "bloom"):  # their attention is too flat for rounding to show
        assert change > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_works_wherever_dynamic_cache_does(family):
    """Rotary embeddings leave keys in fp32 while values are bf16: the two sides have their own dtypes."""
    model, ids = shared_model(family), tokens(2, 80)
    cache = kv_hf.PagedCache(model.config, page_size=16)
    dynamic = DynamicCache(config=model.config)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for part in (ids[:, :70], *ids[:, 70:].split(1, -1)):
            expected = model(part, past_key_values=dynamic).logits[:, -1].float()
            found = model(part, past_key_values=cache).logits[:, -1].float()
    assert (found - expected).norm() <= 0.1 * expected.norm()
