"""Whole generation with the Triton kernels in the interpreter: the cache hands them what they expect."""

import warnings
from contextlib import contextmanager

import pytest
import tiny_latent
import torch
from tiny_models import left_padded, make_model, make_sliding, tokens
from triton_machine import call, runs_kernels
from wrapped_kernels import wrap_kernels

import kv_hf

pytestmark = runs_kernels


@contextmanager
def pages_of_a_gpu(kernel):
    """Make the cache believe that the CPU is a GPU: pages in layout "rows", kernels of Triton where asked for."""
    from kv_hf.backends import registry
    from kv_hf.cache import layer_formats, paged_cache
    from kv_hf.spec import ROWS

    kept = registry.why_not, layer_formats.layout_for, paged_cache.layout_for
    if kernel == "triton":
        registry.why_not = lambda *_: None
    layer_formats.layout_for = paged_cache.layout_for = lambda device: ROWS
    try:
        yield
    finally:
        registry.why_not, layer_formats.layout_for, paged_cache.layout_for = kept


def generate(name, kernel):
    """Greedy tokens of a padded batch, the first layer's key codes, and the kernel used (runs in the worker).

    `name`: "paged_" in front of it names the cache; "latent NAME" is a model with latents in that format.
    """
    with pages_of_a_gpu(kernel):
        _, _, latent = name.partition("latent ")
        model = tiny_latent.make_model("deepseek_v3") if latent else make_model("llama")
        options = {"page_size": 16, "kernel": kernel}
        if latent:
            cache = kv_hf.PagedCache(model.config, latent=latent, **options)
        else:
            cache = kv_hf.PagedCache.from_implementation(model.config, f"paged_{name}", options)
        tokens = model.generate(
            **left_padded([40, 3, 21]),
            past_key_values=cache,
            max_new_tokens=14,
            min_new_tokens=14,
            do_sample=False,
        )
        first = cache.layers[0].store
        return tokens, first.pages.keys.fields["codes"], first.kernel.name


def long_turn(name, lengths, kernel):
    """Logits of a second turn that is written out densely, and what was written out by what (runs in the worker)."""
    from kv_hf.backends.triton.direct import Kernel

    written, launch = [], Kernel.launch

    def noted(self, *args):
        if self.jit.__name__ == "dense_kernel":
            written.append(args[:3])
        return launch(self, *args)

    Kernel.launch = noted
    try:
        with pages_of_a_gpu(kernel), torch.no_grad():
            model = make_sliding("gemma3", 24) if name == "gemma3" else make_model(name)
            cache = kv_hf.PagedCache(model.config, keys="int4", page_size=16, kernel=kernel)
            inputs = left_padded(lengths)
            model(**inputs, past_key_values=cache)
            ids = tokens(len(lengths), 65, 7)
            mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids)], 1)
            logits = model(ids, attention_mask=mask, past_key_values=cache).logits
            return logits, written, [group.offset for group in cache.groups]
    finally:
        Kernel.launch = launch


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
            config = {
                "page_size": 16,
                "kernel": kernel,
                "read": {"tokens": 96, "from": 100},
                **options,
            }
            found = model.generate(
                **left_padded([170, 130]),
                past_key_values=kv_hf.PagedCache(model.config, **config),
                max_new_tokens=4,
                min_new_tokens=4,
                do_sample=False,
            )
            return (
                found,
                chosen,
                [str(one.message) for one in said if "that a step reads" in str(one.message)],
            )


@pytest.mark.parametrize(
    "name",
    [
        "int4",
        "int3",
        "latent int8",
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("exact", "fp8", "int8", "int2", "k5v3", "latent int4")
        ),
    ],
)
def test_generate_with_triton_gives_the_tokens_and_bytes_of_the_reference(name):
    """The first layer's keys and latents depend on the tokens alone, so that not a bit of them may differ."""
    tokens, codes, used = call(generate, name, "triton")
    expected, expected_codes, _ = generate(name, "reference")
    assert used == "triton"
    assert torch.equal(tokens, expected)
    assert len(codes) > 3
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))


@pytest.mark.parametrize("outside", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("keys", ["int4", pytest.param("exact", marks=pytest.mark.slow)])
def test_steps_that_read_a_part_with_triton_give_the_tokens_of_the_reference(keys, outside):
    """Also where pages live outside: then it chooses by an index."""
    options = {"keys": keys} | ({"offload": "disk"} if outside else {})
    found, chosen, said = call(read_in_part, options, "triton")
    expected, by_reference, _ = read_in_part(options, "reference")
    assert torch.equal(found, expected)
    assert set(chosen) == {("kv_hf.backends.triton.selection", outside)}
    assert len(chosen) == len(by_reference) == 3 * 2  # steps behind the prompt's, and layers
    assert not said


@pytest.mark.parametrize(("name", "lengths"), [("llama", [37, 20]), ("gemma3", [60])])
def test_long_turn_with_triton_gives_the_logits_of_the_reference(name, lengths):
    """Not a bit differs: both write the same numbers out, with padding and with pages that a sliding layer gave back."""
    logits, written, offsets = call(long_turn, name, lengths, "triton")
    expected, by_reference, _ = long_turn(name, lengths, "reference")
    assert torch.equal(logits, expected)
    assert len(written) == {"llama": 4, "gemma3": 8}[name]
    assert not by_reference
    assert any(offsets) == (name == "gemma3")
