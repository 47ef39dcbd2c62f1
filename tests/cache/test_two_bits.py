"""Two bits warn once, with figures that are those of the rows."""

import json
import warnings
from pathlib import Path

import pytest
from tiny_models import shared_model, tokens

import kv_hf
from kv_hf.cache.layer_formats import MEASURED
from kv_hf.formats import cache_options, key_scheme, value_scheme

ROWS = Path(__file__).parents[2] / "results" / "long_context.jsonl"
TWO_BITS = {"keys": "int2", "values": "int2"}


def warned(**options):
    model = shared_model("llama")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            cache = kv_hf.PagedCache(model.config, **options)
            model.generate(tokens(1, 9), past_key_values=cache, max_new_tokens=2)
    return [str(one.message) for one in found if "2 bits" in str(one.message)]


def needles():
    """(cache, model, length) -> (found, asked), from the rows of the needle test."""
    counted = {}
    for row in map(json.loads, ROWS.read_text().splitlines()):
        if row.get("kind") == "needle" and row["task"] == "single":
            key = row["cache"], row["model"], row["length"]
            found, asked = counted.get(key, (0, 0))
            counted[key] = found + sum(row["scores"]), asked + len(row["scores"])
    return counted


def is_two_bits(name):
    if name not in kv_hf.cache_names():
        return False
    options = cache_options(name)
    schemes = key_scheme(options["keys"]), value_scheme(options["values"])
    return all(0 < scheme.bits <= 2 for scheme in schemes)


def test_warning_quotes_the_rows():
    counted = needles()
    for (keys, values), (cache, found) in MEASURED.items():
        assert counted[(cache, "smollm2-135m", 2048)] == (found, 20)
        options = cache_options(cache)
        assert (options["keys"], options["values"]) == (keys, values)
    assert counted[("dynamic", "smollm2-135m", 2048)] == (20, 20)
    quoted = {cache for cache, _ in MEASURED.values()}
    assert {cache for cache, _, _ in counted if is_two_bits(cache)} <= quoted


def test_generate_warns_once_of_two_bits_with_the_figures():
    (said,) = warned(**TWO_BITS)
    assert "found 4 of 20 facts" in said and "DynamicCache 20" in said
    assert "2,048 tokens (smollm2-135m)" in said and "int8 is the safe choice" in said


def test_generate_says_that_a_pair_was_not_measured():
    (said,) = warned(keys="int2", values="int2_rotated")
    assert "int2 and int2_rotated were not measured, paged_int2 (int2_mixed keys" in said


@pytest.mark.parametrize(
    "options",
    [
        {"keys": "int4", "values": "int2"},
        {"keys": "int2", "values": "int4"},
        {"keys": "int8", "values": "int4"},
        {**TWO_BITS, "layers": {"0": "int4"}},
    ],
    ids=["int2 values", "int2 keys", "k8v4", "half of the layers"],
)
def test_generate_does_not_warn_of_more_bits(options):
    assert warned(**options) == []
