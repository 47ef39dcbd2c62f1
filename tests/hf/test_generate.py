"""What generate() does with a paged cache, each against the same call on DynamicCache, and what stands around generate()."""

import copy
import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from beside_stock import compare, pages, run
from harness import slow_but
from measure.family_models import build_model, families
from rounding import assert_close
from tiny_models import ONE_FORMAT, left_padded, make_model, shared_model, tokens
from transformers import (
    GenerationConfig,
    StoppingCriteria,
    StoppingCriteriaList,
    modeling_layers,
)
from transformers.generation import candidate_generator

import kv_hf
from kv_hf.cache.model_shape import CACHE

PAGES = pages()
FORMATS = tuple(ONE_FORMAT)
GREEDY = {"max_new_tokens": 24, "do_sample": False}
EVEN, PADDED = {"input_ids": tokens(2, 60)}, left_padded([60, 3, 31])
REPEATING = {"input_ids": tokens(1, 9).repeat(1, 6)}


@pytest.fixture(scope="module")
def model():
    return shared_model("llama")


class StopsRows(StoppingCriteria):
    """End row i behind its token number 5 + 7 * i, as per-row criteria may since 4.39."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.tensor([self.calls >= 5 + 7 * row for row in range(input_ids.shape[0])])


# beams end at different lengths
ENDS = {"eos_token_id": [5, 11, 17, 23, 31, 41, 53, 67]}
SAMPLE = {"do_sample": True}
# options of generate(); functions make what has a state
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "beams that end early": {**ENDS, "num_beams": 3, "early_stopping": True, "length_penalty": 2.0},
    "several beams": {"num_beams": 4, "num_return_sequences": 4},
    "sampled beams": {**SAMPLE, "num_beams": 3, "temperature": 0.7, "top_k": 12},
    "samples": {**SAMPLE, "num_return_sequences": 3, "top_p": 0.8},
    "chunks of 7": {"prefill_chunk_size": 7},
    "criteria": {"stopping_criteria": lambda: StoppingCriteriaList([StopsRows()])},
}  # fmt: skip
# of one row
SINGLE: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 1.5},
    "guidance, negative prompt": {"guidance_scale": 1.5, "negative_prompt_ids": tokens(1, 9)},
}


@pytest.mark.parametrize(
    "inputs", [pytest.param(EVEN, marks=pytest.mark.slow), PADDED], ids=["even", "padded"]
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_generate_equals_dynamic_cache(model, options, inputs):
    compare(model, inputs, **options)


@pytest.mark.parametrize("options", SINGLE.values(), ids=SINGLE)
def test_generate_of_one_row_equals_dynamic_cache(model, options):
    compare(model, REPEATING, **options)


def drafts(kind, model):
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": 6}
    if kind == "early-exit":
        return {"assistant_early_exit": 1}
    # the model itself accepts nearly everything, a smaller one nearly nothing
    draft = model if kind == "itself" else make_model("llama", num_hidden_layers=1)
    # transformers drafts up to 20 tokens and adapts a threshold where scikit-learn is installed; more than a page of
    # unconfirmed tokens would be sealed, which is said once
    draft.generation_config.num_assistant_tokens = 12
    draft.generation_config.assistant_confidence_threshold = 0
    return {"assistant_model": draft}


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["draft", "itself", "lookup", "early-exit"])
def test_drafted_decoding_equals_dynamic_cache(kind, sampled):
    model, found = make_model("llama"), []
    for cache in (None, PAGES):
        # a new draft each time: transformers remembers in it how many tokens it had better draft
        way = drafts(kind, make_model("llama"))
        found.append(run(model, REPEATING, cache, do_sample=sampled, **way).sequences)
    assert torch.equal(*found)
    if not sampled:
        assert torch.equal(found[1], run(model, REPEATING, PAGES).sequences)


# way -> families: layers with windows, with states of convolutions beside their pages, of latents, and of latents with an indexer
GENERATORS = {"lookup": "PromptLookupCandidateGenerator", "mtp": "MTPCandidateGenerator"}
QUICK = [("lookup", "gemma3_text"), ("lookup", "lfm2"), ("mtp", "deepseek_v3")]
DRAFTED = [*QUICK, ("lookup", "inkling_text"), ("lookup", "deepseek_v32"), ("mtp", "inkling_text")]


@pytest.mark.parametrize(("way", "family"), slow_but(QUICK, DRAFTED))
def test_refused_drafts_leave_no_trace_in_layers_of_any_kind(monkeypatch, way, family):
    """Exact pages give DynamicCache's tokens; int4 pages the logits of forwards that had the kept tokens alone.

    In float64 no code of these rounds otherwise.
    """
    generator = getattr(candidate_generator, GENERATORS[way], None)
    if generator is None or family not in families("causal"):
        pytest.skip("this transformers does not have it")
    model, prompt, cuts = build_model(family), tokens(1, 90), [0]
    options = {"use_mtp": True} if way == "mtp" else {"prompt_lookup_num_tokens": 9}
    model.config.num_mtp_layers = 2
    model.set_experts_implementation("eager")  # which multiplies float64 too
    draft, crop = generator.get_candidates, kv_hf.PagedCache.crop

    def drafted(self, ids, **kwargs):
        """The model's own text, every seventh token wrong: as many as there are MTP layers, or 0 to 8."""
        start, end = ids.shape[1], draft(self, ids, **kwargs)[0].shape[1]
        end = min(end if way == "mtp" else start + start % 9, text.shape[1] - 1)
        places = torch.arange(start, end)
        return torch.cat([ids, torch.where(places % 7 == 3, 5, text[:, places])], 1), None

    def cropped(self, count):
        crop(self, count)
        cuts.append(self.get_seq_length())

    def mtp_model(main, **_):
        return modeling_layers.MtpModel(main, 2).to(main.dtype).eval()

    inputs, int4 = {"input_ids": prompt}, pages("paged_int4")
    text = run(model, inputs).sequences
    with monkeypatch.context() as patch:
        patch.setattr(generator, "get_candidates", drafted)
        if way == "mtp":
            patch.setattr(modeling_layers.MtpModel, "from_pretrained", mtp_model)
        compare(model, inputs, **options)
        text = run(model.double(), inputs, int4).sequences
        patch.setattr(kv_hf.PagedCache, "crop", cropped)
        found = run(model, inputs, int4, **options)
    assert len(cuts) < 35  # of 40 tokens: many drafts were taken
    again, logits = kv_hf.PagedCache.from_implementation(model.config, *int4.values()), []
    again.activate_past_recording()
    for start, end in pairwise(cuts):
        with torch.no_grad():
            logits.append(model(found.sequences[:, start:end], past_key_values=again).logits)
        again.crop(0)
    assert_close(torch.stack(found.logits, 1), torch.cat(logits, 1)[:, 89:].float())
    assert again.memory().pages_held == found.past_key_values.memory().pages_held > 0


