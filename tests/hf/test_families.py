"""Exact pages against DynamicCache on every family: padded rows, images, models that attend by themselves, and scripts/measure's walk."""

import dataclasses

import pytest
import rounding
import torch
import transformers
from beside_stock import assert_same, compare, pages, run
from harness import slow_but
from measure import suites
from measure.families import SENSITIVE, examine
from measure.families import compare as compare_operation
from measure.family_models import ROLES, build_model, families
from measure.family_operations import OPERATIONS, STOCK, NotOffered, Subject
from measure.runner import WORKLOADS
from measure.runner import run as run_workload
from tiny_encoders import MODELS, make
from tiny_models import FAMILIES, NO_INTERFACE, left_padded, shared_model, tokens
from transformers import DynamicCache

import kv_hf
from kv_hf.cache.model_shape import CACHE, CHUNKS_BEHIND_A_CACHE
from kv_hf.hf import attention

# the others are slow
QUICK = ["llama", "qwen3", "gemma", "gpt2", "phi", "mixtral", "gptj", "bloom"]
every_family = pytest.mark.parametrize("family", slow_but(QUICK, FAMILIES))


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_left_padded_equals_dynamic_cache(family, said):
    """Two pages of each row are sealed while it grows; wherever attention has an interface, kernels read them."""
    compare(shared_model(family), left_padded([70, 9, 40]))
    assert bool(said("does not know kv_hf")) == (family in NO_INTERFACE)
    # without a C compiler another kernel reads the pages
    assert family in NO_INTERFACE or len(said()) == len(said("'c' would"))


@every_family
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


# -- models that attend by themselves, or keep keys and values in their own way ------------------------------


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"n_embd": 32, "n_layer": 1, "n_head": 2}, "OpenAIGPTLMHeadModel"),
        ({"emb_dim": 32, "n_layers": 1, "n_heads": 2}, "FlaubertWithLMHeadModel"),
    ],
)
def test_model_without_an_argument_for_a_cache_is_refused(config, name):
    """Flaubert keeps its keys and values in a transformers Cache, but takes it under another name."""
    cls = getattr(transformers, name)
    model = cls(cls.config_class(vocab_size=97, **config)).eval()
    with pytest.raises(kv_hf.UnsupportedModelError, match=f"{name} does not keep .* as {CACHE}"):
        model.generate(tokens(1, 9), max_new_tokens=2, cache_implementation="paged_exact")


def test_model_whose_generate_makes_no_cache_by_name_is_refused_and_takes_one():
    """MusicGen ignored the name without a word."""
    few = {"num_layers": 1, "num_heads": 2, "d_model": 32, "d_kv": 16, "d_ff": 32}
    codec = {"num_filters": 2, "upsampling_ratios": [4, 2], "hidden_size": 16, "codebook_size": 32}
    decoder = {"hidden_size": 32, "ffn_dim": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MusicgenConfig(
        text_encoder={"model_type": "t5", "vocab_size": 97, **few},
        audio_encoder={"model_type": "encodec", "codebook_dim": 16, "sampling_rate": 640, **codec},
        decoder={"vocab_size": 32, "num_codebooks": 2, **decoder},
    )
    model = transformers.MusicgenForConditionalGeneration(config).eval()
    model.generation_config.update(decoder_start_token_id=32, pad_token_id=32)
    given = {"input_ids": tokens(1, 7), "max_new_tokens": 80, "do_sample": False}
    cache = kv_hf.PagedEncoderDecoderCache(config)
    with pytest.raises(kv_hf.UnsupportedModelError, match=f"pass {CACHE}=kv_hf.PagedEnc"):
        model.generate(**given, cache_implementation="paged_exact")
    assert torch.equal(model.generate(**given, **{CACHE: cache}), model.generate(**given))
    assert cache.get_seq_length() == 81


def test_blt_which_keeps_a_second_cache_shares_no_prefix_and_gets_no_preallocated_pages():
    """Both ended in a RuntimeError about shapes, the store at the second prompt."""
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    part = {**layers, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 260}
    local = {**part, "hidden_size_global": 64, "cross_attn_k": 2}
    config = transformers.BltConfig(
        patcher_config=part,
        encoder_config=local,
        decoder_config=local,
        global_config={**part, "hidden_size": 64},
        encoder_hash_byte_group_vocab=500,
        encoder_hash_byte_group_size=[3, 4],
        num_hidden_layers=1,
        vocab_size=260,
        pad_token_id=0,
    )
    model, store = transformers.BltForCausalLM(config).eval(), kv_hf.PrefixStore()
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "paged_exact"}
    with pytest.raises(kv_hf.CacheOptionError, match="keeps a second cache .* Leave max_length"):
        model.generate(tokens(1, 90), **options, cache_config={"max_length": 256})
    options["cache_config"] = {"prefix_store": store}
    with pytest.warns(kv_hf.KVCacheWarning, match="prefix_store is not used: .* second cache"):
        model.generate(tokens(1, 90), **options)
    model.generate(tokens(1, 90), **options)
    assert store.stats().rows == 0


