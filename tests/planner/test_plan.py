"""kv_hf.plan and its commands: what fits by the predicted bytes, what a decode step reads, what one of several devices holds."""

import json
import os
import shutil
import sys
from dataclasses import replace

import pytest
import torch
import transformers
from harness import slow_but

import kv_hf
from kv_hf.errors import CacheOptionError, DeviceBudgetError, UnsupportedModelError
from kv_hf.page_summary import part_bytes
from kv_hf.planner import explore
from kv_hf.planner.devices import DEVICES
from kv_hf.planner.inventory import CachedLayer, Inventory, State, cut_heads, device_share
from kv_hf.planner.memory_plan import Choice, find_fit, planned_caches
from kv_hf.planner.plan_table import Decode
from kv_hf.planner.source import preset_names, read_preset
from kv_hf_cli import main

GIB = 2**30


def attention(kv_heads, dim=128, **more):
    return CachedLayer(kv_heads=kv_heads, key_dim=dim, value_dim=dim, **more)


KINDS = {
    "DynamicSlidingWindowLayer": "sliding_attention",
    "LinearAttentionLayer": "linear_attention",
}


def model(*layers, model_type="llama", **more):
    """Return an inventory of these layers, and a config of which a real cache has the same."""
    if layers[0].latent:
        config = transformers.DeepseekV3Config(
            num_hidden_layers=len(layers), kv_lora_rank=64, qk_rope_head_dim=16
        )
    else:
        config = transformers.LlamaConfig(
            num_hidden_layers=len(layers),
            head_dim=layers[0].key_dim or 16,
            layer_types=[KINDS.get(layer.cache_class, "full_attention") for layer in layers],
            sliding_window=next((layer.window for layer in layers if layer.window), None),
        )
    return Inventory("m", model_type, "bfloat16", layers, config=config, **more)


def seventy(kv_heads=8, **more):
    return model(*[attention(kv_heads)] * 80, **more)


def sliding(window, kv_heads=2, dim=16):
    return attention(kv_heads, dim, cache_class="DynamicSlidingWindowLayer", window=window)


LATENT = CachedLayer(kv_heads=1, key_dim=64, value_dim=16, latent=True)
STATES = CachedLayer("LinearAttentionLayer", states=(State((4, 8)), State((4, 8, 8), "float32")))
SMALL = {
    "full": model(*[attention(2, 16)] * 3),
    "windows": model(sliding(40), attention(2, 16), sliding(40), model_type="gemma3_text"),
    "latent": model(LATENT, LATENT, model_type="deepseek_v3"),
    "states": model(attention(2, 16), STATES, model_type="qwen3_next"),
}
CACHES = (
    "dynamic",
    "static",
    "paged_exact:page_size=16",
    "paged_int4:page_size=16,recent_tokens=5",
)


def row_of(inventory, cache, **options):
    return kv_hf.plan(inventory, caches=[cache], **options).rows[0]


def page_spec(options, layers=3):
    sizes = {"num_kv_heads": 2, "key_dim": 16, "value_dim": 16, "dtype": torch.bfloat16}
    schemes = options.schemes(0, layers)
    return kv_hf.PageSpec.build(*schemes, **sizes, page_size=options.page_size)


# -- what a plan says -------------------------------------------------------------------------------------------


def test_plan_gives_the_figures_of_the_field():
    assert row_of(seventy(), "dynamic", batch=32, context=8192).total == 85_899_345_920
    # one layer of three grows for ever; pages as they are stored
    for name in ("paged_int4", "paged_int8:page_size=32"):
        options = Choice.read(name, {}).options
        each = page_spec(options).page_bytes / options.page_size
        assert row_of(SMALL["windows"], name, context=64).bytes_per_token == each


def test_options_come_from_the_name_then_from_cache_config_then_as_cache_config():
    own = kv_hf.CacheConfig(keys="int4", values="int4", page_size=32, recent_tokens=64)
    names = ["paged_int4:page_size=16", "paged_int4", own, "paged_int4:max_length=2k"]
    found = kv_hf.plan(
        SMALL["full"], caches=iter(names), cache_config={"page_size": 32}, context=500
    ).rows
    assert found[1].memory == found[2].memory != found[0].memory
    assert found[2].cache == "paged_int4:page_size=32"
    long = row_of(SMALL["full"], "paged_int4:max_length=2048,page_size=32", context=500)
    assert found[3].memory == long.memory


