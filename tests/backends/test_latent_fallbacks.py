"""Where latents cannot be absorbed: one warning with the reason, right results by expansion, errors where absorption was asked for."""

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import rounding
import torch
from accelerate import cpu_offload, dispatch_model
from harness import at_once
from test_latent import (
    LENGTHS,
    assert_all_close,
    expansions,
    forwards,
    largest_difference,
    paged,
)
from tiny_latent import latent_modules, make_model, shared_model
from tiny_models import left_padded, tokens
from transformers import DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

import kv_hf
from kv_hf.hf import latent

CPU = torch.device("cpu")
OPTIONS = {"max_new_tokens": 14, "do_sample": False}  # a page is sealed in one of the steps


def generate(model: Any, **config: Any) -> torch.Tensor:
    paged = {"cache_implementation": "paged_exact", "cache_config": {"page_size": 16, **config}}
    return model.generate(**left_padded(LENGTHS), **OPTIONS, **(paged if config else {}))


class Adapter(torch.nn.Module):
    """What an adapter looks like: the layer inside, and something added to it."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.added = torch.nn.Linear(base_layer.in_features, base_layer.out_features, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.added(x)


class Rounded(torch.nn.Linear):
    """A Linear with int8 weights."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(1, 1, bias=False)
        self.scale = linear.weight.abs().max().item() / 127
        codes = (linear.weight / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(codes, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


class Tagged(torch.Tensor):
    """A tensor subclass, which may hold anything."""


def change(make: Callable[[torch.nn.Linear], Any]) -> Callable[[Any], None]:
    def apply(model: Any) -> None:
        for module in latent_modules(model):
            torch.manual_seed(3)
            module.kv_b_proj = make(module.kv_b_proj)

    return apply


def with_bias(linear: torch.nn.Linear) -> torch.nn.Linear:
    linear.bias = torch.nn.Parameter(torch.randn(linear.out_features) * 0.1)
    return linear


def tagged(linear: torch.nn.Linear) -> torch.nn.Linear:
    weight = linear.weight.detach().as_subclass(Tagged)
    del linear._parameters["weight"]
    linear.weight = weight
    return linear


def hooked(linear: torch.nn.Linear) -> torch.nn.Linear:
    linear.register_forward_hook(lambda module, given, out: out * 1.5)
    return linear


def patched(linear: torch.nn.Linear) -> torch.nn.Linear:
    linear.forward = lambda x: torch.nn.functional.linear(x, linear.weight) * 1.5
    return linear


class Doubling(DeepseekV3Attention):
    """Attention of somebody's own, whose expansion is more than a product."""

    def expand_kv(self, kv_nope: Any, k_rot: Any) -> Any:
        keys, values = super().expand_kv(kv_nope, k_rot)
        return keys, 2 * values


def doubled(model: Any) -> None:
    for module in latent_modules(model):
        module.__class__ = Doubling


def replaced(model: Any) -> None:
    for module in latent_modules(model):
        own = module.expand_kv
        module.expand_kv = lambda latent, rope, own=own: tuple(2 * x for x in own(latent, rope))


REASONS = {
    "bias": (change(with_bias), "without a bias"),
    "adapter": (change(Adapter), r"adapter \(Adapter\)"),
    "int8": (change(Rounded), "Rounded of torch.int8.*is no torch.nn.Linear"),
    "subclass": (change(tagged), "may be quantized"),
    "hook": (change(hooked), "has forward hooks"),
    "patch": (change(patched), "forward of kv_b_proj was replaced"),
    "class": (doubled, "expand_kv is that of Doubling"),  # was taken for transformers' own
    "method": (replaced, "expand_kv was replaced"),  # the wrapper came behind the patched class
    "cpu offload": (lambda model: cpu_offload(model, CPU), "offloaded"),
}


def changed(reason: str) -> Any:
    model = make_model("deepseek_v3")
    with torch.no_grad():
        REASONS[reason][0](model)
    return model


@pytest.mark.parametrize("reason", REASONS)
def test_expansion_is_right_and_said_once_and_absorption_an_error(reason, said):
    kv_hf.uninstall()
    kv_hf.install()
    model, match = changed(reason), REASONS[reason][1]
    with pytest.raises(kv_hf.UnsupportedModelError, match=rf"latent\['decode'\]='absorb'.*{match}"):
        generate(model, latent={"decode": "absorb"})
    assert model.config._attn_implementation == "sdpa"
    assert not latent._originals  # the class is left alone
    stock = generate(model)
    assert all(torch.equal(generate(model, latent={"decode": "auto"}), stock) for _ in range(2))
    # an expansion that is not transformers' own gets dense latents
    says = "densely" if "expand_kv" in match else "cannot attend to latents"
    (text,) = said(says)
    assert re.search(says if "expand_kv" in match else match, text)
    # a model of the class that was not changed is absorbed all the same
    other = shared_model("deepseek_v3")
    assert torch.equal(generate(other, latent={"decode": "absorb"}), generate(other))


def test_a_model_split_by_accelerate_is_absorbed():
    """Hooks that only move inputs do not keep kv_b_proj from being absorbed."""
    model = make_model("deepseek_v3")
    parts = ("embed_tokens", "rotary_emb", "norm", "layers.0", "layers.1")
    places = dict.fromkeys(["lm_head", *(f"model.{part}" for part in parts)], "cpu")
    dispatch_model(model, places, main_device="cpu", force_hooks=True)
    assert hasattr(model.model.layers[0].self_attn.kv_b_proj, "_hf_hook")
    want = generate(make_model("deepseek_v3"))
    assert torch.equal(generate(model, latent={"decode": "absorb"}), want)
    with expansions(model) as lengths:
        generate(model, latent={"decode": "auto"})
    assert lengths == [40, 40]


def test_expansion_can_be_asked_for():
    model = make_model("deepseek_v3")
    stock = forwards(model, DynamicCache(config=model.config))
    with expansions(model) as lengths:
        found = forwards(model, paged(model, latent={"decode": "expand"}))
    assert len(lengths) == 2 * 14 and lengths[2:4] == [43, 43]
    assert_all_close(found, stock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Paged attention runs as")
        generate(model, latent={"decode": "expand"})


def test_eager_attention_gets_dense_latents():
    model = make_model("deepseek_v3")
    model.set_attn_implementation("eager")
    stock = generate(model)
    with pytest.warns(kv_hf.KVCacheWarning, match="densely"):
        assert torch.equal(generate(model, latent={"decode": "auto"}), stock)
    with pytest.raises(
        kv_hf.UnsupportedModelError, match=r"latent\['decode'\]='absorb'.*its attention is 'eager'"
    ):
        generate(model, latent={"decode": "absorb"})


def test_absorption_that_was_asked_for_without_generate():
    model = changed("bias")
    with pytest.raises(kv_hf.UnsupportedModelError, match="without a bias"):
        forwards(model, paged(model, latent={"decode": "absorb"}))


class Inherited(DeepseekV3Attention):
    """A subclass as somebody's own code makes it."""


def test_uninstall_gives_all_classes_their_own_method_back():
    model = make_model("deepseek_v3")
    own = DeepseekV3Attention.expand_kv
    if "__wrapped__" in vars(own):
        kv_hf.uninstall()
        own = DeepseekV3Attention.expand_kv
        kv_hf.install()
    stock = generate(model)
    model.model.layers[1].self_attn.__class__ = Inherited
    assert torch.equal(generate(model, latent={"decode": "absorb"}), stock)
    assert DeepseekV3Attention.expand_kv is not own
    assert "expand_kv" not in vars(Inherited)
    cache = paged(model)
    forwards(model, cache)
    kv_hf.uninstall()
    assert DeepseekV3Attention.expand_kv is own and Inherited.expand_kv is own
    model.set_attn_implementation("sdpa")
    assert torch.equal(generate(model), stock)
    with torch.no_grad():  # handles are right tensors without kv_hf, too
        model(tokens(2, 1), past_key_values=cache)
    forwards(model, paged(model))  # nor does a new cache change the class again
    assert DeepseekV3Attention.expand_kv is own
    kv_hf.install()
    assert torch.equal(generate(model, latent={"decode": "absorb"}), stock)
    with expansions(model) as lengths:
        generate(model, latent={"decode": "auto"})
    assert lengths == [40, 40]


def largest_ulp(logits, dtype):
    return torch.finfo(dtype).eps * max(float(one.abs().max()) for one in logits)


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float16, False)],
)
def test_half_precision_is_as_near_to_the_truth_as_the_stock_model(dtype, autocast):
    exact = make_model("deepseek_v3", num_experts_per_tok=4)  # all experts: no choice flips
    truth = forwards(exact, DynamicCache(config=exact.config))
    model = exact if autocast else make_model("deepseek_v3", num_experts_per_tok=4).to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        stock = forwards(model, DynamicCache(config=model.config))
        found = forwards(model, paged(model))
    rounded = largest_difference(stock, truth)
    assert rounded > 1e-4
    assert largest_difference(found, truth) < 2 * (rounded + largest_ulp(truth, dtype))