def test_masks_that_transformers_makes_without_a_window_are_refused_beside_preallocated_pages():
    """generate() makes the masks of such a cache itself; 5.23 gives Inkling's sliding layers those of full attention."""
    try:
        model, ids = build_model("inkling_text", "causal"), tokens(1, 60)
    except KeyError:
        pytest.skip("the installed transformers has no such family")
    given = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "paged_exact"}
    config = model.config.get_text_config()
    assert config.sliding_window < 60
    assert torch.equal(
        model.generate(ids, **given), model.generate(ids, max_new_tokens=4, do_sample=False)
    )
    with pytest.raises(kv_hf.CacheOptionError, match="masks without their window .*max_length out"):
        model.generate(ids, **given, cache_config={"max_length": 128})
    exact = model(ids).logits
    found = model(ids, past_key_values=kv_hf.PagedCache(config, max_length=128)).logits
    rounding.assert_close(found, exact)  # a forward makes its own


@pytest.mark.parametrize("family", ["gpt_neo", "bloom", "prophetnet"])
def test_models_that_attend_by_themselves_get_no_preallocated_pages(family):
    """GPT-Neo takes the number of keys for its place in the text: its local layers saw other tokens."""
    model, store = build_model(family, "causal"), kv_hf.PrefixStore()
    given = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "paged_exact"}
    ids, plain = tokens(1, 60), {"max_new_tokens": 4, "do_sample": False}
    with pytest.raises(kv_hf.CacheOptionError, match="cannot use it: .* Leave max_length out"):
        model.generate(ids, **given, cache_config={"max_length": 128})
    for _ in range(2):
        found = model.generate(ids, **given, cache_config={"prefix_store": store, "page_size": 16})
        assert torch.equal(found, model.generate(ids, **plain))
    assert store.stats().rows_hit == (0 if family == "prophetnet" else 1)


def test_model_that_puts_columns_in_front_goes_on_with_its_cache():
    """CPMAnt has 32 prompt columns in front of the text: its cache has seen more than the text is long."""
    model = build_model("cpmant", "causal")
    ids, more = tokens(1, 60), {"do_sample": False, "return_dict_in_generate": True}
    made = {}
    for kind, cache in (
        ("stock", DynamicCache(config=model.config)),
        ("paged", kv_hf.PagedCache(model.config, page_size=16)),
    ):
        first = model.generate(ids, **more, max_new_tokens=6, past_key_values=cache)
        text = torch.cat([first.sequences, tokens(1, 9, seed=3)], 1)
        made[kind] = model.generate(text, **more, max_new_tokens=6, past_key_values=cache)
    assert torch.equal(made["stock"].sequences, made["paged"].sequences)


# -- images in the prompt ------------------------------------------------------------------------------------

GREEDY = {"no_repeat_ngram_size": 2}