def test_default_caches_leave_out_with_a_reason_what_the_model_cannot_have():
    inventory = model(STATES, model_type="mamba")
    found = kv_hf.plan(inventory, device_memory="1MiB", weights=0)
    assert [row.cache for row in found.rows] == ["dynamic", "static"]
    reasons = [note for note in found.notes if "no attention layer that pages could hold" in note]
    assert len(reasons) == len(planned_caches()) + 1 - 2
    # states do not grow: no context is too long
    assert found.rows[0].fit.context is found.rows[0].fit.resident_tokens is None
    assert found.rows[0].fit.batch == 2**20 // (32 * 2 + 256 * 4)
    with pytest.raises(UnsupportedModelError):
        kv_hf.plan(inventory, caches=["paged_int4"])


def test_notes_name_what_is_beyond_the_model_or_the_device():
    inventory = seventy(max_positions=8192, parameters=70 * 10**9)
    given = {"caches": ["dynamic"]}
    assert kv_hf.plan(inventory, **given).notes == ()
    found = kv_hf.plan(inventory, context="16k", device_memory="24GB", reserve="1GiB", **given)
    assert any("8,192 positions" in note for note in found.notes)
    said = "weights (130.39 GiB) and the reserve of 1.00 GiB do not fit"
    assert any(said in note for note in found.notes)
    assert found.rows[0].fits is False and set(vars(found.rows[0].fit).values()) == {0}
    assert found.available == 24 * 10**9 - GIB - 140 * 10**9
    assert "not known" in kv_hf.plan(seventy(), **given).notes[0]
    assert kv_hf.plan(seventy(), weights="5GB", **given).weights == 5 * 10**9
    found = kv_hf.plan(inventory, dtype="float32", **given)
    assert (found.weights, found.rows[0].bytes_per_token) == (280 * 10**9, 2 * 327_680)
    assert kv_hf.plan(seventy(max_positions=2048), **given).context == 2048
    prefill = kv_hf.plan(SMALL["windows"], context=100, **given).notes[-1]
    assert "right after a prefill" in prefill and "15.00 KiB more" in prefill


