"""The planner's probe against real models: what a DynamicCache holds after a real forward, byte for byte."""

import collections
import copy
import inspect
import json
import math
import threading
import warnings

import planned_models
import pytest
import tiny_latent
import tiny_models
import tiny_vision
import torch
import transformers
from tiny_models import COMMON, tokens
from transformers import DynamicCache

import kv_hf
from kv_hf.planner.fields import inventory_of_fields
from kv_hf.planner.inventory import Inventory
from kv_hf.planner.meta_model import model_kind
from kv_hf.planner.probe import ENCODERS, probe

ROWS, PROMPT = 3, 9
PLAIN = [("plain", family) for family in tiny_models.FAMILIES]
LATENT = [("latent", family) for family in tiny_latent.FAMILIES]
OTHER = [("other", family) for family in planned_models.ALL]
MAKERS = {"plain": tiny_models, "latent": tiny_latent, "other": planned_models}
PROBES = {"kv_hf_probe", "kv_hf_probe_masked"}
COUNTERS = ("_sliding_window_tensor",)


def config_of(kind, family):
    if kind != "plain" and not MAKERS[kind].is_there(family):
        pytest.skip(f"this transformers has no {family}")
    return MAKERS[kind].make_config(family)


def look(config, **options):
    return probe(config, **{"name": "tiny", "source": "a test", "dtype": "bfloat16", **options})


def real_model(config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    return model_kind(config).from_config(copy.deepcopy(config), dtype=dtype).eval()


def real_cache(model):
    """Return the cache after a prompt of 9 tokens and one more, in 3 rows."""
    takes = inspect.signature(model.forward).parameters
    name = "past_key_values" if "past_key_values" in takes else "cache_params"
    own = model.config.model_type == "minimax"  # takes none but its own class
    cache = None if own else DynamicCache(config=model.config)
    ids = tokens(ROWS, PROMPT + 1)
    with torch.no_grad():
        for part in (ids[:, :PROMPT], ids[:, PROMPT:]):
            out = model(input_ids=part, use_cache=True, **{name: cache})
            cache = out.past_key_values if own else cache
    return cache


def held(layer):
    """Return name -> tensor of everything that a layer of a cache holds."""
    found = {}
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor) and name not in COUNTERS:
            found[name] = value
        elif isinstance(value, dict):
            found |= {
                f"{name}.{key}": part
                for key, part in value.items()
                if isinstance(part, torch.Tensor)
            }
    return found


def planned_bytes(layer, rows, count, dtype):
    """Return the bytes of a CachedLayer in a DynamicCache that holds `count` tokens of each row."""
    index = dtype if layer.index_dtype is None else getattr(torch, layer.index_dtype)
    kept = count if layer.window is None else min(count, layer.window - 1)
    per_row = kept * layer.elements * dtype.itemsize + count * layer.index_dim * index.itemsize
    per_row += count * layer.index_positions * torch.long.itemsize
    return rows * (per_row + sum(state.nbytes(dtype) for state in layer.states))


def check_layer(planned, layer, count, dtype, linear=None):
    assert planned.cache_class == type(layer).__name__
    tensors = held(layer) | ({} if linear is None else {"linear": linear})
    assert planned_bytes(planned, ROWS, count, dtype) == sum(t.nbytes for t in tensors.values())
    assert planned.window == getattr(layer, "sliding_window", None) or not planned.elements
    if planned.elements:
        kept = layer.keys.shape[2]
        assert layer.keys.shape == (ROWS, planned.kv_heads, kept, planned.key_dim)
        assert layer.values.shape == (ROWS, planned.kv_heads, kept, planned.value_dim)
    else:
        assert layer.__dict__.get("keys") is None
    states = [t for name, t in tensors.items() if name.split(".")[0] not in ("keys", "values")]
    states = [t for t in states if math.prod(t.shape[1:]) and not planned.index_dim]
    assert [(s.shape, s.dtype or "bfloat16") for s in planned.states] == [
        (tuple(t.shape[1:]), str(t.dtype)[6:]) for t in states
    ]


