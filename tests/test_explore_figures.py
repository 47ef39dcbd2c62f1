"""The arithmetic of the planner's page, in a browser, beside the planner's own: hundreds of random plans."""

import json
import random

import pytest
from headless import FLAGS, find_browser
from random_plans import KINDS, random_inventory, random_kinds, random_options

from kv_hf.config import CacheConfig
from kv_hf.errors import KVCacheError
from kv_hf.planner.choices import Choice
from kv_hf.planner.explore.page import Model, build_page, formats
from kv_hf.planner.fit import find_fit
from kv_hf.planner.inventory import CachedLayer, Inventory
from kv_hf.planner.predict import figures
from kv_hf.planner.roofline import cache_read, weights_read
from kv_hf.planner.shares import device_share, heads_in_plan

REPORTS = 400
FITS = 50
PARTS = (
    "payload",
    "scales",
    "tail",
    "tables",
    "other",
    "pages_held",
    "pages_allocated",
    "tokens",
    "total",
    "waste",
)

REPORTS_SCRIPT = """cases => cases.map(one => {
    try {
        const inventory = Planner.shard(one.inventory, one.degree, one.cut);
        const load = Planner.loadOf(one.kinds, one.prompt);
        return { report: Planner.predict(inventory, one.cache, one.options, load, one.formats) };
    } catch (error) {
        if (!(error instanceof Planner.Refused)) throw error;
        return { refused: error.message };
    }
})"""
FITS_SCRIPT = """cases => cases.map(one => {
    try {
        const inventory = Planner.shard(one.inventory, one.degree, one.cut);
        const weights = Fit.weightBytes(one.inventory, one.degree);
        const device = { bytes: one.memory, bandwidth: one.bandwidth, weights };
        return { plan: Fit.plan(inventory, one.cache, one.options, one.load, device, one.formats), weights };
    } catch (error) {
        if (!(error instanceof Planner.Refused)) throw error;
        return { refused: error.message };
    }
})"""
WORKED_SCRIPT = """one => Planner.predict(
    one.inventory, one.cache, one.options, Planner.loadOf([[one.tokens, one.rows]]), one.formats)"""


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory):
    """Return what runs a function of the page with JSON arguments."""
    path = find_browser()
    from playwright.sync_api import sync_playwright

    file = tmp_path_factory.mktemp("page") / "page.html"
    inventory = Inventory(
        "any",
        "llama",
        "bfloat16",
        (CachedLayer(kv_heads=2, key_dim=64, value_dim=64, query_heads=4),),
    )
    file.write_text(build_page([Model("any", "any", inventory)]))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        page = browser.new_page()
        page.goto(file.as_uri())
        yield page.evaluate
        browser.close()


def plain_case(rng, kind, most_layers=6):
    """Return what both sides get: JSON types only."""
    inventory = random_inventory(rng, kind, most_layers)
    latent = any(layer.latent for layer in inventory.layers)
    cache = rng.choice(("dynamic", "static", "paged", "paged", "paged", "paged"))
    return {
        "inventory": inventory.as_dict(),
        "cache": cache,
        "options": random_options(rng, latent),
        "degree": rng.choice((1, 1, 1, 2, 4)),
        "cut": heads_in_plan(inventory.model_type),
        "formats": formats(),
    }


def options_of(case):
    return CacheConfig(**case["options"]) if case["cache"] == "paged" else None


def test_reports_equal_the_planners(evaluate):
    rng = random.Random(8)
    cases = []
    for index in range(REPORTS):
        case = plain_case(rng, KINDS[index % len(KINDS)])
        kinds = random_kinds(rng)
        longest = max(tokens for tokens, _ in kinds)
        prompt = rng.choice((None, rng.randint(1, longest)))
        cases.append({**case, "kinds": kinds, "prompt": prompt})
    found = evaluate(REPORTS_SCRIPT, cases)
    assert len(found) == REPORTS
    refused = 0
    for case, ours in zip(cases, found, strict=True):
        what, wanted = json.dumps({**case, "formats": None}), None
        rows = [tokens for tokens, count in case["kinds"] for _ in range(count)]
        try:
            inventory, _ = device_share(Inventory.from_dict(case["inventory"]), case["degree"])
            wanted = figures(
                inventory, case["cache"], options_of(case), row_tokens=rows, prompt=case["prompt"]
            )
        except KVCacheError:
            refused += 1
        if wanted is None:
            assert "refused" in ours, what
            continue
        assert "report" in ours, f"{ours}: {what}"
        report = {**vars(wanted.report), "total": wanted.report.total, "waste": wanted.waste}
        assert {part: ours["report"][part] for part in PARTS} == {
            part: report[part] for part in PARTS
        }, what
    assert 0 < refused < REPORTS // 4


