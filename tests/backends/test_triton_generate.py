"""Whole generation with the Triton kernels in the interpreter: the cache hands them what they expect."""

import warnings
from contextlib import contextmanager

import pytest
import tiny_latent
import torch
from harness import slow_but
from tiny_models import left_padded, make_model
from torch._dynamo.utils import counters
from transformers import CompileConfig
from triton_machine import call, runs_kernels
from wrapped_kernels import wrap_kernels

import kv_hf

pytestmark = runs_kernels


@contextmanager
def pages_of_a_gpu(kernel):
    """Make the cache believe that the CPU is a GPU: pages in layout "rows", kernels of Triton where asked for."""
    from kv_hf.backends import dispatch
    from kv_hf.cache import build, layer_formats
    from kv_hf.spec import ROWS

    kept = dispatch.why_not, layer_formats.layout_for, build.layout_for
    if kernel == "triton":
        dispatch.why_not = lambda *_: None
    layer_formats.layout_for = build.layout_for = lambda device: ROWS
    try:
        yield
    finally:
        dispatch.why_not, layer_formats.layout_for, build.layout_for = kept


def generate(name, kernel, compiled=False):
    """Greedy tokens of a padded batch, the first layer's key codes, the kernel used, and graphs (runs in the worker).

    `name`: "paged_" in front of it names the cache; "latent NAME" is a model with latents in that format.
    `compiled`: with room for all tokens, so that steps run as one graph.
    """
    before = counters["stats"]["unique_graphs"]  # of other tests in this worker
    with pages_of_a_gpu(kernel):
        _, _, latent = name.partition("latent ")
        model = tiny_latent.make_model("deepseek_v3") if latent else make_model("llama")
        options = {"page_size": 16, "kernel": kernel, "max_length": 64 if compiled else None}
        if latent:
            cache = kv_hf.PagedCache(model.config, latent=latent, **options)
        else:
            options["recent_tokens"] = 0
            cache = kv_hf.PagedCache.from_implementation(model.config, f"paged_{name}", options)
        how = CompileConfig(backend="eager", mode=None, fullgraph=True)
        how._compile_all_devices = True
        tokens = model.generate(
            **left_padded([40, 3, 21]),
            past_key_values=cache,
            max_new_tokens=14,
            min_new_tokens=14,
            do_sample=False,
            compile_config=how if compiled else None,
        )
        first = cache.layers[0].store
        made = counters["stats"]["unique_graphs"] - before
        torch._dynamo.reset()
        return tokens, first.pages.keys.fields["codes"], first.kernel.name, made


def read_in_part(options, kernel):
    """Greedy tokens of a padded batch that reads a part of its pages, how often what chose, and warnings (in the worker)."""
    chosen = []

    def noted(choose_pages):
        def choose(call):
            chosen.append((choose_pages.__module__, call.kv.words is not None))
            return choose_pages(call)

        return choose

    with pytest.MonkeyPatch.context() as patch:
        wrap_kernels(patch, choose_pages=noted)
        with pages_of_a_gpu(kernel), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            model = make_model("llama", head_dim=64)
            for layer in model.model.layers:  # whose attention is far from even
                layer.self_attn.q_proj.weight.data *= 3
            config = {"page_size": 16, "kernel": kernel, "read": {"tokens": 96, "from": 100}}
            found = model.generate(
                **left_padded([170, 130]),
                past_key_values=kv_hf.PagedCache(model.config, **config, **options),
                max_new_tokens=4,
                min_new_tokens=4,
                do_sample=False,
            )
            messages = [str(one.message) for one in said]
            return found, chosen, [text for text in messages if "that a step reads" in text]


QUICK = [("int4", True), ("int3", False), ("latent int8", False)]
OTHERS = [(name, False) for name in ("exact", "fp8", "int8", "int6", "int2", "latent int4")]


@pytest.mark.parametrize(("name", "compiled"), slow_but(QUICK, [*QUICK, ("exact", True), *OTHERS]))
def test_generate_with_triton_gives_the_tokens_and_bytes_of_the_reference(name, compiled):
    """The first layer's keys and latents depend on the tokens alone, so that not a bit of them may differ."""
    tokens, codes, used, graphs = call(generate, name, "triton", compiled)
    expected, expected_codes, _, _ = generate(name, "reference")
    assert (used, graphs) == ("triton", int(compiled))
    assert torch.equal(tokens, expected)
    held = len(expected_codes)
    assert held > 3
    assert torch.equal(codes[:held].view(torch.uint8), expected_codes.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("keys", ["int4", "exact"])
def test_steps_that_read_a_part_with_triton_give_the_tokens_of_the_reference(keys, outside):
    """Also where pages live outside: then it chooses by an index."""
    options = {"keys": keys} | ({"offload": "disk"} if outside else {})
    found, chosen, said = call(read_in_part, options, "triton")
    expected, by_reference, _ = read_in_part(options, "reference")
    assert torch.equal(found, expected)
    assert set(chosen) == {("kv_hf.backends.triton.selection", outside)}
    assert len(chosen) == len(by_reference) == 3 * 2  # steps behind the prompt's, and layers
    assert not said
