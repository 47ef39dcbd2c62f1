"""Whole generation with the Triton kernels in the interpreter: the cache hands them what they expect."""

import pytest
import torch
from interpreter import call, needs_interpreter
from tiny_models import left_padded, make_model

import kv_hf

pytestmark = needs_interpreter


def generate(name, kernel):
    """Greedy tokens of a padded batch, the first layer's key codes, and the kernel used (runs in the worker).

    The cache is made to believe that the CPU is a GPU: pages in layout "rows", kernels of Triton.
    """
    from kv_hf.cache import layer_formats, paged_cache
    from kv_hf.kernels import choice
    from kv_hf.spec import ROWS

    kept = choice.why_not, layer_formats.layout_for, paged_cache.layout_for
    if kernel == "triton":
        choice.why_not = lambda *_: None
    layer_formats.layout_for = paged_cache.layout_for = lambda device: ROWS
    try:
        torch.manual_seed(0)
        model = make_model("llama")
        cache = kv_hf.PagedCache(model.config, keys=name, page_size=16, kernel=kernel)
        tokens = model.generate(
            **left_padded([40, 3, 21]),
            past_key_values=cache,
            max_new_tokens=14,
            min_new_tokens=14,
            do_sample=False,
        )
        first = cache.layers[0].store
        return tokens, first.pages.keys.fields["codes"], first.kernel.name
    finally:
        choice.why_not, layer_formats.layout_for, paged_cache.layout_for = kept


@pytest.mark.parametrize(
    "name", ["int8", "int4", *(pytest.param(n, marks=pytest.mark.slow) for n in ("exact", "fp8"))]
)
def test_generate_with_triton_gives_the_tokens_and_bytes_of_the_reference(name):
    """The first layer's keys depend on the tokens alone, so that not a bit of them may differ."""
    tokens, codes, used = call(generate, name, "triton")
    expected, expected_codes, _ = generate(name, "reference")
    assert used == "triton"
    assert torch.equal(tokens, expected)
    assert len(codes) > 3
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
