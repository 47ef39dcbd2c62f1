"""What generate() does with a paged cache, each against the same call on DynamicCache."""

import copy
import queue
import threading

import pytest
import torch
import transformers
from tiny_models import ONE_FORMAT, left_padded, make_model, shared_model, tokens
from transformers import GenerationConfig, TextIteratorStreamer

import kv_hf

PAGES = {"cache_implementation": "paged_exact", "cache_config": {"page_size": 16}}
FORMATS = tuple(ONE_FORMAT)


@pytest.fixture(scope="module")
def model():
    return shared_model("llama")


def both(model, inputs, **options):
    """Run the same generate() on DynamicCache and on exact pages."""
    torch.manual_seed(7)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(7)
    return expected, model.generate(**inputs, **PAGES, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 1.3, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": False, "prefill_chunk_size": 7},
        {"do_sample": False, "prefill_chunk_size": 33},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_beams": 2, "num_return_sequences": 2},
        {"do_sample": False, "prompt_lookup_num_tokens": 5},
        {"do_sample": False, "repetition_penalty": 1.4},
        {"do_sample": False, "stop_strings": None, "max_time": 60.0},
    ],
    ids=[
        "sample",
        "returns",
        "chunk7",
        "chunk33",
        "beams",
        "beam-sample",
        "lookup",
        "penalty",
        "stop",
    ],
)
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_generate_equals_dynamic_cache(model, options, padded):
    if options.get("prompt_lookup_num_tokens"):
        inputs = {"input_ids": tokens(1, 8).repeat(1, 6)}  # batches of 1 only
    else:
        inputs = left_padded([60, 3, 31]) if padded else {"input_ids": tokens(2, 60)}
    expected, found = both(model, inputs, max_new_tokens=40, **options)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("implementation", FORMATS)
def test_assisted_decoding_equals_plain_decoding(implementation):
    """Rejected candidates must leave no trace in the pages, and the assistant's cache crops all the time."""
    model = shared_model("llama")
    assistant = make_model("llama", num_hidden_layers=1)
    ids = tokens(1, 50)
    options = {"cache_implementation": implementation, "cache_config": {"page_size": 16}}
    plain = model.generate(ids, max_new_tokens=40, do_sample=False, **options)
    helped = model.generate(
        ids, max_new_tokens=40, do_sample=False, assistant_model=assistant, **options
    )
    if implementation == "paged_exact":
        assert torch.equal(plain, helped)
    else:  # several queries per forward see their own tokens exact, so distant tokens may differ
        assert torch.equal(plain[:, :56], helped[:, :56])


