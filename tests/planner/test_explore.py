"""The planner's page: its curves are those of plans, and it opens in a real browser."""

import os
import shutil
import sys

import pytest

import kv_hf
from kv_hf.planner import explore

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def test_curves_are_those_of_plans():
    found = explore.planned("llama-3.1-8b", ["dynamic", "paged_int4"], 2, 13, "rtx4090", 1)
    contexts, totals = explore.curves(found)
    for name, sizes in totals.items():
        for context, size in zip(contexts, sizes, strict=True):
            row = kv_hf.plan("llama-3.1-8b", caches=[name], batch=2, context=context).rows[0]
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