def test_gradients_reach_kv_b_proj_as_with_expansion():
    """Of the newest tokens' queries and results; earlier tokens carry none, as said."""
    grads = []
    for decode in ("absorb", "expand"):
        model = make_model("deepseek_v3")
        cache = paged(model, latent={"decode": decode})
        with torch.no_grad():
            model(tokens(2, 40), past_key_values=cache, use_cache=True)
        out = model(tokens(2, 2, seed=1), past_key_values=cache).logits
        out.square().sum().backward()
        grads.append([parameter.grad for parameter in model.model.layers[1].self_attn.parameters()])
    for absorbed, expanded in zip(*grads, strict=True):
        assert (absorbed is None) == (expanded is None)
        if absorbed is not None:
            rounding.assert_close(absorbed, expanded)
    assert any(grad is not None and grad.abs().sum() > 0 for grad in grads[0])


def test_several_threads_patch_the_class_once():
    kv_hf.uninstall()
    own = DeepseekV3Attention.expand_kv
    kv_hf.install()
    models = [make_model("deepseek_v3") for _ in range(6)]
    stock = generate(models[0])
    found = at_once(lambda index: generate(models[index], latent={"decode": "absorb"}), 6)
    assert all(torch.equal(one, stock) for one in found)
    assert DeepseekV3Attention.expand_kv.__wrapped__ is own
    kv_hf.uninstall()
    assert DeepseekV3Attention.expand_kv is own


