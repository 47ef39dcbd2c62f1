"""Importing registers names and nothing else; uninstall() takes everything back."""

import subprocess
import sys

import pytest
from tiny_models import make_model, tokens
from transformers import AttentionInterface, GenerationConfig
from transformers.generation.utils import GenerationMixin

import kv_hf


def test_uninstall_restores_transformers():
    model = make_model("llama")
    model.generate(tokens(1, 8), max_new_tokens=2, cache_implementation="paged_int4")
    kv_hf.uninstall()
    try:
        assert not hasattr(AttentionInterface.get_interface, "__wrapped__")
        assert not hasattr(GenerationMixin._prepare_cache_for_generation, "__wrapped__")
        with pytest.raises(ValueError, match="paged_int4"):
            GenerationConfig(cache_implementation="paged_int4").validate()
        assert model.generate(tokens(1, 8), max_new_tokens=2).shape == (1, 10)
    finally:
        kv_hf.install()
    model.generate(tokens(1, 8), max_new_tokens=2, cache_implementation="paged_int4")


def test_generate_without_our_names_is_untouched():
    model = make_model("llama")
    out = model.generate(tokens(1, 8), max_new_tokens=2, return_dict_in_generate=True)
    assert type(out.past_key_values).__name__ == "DynamicCache"
    assert model.config._attn_implementation == "sdpa"


def test_importing_does_not_import_heavy_or_optional_packages():
    """Nor what measures; and why a GPU kernel cannot run is known without triton."""
    code = """
import sys
sys.modules.update({name: None for name in ("triton", "lm_eval", "datasets", "rich")})  # imports raise
import torch, kv_hf
dir(kv_hf)  # lists what is imported later
late = {"evaluation", "gqa", "planner", "doctor"}
assert not late & {name.split(".")[1] for name in sys.modules if name.startswith("kv_hf.")}
kv_hf.plan
from kv_hf.backends.triton import meta_params, support
spec = kv_hf.spec.PageSpec.build(
    kv_hf.formats.key_scheme("int4"), kv_hf.formats.value_scheme("int4"),
    num_kv_heads=8, key_dim=128, value_dim=128, page_size=64, dtype=torch.bfloat16,
)
assert support.why_not("cpu", torch.float32, spec)
assert meta_params.constants(spec, meta_params.Step(torch.bfloat16, 8, 1, 90))["STAGES"] > 0
print(kv_hf.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == kv_hf.__version__
