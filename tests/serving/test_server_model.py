"""What a request's generation_config becomes: the server's cache, the request's own, and what max_pages has room for."""

import gc
import weakref

import pytest
import torch
from tiny_models import make_model, shared_model, tokens
from transformers import GenerationConfig

import kv_hf
from kv_hf.serving.server_model import ServedModel, ServerOptions


def served(model, config=None, store="0", cache="paged_int8"):
    return ServedModel(model, ServerOptions.parse(cache, config, store))


def prepared(one, prompt_tokens=10, **asked):
    config = GenerationConfig(**{"max_new_tokens": 1000, **asked})
    one.prepare(config, prompt_tokens)
    return config


def generate(model, prompt_tokens, new, config):
    return model.generate(
        tokens(1, prompt_tokens),
        max_new_tokens=new,
        do_sample=False,
        cache_implementation=config.cache_implementation,
        cache_config=config.cache_config,
    )


@pytest.mark.parametrize("prompt", [10, 83, 84, 99])
@pytest.mark.parametrize("recent", [0, 20])
def test_max_new_tokens_is_all_that_max_pages_has_room_for(prompt, recent):
    model = shared_model("llama")
    options = f'{{"max_pages": 5, "page_size": 16, "recent_tokens": {recent}}}'
    config = prepared(served(model, options), prompt)
    new = config.max_new_tokens
    assert prompt + new == 4 + recent + 6 * 16
    assert generate(model, prompt, new, config).shape == (1, prompt + new)
    with pytest.raises(kv_hf.PagePoolExhaustedError):
        generate(model, prompt, new + 1, config)


def test_prompt_that_max_pages_has_no_room_for_is_refused():
    one = served(shared_model("llama"), '{"max_pages": 5, "page_size": 16}')
    assert prepared(one, 99).max_new_tokens == 1
    with pytest.raises(kv_hf.PagePoolExhaustedError, match="takes 100 tokens, .* has room for 99"):
        prepared(one, 100)


def test_sliding_layers_give_pages_back_and_bound_no_prompt():
    model = make_model("mistral", sliding_window=32, max_position_embeddings=2048)
    one = served(model, '{"max_pages": 8, "page_size": 16}')
    config = prepared(one, 300)
    assert config.max_new_tokens == 1000
    assert generate(model, 300, 4, config).shape == (1, 304)


def test_cache_of_the_models_own_file_gives_way_to_the_servers():
    model = make_model("llama")
    model.generation_config.cache_implementation = "paged_int8"
    one = served(model, cache="paged_int4")
    config = prepared(one, cache_implementation="paged_int8")
    assert config.cache_implementation == "paged_int4"


def test_request_has_no_more_memory_than_the_server_gives():
    """Another cache keeps the bounds, one of transformers' is refused beside them, and windows end where a text ends."""
    model = shared_model("llama")
    one = served(model, '{"max_pages": 5, "page_size": 16, "recent_tokens": 2}')
    config = prepared(one, cache_implementation="paged_int4", cache_config={"read_tokens": 64})
    assert config.cache_implementation == "paged_int4"
    assert config.cache_config == {"max_pages": 5, "page_size": 16, "read_tokens": 64}
    assert 10 + config.max_new_tokens == 4 + 6 * 16
    with pytest.raises(
        kv_hf.CacheOptionError, match="must be a paged cache here, .* got 'dynamic'"
    ):
        prepared(one, cache_implementation="dynamic")
    most = model.config.max_position_embeddings
    free = served(model)
    for asked in ({"max_new_tokens": 10**30}, {"max_new_tokens": None, "max_length": 10**30}):
        assert prepared(free, **asked).max_new_tokens == most - 10
    asked = prepared(free, cache_config={"recent_tokens": 2**29, "sink_tokens": 2**29}).cache_config
    assert asked == {"recent_tokens": most, "sink_tokens": most}
    for option in ("page_size", "max_pages", "kernel", "device_bytes", "prefix_store"):
        with pytest.raises(
            kv_hf.CacheOptionError, match=f"must not set {option}, which the server"
        ):
            prepared(free, cache_config={option: 64})


def test_model_that_is_unloaded_is_not_kept():
    model = make_model("llama")
    one = served(model, store="1MiB")
    config = prepared(one)
    with torch.no_grad():
        generate(model, 80, 4, config)
    assert one.counts()["pages"] == 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_a_prompt_took_from_the_store_is_logged_at_info(caplog):
    model = shared_model("llama")
    one = served(model, '{"page_size": 16}', "1MiB")
    caplog.set_level("INFO", "transformers.kv_hf")
    for _ in range(2):
        generate(model, 60, 2, prepared(one))
    said = [one.getMessage() for one in caplog.records if "prefix store" in one.getMessage()]
    assert said == [f"kv_hf: {n} of 60 columns were in the prefix store" for n in (0, 52)]