def test_fits_and_bounds_equal_the_planners(evaluate):
    rng = random.Random(9)
    cases = []
    for index in range(FITS):
        load = {"rows": rng.choice((1, 3, 32)), "tokens": rng.choice((20, 130, 2000))}
        case = plain_case(rng, KINDS[index % len(KINDS)], most_layers=1)
        weights = (case["inventory"]["parameters"] or 0) * 4 // case["degree"]
        more = {"memory": weights + rng.choice((-1, 10**5, 10**7, 10**8)), "bandwidth": 3.35e12}
        cases.append({**case, "load": load, **more})
    compared = 0
    for case, ours in zip(cases, evaluate(FITS_SCRIPT, cases), strict=True):
        what, report = json.dumps({**case, "formats": None}), None
        whole, rows, tokens = (
            Inventory.from_dict(case["inventory"]),
            case["load"]["rows"],
            case["load"]["tokens"],
        )
        try:
            inventory, _ = device_share(whole, case["degree"])
            choice = Choice("any", case["cache"], options_of(case))
            report = choice.predict(inventory, [tokens] * rows)
        except KVCacheError:
            pass
        if report is None:
            assert "refused" in ours, what
            continue
        compared += 1
        weights = None
        if whole.parameters is not None:
            weights = -(-whole.parameters * whole.torch_dtype.itemsize // case["degree"])
        assert ours["weights"] == weights, what
        plan, free = ours["plan"], case["memory"] - (weights or 0)
        fit = find_fit(choice, inventory, free, batch=rows, context=tokens)
        assert (plan["context"], plan["batch"], plan["resident"]) == (
            fit.context,
            fit.batch,
            fit.resident_tokens,
        ), what
        assert plan["fits"] == (report.total <= free), what
        assert plan["perToken"] == choice.slope(inventory)[0], what
        read, _ = cache_read(choice, inventory, report, batch=rows, context=tokens)
        assert plan["cacheBytes"] == read, what
        # powers of the two languages may differ in the last bit, and so by a byte of 10**12
        step = read + (weights_read(inventory, rows, weights) or 0)
        assert abs(plan["step"] - step) <= 1, what
        assert plan["tokensPerSecond"] == pytest.approx(rows / (step / 3.35e12), rel=1e-9)
    assert compared > FITS // 2


@pytest.mark.parametrize(
    ("layers", "heads", "rows", "tokens", "wanted"),
    [
        (80, 8, 32, 8192, 85_899_345_920),
        (80, 64, 1, 32768, 80 * 2**30),
        (80, 8, 1, 32768, 10 * 2**30),
        (80, 1, 1, 32768, 5 * 2**28),
        (80, 8, 1, 1, 327_680),
    ],
)
def test_worked_examples_of_the_field(evaluate, layers, heads, rows, tokens, wanted):
    layer = CachedLayer(kv_heads=heads, key_dim=128, value_dim=128, query_heads=64)
    inventory = Inventory("70B", "llama", "bfloat16", (layer,) * layers)
    case = {
        "inventory": inventory.as_dict(),
        "options": {},
        "cache": "dynamic",
        "formats": formats(),
    }
    found = evaluate(WORKED_SCRIPT, {**case, "rows": rows, "tokens": tokens})
    assert found["total"] == wanted


def test_a_typed_model_is_the_inventory_it_says(evaluate):
    typed = {
        "layers": 3,
        "heads": 8,
        "kvheads": 2,
        "dim": 64,
        "window": 128,
        "windowed": 2,
        "billions": 0.5,
        "rank": 0,
    }
    found = Inventory.from_dict(evaluate("given => Planner.customInventory(given)", typed))
    full = CachedLayer(kv_heads=2, key_dim=64, value_dim=64, query_heads=8)
    sliding = CachedLayer("DynamicSlidingWindowLayer", 2, 64, 64, window=128, query_heads=8)
    assert found.layers == (sliding, sliding, full)
    assert found.parameters == 500_000_000
    mla = {**typed, "rank": 512, "rope": 64}
    found = Inventory.from_dict(evaluate("given => Planner.customInventory(given)", mla))
    assert (
        found.layers
        == (CachedLayer(kv_heads=1, key_dim=512, value_dim=64, latent=True, query_heads=8),) * 3
    )
