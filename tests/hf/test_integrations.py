"""What else transformers, accelerate and torch offer around generate(): with pages as with DynamicCache, or refused."""

import threading
import warnings
from typing import Any

import pytest
import torch
import transformers
from test_prefix_store import PAGE
from tiny_models import left_padded, make_model, shared_model, tokens
from tiny_tokenizer import make_tokenizer

import kv_hf

TEXTS = [
    "Four score and seven years ago our fathers brought forth on this continent a new nation. " * 3,
    "Now we are engaged in a great civil war",
    "The",
]
PAGES: dict[str, Any] = {"cache_implementation": "paged_exact", "cache_config": {"page_size": PAGE}}
GREEDY = {"max_new_tokens": 24, "do_sample": False}
PADDED = left_padded([80, 57, 9])


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(chat=True)


@pytest.fixture(scope="module")
def model():
    return make_model("llama", vocab_size=1000)


def encoded(tokenizer, texts):
    tokenizer.padding_side = "left"
    found = tokenizer(texts, return_tensors="pt", padding=True)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def check(model, inputs, **options):
    """Compare greedy tokens with those of a DynamicCache; return what was generated with pages."""
    expected = model.generate(**inputs, **GREEDY, **options)
    found = model.generate(**inputs, **GREEDY, return_dict_in_generate=True, **PAGES, **options)
    assert torch.equal(found.sequences, expected)
    assert isinstance(found.past_key_values, kv_hf.PagedCache)
    found.past_key_values.check_integrity()
    return found


# -- pipelines and streamers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_pipeline_gives_the_texts_of_dynamic_cache(model, tokenizer, rows, chat):
    tokenizer.padding_side = "left"
    texts = [[{"role": "user", "content": text}] for text in TEXTS] if chat else TEXTS
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    expected = pipe(texts, batch_size=rows, **GREEDY)
    assert pipe(texts, batch_size=rows, **GREEDY, **PAGES) == expected
    always = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, **PAGES)
    assert always(texts, batch_size=rows, **GREEDY) == expected


def test_streamers_get_the_texts_of_dynamic_cache(model, tokenizer):
    inputs, texts = encoded(tokenizer, TEXTS[:1]), []
    for pages in ({}, PAGES):
        streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
        options = {**inputs, **GREEDY, **pages, "streamer": streamer}
        thread = threading.Thread(target=model.generate, kwargs=options)
        thread.start()
        texts.append(list(streamer))
        thread.join()
    assert texts[0] == texts[1] and "".join(texts[0])


# -- what steers the choice of tokens ----------------------------------------------------------------------------


def allowed(row, ids):
    return [5, 6, 7, 9 + len(ids) % 5, 20 + row]


OPTIONS: dict[str, dict[str, Any]] = {
    "constrained": {"prefix_allowed_tokens_fn": allowed},
    "constrained beams": {"prefix_allowed_tokens_fn": allowed, "num_beams": 3},
    "guidance": {"guidance_scale": 1.5},
    "guidance, negative prompt": {"guidance_scale": 1.5, "negative_prompt_ids": tokens(1, 9)},
    "watermark": {"watermarking_config": transformers.WatermarkingConfig()},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "bad_words_ids": [[5], [6, 7]]},
    "early exit": {"assistant_early_exit": 1},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", list(OPTIONS))
def test_decoding_options_give_the_tokens_of_dynamic_cache(model, tokenizer, name):
    check(model, encoded(tokenizer, TEXTS[:1]), **OPTIONS[name])


def test_sampled_watermark_gives_the_tokens_of_dynamic_cache(model, tokenizer):
    mark = transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
    found = []
    for pages in ({}, PAGES):
        torch.manual_seed(0)
        options = {"max_new_tokens": 24, "do_sample": True, "watermarking_config": mark, **pages}
        found.append(model.generate(**encoded(tokenizer, TEXTS[:1]), **options))
    assert torch.equal(*found)


@pytest.mark.parametrize("rows", [1, 3])
def test_stop_strings_give_the_tokens_of_dynamic_cache(model, tokenizer, rows):
    inputs = encoded(tokenizer, TEXTS[:rows])
    text = tokenizer.decode(model.generate(**inputs, **GREEDY)[0, -12:-9])
    found = check(model, inputs, stop_strings=[text], tokenizer=tokenizer)
    assert found.sequences.shape[1] < inputs["input_ids"].shape[1] + 24 or rows > 1