@pytest.mark.parametrize(("kind", "family"), PLAIN + LATENT + OTHER)
def test_probe_equals_a_real_cache(kind, family):
    config = config_of(kind, family)
    planned = look(config)
    assert planned.how == "meta"
    model = real_model(config)
    cache = real_cache(model)
    assert planned.parameters == sum(p.numel() for p in model.parameters())
    linear = getattr(cache, "linear_cache", [])
    assert len(planned.layers) == len(cache)
    for index, layer in enumerate(cache.layers):
        state = linear[index] if index < len(linear) and len(linear[index]) else None
        check_layer(planned.layers[index], layer, PROMPT + 1, torch.bfloat16, state)
    assert Inventory.from_dict(json.loads(json.dumps(planned.as_dict()))) == planned


def test_vision_models_are_planned_with_their_tower():
    for make in (tiny_vision.llava, tiny_vision.qwen2_5_vl):
        model, _ = make()
        planned = look(model.config)
        tower = sum(p.numel() for p in vision_tower(model).parameters())
        assert planned.parameters == sum(p.numel() for p in model.parameters())
        assert planned.notes == (f"weights include vision: {tower:,} parameters",)
        assert {(layer.kv_heads, layer.key_dim) for layer in planned.layers} == {(2, 16)}


def vision_tower(model):
    return next(
        m for n, m in model.named_modules() if n.rsplit(".", 1)[-1] in ("visual", "vision_tower")
    )


@pytest.mark.parametrize("family", planned_models.SHARED)
def test_layers_that_share_keys_are_counted_as_readers(family):
    """Layers 4 and 5 of 6 read what 2 (sliding) and 3 (full) hold."""
    layers = look(config_of("other", family)).layers
    assert [layer.readers for layer in layers[:4]] == [1, 1, 2, 2]
    assert not any(layer.elements for layer in layers[4:])  # 5.17 leaves them out
    assert {layer.query_heads for layer in layers[:4]} == {4}


def test_latents_that_are_shared_are_read_by_two_layers():
    """Layers 2 and 3 of 5 read the latents of 0 and 1; the second has an indexer's keys of its own."""
    layers = look(config_of("latent", "mistral_large4")).layers
    assert [layer.readers for layer in layers] == [2, 2, 1, 1, 1]
    assert [bool(layer.index_dim) for layer in layers] == [True, False, True, False, True]
    assert [layer.latent for layer in layers] == [True, True, False, False, True]


def test_indexer_keys_keep_their_own_dtype():
    layers = look(config_of("latent", "dots3_note")).layers
    assert [layer.index_dtype for layer in layers] == ["float32", None, "float32"]


@pytest.mark.parametrize(
    ("family", "experts", "chosen"),
    [("mixtral", 4, 2), ("deepseek_v3", 4, 2), ("gpt_oss", 4, 2), ("jamba", 4, 2)],
)
def test_experts_are_told_apart(family, experts, chosen):
    kind = next(kind for kind, name in PLAIN + LATENT + OTHER if name == family)
    config = config_of(kind, family)
    planned = look(config)
    model = real_model(config)
    own = [
        parameter
        for module in model.modules()
        if type(module).__name__.endswith("Experts")
        for parameter in module.parameters()
    ]
    assert planned.expert_parameters == sum(p.numel() for p in own) > 0
    assert (planned.experts, planned.experts_per_token) == (experts, chosen)
    assert look(config_of("plain", "llama")).expert_parameters == 0


def test_tied_weights_count_once():
    tied, loose = (
        look(tiny_models.make_config("llama", tie_word_embeddings=tie)) for tie in (True, False)
    )
    assert loose.parameters - tied.parameters == COMMON["vocab_size"] * COMMON["hidden_size"]


def test_dtype_is_the_configs_unless_it_is_given():
    config = tiny_models.make_config("llama", dtype="float16")
    assert look(config, dtype=None).dtype == "float16"
    assert look(config, dtype=torch.float32).dtype == "float32"
    assert look(tiny_models.make_config("llama"), dtype=None).dtype == "bfloat16"
    with pytest.raises(kv_hf.KVCacheError, match="floating-point dtype"):
        look(config, dtype="int8")
    states = look(planned_models.make_config("jamba"), dtype="float32").layers[0].states
    assert [state.dtype for state in states] == [None, "float32"]