# beams move the layers of images too, which mllama alone has
@pytest.mark.parametrize(("name", "beams"), [*((name, 1) for name in MODELS), ("mllama", 3)])
def test_prompt_with_images_equals_dynamic_cache(name, beams, said):
    model, inputs = make(name)
    options = {**GREEDY, "num_beams": beams}
    expected = run(model, inputs, **options)
    other = {**inputs, "pixel_values": inputs["pixel_values"] + 1}
    changed = run(model, other, **options).logits[0] - expected.logits[0]
    assert changed.abs().max() > 1e-3  # the images count
    for _ in range(2):
        found = run(model, inputs, pages(), **options)
        assert_same(found, expected)
    assert not said("dense")
    cache = found.past_key_values
    cache.check_integrity()
    assert cache.memory().pages_held > 0
    assert all(row.reason for row in cache.report() if not row.kind.startswith("paged"))


def test_image_layers_of_mllama_keep_transformers_layer_and_say_so():
    model, inputs = make("mllama")
    cache = run(model, inputs, pages(), **GREEDY).past_key_values
    rows = cache.report()
    assert [row.kind for row in rows] == ["paged", "DynamicLayer", "paged"]
    assert "images" in rows[1].reason
    # sides, rows, heads, 2 tiles of 5, head_dim
    assert cache.memory().other == 2 * 2 * 2 * 10 * 16 * 4
    assert cache.memory().tokens == 2 * 99 - 2
    text_only = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    text_only["input_ids"] = text_only["input_ids"].clamp(max=90)
    found = run(model, text_only, pages(), **GREEDY)
    assert_same(found, run(model, text_only, **GREEDY))
    held = found.past_key_values
    assert held.memory().other == 0
    if CHUNKS_BEHIND_A_CACHE:  # 5.17 crops no layer without tokens
        held.crop(-held.get_seq_length())  # its model asks for the keys of such layers
        assert_same(run(model, text_only, held, **GREEDY), found)


# -- scripts/measure: the walk over all families, that it finds what is wrong, and the suites of transformers --

# family -> role, part of a decode step's layers that kernels read, operations that are not equal with a reason of transformers'
# own; each of these stresses another seam: KV-shared layers, block selection, latents, chunks, sinks, biases, states, ...
STATEFUL = {"lookup": "impossible", "assisted": "impossible"}
FAST = {
    "gemma4_text": ("causal", 1, {}),
    "minimax_m3_vl_text": ("causal", 1, {}),
    "deepseek_v3": ("causal", 1, {}),
    "deepseek_v32": ("causal", 1, {}),
    "llama4_text": ("causal", 1, {}),
    "gpt_oss": ("causal", 1, {}),
    "bloom": ("causal", 0, {}),
    "falcon_h1": ("causal", 1, STATEFUL),
    "zamba2": ("causal", 1, STATEFUL),
    # attends to pages, and computes a mask from all values
    "doge": ("causal", 0.5, {}),
    # its cached steps show padding again, whatever the cache
    "git": ("causal", 0, {}),
    "t5": ("seq2seq", 1, {}),
    "qwen2_vl": ("conditional", 1, {}),
}


# the others are slow, as is the walk over all families
WALKED = ("deepseek_v3", "gpt_oss", "zamba2", "t5", "qwen2_vl")