@pytest.mark.parametrize("implementation", FORMATS)
def test_row_does_not_depend_on_its_batch(model, implementation):
    inputs = left_padded([90, 17, 45])
    options = {"cache_implementation": implementation, "cache_config": {"page_size": 16}}
    kept = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    together = model.generate(**inputs, **options, **kept)
    for row, length in enumerate([90, 17, 45]):
        alone = model.generate(inputs["input_ids"][row : row + 1, 90 - length :], **options, **kept)
        assert torch.equal(alone.sequences[0, length:], together.sequences[row, 90:])
        cache, only = together.past_key_values, alone.past_key_values
        pages = cache.group.rows[row].pages
        assert len(pages) == len(only.group.rows[0].pages) > 0
        for mine, theirs in zip(cache.paged_layers, only.paged_layers, strict=True):
            for side in (0, 1):
                mine_read = mine.storage.sides[side].read(torch.tensor(pages), torch.float32)
                ids = torch.tensor(only.group.rows[0].pages)
                theirs_read = theirs.storage.sides[side].read(ids, torch.float32)
                torch.testing.assert_close(mine_read, theirs_read, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("implementation", FORMATS)
def test_streamer_gets_the_tokens_that_generate_returns(model, implementation):
    class Tokenizer:
        def decode(self, ids, **options):
            return "".join(f"<{int(i)}>" for i in ids)

    streamer = TextIteratorStreamer(Tokenizer(), skip_prompt=True, timeout=60)
    results: queue.Queue = queue.Queue()
    ids = tokens(1, 40)

    def work():
        results.put(
            model.generate(
                ids,
                max_new_tokens=30,
                do_sample=False,
                streamer=streamer,
                cache_implementation=implementation,
            )
        )

    thread = threading.Thread(target=work)
    thread.start()
    text = "".join(streamer)
    thread.join(60)
    assert text == Tokenizer().decode(results.get(timeout=1)[0, 40:])


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_chat_continued_with_the_returned_cache_equals_dynamic_cache(family):
    model = shared_model(family)
    options = {"max_new_tokens": 25, "do_sample": False, "return_dict_in_generate": True}
    sequences = []
    for first in ({}, PAGES):
        ids, cache = tokens(2, 40), None
        for turn in range(3):
            given = first if cache is None else {"past_key_values": cache}
            out = model.generate(ids, **given, **options)
            cache = out.past_key_values
            ids = torch.cat([out.sequences, tokens(2, 20, seed=turn + 1)], -1)
        sequences.append(out.sequences)
        if first:
            cache.check_integrity()
            assert cache.get_seq_length() == ids.shape[1] - 21
    assert torch.equal(*sequences)


def test_user_made_cache_with_mixed_formats_generates(model):
    cache = kv_hf.PagedCache(model.config, keys="int8", values="int4", page_size=64)
    out = model.generate(tokens(2, 80), past_key_values=cache, max_new_tokens=8)
    assert out.shape == (2, 88)
    assert cache.get_seq_length() == 87
    specs = {
        (layer.spec.keys.scheme.name, layer.spec.values.scheme.name) for layer in cache.paged_layers
    }
    assert specs == {("int8", "int4")}


def test_deepcopy_of_a_prompt_cache_is_independent(model):
    ids = tokens(1, 70)
    cache = kv_hf.PagedCache(model.config, keys="int4")
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
    before = cache.layers[0].keys.clone()
    copied = copy.deepcopy(cache)
    first = model.generate(ids, past_key_values=copied, max_new_tokens=20, do_sample=False)
    assert torch.equal(cache.layers[0].keys, before)
    assert cache.get_seq_length() == 69
    again = model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert torch.equal(first, again)


@pytest.mark.parametrize("implementation", FORMATS)
def test_cache_filled_in_inference_mode_goes_on_outside_of_it(model, implementation):
    """Tensors made in inference mode cannot be written to outside: the cache must not hold such tensors."""
    ids = tokens(1, 60)
    options = {"cache_implementation": implementation, "cache_config": {"page_size": 16}}
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **options)
    cache = out.past_key_values
    more = torch.cat([out.sequences, tokens(1, 4)], -1)
    found = model.generate(more, past_key_values=cache, max_new_tokens=30, do_sample=False)
    cache.crop(-40)
    cache.check_integrity()
    assert found.shape == (1, 99)


def test_cache_config_is_not_consumed(model):
    config = {"page_size": 32, "sink_tokens": 2}
    for _ in range(2):
        out = model.generate(
            tokens(1, 40),
            max_new_tokens=3,
            cache_implementation="paged_int4",
            cache_config=config,
            return_dict_in_generate=True,
        )
        assert out.past_key_values.options.page_size == 32
    assert config == {"page_size": 32, "sink_tokens": 2}


def test_generation_config_with_our_name_survives_saving(tmp_path, model):
    config = GenerationConfig(
        cache_implementation="paged_int4", cache_config={"page_size": 32}, pad_token_id=0
    )
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    out = model.generate(
        tokens(1, 40), loaded, max_new_tokens=3, return_dict_in_generate=True, eos_token_id=None
    )
    assert out.past_key_values.options.page_size == 32
    assert out.past_key_values.options.keys == "int4"


def test_model_saved_with_our_name_generates_after_loading(tmp_path):
    model = make_model("llama")
    model.generation_config.cache_implementation = "paged_int4"
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    out = loaded.generate(tokens(1, 40), max_new_tokens=3, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, kv_hf.PagedCache)


def test_vision_language_model_pages_its_text_model_only():
    torch.manual_seed(0)
    text = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=16,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=96,
        vision_feature_select_strategy="default",
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    ids = tokens(2, 60).clamp(max=95)
    ids[:, 3:7] = 96  # four image tokens
    inputs = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(**inputs, **options)
    assert torch.equal(expected, model.generate(**inputs, **options, **PAGES))


def test_layer_overrides_of_the_target_do_not_reach_its_assistant():
    model, assistant = make_model("llama"), make_model("llama", num_hidden_layers=1)
    options = {
        "max_new_tokens": 10,
        "do_sample": False,
        "cache_implementation": "paged_exact",
        "cache_config": {"layers": {"1": "int8"}},
    }
    out = model.generate(tokens(1, 30), assistant_model=assistant, **options)
    assert torch.equal(out, model.generate(tokens(1, 30), **options))


def test_a_model_that_prepares_its_cache_by_names_gets_pages():
    """As MusicGen and RAG do, where generate() ended in a TypeError."""
    model, given = make_model("llama"), {"attention_mask": torch.ones(1, 5)}
    config = transformers.GenerationConfig(cache_implementation="paged_int4", max_length=20)
    model._prepare_cache_for_generation(
        config, given, generation_mode=None, batch_size=1, max_cache_length=19
    )
    assert isinstance(given["past_key_values"], kv_hf.PagedCache)