def test_nothing_else_notices_a_probe(caplog):
    config = planned_models.make_config("jamba")
    before = copy.deepcopy(config.to_dict())
    state, default = torch.get_rng_state(), torch.get_default_dtype()
    implementation = config._attn_implementation
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        look(config)
    assert not said
    assert not caplog.records
    assert config.to_dict() == before
    assert config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == default
    assert torch.zeros(1).device.type == "cpu"
    assert not PROBES & {*transformers.AttentionInterface(), *transformers.AttentionMaskInterface()}


def test_a_probe_that_fails_leaves_nothing_behind(monkeypatch):
    def broken(self, input_ids=None, past_key_values=None, **kwargs):
        raise ZeroDivisionError("no numbers here")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", broken)
    planned = look(config_of("plain", "llama"))
    assert planned.how == "fields"
    assert "ZeroDivisionError: no numbers here" in planned.notes[-1]
    assert not PROBES & {*transformers.AttentionInterface(), *transformers.AttentionMaskInterface()}
    assert torch.get_default_dtype() == torch.float32
    assert torch.zeros(1).device.type == "cpu"
    assert torch.zeros(2)[0].item() == 0  # no mode is left that takes numbers for 0
    assert torch.ones(2)[0].item() == 1


# these two ignore the num_key_value_heads that their tiny config names
@pytest.mark.parametrize("family", [f for f in tiny_models.FAMILIES if f not in ("opt", "gpt_neo")])
def test_names_alone_say_the_same_of_plain_models(family):
    config = config_of("plain", family)
    planned = look(config)
    named = inventory_of_fields(
        config.to_dict(),
        name="tiny",
        model_type=config.model_type,
        dtype="bfloat16",
        source="a test",
    )
    assert named.layers == planned.layers
    assert named.max_positions == planned.max_positions


def test_probes_in_threads_do_not_mix():
    families = ["llama", "gpt2", "gemma", "phi"] * 2
    alone = {family: look(config_of("plain", family)) for family in families}
    found, filters = [None] * len(families), list(warnings.filters)

    def work(index):
        found[index] = look(config_of("plain", families[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(families))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone[family] for family in families]
    assert warnings.filters == filters


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: transformers.T5Config(), "encoder-decoder"),
        (lambda: transformers.BartConfig(), "encoder-decoder"),
        (lambda: transformers.XLNetConfig(d_model=64, n_layer=1, n_head=4), "takes no cache"),
        (lambda: object(), "must be a transformers model config"),
        (lambda: transformers.ViTConfig(), "no class that generates text"),
        (
            lambda: transformers.xLSTMConfig(
                vocab_size=97, hidden_size=64, num_hidden_layers=1, num_heads=4
            ),
            "no attention",
        ),
    ],
)
def test_models_that_cannot_be_planned_are_refused(config, message):
    with pytest.raises(kv_hf.UnsupportedModelError, match=message):
        look(config())


def test_a_cache_of_growing_things_that_are_no_keys_is_refused():
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this transformers has no DeepSeek V4")
    with pytest.raises(kv_hf.UnsupportedModelError, match="buffer_kv"):
        look(transformers.DeepseekV4Config(num_hidden_layers=2))


@pytest.mark.slow
def test_default_configs_of_all_decoders():
    """Every decoder that transformers knows is probed, read by its names, or refused with a reason."""
    found, reasons = {}, {}
    for kind in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = transformers.CONFIG_MAPPING[kind]()
        except Exception as error:  # some defaults are not valid themselves
            found[kind], reasons[kind] = "no config", str(error)
            continue
        if kind in ENCODERS:
            config.is_decoder = True
        try:
            planned = look(config, name=kind)
            found[kind] = planned.how
            reasons[kind] = "; ".join(planned.notes)
        except kv_hf.UnsupportedModelError as error:
            found[kind], reasons[kind] = "refused", str(error)
    for kind, how in found.items():
        print(f"{how:10} {kind}: {reasons[kind][:300]}")
    counts = collections.Counter(found.values())
    print(counts)
    assert counts["meta"] >= 0.75 * len(found)
    assert counts["fields"] <= 0.1 * len(found)
