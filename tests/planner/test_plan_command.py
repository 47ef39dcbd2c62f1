"""The planner's commands: `kv-hf memory`, its table, JSON, lists and errors, and `kv-hf explore`, the page in a browser."""

import json
import os
import shutil
import sys

import pytest

import kv_hf
import kv_hf_cli
from kv_hf.planner import explore
from kv_hf.planner.devices import DEVICES
from kv_hf.planner.inventory import CachedLayer, Inventory
from kv_hf.planner.plan_command import main
from kv_hf.planner.plan_table import MOST_ROWS, plain_table
from kv_hf.planner.source import preset_names

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
    assert kv_hf_cli.main(["memory", *arguments, "--bandwidth", "3.35TB/s"]) == 0
    text = capsys.readouterr().out
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
        # nobody said how fast pages outside of the device can be read
        speed = "-" if row.decode.outside else f"{row.tokens_per_second:,.1f}"
        assert cells["tokens/s"] == speed or row.tokens_per_second >= 1000
    assert table["dynamic"]["cache bytes"] == "16.00 GiB"
    assert "layers: 32 x 8 kv heads of 128" in text and "8.03 B parameters" in text
    assert "* more than the 131,072 positions" in text


def test_memory_as_json_is_the_plan(capsys):
    options = ["--device", "h200", "--tensor-parallel", "2", "--dtype", "fp16", "--reserve", "2GiB"]
    options += ["--kv-heads", "4", "--cache", "paged_int4", "dynamic", "--cache", "static"]
    assert main([LLAMA, *options, "--weights", "5GB", "--prompt", "4k", "--json"]) == 0
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
        assert main([flag]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines if line[0] != " "] == list(names)
        assert max(map(len, lines)) <= 80
    assert "79.65 GiB    3.35 TB/s  nvidia-smi 81,559 MiB" in "\n".join(lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./llama-3.1-8b.json"], "there is no file or folder"),
        ([LLAMA, "--cache", "paged_int7"], "cache must be one of"),
        ([LLAMA, "--cache", "paged_int4:max_length=0"], "max_length"),
    ],
)
def test_errors_say_their_reason(arguments, words, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and words in printed.err
    assert printed.err.startswith("kv-hf memory: error: ")


def test_a_model_is_asked_for(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2 and "--list-presets" in capsys.readouterr().err


def test_limits_are_written_plainly():
    inventory = Inventory("m", "llama", "bfloat16", (CachedLayer("DynamicLayer", 1, 1, 1),))
    given = {"caches": ["dynamic"], "context": 4, "weights": 0}
    for bytes_, batch in ((16 * MOST_ROWS, f"{MOST_ROWS:,}+"), (16 * 50_000, "50,000")):
        plan = kv_hf.plan(inventory, device_memory=bytes_, **given)
        assert table_of(plain_table(plan))["dynamic"]["batch"] == batch
    text = plain_table(kv_hf.plan(inventory, caches=["dynamic"], device="l4"))
    assert "fits" not in table_of(text)["dynamic"] and "give weights" in text
    text = plain_table(kv_hf.plan("llama-3.1-70b", device="rtx4090", caches=["paged_int4"]))
    assert "the weights (131.42 GiB) do not fit into 23.99 GiB: no cache does" in text
    row = table_of(text)["paged_int4"]
    assert (row["fits"], row["context"], row["batch"]) == ("no", "0", "0")


def test_plain_table_fits_its_width():
    plan = kv_hf.plan(LLAMA, device="h100")
    for width, tables in ((60, 4), (80, 3), (110, 2), (400, 1)):
        text = plain_table(plan, width)
        assert sum(line.startswith("cache ") for line in text.splitlines()) == tables
        assert max(map(len, text.splitlines())) <= width
        assert table_of(text) == table_of(plain_table(plan))


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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
    assert explore.main([]) == 2
    said = capsys.readouterr().err
    assert "gradio" in said and "pip install -e '.[ui]'" in said and said.count("\n") == 1


@pytest.mark.slow
def test_the_page_opens_in_a_browser(monkeypatch, tmp_path):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    pytest.importorskip("gradio")
    playwright = pytest.importorskip("playwright.sync_api")
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is on PATH")
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
