"""peft: what it does to keys and values, with pages as with DynamicCache; adapters, stores and saved caches."""

import pytest
import rounding
import torch
from beside_stock import assert_same, pages, run
from tiny_models import left_padded, make_model, tokens

import kv_hf
from kv_hf.cache.model_shape import CACHE

peft = pytest.importorskip("peft")

CAUSAL = {"task_type": "CAUSAL_LM"}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
IA3 = {
    "target_modules": ["k_proj", "v_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
    "init_ia3_weights": False,
}


def lora(**options):
    return peft.LoraConfig(
        r=4, lora_alpha=16, init_lora_weights=False, target_modules=PROJECTIONS, **CAUSAL, **options
    )


METHODS = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "ia3": lambda: peft.IA3Config(**IA3, **CAUSAL),
    "modules to save": lambda: lora(modules_to_save=["embed_tokens"]),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **CAUSAL),
    "trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 4], init_weights=False, **CAUSAL),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=20, **CAUSAL),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=20, encoder_hidden_size=32, **CAUSAL),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=20, **CAUSAL),
}  # fmt: skip
BY_CALL = {
    "activated lora": lambda: lora(alora_invocation_tokens=[5, 6]),
    "poly": lambda: peft.PolyConfig(r=4, target_modules=PROJECTIONS, n_tasks=2, n_skills=2, init_weights=False, **CAUSAL),
}  # fmt: skip
VIRTUAL = ["prompt tuning", "p-tuning", "prefix tuning"]
PADDED = left_padded([80, 57, 9])


def tuned(method, family="llama"):
    """Return a model with one adapter whose effect nobody can overlook."""
    if method in VIRTUAL[:2] and CACHE == "cache" and peft.__version__.startswith("0.21."):
        pytest.skip(
            "peft 0.21 does not find this transformers' cache: masks end too early in every step"
        )
    model = make_model(family)
    torch.manual_seed(1)
    model = peft.get_peft_model(model, {**METHODS, **BY_CALL}[method]()).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "prompt_encoder" in name or "adaption_gate" in name:
                parameter.normal_(std=0.3)
    return model


def with_two():
    model = peft.get_peft_model(make_model("llama"), lora(), adapter_name="a")
    torch.manual_seed(2)
    model.add_adapter("b", lora())
    return model.eval()


def generated(model, inputs, held=None, **options):
    """Generate with a DynamicCache, or with pages of these options."""
    cache = None if held is None else pages(**held)
    return run(model, inputs, cache, **{"max_new_tokens": 24, **options})


def check(found, expected):
    # adapters of normal numbers, four times lora_alpha / r: terms on the way are some five times as large
    assert_same(found, expected, 5**2 * rounding.TERMS)
    assert isinstance(found.past_key_values, kv_hf.PagedCache)
    found.past_key_values.check_integrity()


# -- generate ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", list(METHODS))
def test_generate_gives_the_tokens_of_dynamic_cache(method):
    model = tuned(method)
    without = generated(make_model("llama"), PADDED)
    expected = generated(model, PADDED)
    if method != "trainable tokens":  # these change two embeddings
        assert not torch.allclose(without.logits[0], expected.logits[0], atol=1e-2)
    found = generated(model, PADDED, {})
    check(found, expected)
    held = found.past_key_values
    assert held.get_seq_length() == expected.past_key_values.get_seq_length()
    assert held.memory().pages_held > 0


@pytest.mark.parametrize("method", VIRTUAL)
def test_virtual_tokens_do_not_go_into_preallocated_caches(method):
    """With transformers' own preallocated caches peft ends in a KeyError, or in a mask of the wrong length."""
    with pytest.raises(kv_hf.UnsupportedModelError, match="leave max_length out"):
        generated(tuned(method), PADDED, {"max_length": 256})


def test_adapters_for_each_row_give_the_tokens_of_dynamic_cache():
    model = with_two()
    names = ["a", "b", "__base__"]
    check(generated(model, PADDED, {}, adapter_names=names), generated(model, PADDED, adapter_names=names))  # fmt: skip


# -- the store ---------------------------------------------------------------------------------------------------


def scale(model):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["a"] *= 3


def through_data(model):
    for name, parameter in model.named_parameters():
        if "lora_B.a" in name:
            parameter.data.mul_(2)


# change -> (how, what a saved cache of the state before says)
CHANGES = {
    "other adapter": (lambda model: model.set_adapter("b"), "saved with adapter 'a' active, this model has adapter 'b' active"),
    "both": (lambda model: model.base_model.set_adapter(["a", "b"]), "this model has adapters 'a' . 'b' active"),
    "disabled": (lambda model: model.base_model.disable_adapter_layers(), "'a' active, this model has no adapter"),
    "scaling": (scale, "'a' active; the settings of these adapters differ"),
    "merged": (lambda model: model.merge_adapter(), "'a' active, this model has no adapter"),
    "unloaded": (lambda model: model.unload(), "'a' active, this model has no adapter"),
    "written through .data": (through_data, "other weights: .*lora_B.a.weight differs"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "says"), CHANGES.values(), ids=CHANGES)
