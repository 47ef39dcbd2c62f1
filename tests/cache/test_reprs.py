"""A cache says what it is: as its call, with what it holds."""

import pytest
import tiny_encoders
from tiny_models import shared_model, tokens

import kv_hf

# options -> what repr says
SHOWN = {
    "formats": (
        {"keys": "int8", "values": "int4"},
        "PagedCache(keys='int8', values='int4', page_size=64, rows=1, tokens=100, pages=1, bytes=",
    ),
    "layers": (
        {"keys": "int8", "layers": {"1": "int4"}, "sink_tokens": 8},
        "PagedCache(keys='int8', values='int8', page_size=64, sink_tokens=8, layers={'1': 'int4'}, ",
    ),
    "preallocated": (
        {"keys": "int4", "max_length": "1k"},
        "PagedCache(keys='int4', values='int4', page_size=64, max_length=1024, rows=1, tokens=100, ",
    ),
    "offload": (
        {"keys": "int4", "offload": "disk"},
        "PagedCache(keys='int4', values='int4', page_size=64, offload='disk', rows=1, ",
    ),
}


def filled(**options):
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, **options)
    for ids in tokens(1, 100).split([99, 1], dim=1):
        model(ids, past_key_values=cache)
    return cache


@pytest.mark.parametrize(("options", "call"), SHOWN.values(), ids=SHOWN)
def test_cache_shows_its_options_and_contents(options, call):
    cache = filled(**options)
    assert repr(cache).startswith(call)
    assert repr(cache).endswith(")")
    assert f"bytes={cache.memory().total}" in repr(cache)


def test_classes_show_their_own_names():
    class Own(kv_hf.PagedCache):
        pass

    config = shared_model("llama").config
    assert repr(Own(config)).startswith("Own(keys='exact'")
    assert repr(kv_hf.PagedCache(config)).endswith("rows=0, tokens=0, pages=0, bytes=0)")


@pytest.mark.parametrize("cross", ["exact", "same"])
def test_encoder_decoder_cache_shows_both_halves(cross):
    config = tiny_encoders.shared_model("t5").config
    cache = kv_hf.PagedEncoderDecoderCache(config, keys="int4", cross_attention=cross)
    own, other = cache.self_attention_cache, cache.cross_attention_cache
    name = type(cache).__name__
    assert repr(cache) == f"{name}(self_attention_cache={own!r}, cross_attention_cache={other!r})"


def test_memory_report_lists_its_parts():
    report = kv_hf.MemoryReport(
        payload=3 << 20, scales=1 << 20, tail=512, tables=0, other=0,
        pages_held=3, pages_allocated=4, tokens=6144, offloaded=2 << 30,
    )  # fmt: skip
    assert str(report) == (
        "4.00 MiB (codes 3.00 MiB, scales 1.00 MiB, exact tokens 512 B); 2.00 GiB outside of the device; 6,144 tokens, "
        "pages 3 of 4"
    )


def test_layer_report_gives_its_reason():
    assert str(filled(keys="int8").report()[1]) == "layer 1: paged, int8 and int8"
    kept = kv_hf.cache.report.LayerReport(3, "DynamicLayer", None, None, "a reason")
    assert str(kept) == "layer 3: DynamicLayer: a reason"


def test_cache_config_prints_what_was_given():
    given = kv_hf.CacheConfig(keys="int8", values="int4", offload="cpu", device_bytes="1MiB")
    assert (
        str(given) == "CacheConfig(keys='int8', values='int4', offload='cpu', device_bytes=1048576)"
    )
    assert "sink_tokens=4" in repr(given)
