"""SmolLM2-135M on real text: the limits of accuracy that the README promises. Part of `make test-all`."""

import pytest
import torch
from measure.models.packaged import resolve_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import kv_hf
from kv_hf.evaluation.accuracy import measure_accuracy
from kv_hf.texts import load_text, token_windows

LIMITS = {"paged_int8": 0.0005, "paged_fp8": 0.006, "paged_int4": 0.005, "paged_int2": 0.18}


def model_and_texts(length, count):
    """Return SmolLM2-135M and `count` windows of `length` tokens."""
    folder = resolve_model("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(folder)(load_text("lincoln_1862")).input_ids
    return model, [torch.tensor(window) for window in token_windows(ids, length, count)]


@pytest.mark.slow
def test_mean_kl_on_real_text_stays_below_the_limits():
    model, texts = model_and_texts(1536, 4)
    found = measure_accuracy(
        model,
        texts,
        {
            name: lambda name=name: kv_hf.PagedCache.from_implementation(model.config, name)
            for name in LIMITS
        },
        512,
    )
    assert all(result["tokens"] == 4096 for result in found.values())
    assert found["paged_int4"]["bits_per_element"] <= 4.75
    over = {
        name: found[name]["kl_mean"]
        for name, limit in LIMITS.items()
        if found[name]["kl_mean"] > limit
    }
    assert not over
