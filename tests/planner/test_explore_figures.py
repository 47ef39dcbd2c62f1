"""The arithmetic of the planner's page, in a browser, beside the planner's own: hundreds of random plans."""

import contextlib
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from headless import FLAGS, find_browser
from place_cases import SIZES, lengths_of
from random_plans import KINDS, random_inventory, random_kinds, random_options

from kv_hf import planner
from kv_hf.config import CacheConfig
from kv_hf.errors import KVCacheError
from kv_hf.formats import LATENT_FORMAT_NAMES, format_names
from kv_hf.planner.choices import Choice
from kv_hf.planner.explore.models import offered
from kv_hf.planner.explore.page import build_page, formats
from kv_hf.planner.fit import find_fit
from kv_hf.planner.inventory import CachedLayer, Inventory
from kv_hf.planner.memory_plan import plan
from kv_hf.planner.predict import figures
from kv_hf.planner.roofline import cache_read, weights_read
from kv_hf.planner.shares import device_share, heads_in_plan
from kv_hf.planner.source import load_inventory
from kv_hf.row_pages import RowPages

PLANNER = Path(planner.__file__).parent / "explore" / "planner.js"
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
ROWS_SCRIPT = """cases => cases.map(one => {
    const row = Planner.rowPages(one.options, one.window);
    return {
        kept: row.kept, slots: row.slots, sealed: one.lengths.map(row.sealed), dropped: one.lengths.map(row.dropped),
        held: one.lengths.map(row.held), exact: one.lengths.map(row.exact), inUse: one.lengths.map(row.inUse),
    };
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


PAGE_SCRIPT = """hashes => {
    const data = JSON.parse(document.getElementById("data").textContent);
    const fields = State.fieldsOf(data);
    return hashes.map(hash => {
        const read = State.fromHash(hash, fields);
        const settled = Model.settle(read.state, data);
        const { caches, weights } = Model.compute(settled.state, data);
        const rows = caches.map(one => ({ ...one, curve: null }));
        return { rows, weights, problems: [...read.problems, ...settled.problems] };
    });
}"""
FIELDS = {"page_size": "page", "sink_tokens": "sinks", "recent_tokens": "recent"}


@pytest.fixture(scope="module")
def evaluate(tmp_path_factory):
    """Return what runs a function of the page with JSON arguments; the page offers all presets."""
    path = find_browser()
    from playwright.sync_api import sync_playwright

    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(build_page(offered([])), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        page = browser.new_page()
        page.goto(file.as_uri())
        yield page.evaluate
        browser.close()


@pytest.fixture
def evaluate_planner(request):
    """Return what runs a function of planner.js alone, which needs no document: in node, or in a browser without one."""
    node = shutil.which("node")
    if node is None:
        return request.getfixturevalue("evaluate")

    def run(function, argument):
        source = PLANNER.read_text(encoding="utf-8")
        script = f"{source}\nconsole.log(JSON.stringify(({function})({json.dumps(argument)})));"
        command = [node, "-"]
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    return run


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


def test_row_pages_place_tokens_as_geometry_does(evaluate_planner):
    """Over the table of cases that bookkeeping and kernels are checked with."""
    cases = [
        {
            "options": {
                "page_size": sizes.page_size,
                "sink_tokens": sizes.sink_tokens,
                "recent_tokens": sizes.recent_tokens,
            },
            "window": sizes.window,
            "lengths": lengths_of(sizes),
        }
        for sizes in SIZES
    ]
    found = evaluate_planner(ROWS_SCRIPT, cases)
    for sizes, case, ours in zip(SIZES, cases, found, strict=True):
        rows = RowPages(**case["options"], window=sizes.window)
        lengths = case["lengths"]
        assert ours == {
            "kept": sizes.kept,
            "slots": sizes.slots,
            "sealed": [sizes.sealed(tokens) for tokens in lengths],
            "dropped": [rows.dropped(tokens) for tokens in lengths],
            "held": [rows.held(tokens) for tokens in lengths],
            "exact": [sizes.exact(tokens) for tokens in lengths],
            "inUse": rows.in_use(torch.tensor(lengths)).tolist(),
        }, case


def test_reports_equal_the_planners(evaluate):
    rng = random.Random(8)
    cases = []
    for index in range(REPORTS):
        case = plain_case(rng, KINDS[index % len(KINDS)])
        kinds = random_kinds(rng)
        longest = max(tokens for tokens, _ in kinds)
        prompt = rng.choice((None, longest, rng.randint(1, longest)))
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
        own = case["inventory"]
        weights = own.get("weight_bytes") or (own["parameters"] or 0) * 4
        weights //= case["degree"]
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
        if whole.stored_bytes is not None:
            weights = -(-whole.stored_bytes // case["degree"])
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


def random_choice_on_the_page(rng, preset):
    """Return (state of the page, the same as arguments of kv_hf.plan, caches by the page's names)."""
    load = {"batch": rng.choice((1, 4, 33)), "context": rng.choice((1000, 8192, 100_001))}
    mix = {side: rng.choice(format_names(side)) for side in ("keys", "values")}
    mix["latent"] = rng.choice(LATENT_FORMAT_NAMES)
    pages = {
        "page_size": rng.choice((16, 64)),
        "sink_tokens": rng.choice((0, 4)),
        "recent_tokens": rng.choice((0, 50)),
    }
    state = {
        "model": preset,
        "device": "h200",
        **load,
        **mix,
        **{FIELDS[name]: value for name, value in pages.items()},
    }
    inventory = load_inventory(preset)
    with contextlib.suppress(KVCacheError):
        device_share(inventory, 2)
        state["tp"] = load["tensor_parallel"] = rng.choice((1, 2))
    if not any(layer.latent for layer in inventory.layers):
        del mix["latent"]
    caches = {
        "dynamic": "dynamic",
        "static": "static",
        "paged_int4": CacheConfig(keys="int4", values="int4", **pages),
        "mix": CacheConfig(**mix, **pages),
    }
    return (
        "#" + "&".join(f"{name}={value}" for name, value in state.items()),
        (inventory, load),
        caches,
    )


def test_presets_on_the_page_are_what_kv_hf_plan_says(evaluate):
    rng = random.Random(10)
    asked = [random_choice_on_the_page(rng, model.id) for model in offered([])]
    for (link, (inventory, load), caches), found in zip(
        asked, evaluate(PAGE_SCRIPT, [link for link, *_ in asked]), strict=True
    ):
        assert found["problems"] == [], link
        rows = {row["id"]: row for row in found["rows"]}
        searched = rng.choice(
            list(caches)
        )  # what fits takes long to search: one cache of each model
        for name, cache in caches.items():
            wanted = None
            with contextlib.suppress(KVCacheError):
                wanted = plan(
                    inventory, caches=[cache], **load, device="h200" if name == searched else None
                )
            if wanted is None:
                assert "error" in rows[name], (link, name)
                continue
            ours, row = rows[name]["plan"], wanted.rows[0]
            assert found["weights"] == wanted.weights, link
            report = {part: getattr(row.memory, part) for part in PARTS if part != "waste"}
            assert {part: ours["report"][part] for part in report} == report, (link, name)
            assert (ours["ratio"], ours["perToken"]) == (row.ratio, row.bytes_per_token), (
                link,
                name,
            )
            if row.fit is not None:
                limits = (row.fit.context, row.fit.batch, row.fit.resident_tokens, row.fits)
                assert (
                    tuple(ours[name] for name in ("context", "batch", "resident", "fits")) == limits
                ), (link, name)
                assert ours["tokensPerSecond"] == pytest.approx(row.tokens_per_second, rel=1e-9)


@pytest.mark.parametrize(
    ("limit", "most", "wanted"),
    [
        (100, 50, 10),
        (99, 50, 9),
        (101, 50, 10),
        (9, 50, 0),
        (10, 50, 1),
        (490, 50, 49),
        (500, 50, None),
        (600, 50, None),
        (50, 0, 0),
    ],
)
def test_largest_is_the_last_that_fits(evaluate, limit, most, wanted):
    assert evaluate(f"() => Fit.largest(n => 10 * n, {limit}, {most})") == wanted


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