def test_pages_of_another_state_are_neither_served_nor_loaded(change, says, tmp_path):
    """Addresses and write counts of parameters stay the same in most of these."""
    model, store = with_two(), {"prefix_store": kv_hf.PrefixStore()}
    inputs = {"input_ids": tokens(1, 80)}
    generated(model, inputs, store).past_key_values.save(tmp_path / "cache", model)
    changed = change(model) or model
    with pytest.raises(kv_hf.CacheFileError, match=says):
        kv_hf.PagedCache.load(tmp_path / "cache", changed)
    for hits in (0, 1):
        check(generated(changed, inputs, store), generated(changed, inputs))
        assert store["prefix_store"].stats().rows_hit == hits


REASONS = {
    "activated lora": "give rows adapters of their own",
    "poly": "task_ids .* give rows adapters of their own",
    "adapter_names": "give rows adapters of their own",
    "prompt tuning": "virtual tokens stand in front .prompt tuning 'default' .20.",
    "prefix tuning": "virtual tokens stand in front .prefix tuning 'default' .20.",
}


@pytest.mark.parametrize("kind", list(REASONS))
def test_a_store_is_not_used_where_tokens_do_not_tell_and_says_so(kind):
    model = with_two() if kind == "adapter_names" else tuned(kind)
    options = {"adapter_names": ["a", "b", "__base__"]} if kind == "adapter_names" else {}
    options |= {"task_ids": torch.zeros(3, dtype=torch.long)} if kind == "poly" else {}
    store = kv_hf.PrefixStore()
    with pytest.warns(kv_hf.KVCacheWarning, match=REASONS[kind].replace("front ", "front of the prompt ")):  # fmt: skip
        found = generated(model, PADDED, {"prefix_store": store}, **options)
    check(found, generated(model, PADDED, **options))
    assert store.stats().rows == 0 and store._tree.counts()[0] == 0
    with pytest.raises(kv_hf.CacheMismatchError, match="do not follow from its tokens alone"):
        store.add(found.past_key_values, [row.tolist() for row in found.sequences[:, :-1]])


# -- saved caches ------------------------------------------------------------------------------------------------


def test_save_refuses_a_cache_of_other_adapters_than_the_model_has(tmp_path):
    model = with_two()
    first = generated(model, {"input_ids": tokens(1, 40)}, {})
    model.set_adapter("b")
    with pytest.raises(kv_hf.CacheMismatchError, match="'a' active; .* to save it for has adapter 'b'"):  # fmt: skip
        first.past_key_values.save(tmp_path / "cache", model)
    text = torch.cat([first.sequences, tokens(1, 30, seed=5)], 1)
    out = generated(model, {"input_ids": text}, past_key_values=first.past_key_values)
    for name in ("a", "b"):
        model.set_adapter(name)
        with pytest.raises(kv_hf.CacheMismatchError, match="tokens of a single state"):
            out.past_key_values.save(tmp_path / "cache", model)
    assert not list(tmp_path.iterdir())
    out.past_key_values.reset()
    again = generated(model, {"input_ids": text}, past_key_values=out.past_key_values)
    again.past_key_values.save(tmp_path / "cache", model)


def test_save_refuses_a_cache_of_an_adapter_for_each_row(tmp_path):
    model = with_two()
    out = generated(model, PADDED, {}, adapter_names=["a", "b", "__base__"])
    with pytest.raises(kv_hf.CacheMismatchError, match="adapters chosen for each row"):
        out.past_key_values.save(tmp_path / "cache", model)


@pytest.mark.parametrize("method", ["prompt tuning", "prefix tuning"])
def test_saved_virtual_tokens_belong_to_their_model(method, tmp_path):
    model = tuned(method)
    out = generated(model, PADDED, {})
    with pytest.raises(kv_hf.CacheMismatchError, match=f"virtual tokens of {method}"):
        out.past_key_values.save(tmp_path / "cache", model.get_base_model())
    out.past_key_values.save(tmp_path / "cache", model)
    kv_hf.PagedCache.load(tmp_path / "cache", model).check_integrity()
    with pytest.raises(kv_hf.CacheFileError, match="virtual tokens .* model has no adapter"):
        kv_hf.PagedCache.load(tmp_path / "cache", model.get_base_model())
    with model.disable_adapter(), pytest.raises(kv_hf.CacheFileError, match="has no adapter"):
        kv_hf.PagedCache.load(tmp_path / "cache", model)
    with torch.no_grad():
        next(tensor for name, tensor in model.named_parameters() if "prompt_enc" in name).mul_(2)
    with pytest.raises(kv_hf.CacheFileError, match="other weights: prompt_encoder"):
        kv_hf.PagedCache.load(tmp_path / "cache", model)