@torch.no_grad()
def test_large_weights_do_not_overflow_half_precision():
    """The query times kv_b_proj left the range of float16, where each of them is within it."""
    model = make_model("youtu").half()
    with torch.no_grad():
        for module in latent_modules(model):
            for projection in (
                getattr(module, "q_b_proj", None) or module.q_proj,
                module.kv_b_proj,
            ):
                projection.weight *= 1000
            module.o_proj.weight /= 1000
            module.scaling /= 1000 * 1000
    ids = tokens(1, 40)
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    expected = model(ids[:, :1], past_key_values=cache).logits
    pages = paged(model)
    model(ids, past_key_values=pages)
    found = model(ids[:, :1], past_key_values=pages).logits
    assert bool(torch.isfinite(expected).all()) and bool(torch.isfinite(found).all())
    rounding.assert_close(found, expected)


def test_keys_of_the_size_of_latents_are_keys():
    """A model of one kv head, whose config names a rank for something else."""
    from tiny_models import make_model as make_ordinary

    model = make_ordinary("llama", num_key_value_heads=1)
    model.config.kv_lora_rank = model.config.head_dim
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(generate(model, latent={"decode": "auto"}), generate(model))


def test_an_assistant_without_latents_does_not_get_options_about_them():
    """They reached it, and raised that it has none."""
    from tiny_models import make_model as make_ordinary

    model = make_model("deepseek_v3")
    assistant = make_ordinary("llama", vocab_size=model.config.vocab_size)
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    inputs = {"input_ids": tokens(1, 40), **OPTIONS}
    expected = model.generate(**inputs)
    found = model.generate(
        **inputs,
        assistant_model=assistant,
        cache_implementation="paged_exact",
        cache_config={"page_size": 16, "latent": {"format": "exact", "decode": "absorb"}},
    )
    assert torch.equal(found, expected)