def test_stop_strings_leave_attention_on_the_pages(model, tokenizer):
    inputs = encoded(tokenizer, TEXTS[:1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", kv_hf.KVCacheWarning)
        model.generate(**inputs, **GREEDY, **PAGES, stop_strings=["the"], tokenizer=tokenizer)


def test_universal_assisted_decoding_gives_the_tokens_of_dynamic_cache(model, tokenizer):
    assistant = make_model("llama", vocab_size=600, num_hidden_layers=1)
    both = {"tokenizer": tokenizer, "assistant_tokenizer": make_tokenizer(600)}
    check(model, encoded(tokenizer, TEXTS[:1]), assistant_model=assistant, **both)


def contrast(model, input_ids, generation_config, logits_processor, stopping_criteria, **inputs):
    """Contrastive search, two candidates: the cache's rows are repeated, chosen among and cut back in every step."""
    cache = inputs["past_key_values"]
    logits = model(input_ids, past_key_values=cache).logits[:, -1]
    for _ in range(generation_config.max_new_tokens):
        chances, best = logits.softmax(-1).topk(2)
        cache.batch_repeat_interleave(2)
        tried = model(best.view(-1, 1), past_key_values=cache, output_hidden_states=True)
        states = tried.hidden_states[-1].view(len(input_ids), 2, -1)
        score = chances - 0.3 * torch.tanh(states.mean(-1))
        chosen = score.argmax(-1)
        rows = chosen + 2 * torch.arange(len(chosen))
        cache.batch_select_indices(rows)
        input_ids = torch.cat([input_ids, best.gather(1, chosen[:, None])], 1)
        logits = tried.logits[rows, -1]
    return input_ids


@pytest.mark.parametrize("custom", ["sample", "contrastive"])
def test_custom_generate_gives_the_tokens_of_dynamic_cache(model, tokenizer, custom):
    def same(model, input_ids, **rest):
        return model._sample(input_ids, **rest)

    inputs = {"input_ids": encoded(tokenizer, TEXTS[:1])["input_ids"].repeat(2, 1)}
    inputs["input_ids"][1] = inputs["input_ids"][1].flip(0)
    function = same if custom == "sample" else contrast
    found = [
        model.generate(**inputs, **GREEDY, **pages, custom_generate=function)
        for pages in ({}, PAGES)
    ]
    assert torch.equal(*found)


MOVED: dict[str, dict[str, Any]] = {
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
    "group beams": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "constrained beams": {"num_beams": 4, "force_words_ids": [[5]]},
}


@pytest.mark.parametrize("name", list(MOVED))
def test_modes_that_transformers_has_moved_to_the_hub_are_refused_by_it(name):
    """Code of the Hub, which only trust_remote_code=True runs: with any cache."""
    for pages in ({}, PAGES):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            shared_model("llama").generate(**PADDED, **GREEDY, **MOVED[name], **pages)


# -- modes and dtypes --------------------------------------------------------------------------------------------


def test_inference_mode_gives_the_tokens_of_dynamic_cache():
    with torch.inference_mode():
        check(shared_model("llama"), PADDED)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpoints"])
def test_training_flags_give_the_tokens_of_dynamic_cache(training, checkpoints):
    """With checkpoints in training transformers leaves the cache out: wrong texts, but the same ones."""
    model = make_model("llama").train(training)
    if checkpoints:
        model.gradient_checkpointing_enable()
    check(model, PADDED)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_model_of_another_dtype_after_its_first_use(dtype):
    """Halves round otherwise in the kernel: they are compared on the same dense attention."""
    model = make_model("llama")
    first = check(model, PADDED)
    model.to(dtype)
    # eager masks of rows that see nothing are nan in float64, with any cache
    model.set_attn_implementation("sdpa" if dtype == torch.float64 else "eager")
    expected = model.generate(**PADDED, **GREEDY)
    found = model.generate(**PADDED, **GREEDY, **PAGES)
    assert torch.equal(found, expected)
    text = torch.cat([first.sequences, tokens(3, 5)], 1)
    with pytest.raises(kv_hf.CacheMismatchError, match="one cache per model, dtype and adapters"):
        model.generate(text, past_key_values=first.past_key_values, **GREEDY)


@pytest.mark.slow
def test_compiled_forward_gives_the_tokens_of_dynamic_cache():
    """torch leaves the graph wherever the cache decides something: right, but nothing gained (docs/speed_and_memory.md)."""
    model = make_model("llama", num_hidden_layers=1)
    model.forward = torch.compile(model.forward, backend="eager")
    expected = make_model("llama", num_hidden_layers=1).generate(**PADDED, max_new_tokens=3)
    assert torch.equal(model.generate(**PADDED, max_new_tokens=3, **PAGES), expected)


# -- quantized weights -------------------------------------------------------------------------------------------


def torchao(model, kind):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, getattr(quantization, kind)())


def quanto(model, kind):
    library = pytest.importorskip("optimum.quanto")
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
    plain = check(model, PADDED).past_key_values
    plain.save(tmp_path / "plain", model)
    quantize(model, kind)
    cache = check(model, PADDED).past_key_values
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


# -- accelerate and processes ------------------------------------------------------------------------------------


def dispatched(model, folder):
    import accelerate

    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    options = {"main_device": "cpu", "offload_dir": folder, "force_hooks": True}
    accelerate.dispatch_model(model, places, **options)


def offloaded(model, folder):
    import accelerate

    accelerate.cpu_offload(model, torch.device("cpu"))


def on_disk(model, folder):
    import accelerate

    accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("place", [offloaded, on_disk, dispatched])
def test_offloaded_weights_give_the_tokens_of_dynamic_cache(place, tmp_path):
    """A saved cache knows them by their numbers, wherever these lie."""
    pytest.importorskip("accelerate")
    model = make_model("llama")
    place(model, tmp_path / "weights")
    cache = check(model, PADDED).past_key_values
    cache.save(tmp_path / "cache", model)
    kv_hf.PagedCache.load(tmp_path / "cache", make_model("llama")).check_integrity()
    other = make_model("llama")
    other.model.layers[1].mlp.up_proj.weight.data.mul_(2)
    with pytest.raises(kv_hf.CacheFileError, match="up_proj.weight differs"):
        kv_hf.PagedCache.load(tmp_path / "cache", other)