@pytest.mark.parametrize(
    ("name", "values", "words", "more"),
    [
        ("caches", (["paged_int5"], ["offloaded"], ["static:page_size=16"]), "cache", {}),
        ("cache_config", ({"page_size": 16}, {"keys": "int8"}), "caches has none", {"caches": ["dynamic"]}),
        ("context", (True, 9.0, "9x", 0, 2**31), "context must be", {}),
        ("prompt", (0, 65, "1k"), "prompt must be", {}),
        ("batch", (0, 10**7, "2"), "batch must be", {}),
        ("device", ("h10", "", "rtx"), "device must be", {}),
        ("tensor_parallel", (4, 3, 0), "tensor_parallel", {}),
        ("device_memory", ("9x", -1, 0), "device_memory must be", {}),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(name, values, words, more):
    for value in values:
        with pytest.raises(CacheOptionError, match=words):
            kv_hf.plan(SMALL["full"], **{"context": 64, **more, name: value})


# as their makers give them: parameters in billions, and bytes of keys and values of a token in bfloat16
MAKERS = {
    "deepseek-v3": (671.0, 61 * (512 + 64) * 2),
    "gemma-2-9b": (9.24, 21 * 2 * 8 * 256 * 2),
    "gpt-oss-120b": (116.8, 18 * 2 * 8 * 64 * 2),
    "llama-3.1-70b": (70.6, 80 * 2 * 8 * 128 * 2),
    "llama-3.1-8b": (8.03, 32 * 2 * 8 * 128 * 2),
    "mixtral-8x7b": (46.7, 32 * 2 * 8 * 128 * 2),
    "qwen2.5-7b": (7.62, 28 * 2 * 4 * 128 * 2),
    "qwen3-235b-a22b": (235.0, 94 * 2 * 4 * 128 * 2),
    "smollm2-135m": (0.135, 30 * 2 * 3 * 64 * 2),
}
# those of their makers, and one of every other family; all are read in test_source.py
FAMILIES = {read_preset(name)["config"]["model_type"]: name for name in preset_names()}
PRESETS = sorted({*MAKERS, *FAMILIES.values()})
QUICK = ("deepseek-v3", "gemma-2-9b", "gpt-oss-120b", "llama-3.1-8b")  # the others are slow


@pytest.mark.parametrize("name", slow_but(QUICK, PRESETS))
def test_every_preset_has_a_plan(name):
    found = kv_hf.plan(name, batch=2, caches=["dynamic", "static", "paged_int8"], bandwidth="1TB/s")
    assert found.rows[2].ratio > 1 and found.rows[2].tokens_per_second > 0
    assert found.inventory.parameters > 10**8
    if name in MAKERS:
        billions, token = MAKERS[name]
        assert found.inventory.parameters / 1e9 == pytest.approx(billions, rel=0.004)
        assert found.rows[0].bytes_per_token == token


# -- what fits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("name", CACHES)
def test_what_fits_is_what_counting_up_finds(kind, name):
    cache, batch, context = Choice.read(name, {}).of(SMALL[kind]), 3, 50
    own = cache.options
    page, exact = (1, 0) if own is None else (16, own.sink_tokens + own.recent_tokens)
    for available in (3_000, 60_000, 150_001):
        found = find_fit(cache, available, batch=batch, context=context)

        def count_up(rows_of, available=available):
            count = 0
            while cache.report(rows_of(count + 1)).total <= available:
                count += 1
                assert count < 5000
            return count

        def of_pages(pages):
            rows = [pages // batch + (row < pages % batch) for row in range(batch)]
            return [tokens for tokens in (exact + count * page for count in rows) if tokens]

        assert found.context == count_up(lambda tokens: [tokens] * batch)
        assert found.batch == count_up(lambda rows: [context] * rows)
        assert found.resident_tokens == page * count_up(of_pages)


def test_bounds_of_the_cache_bound_what_fits():
    given = {"batch": 2, "context": 100, "device_memory": "1GiB", "weights": 0}
    for name, resident in (("static:max_length=300", 600), ("paged_exact:page_size=16,max_length=300", 2 * 18 * 16)):  # fmt: skip
        fit = row_of(SMALL["full"], name, **given).fit
        assert (fit.context, fit.resident_tokens) == (300, resident)
    pool = "paged_int4:page_size=16,recent_tokens=5,sink_tokens=4,max_pages=20"
    fit = row_of(SMALL["full"], pool, **given).fit
    # 10 pages of a row, 9 exact tokens, and 15 more that seal none
    assert vars(fit) == {"context": 10 * 16 + 9 + 15, "batch": 20 // 5, "resident_tokens": 20 * 16}
    budget = "paged_int4:offload=cpu,device_bytes=2GiB"
    inventory = model(*[attention(32)] * 8, parameters=10**9)
    found = row_of(inventory, budget, context=8192, device_memory="24GiB")
    assert found.fits and found.offloaded_bytes_per_token > 0
    cache = Choice.read(budget, {}).of(inventory)
    assert cache.report([found.fit.context]).total <= 24 * GIB
    with pytest.raises(DeviceBudgetError):
        cache.report([found.fit.context + 1])


# -- the roofline -----------------------------------------------------------------------------------------------


def test_a_step_reads_weights_once_and_the_tokens_of_every_row():
    inventory = seventy(parameters=70 * 10**9)
    row = row_of(inventory, "dynamic", batch=4, context=1000, bandwidth="1TB/s")
    step = 140 * 10**9 + 4 * 1000 * 327_680
    assert row.decode == Decode(4, 140 * 10**9, 4 * 1000 * 327_680)
    assert (row.decode.step_bytes, row.decode.bytes_per_token) == (step, step / 4)
    assert row.tokens_per_second == pytest.approx(4 * 1e12 / step)


def test_a_step_reads_windows_readers_states_and_indexer_keys():
    token = 2 * 32 * 2
    inventory = model(sliding(40), attention(2, 16, readers=3), STATES)
    read = row_of(inventory, "dynamic", batch=2, context=100).decode.cache
    assert read == 2 * (40 * token + 3 * 100 * token + 32 * 2 + 256 * 4)
    indexed = replace(LATENT, cache_class="DynamicIndexedLayer", index_dim=32)
    given = model(indexed, model_type="deepseek_v32")
    assert row_of(given, "dynamic", context=10).decode.cache == 10 * 112 * 2
    # a static cache is read with the columns that hold nothing
    assert row_of(given, "static:max_length=99", context=30).decode.cache == 99 * 112 * 2
    layers = model(sliding(40), sliding(200), attention(2, 16))
    found = row_of(layers, "static:max_length=150", batch=2, context=30).decode.cache
    assert found == 2 * (40 + 150 + 150) * token


def test_a_step_reads_sealed_pages_as_stored_and_of_a_part_what_tells_which():
    inventory, options = SMALL["windows"], {"keys": "int4", "values": "int4", "page_size": 16}
    whole = kv_hf.CacheConfig(**options)
    part = kv_hf.CacheConfig(**options, read={"tokens": 52, "from": 90})
    spec = page_spec(whole)
    # 4 sinks, 6 pages of 16, 3 tokens open; a window of 40 holds 7 exact ones and 33 of pages
    read = row_of(inventory, whole, context=103).decode.cache
    assert read == round(3 * 7 * 2 * 32 * 2 + (96 + 2 * 33) * spec.page_bytes / 16)
    # of the one full layer 2 of 6 pages, and of each page what tells whether to read it
    some = row_of(inventory, part, context=103).decode.cache
    assert some == read - 4 * spec.page_bytes + 6 * part_bytes(spec.keys)
    once, shared = (model(attention(2, 16, readers=count)) for count in (1, 3))
    one, three = (row_of(each, "paged_int4", context=1000) for each in (once, shared))
    assert three.decode.cache == 3 * one.decode.cache and three.memory == one.memory


def test_offloaded_pages_come_over_the_host_link():
    with pytest.raises(CacheOptionError, match="the model is on the CPU"):
        row_of(SMALL["full"], "paged_int4:offload=cpu", device="cpu-ddr5-2ch")
    # a CPU offloads to a disk by one buffer, a GPU by two
    on_cpu, on_gpu = (
        row_of(SMALL["full"], "paged_int4:offload=disk", device=name, weights=0).memory.staging
        for name in ("cpu-ddr5-2ch", "h200")
    )
    assert 2 * on_cpu == on_gpu > 0
    inventory = seventy(parameters=10**9)
    given = {"caches": ["paged_int4", "paged_int4:offload=cpu"], "context": 100_000}
    found = kv_hf.plan(inventory, **given, bandwidth="3TB/s")
    plain, offloaded = found.rows
    assert plain.decode.offloaded == 0 and offloaded.decode.cache == plain.decode.cache
    assert offloaded.decode.offloaded > 0.99 * offloaded.decode.cache
    assert offloaded.tokens_per_second == plain.tokens_per_second
    assert any("host_bandwidth" in note for note in found.notes)
    slow = kv_hf.plan(inventory, **given, bandwidth="3TB/s", host_bandwidth="64GB/s").rows[1]
    assert slow.tokens_per_second == pytest.approx(64e9 / slow.decode.offloaded)


def test_a_step_reads_the_experts_that_its_tokens_take():
    inventory = seventy(parameters=100, expert_parameters=80, experts=8, experts_per_token=2)
    for batch, share in ((1, 0.25), (2, 1 - 0.75**2), (1000, 1)):
        found = row_of(inventory, "dynamic", batch=batch, context=1)
        assert found.decode.weights == round(2 * (20 + 80 * share))


# -- several devices, and known ones ----------------------------------------------------------------------------


def test_a_device_holds_its_kv_heads():
    inventory = seventy(parameters=70 * 10**9)
    one, four = (kv_hf.plan(inventory, context=4096, tensor_parallel=n) for n in (1, 4))
    assert four.weights == one.weights // 4 and four.inventory == inventory
    for whole, part in zip(one.rows, four.rows, strict=True):
        tables = whole.memory.tables
        if whole.cache not in ("static", "paged_int4:offload=cpu"):
            assert 4 * (part.total - tables) == whole.total - tables
        assert 4 * part.decode.cache == whole.decode.cache
    assert "1/4 of the kv heads" in four.notes[0]


def test_what_transformers_keeps_whole_stays_whole_on_every_device():
    share, notes = device_share(SMALL["latent"], 4)
    assert share.layers == SMALL["latent"].layers
    assert notes[0] == "latents, indexer keys and states are whole on every device"
    share, notes = device_share(SMALL["states"], 2)
    assert [layer.kv_heads for layer in share.layers] == [1, 0] and share.layers[1] == STATES
    assert [cut_heads(name) for name in ("llama", "gemma3", "gpt_neox")] == [True] * 3
    assert [cut_heads(name) for name in ("olmo2", "phi3", "deepseek_v3")] == [False] * 3
    assert [cut_heads(name) for name in ("gpt2", "no such family")] == [None] * 2
    assert device_share(seventy(5, model_type="olmo2"), 4)[0].layers[0].kv_heads == 5
    assert "assumption" in device_share(seventy(8, model_type="gpt2"), 4)[1][0]


# -- commands ------------------------------------------------------------------------------------------------

LLAMA = "llama-3.1-8b"


def table_of(text):
    """Return {cache: {heading: cell}} of a printed plan."""
    found, headings = {}, None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if cells[:1] == ["cache"]:
            headings = cells
        elif not cells:
            headings = None if found else headings
        elif headings and len(cells) == len(headings):
            found.setdefault(cells[0], {}).update(zip(headings[1:], cells[1:], strict=True))
    return found


def test_memory_prints_what_the_plan_says(capsys):
    arguments = [LLAMA, "--batch", "8", "--context", "16k", "--device-memory", "80GB"]
    assert main(["memory", *arguments, "--bandwidth", "3.35TB/s"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    sizes = {"device_memory": 80 * 10**9, "bandwidth": 3_350 * 10**9}
    found = kv_hf.plan(LLAMA, batch=8, context=16384, **sizes)
    table = table_of(text)
    assert list(table) == [row.cache for row in found.rows]
    for row in found.rows:
        cells = table[row.cache]
        assert cells["bytes/token"] == f"{row.bytes_per_token:,.0f}"
        assert (cells["ratio"], cells["fits"]) == (f"{row.ratio:,.2f}x", "yes")
        assert cells["batch"] == f"{row.fit.batch:,}"
        assert cells["resident"] == f"{row.fit.resident_tokens:,}"
        assert cells["context"] == f"{row.fit.context:,}" + "*" * (row.fit.context > 131_072)
        # nobody said how fast offloaded pages can be read
        speed = "-" if row.decode.offloaded else f"{row.tokens_per_second:,.1f}"
        assert cells["tokens/s"] == speed or row.tokens_per_second >= 1000
    assert table["dynamic"]["cache bytes"] == "16.00 GiB"
    assert "layers: 32 x 8 kv heads of 128" in text and "8.03 B parameters" in text
    assert "* more than the 131,072 positions" in text


def test_memory_as_json_is_the_plan(capsys):
    options = ["--device", "h200", "--tensor-parallel", "2", "--dtype", "fp16", "--reserve", "2GiB"]
    options += ["--kv-heads", "4", "--cache", "paged_int4", "dynamic", "--cache", "static"]
    assert main(["memory", LLAMA, *options, "--weights", "5GB", "--prompt", "4k", "--json"]) == 0
    found = kv_hf.plan(
        LLAMA,
        caches=["paged_int4", "dynamic", "static"],
        **{"device": "h200", "tensor_parallel": 2, "dtype": "float16", "reserve": "2GiB"},
        **{"weights": "5GB", "prompt": 4096, "kv_heads": 4},
    )
    given = json.loads(capsys.readouterr().out)
    assert given == json.loads(json.dumps(found.as_dict()))
    assert given["weights"] == 25 * 10**8


def test_lists(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for flag, names in (("--list-presets", preset_names()), ("--list-devices", DEVICES)):
        assert main(["memory", flag]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines if line[0] != " "] == list(names)
        assert max(map(len, lines)) <= 80
    assert "79.65 GiB    3.35 TB/s  nvidia-smi 81,559 MiB" in "\n".join(lines)


def test_curves_are_those_of_plans():
    found = explore.planned("llama-3.1-8b", ["dynamic", "paged_int4"], 2, 13, "rtx4090", 1)
    contexts, totals = explore.curves(found)
    for name, sizes in totals.items():
        for context, size in zip(contexts, sizes, strict=True):
            row = kv_hf.plan(found.inventory, caches=[name], batch=2, context=context).rows[0]
            assert size * 2**30 == row.total
    lines = explore.figure(found).axes[0].get_lines()
    assert [line.get_label() for line in lines][:2] == ["dynamic", "paged_int4"]
    assert list(lines[2].get_ydata()) == [found.available / 2**30] * 2


def test_a_missing_gradio_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(["explore"]) == 2
    said = capsys.readouterr().err
    assert "gradio" in said and "pip install -e '.[ui]'" in said and said.count("\n") == 1


@pytest.mark.slow
def test_the_page_opens_in_a_browser(monkeypatch, tmp_path):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip("gradio")
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on PATH")
    app = explore.build(["smollm2-135m"])
    _, address, _ = app.launch(server_name=explore.HOST, prevent_thread_lock=True, quiet=True)
    try:
        with playwright.sync_playwright() as started:
            chromium = started.chromium.launch(executable_path=browser, args=["--no-sandbox"])
            page = chromium.new_page(viewport={"width": 1400, "height": 1100})
            page.goto(address)
            page.get_by_text("batch 1, context 8,192").wait_for(timeout=60_000)
            page.locator("img[src^='data:image']").first.wait_for()
            batch = page.get_by_role("spinbutton", name="Batch").first
            batch.fill("4")
            batch.press("Enter")
            page.get_by_text("batch 4, context 8,192").wait_for(timeout=60_000)
            page.screenshot(path=os.environ.get("KV_HF_SCREENSHOT", tmp_path / "page.png"))
            chromium.close()
    finally:
        app.close()