# -- chats ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lookup", "draft", "early-exit"])
def test_chat_goes_on_behind_drafted_decoding_like_dynamic_cache(kind):
    """Past recording of the first turn must not outlive it: the next ones seal every page that is full."""
    found = []
    for options in ({}, PAGES):
        model, sequence, cache = make_model("llama"), REPEATING["input_ids"], None
        for turn, way in enumerate((drafts(kind, model), {}, {"do_sample": True}, {})):
            torch.manual_seed(turn)
            out = model.generate(
                sequence,
                max_new_tokens=20,
                return_dict_in_generate=True,
                **{"do_sample": False, **way},
                **(options if cache is None else {"past_key_values": cache}),
            )
            cache = copy.deepcopy(out.past_key_values)
            assert cache.get_seq_length() == out.sequences.shape[1] - 1
            sequence = torch.cat([out.sequences, tokens(1, 10, seed=turn + 1)], -1)
        found.append(out.sequences)
    cache.check_integrity()
    assert cache._group.pool.num_held == (cache.get_seq_length() - 4) // 16
    assert torch.equal(*found)


# -- formats ----------------------------------------------------------------------------------------------------


# -- names and options ------------------------------------------------------------------------------------------


def test_a_model_that_prepares_its_cache_by_names_gets_pages():
    """As MusicGen and RAG do, where generate() ended in a TypeError."""
    model, given = make_model("llama"), {"attention_mask": torch.ones(1, 5)}
    config = GenerationConfig(cache_implementation="paged_int4", max_length=20)
    model._prepare_cache_for_generation(
        config, given, generation_mode=None, batch_size=1, max_cache_length=19
    )
    assert isinstance(given[CACHE], kv_hf.PagedCache)


# -- modes and dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_model_of_another_dtype_after_its_first_use(dtype):
    """Halves round otherwise in the kernel: they are compared on the same dense attention."""
    model = make_model("llama")
    first = run(model, PADDED, PAGES)
    model.to(dtype)
    # eager masks of rows that see nothing are nan in float64, with any cache
    model.set_attn_implementation("sdpa" if dtype == torch.float64 else "eager")
    assert torch.equal(*(model.generate(**PADDED, **GREEDY, **cache) for cache in ({}, PAGES)))
    text = torch.cat([first.sequences, tokens(3, 5)], 1)
    with pytest.raises(kv_hf.CacheMismatchError, match="one cache per model, dtype and adapters"):
        model.generate(text, past_key_values=first.past_key_values, **GREEDY)


def torchao(model, kind):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, getattr(quantization, kind)())


def quanto(model, kind):
    library = pytest.importorskip("optimum.quanto")
    importlib.import_module("quanto_in_python")
    library.quantize(model, weights=getattr(library, kind), exclude="lm_head")
    library.freeze(model)


QUANTIZED = [
    (torchao, "Int8WeightOnlyConfig"),
    (torchao, "Int8DynamicActivationInt8WeightConfig"),
    (quanto, "qint8"),
    (quanto, "qint4"),
]


@pytest.mark.parametrize(("quantize", "kind"), QUANTIZED, ids=[kind for _, kind in QUANTIZED])
def test_quantized_weights_give_the_tokens_of_dynamic_cache(quantize, kind, tmp_path):
    """Their numbers lie in tensors within tensors: stores and saved caches read those."""
    from kv_hf.cache.identity import plain_parts

    model, store = make_model("llama"), kv_hf.PrefixStore()
    plain = compare(model, PADDED, **GREEDY)
    plain.save(tmp_path / "plain", model)
    quantize(model, kind)
    cache = compare(model, PADDED, **GREEDY)
    cache.save(tmp_path / "cache", model)
    kv_hf.PagedCache.load(tmp_path / "cache", model).check_integrity()
    with pytest.raises(kv_hf.CacheFileError):
        kv_hf.PagedCache.load(tmp_path / "plain", model)
    space = store.bind_model(model)
    assert store.bind_model(model) == space
    scale = list(plain_parts(model.model.layers[0].self_attn.k_proj.weight))[1]
    with torch.no_grad():
        scale.mul_(2)
    assert store.bind_model(model) != space
    with pytest.raises(kv_hf.CacheFileError, match="k_proj.weight differs"):
        kv_hf.PagedCache.load(tmp_path / "cache", model)
