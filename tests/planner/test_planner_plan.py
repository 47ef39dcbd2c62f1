"""kv_hf.plan: what fits by the predicted bytes, what a decode step reads, and what one of several devices holds."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import ROOT

import kv_hf
from kv_hf.errors import (
    CacheOptionError,
    DeviceBudgetError,
    PagePoolExhaustedError,
    UnsupportedModelError,
)
from kv_hf.page_summary import part_bytes
from kv_hf.planner import choices
from kv_hf.planner.choices import Choice, default_caches
from kv_hf.planner.devices import DEVICES
from kv_hf.planner.fit import find_fit, largest, largest_context
from kv_hf.planner.inventory import CachedLayer, Inventory, State
from kv_hf.planner.predict import predict
from kv_hf.planner.roofline import Decode, expected_experts
from kv_hf.planner.shares import SPLIT, UNKNOWN, WHOLE, device_share, heads_in_plan
from kv_hf.units import (
    format_bandwidth,
    format_bytes,
    parse_bandwidth,
    parse_bytes,
    parse_tokens,
)

GIB = 2**30


def attention(kv_heads, dim=128, **more):
    return CachedLayer(kv_heads=kv_heads, key_dim=dim, value_dim=dim, query_heads=64, **more)


def model(*layers, model_type="llama", **more):
    given = {"name": "m", "model_type": model_type, "dtype": "bfloat16", "parameters": None}
    return Inventory(layers=layers, **{**given, **more})


def seventy(kv_heads=8, **more):
    return model(*[attention(kv_heads)] * 80, **more)


def sliding(window, kv_heads=2, dim=16):
    return attention(kv_heads, dim, cache_class="DynamicSlidingWindowLayer", window=window)


SMALL = {
    "full": model(*[attention(2, 16)] * 3),
    "windows": model(sliding(40), attention(2, 16), sliding(40), model_type="gemma3_text"),
    "latent": model(
        *[CachedLayer(kv_heads=1, key_dim=64, value_dim=16, latent=True)] * 2,
        model_type="deepseek_v3",
    ),
    "states": model(
        attention(2, 16),
        CachedLayer("LinearAttentionLayer", states=(State((4, 8)), State((4, 8, 8), "float32"))),
        model_type="qwen3_next",
    ),
}
CACHES = (
    "dynamic",
    "static",
    "paged_exact:page_size=16",
    "paged_int4:page_size=16,recent_tokens=5",
)


# worked examples of the field


def test_plan_gives_the_figures_of_the_field():
    dynamic = {"caches": ["dynamic"]}
    found = kv_hf.plan(seventy(), batch=32, context=8192, **dynamic).rows[0]
    assert found.total == 85_899_345_920
    assert found.bytes_per_token == 327_680
    many = kv_hf.plan(seventy(64), context=32_768, **dynamic)
    assert many.rows[0].total == 80 * GIB
    for heads, gib in ((8, 10), (1, 1.25)):
        assert kv_hf.plan(seventy(heads), context=32_768, **dynamic).rows[0].total == gib * GIB
    assert kv_hf.plan(seventy(), context="128k", **dynamic).rows[0].total == 42_949_672_960
    held = kv_hf.plan(seventy(64), context=1, device_memory="40GiB", weights=0, **dynamic)
    assert held.rows[0].fit.resident_tokens == held.rows[0].fit.context == 16_384


def test_plan_counts_900_tokens_as_57_pages_of_16():
    found = kv_hf.plan(
        seventy(), context=900, caches=["paged_exact:page_size=16,sink_tokens=0"]
    ).rows[0]
    # 56 full pages, and the one that is being filled
    assert found.memory.pages_held == 56
    assert found.memory.payload + found.memory.tail == 57 * 16 * 327_680 == 285 * 2**20


def test_plan_gives_the_latent_bytes_of_deepseek_v3():
    layer = CachedLayer(kv_heads=1, key_dim=512, value_dim=64, latent=True, query_heads=128)
    found = kv_hf.plan(model(*[layer] * 61, model_type="deepseek_v3"), caches=["dynamic"])
    assert found.rows[0].bytes_per_token == 70_272


# what a plan says


def test_plan_rows_are_what_predict_says():
    inventory = SMALL["windows"]
    found = kv_hf.plan(inventory, caches=CACHES, batch=3, context=100, prompt=70)
    dynamic = predict(inventory, "dynamic", row_tokens=[100] * 3).total
    for name, row in zip(CACHES, found.rows, strict=True):
        choice = Choice.of(name, None)
        memory = predict(inventory, choice.kind, choice.options, row_tokens=[100] * 3, prompt=70)
        assert row.memory == memory
        assert row.ratio == dynamic / memory.total
        assert row.fit is row.fits is row.tokens_per_second is None
    assert found.row("static") is found.rows[1]
    with pytest.raises(CacheOptionError, match="plan's"):
        found.row("paged_int2")


def test_bytes_per_token_are_those_of_a_page():
    inventory = SMALL["windows"]
    for name in ("paged_int4", "paged_int8:page_size=32"):
        options = Choice.of(name, None).options
        spec = kv_hf.PageSpec.build(
            *options.schemes(1, 3),
            num_kv_heads=2,
            key_dim=16,
            value_dim=16,
            page_size=options.page_size,
            dtype=torch.bfloat16,
        )
        row = kv_hf.plan(inventory, caches=[name], context=64).rows[0]
        # one layer of three grows for ever
        assert row.bytes_per_token == spec.page_bytes / options.page_size


def test_bytes_per_token_of_static_and_of_max_length_are_those_of_a_longer_one():
    inventory = SMALL["full"]
    found = kv_hf.plan(
        inventory, caches=["static:max_length=256", "paged_exact:max_length=256"], context=100
    )
    for row in found.rows:
        assert row.bytes_per_token == 3 * 2 * 2 * 16 * 2
    assert found.rows[0].total >= 256 * 3 * 2 * 2 * 16 * 2


def test_lengths_are_written_as_contexts_are():
    found = kv_hf.plan(
        SMALL["full"],
        caches=["static:max_length=2k", "paged_int4:max_length=2k", "paged_int4:reserve_tokens=2k"],
        context=64,
    )
    wanted = kv_hf.plan(
        SMALL["full"],
        caches=[
            "static:max_length=2048",
            "paged_int4:max_length=2048",
            "paged_int4:reserve_tokens=2048",
        ],
        context=64,
    )
    assert [row.memory for row in found.rows] == [row.memory for row in wanted.rows]
    given = {"max_length": "2k"}
    found = kv_hf.plan(SMALL["full"], caches=["paged_int4"], context=64, cache_config=given)
    assert found.rows[0].memory == wanted.rows[1].memory


def test_plan_as_dict_is_json_with_totals():
    found = kv_hf.plan(
        SMALL["full"],
        device="L4",
        caches=["dynamic", "paged_int4:offload=cpu"],
        context=300,
        weights=0,
    )
    given = json.loads(json.dumps(found.as_dict()))
    assert given["device"] == "l4"
    assert given["device_memory"] == DEVICES["l4"].memory
    assert [row["memory"]["total"] for row in given["rows"]] == [row.total for row in found.rows]
    assert Inventory.from_dict(given["inventory"]) == SMALL["full"]
    assert given["rows"][0]["fit"] == {
        "context": found.rows[0].fit.context,
        "batch": found.rows[0].fit.batch,
        "resident_tokens": found.rows[0].fit.resident_tokens,
    }


def test_options_come_from_the_name_then_from_cache_config_then_as_cache_config():
    inventory = SMALL["full"]
    names = ["paged_int4:page_size=16", "paged_int4"]
    own = kv_hf.CacheConfig(keys="int4", values="int4", page_size=32)
    found = kv_hf.plan(inventory, caches=[*names, own], cache_config={"page_size": 32}, context=500)
    assert found.rows[1].memory == found.rows[2].memory != found.rows[0].memory
    assert found.rows[2].cache == "paged_int4:page_size=32"


def test_default_caches_leave_out_with_a_reason_what_the_model_cannot_have():
    states = CachedLayer("LinearAttentionLayer", states=(State((4, 8)),))
    found = kv_hf.plan(model(states, model_type="mamba"), device_memory="1MiB", weights=0)
    assert [row.cache for row in found.rows] == ["dynamic", "static"]
    assert sum("no attention layer that pages could hold" in note for note in found.notes) == len(
        default_caches()
    ) - len(found.rows)
    # states do not grow: no context is too long
    assert found.rows[0].fit.context is found.rows[0].fit.resident_tokens is None
    assert found.rows[0].fit.batch == 2**20 // (32 * 2)
    with pytest.raises(UnsupportedModelError):
        kv_hf.plan(model(states, model_type="mamba"), caches=["paged_int4"])


def test_notes_name_what_is_beyond_the_model_or_the_device():
    inventory = seventy(max_positions=8192, parameters=70 * 10**9)
    assert kv_hf.plan(inventory, caches=["dynamic"]).notes == ()
    found = kv_hf.plan(
        inventory, caches=["dynamic"], context="16k", device_memory="24GB", reserve="1GiB"
    )
    assert any("8,192 positions" in note for note in found.notes)
    assert any(
        "weights (130.39 GiB) and the reserve of 1.00 GiB do not fit" in n for n in found.notes
    )
    assert found.rows[0].fits is False
    assert found.rows[0].fit == type(found.rows[0].fit)(0, 0, 0)
    assert found.available == 24 * 10**9 - GIB - 140 * 10**9
    assert "not known" in kv_hf.plan(seventy(), caches=["dynamic"]).notes[0]
    assert kv_hf.plan(seventy(max_positions=2048), caches=["dynamic"]).context == 2048


def test_weights_are_parameters_or_what_is_given():
    inventory = seventy(parameters=10**9 + 1)
    assert kv_hf.plan(inventory, caches=["dynamic"]).weights == 2 * (10**9 + 1)
    assert kv_hf.plan(inventory, caches=["dynamic"], weights="5GB").weights == 5 * 10**9
    found = kv_hf.plan(inventory, caches=["dynamic"], dtype="float32")
    assert found.weights == 4 * (10**9 + 1)
    assert found.rows[0].bytes_per_token == 2 * 327_680


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"caches": ["paged_int5"]}, "did you mean 'paged_int"),
        ({"caches": ["paged_int4:keys"]}, "NAME=VALUE"),
        ({"caches": ["paged_int4:page_sise=16"]}, "page_size"),
        ({"caches": ["dynamic:page_size=16"]}, "takes no options"),
        ({"caches": ["static:page_size=16"]}, "takes only max_length"),
        ({"caches": ["quanto_int4"]}, "not planned"),
        ({"caches": ["offloaded"]}, "not planned"),
        ({"caches": "dynamic"}, "sequence"),
        ({"caches": [4]}, "must be names"),
        ({"batch": 0}, "batch"),
        ({"batch": 1_000_001}, "batch must be at most 1,000,000 rows, got 1,000,001"),
        ({"cache_config": {"nope": 16}}, "nope"),
        ({"cache_config": {"nope": 16}, "caches": ["dynamic"]}, "nope"),
        ({"cache_config": {"page_size": 16}, "caches": ["dynamic"]}, "caches has none"),
        (
            {"cache_config": {"page_size": 16}, "caches": [kv_hf.CacheConfig(page_size=32)]},
            "caches has none",
        ),
        ({"caches": ["static:max_length=128kB"]}, "max_length must be a number of tokens"),
        ({"caches": ["paged_int4:max_length=many"]}, "max_length must be a number of tokens"),
        ({"device": 4}, "device must be one of"),
        ({"context": 0}, "context"),
        ({"context": "8G"}, "context must be a number of tokens"),
        ({"context": 10, "prompt": 11}, "prompt must be at most the context"),
        ({"device_memory": "24G"}, "24GiB"),
        ({"device_memory": "24GiB/s"}, "device_memory"),
        ({"bandwidth": "fast"}, "bandwidth"),
        ({"device": "h10"}, "did you mean 'h100'"),
        ({"reserve": "-1GiB"}, "reserve"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"tensor_parallel": 4}, "does not divide the 2 kv heads of m; these do: 1, 2"),
        ({"caches": ["paged_int4:layers=3"]}, "layers"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(options, words):
    with pytest.raises(CacheOptionError, match=words):
        kv_hf.plan(SMALL["full"], **{"context": 64, **options})


def test_max_length_of_latents_is_refused_as_the_cache_refuses_it():
    with pytest.raises(UnsupportedModelError, match="max_length"):
        kv_hf.plan(SMALL["latent"], caches=["paged_int4:max_length=128"], context=64)


# what fits


@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(0, 500),
    slope=st.integers(0, 40),
    step=st.integers(1, 90),
    flat=st.integers(1, 3000),
    limit=st.integers(0, 100_000),
    most=st.integers(1, 3000),
)
def test_largest_finds_the_last_number_that_fits(start, slope, step, flat, limit, most):
    def cost(count):
        assert 1 <= count <= most
        return start + slope * step * (min(count, flat) // step)

    fitting = [count for count in range(1, most + 1) if cost(count) <= limit]
    expected = fitting[-1] if fitting else 0
    assert largest(cost, limit, most) == (None if expected == most else expected)
    found = largest_context(cost, limit, most, step if step > 1 else 2, 3)
    assert found == (None if expected == most else expected)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("batch", [1, 3])
def test_what_fits_is_what_counting_up_finds(kind, name, batch):
    inventory, choice, context = SMALL[kind], Choice.of(name, None), 50
    page, exact = choice.page_size, choice.exact_tokens
    for available in (3_000, 60_000, 150_001):
        found = find_fit(choice, inventory, available, batch=batch, context=context)

        def fits(rows, available=available):
            return choice.predict(inventory, rows).total <= available

        def count_up(rows_of):
            count = 0
            while fits(rows_of(count + 1)):
                count += 1
                assert count < 5000
            return count

        def of_pages(pages):
            rows = [pages // batch + (row < pages % batch) for row in range(batch)]
            return [tokens for tokens in (exact + count * page for count in rows) if tokens]

        assert found.context == count_up(lambda tokens: [tokens] * batch)
        assert found.batch == count_up(lambda rows: [context] * rows)
        assert found.resident_tokens == page * count_up(of_pages)


@pytest.mark.parametrize(
    "name", ["dynamic", "paged_int4", "paged_int2:keys=int4", "paged_fp8:offload=cpu"]
)
def test_what_fits_is_the_last_that_fits_at_full_size(name):
    inventory = model(*[attention(8)] * 8, *[sliding(4096, 8, 128)] * 8, parameters=8 * 10**9)
    batch, context = 4, 20_000
    found = kv_hf.plan(inventory, caches=[name], batch=batch, context=context, device="h100")
    fit, choice = found.rows[0].fit, Choice.of(name, None)
    for rows, more in (
        ([fit.context] * batch, [fit.context + 1] * batch),
        ([context] * fit.batch, [context] * (fit.batch + 1)),
    ):
        assert choice.predict(inventory, rows).total <= found.available
        assert choice.predict(inventory, more).total > found.available


def test_max_length_bounds_what_fits():
    found = kv_hf.plan(
        SMALL["full"],
        caches=["static:max_length=300", "paged_exact:page_size=16,max_length=300"],
        batch=2,
        context=100,
        device_memory="1GiB",
        weights=0,
    )
    assert [row.fit.context for row in found.rows] == [300, 300]
    assert [row.fit.resident_tokens for row in found.rows] == [600, 2 * 18 * 16]


def test_a_search_takes_few_predictions(monkeypatch):
    calls = []

    def counted(*args, **options):
        calls.append(options["row_tokens"])
        return predict(*args, **options)

    monkeypatch.setattr(choices, "predict", counted)
    kv_hf.plan(
        seventy(parameters=7 * 10**10), device_memory="640GB", batch=16, caches=["paged_int4"]
    )
    assert len(calls) < 60


def test_nothing_is_said_to_fit_beside_weights_that_are_not_known():
    given = {"caches": ["dynamic", "paged_int4"], "device_memory": "1GiB", "reserve": "1MiB"}
    found = kv_hf.plan(SMALL["full"], **given)
    assert found.weights is found.available is None
    assert all(row.fit is row.fits is None for row in found.rows)
    assert "not known" in found.notes[0]
    assert "give weights" in found.notes[1]
    alone = kv_hf.plan(SMALL["full"], **given, weights=0)
    assert alone.available == GIB - 2**20
    assert all(row.fits and row.fit.context for row in alone.rows)
    assert alone.notes == ()


def test_place_outside_of_the_device_is_said_to_be_endless():
    given = {"context": 1000, "weights": 0, "bandwidth": None}
    names = ["paged_int4", "paged_int4:offload=cpu"]
    for caches, memory, said in (
        (names, "1GiB", True),
        (names[:1], "1GiB", False),
        (names, None, False),
    ):
        found = kv_hf.plan(SMALL["full"], caches=caches, device_memory=memory, **given)
        assert any("endless" in note for note in found.notes) == said


# what the cache itself refuses


@pytest.mark.parametrize(
    "budget",
    [
        "paged_int4:offload=cpu,device_bytes=2GiB",
        pytest.param("paged_int4:offload=cpu,device_pages=4096", marks=pytest.mark.slow),
    ],
)
def test_a_budget_of_an_offload_bounds_what_fits(budget):
    inventory = seventy(parameters=10**9)
    found = kv_hf.plan(inventory, caches=[budget], context=8192, device_memory="24GiB").rows[0]
    endless = kv_hf.plan(inventory, caches=["paged_int4:offload=cpu"], context=8192).rows[0]
    # behind the budget all that comes lies outside
    assert found.bytes_per_token == endless.bytes_per_token
    assert found.outside_bytes_per_token == endless.outside_bytes_per_token > 0
    assert found.fits
    choice = Choice.of(budget, None)
    for rows, more in (
        ([found.fit.context], [found.fit.context + 1]),
        ([8192] * found.fit.batch, [8192] * (found.fit.batch + 1)),
    ):
        assert choice.predict(inventory, rows).total <= 24 * GIB
        with pytest.raises(DeviceBudgetError):
            choice.predict(inventory, more)


def test_max_pages_bounds_what_fits():
    inventory = SMALL["full"]
    found = kv_hf.plan(
        inventory,
        caches=["paged_int4:page_size=16,recent_tokens=5,sink_tokens=4,max_pages=20"],
        batch=2,
        context=100,
        device_memory="1GiB",
        weights=0,
    ).rows[0]
    # 10 pages of a row, 9 exact tokens, and 15 more that seal none
    assert found.fit.context == 10 * 16 + 9 + 15
    assert found.fit.batch == 20 // 5
    assert found.fit.resident_tokens == 20 * 16
    with pytest.raises(PagePoolExhaustedError):
        kv_hf.plan(inventory, caches=["paged_int4:page_size=16,max_pages=20"], context=1000)


# the roofline


def test_a_step_reads_weights_once_and_the_tokens_of_every_row():
    inventory = seventy(parameters=70 * 10**9)
    found = kv_hf.plan(inventory, caches=["dynamic"], batch=4, context=1000, bandwidth="1TB/s")
    row = found.rows[0]
    step = 140 * 10**9 + 4 * 1000 * 327_680
    assert row.decode == Decode(4, 140 * 10**9, 4 * 1000 * 327_680)
    assert row.decode.step_bytes == step
    assert row.decode.bytes_per_token == step / 4
    assert row.tokens_per_second == pytest.approx(4 * 1e12 / step)


def test_a_step_reads_windows_readers_states_and_indexer_keys():
    inventory = model(
        sliding(40),
        attention(2, 16, readers=3),
        CachedLayer("LinearAttentionLayer", states=(State((4, 8), "float32"),)),
    )
    read = kv_hf.plan(inventory, caches=["dynamic"], batch=2, context=100).rows[0].decode.cache
    token = 2 * 32 * 2
    assert read == 2 * (40 * token + 3 * 100 * token + 4 * 8 * 4)
    indexed = CachedLayer(
        "DynamicIndexedLayer", kv_heads=1, key_dim=64, value_dim=16, latent=True, index_dim=32
    )
    given = model(indexed, model_type="deepseek_v32")
    assert kv_hf.plan(given, caches=["dynamic"], context=10).rows[0].decode.cache == 10 * 112 * 2


def test_a_step_of_a_static_cache_reads_all_its_columns():
    layers = (sliding(40), sliding(200), attention(2, 16))
    found = kv_hf.plan(
        model(*layers),
        caches=["static:max_length=150", "static:max_length=30", "static"],
        batch=2,
        context=30,
    )
    token = 2 * 2 * 16 * 2
    assert [row.decode.cache for row in found.rows] == [
        2 * (40 + 150 + 150) * token,
        2 * 3 * 30 * token,
        2 * 3 * 30 * token,
    ]
    # pages of max_length that hold nothing are not read
    given = {"context": 30, "caches": ["paged_int4:max_length=150", "paged_int4:max_length=30"]}
    assert len({row.decode.cache for row in kv_hf.plan(SMALL["full"], **given).rows}) == 1
    layer = CachedLayer(
        "DynamicIndexedLayer", kv_heads=1, key_dim=64, value_dim=16, latent=True, index_dim=32
    )
    indexed = model(layer, model_type="deepseek_v32")
    found = kv_hf.plan(indexed, caches=["static:max_length=99"], context=30)
    assert found.rows[0].decode.cache == 99 * 112 * 2


def test_a_step_reads_sealed_pages_as_stored_and_other_tokens_exact():
    inventory = SMALL["windows"]
    options = kv_hf.CacheConfig(keys="int4", values="int4", page_size=16)
    spec = kv_hf.PageSpec.build(
        *options.schemes(0, 3),
        num_kv_heads=2,
        key_dim=16,
        value_dim=16,
        page_size=16,
        dtype=torch.bfloat16,
    )
    # 4 sinks, 6 pages of 16, 3 tokens open; a window of 40 holds 7 exact ones and 33 of pages
    read = kv_hf.plan(inventory, caches=[options], context=103).rows[0].decode.cache
    exact, sealed = 2 * 32 * 2, spec.page_bytes / 16
    assert read == round(3 * 7 * exact + (96 + 2 * 33) * sealed)


def test_a_step_reads_of_other_pages_what_a_choice_reads():
    inventory = SMALL["windows"]
    options = {"keys": "int4", "values": "int4", "page_size": 16}
    part = kv_hf.CacheConfig(**options, read_tokens=52, read_from=90)
    whole = kv_hf.CacheConfig(**options)
    spec = kv_hf.PageSpec.build(
        *part.schemes(0, 3), num_kv_heads=2, key_dim=16, value_dim=16, page_size=16, dtype=torch.bfloat16
    )  # fmt: skip
    all_of_it, some = (
        kv_hf.plan(inventory, caches=[one], context=103).rows[0].decode.cache
        for one in (whole, part)
    )
    # of the one full layer 2 of 6 pages, and of each page what tells whether to read it
    assert some == all_of_it - 4 * spec.page_bytes + 6 * part_bytes(spec.keys)
    short = [
        kv_hf.plan(inventory, caches=[one], context=80).rows[0].decode for one in (whole, part)
    ]
    assert short[0] == short[1]


@pytest.mark.parametrize(
    ("preset", "match"),
    [("deepseek-v3", "caches latents"), ("mistral-7b-v0.1", "4096 tokens at most")],
)
def test_models_that_no_step_reads_in_part_are_refused(preset, match):
    with pytest.raises(CacheOptionError, match=match):
        kv_hf.plan(preset, caches=["paged_int4:read_tokens=2048"], context="32k")


def test_pages_are_read_once_by_every_layer_that_shares_them():
    once, shared = (model(attention(2, 16, readers=count)) for count in (1, 3))
    given = {"caches": ["paged_int4"], "context": 1000}
    one, three = (kv_hf.plan(each, **given).rows[0] for each in (once, shared))
    assert three.decode.cache == 3 * one.decode.cache
    assert three.memory == one.memory


def test_offloaded_pages_come_over_the_host_link():
    inventory = seventy(parameters=10**9)
    names = ["paged_int4", "paged_int4:offload=cpu"]
    given = {"caches": names, "context": 100_000, "bandwidth": "3TB/s"}
    plain, outside = kv_hf.plan(inventory, **given).rows
    assert plain.decode.outside == 0
    assert outside.decode.cache == plain.decode.cache
    assert outside.decode.outside > 0.99 * outside.decode.cache
    assert outside.tokens_per_second == plain.tokens_per_second
    found = kv_hf.plan(inventory, **given, host_bandwidth="64GB/s").rows[1]
    assert found.tokens_per_second == pytest.approx(64e9 / found.decode.outside)
    assert any("host_bandwidth" in note for note in kv_hf.plan(inventory, **given).notes)


def test_a_step_reads_the_experts_that_its_tokens_take():
    assert expected_experts(256, 8, 1) == pytest.approx(8 / 256)
    assert expected_experts(8, 8, 5) == 1
    inventory = seventy(parameters=100, expert_parameters=80, experts=8, experts_per_token=2)
    for batch, share in ((1, 0.25), (2, 1 - 0.75**2), (1000, 1)):
        found = kv_hf.plan(inventory, caches=["dynamic"], batch=batch, context=1)
        assert found.weights == 200
        assert found.rows[0].decode.weights == round(2 * (20 + 80 * share))
    # weights that are given are shared out alike
    found = kv_hf.plan(inventory, caches=["dynamic"], context=1, weights=50)
    assert found.rows[0].decode.weights == round(50 * (0.2 + 0.8 * 0.25))


def test_expected_experts_is_the_mean_of_drawing_them():
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(4000, 5, 16, generator=generator).topk(3).indices  # 5 tokens take 3 of 16
    taken = torch.zeros(4000, 16).scatter_(1, draws.flatten(1), 1).mean().item()
    assert taken == pytest.approx(expected_experts(16, 3, 5), abs=0.01)


# several devices


def test_a_device_holds_its_kv_heads():
    inventory = seventy(parameters=70 * 10**9)
    one = kv_hf.plan(inventory, context=4096)
    four = kv_hf.plan(inventory, context=4096, tensor_parallel=4)
    assert four.weights == one.weights // 4
    assert four.inventory == inventory
    for whole, part in zip(one.rows, four.rows, strict=True):
        tables = whole.memory.tables
        if whole.cache not in ("static", "paged_int4:offload=cpu"):
            assert 4 * (part.total - tables) == whole.total - tables
        assert 4 * part.decode.cache == whole.decode.cache
    assert "1/4 of the kv heads" in four.notes[0]


def test_what_transformers_keeps_whole_stays_whole_on_every_device():
    latent = SMALL["latent"]
    share, notes = device_share(latent, 4)
    assert share.layers == latent.layers
    assert notes == ["latents are whole on every device"]
    states = replace(SMALL["states"], model_type="qwen3_next")
    share, notes = device_share(states, 2)
    assert [layer.kv_heads for layer in share.layers] == [1, 0]
    assert share.layers[1] == states.layers[1]
    assert notes[-1] == "states of linear attention are whole on every device"


def test_plans_of_transformers_say_which_heads_are_cut():
    assert heads_in_plan("llama") == heads_in_plan("qwen3_next") == SPLIT
    assert heads_in_plan("gemma3") == heads_in_plan("gpt_neox") == SPLIT
    assert heads_in_plan("olmo2") == heads_in_plan("phi3") == heads_in_plan("deepseek_v3") == WHOLE
    assert heads_in_plan("gpt2") == heads_in_plan("no such family") == UNKNOWN
    share, notes = device_share(seventy(5, model_type="olmo2"), 4)
    assert share.layers[0].kv_heads == 5
    assert "does not cut them" in notes[0]
    share, notes = device_share(seventy(8, model_type="gpt2"), 4)
    assert share.layers[0].kv_heads == 2
    assert "assumption" in notes[1]


def test_layers_with_different_heads_are_cut_by_what_divides_all():
    inventory = model(attention(4), attention(6), model_type="gemma4_text")
    assert [layer.kv_heads for layer in device_share(inventory, 2)[0].layers] == [2, 3]
    with pytest.raises(CacheOptionError, match="4 and 6 kv heads of m; these do: 1, 2"):
        device_share(inventory, 4)


# units and devices


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("80,000MB", 8 * 10**10),
        ("123", 123),
        (123, 123),
        ("0.5KiB", 512),
        ("1,024GiB", 1024 * GIB),
        ("1,234,567.5 KB", 1_234_567_500),
        ("24_000", 24_000),
    ],
)
def test_parse_bytes(text, count):
    assert parse_bytes("device_memory", text) == count


@pytest.mark.parametrize(
    "text",
    [
        *("", "GiB", "24 gib", "1.2.3GB", "1e9", "0", "0.3", -1, 1.5, True, None),
        # a decimal comma is no separator of thousands
        *("1,5GiB", "1,2,3GiB", "24_", "24,", "0,500GiB", "1234,567", "1,0000", "_24", "2__4"),
    ],
)
def test_parse_bytes_names_what_it_cannot_read(text):
    with pytest.raises(CacheOptionError, match="device_memory must be"):
        parse_bytes("device_memory", text)


def test_nothing_may_be_kept_free_in_any_unit():
    for text in (0, "0", "0GiB", "0 B"):
        assert parse_bytes("reserve", text, least=0) == 0
        found = kv_hf.plan(SMALL["full"], caches=["dynamic"], reserve=text, weights=text)
        assert found.reserve == found.weights == 0
    with pytest.raises(CacheOptionError, match="reserve must be a size of at least 0 bytes"):
        parse_bytes("reserve", -1, least=0)


def test_parse_bandwidth_and_tokens():
    assert parse_bandwidth("bandwidth", "3.35TB/s") == 3_350 * 10**9
    assert parse_bandwidth("bandwidth", "900GB/s") == parse_bandwidth("bandwidth", "900GB")
    assert parse_tokens("context", "128k") == parse_tokens("context", "128K") == 131_072
    assert parse_tokens("context", "1M") == 2**20
    assert parse_tokens("context", "8,192") == 8192
    with pytest.raises(CacheOptionError, match="context"):
        parse_tokens("context", "128kB")


def test_sizes_are_printed_in_units_that_are_read():
    assert [format_bytes(n) for n in (0, 1023, 1024, 80 * 10**9)] == [
        "0 B",
        "1,023 B",
        "1.00 KiB",
        "74.51 GiB",
    ]
    assert format_bandwidth(3_350 * 10**9) == "3.35 TB/s"
    assert parse_bytes("x", format_bytes(3 * 2**30)) == 3 * 2**30


def test_devices_have_sources():
    for name, device in DEVICES.items():
        assert device.name == name == name.lower()
        assert device.source and bool(device.memory_source) == (device.memory is not None)
        assert device.memory is None or 10**10 < device.memory < 10**12
        assert 5 * 10**10 < device.bandwidth < 10**13


def test_devices_hold_what_their_driver_reports():
    """They held the data sheets' gigabytes, 7 % less."""
    gib = {name: round(d.memory / 2**30, 2) for name, d in DEVICES.items() if d.memory is not None}
    assert (gib["rtx4090"], gib["h100"], gib["h200"]) == (23.99, 79.65, 140.4)
    unknown = [name for name, device in DEVICES.items() if not device.reported]
    assert unknown
    for name in unknown:
        assert "found" in DEVICES[name].memory_source
        notes = kv_hf.plan("llama-3.1-8b", caches=["dynamic"], device=name).notes
        assert f"memory of {name}: {DEVICES[name].memory_source}" in notes
    assert not [
        note
        for note in kv_hf.plan("llama-3.1-8b", caches=["dynamic"], device="l4").notes
        if "memory of" in note
    ]


def test_examples_of_the_documentation_run(capsys):
    text = (ROOT / "docs" / "planning.md").read_text()
    examples = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert examples
    exec(compile("\n".join(examples), "docs/planning.md", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"keys": "int8", "values": "int4"}, "paged_k8v4"),
        ({"keys": "int2", "values": "int2"}, "paged_int2_v1"),
        ({"keys": "int2_mixed", "values": "int8"}, "paged_int8:keys=int2_mixed"),
        ({"page_size": 32}, "paged_int4:page_size=32"),
    ],
)
def test_plan_names_options_by_the_nearest_cache_name(options: dict, label: str) -> None:
    """Formats of one side have no cache name of their own: they were refused here."""
    config = kv_hf.CacheConfig(**{"keys": "int4", "values": "int4", **options})
    found = kv_hf.plan("llama-3.1-8b", caches=[config], context=1000).rows[0]
    assert found.cache == label
    assert found.memory.total > 0