@pytest.mark.parametrize("family", slow_but(WALKED, FAST))
def test_examine_family_equals_dynamic_cache(family):
    role, reads, expected = FAST[family]
    if family not in families(role):
        pytest.skip(f"this transformers has no {family}")
    row = examine(family, role)
    others = {name: one["verdict"] for name, one in row["others"].items()}
    options = {name for name, verdict in others.items() if verdict == "refused"}
    if not CHUNKS_BEHIND_A_CACHE and family in ("git", "qwen2_vl"):
        pytest.skip("this transformers' own caches fail in some operations of the family")
    assert {name: others[name] for name in others.keys() - options} == expected, row["others"]
    assert options <= {"saved", "prefix", "max_length", "reading"} | (
        {"padded"} if family == "git" else set()
    )
    assert row["verdict"] == ("broken" if "broken" in expected.values() else "equal")
    assert row["pages"] >= 10
    assert row["reads"] == reads
    assert row["sensitivity"] > SENSITIVE


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_walk_finds_no_family_that_differs(role, tmp_path):
    """Every family of the installed transformers: equal, refused, or wrong with DynamicCache as well."""
    work = WORKLOADS["model_families"]
    found = run_workload(work, work.configurations({"role": [role]}), workers=2)
    assert not found.failed
    assert len(found.rows) == len(families(role))


# what the walk would say of a paged cache that is wrong


def faulty_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = attention.paged_attention

    def scaled(asked, kernel):
        return whole(dataclasses.replace(asked, softmax_scale=1.05 * asked.softmax_scale), kernel)

    monkeypatch.setattr(attention, "paged_attention", scaled)


def faulty_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_hf.PagedCache, "reorder_cache", lambda self, order: None)


@pytest.mark.parametrize(
    ("fault", "operation"),
    [
        (faulty_scale, "greedy"),
        (faulty_scale, "padded"),
        (faulty_order, "beams"),
    ],
)
def test_compare_finds_seeded_fault(monkeypatch, fault, operation):
    subject = Subject(build_model("qwen3"))
    fault(monkeypatch)
    assert compare_operation(subject, operation)["verdict"] == "DIFFERS"


# verdicts of made-up operations


def told(monkeypatch: pytest.MonkeyPatch, **by_kind) -> str:
    """Return the verdict where each kind of cache gives this outcome; an exception is raised."""

    def operation(subject, kind):
        found = by_kind["paged" if kind not in STOCK else kind]
        if isinstance(found, Exception):
            raise found
        return {
            "tokens": torch.tensor([[1, 2]]),
            "logits": torch.tensor([[[0.0, found], [1.0, found]]]),
        }

    monkeypatch.setitem(OPERATIONS, "made_up", operation)
    return compare_operation(None, "made_up")["verdict"]


@pytest.mark.parametrize(
    ("dynamic", "paged", "plain", "expected"),
    [
        (1.0, 1.0 + 1e-5, 5.0, "equal"),
        (1.0, 2.0, 1.0, "DIFFERS"),
        (1.0, 2.0, 2.0, "broken"),
        (1.0, float("nan"), 1.0, "DIFFERS"),
        (1.0, kv_hf.UnsupportedModelError("no"), 1.0, "refused"),
        (1.0, RuntimeError("sizes"), 1.0, "ERROR"),
        (ValueError("no beams"), ValueError("no beams"), 1.0, "impossible"),
        (ValueError("no beams"), 1.0, 1.0, "equal"),
        (ValueError("no beams"), 1.0, ValueError("no"), "ERROR"),
        (NotOffered("no such argument"), 1.0, 1.0, "absent"),
    ],
    ids=str,
)
def test_compare_verdict(monkeypatch, dynamic, paged, plain, expected):
    assert told(monkeypatch, dynamic=dynamic, paged=paged, plain=plain) == expected


# -- transformers' own suites --------------------------------------------------------------------------------


def test_compared_counts_tests_that_used_pages():
    stock = {f"T::{name}": {"outcome": "passed"} for name in "xyz"}
    ours = {
        "T::x": {"outcome": "passed", "made": 1, "pages": 4},
        "T::y": {"outcome": "passed", "pages": 0},
        "T::z": {"outcome": "failed", "made": 1, "pages": 9},
        "T::new": {"outcome": "passed", "made": 1, "pages": 2},
    }
    found = suites.compared(stock, ours)
    assert (found["passed"], found["only_ours_failed"]) == (2, 1)
    assert found["names"] == {"only_ours_failed": ["T::z"]}
    assert (found["passed_with_pages"], found["pages_sealed"]) == (1, 4)
