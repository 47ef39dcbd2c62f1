"""Which rows a report shows, and that the page shows them as they are. No plot is drawn here."""

import itertools
import json
import math
import random
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_rows import (
    CACHES,
    accuracy_row,
    all_rows,
    memory_rows,
    needle_rows,
    sensitivity_rows,
    task_rows,
)

from kv_hf.evaluation import cache_parts
from kv_hf.evaluation.report.accuracy_tables import accuracy_table
from kv_hf.evaluation.report.cells import MINUS, NONE, short
from kv_hf.evaluation.report.other_tables import PARTS
from kv_hf.evaluation.report.page import page
from kv_hf.evaluation.report.select import KINDS, family, groups

ONE_OF_EACH = {
    "accuracy": [accuracy_row(cache=cache) for cache in CACHES],
    "sensitivity": sensitivity_rows("gemma-3-270m", ("int4",)),
    "task": task_rows(),
    "needle": needle_rows(),
    "memory": memory_rows(),
}
HEADINGS = {
    "accuracy": "Distance from the exact cache",
    "sensitivity": "What each layer costs",
    "task": "Tasks",
    "needle": "Needles in long texts",
    "memory": "Memory and speed",
}


class Page(HTMLParser):
    """Elements of a page: (name, attributes, text), in the order of their ends."""

    EMPTY = ("meta", "br", "col")

    def __init__(self, text):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(text)
        self.close()
        assert self.open == [], "an element is not closed"

    def handle_starttag(self, name, attributes):
        if name not in self.EMPTY:
            self.open.append((name, dict(attributes), []))

    def handle_endtag(self, name):
        opened, attributes, text = self.open.pop()
        assert opened == name
        self.elements.append((name, attributes, "".join(text)))

    def handle_data(self, data):
        for _, _, text in self.open:
            text.append(data)

    def all(self, name):
        return [element for element in self.elements if element[0] == name]


def shown(rows, unknown=()):
    return Page(page(groups(rows), {}, unknown))


def values_of(rows):
    """All numbers in rows, as the page writes them."""
    found = set()

    def walk(value):
        if isinstance(value, dict):
            for part in value.values():
                walk(part)
        elif isinstance(value, (int, float)):
            found.add(repr(value))

    for row in rows:
        walk(row)
    return found


def test_newest_row_of_a_cell_wins_whatever_the_order():
    old = accuracy_row(kl_mean=0.5, date="2026-11-20")
    new = accuracy_row(kl_mean=0.25, date="2026-11-21")
    last = accuracy_row(kl_mean=0.125, date="2026-11-21")
    other = accuracy_row(cache="hqq_int4", date="2026-11-01")
    for rows in itertools.permutations([old, new, other]):
        (group,) = groups(rows)
        assert sorted(row["kl_mean"] for row in group.rows) == sorted([0.25, other["kl_mean"]])
    (group,) = groups([new, old, last, other])
    assert last in group.rows and new not in group.rows


@pytest.mark.parametrize(
    "change",
    [
        {"window": 1280},
        {"windows": 2},
        {"prompt": 256},
        {"text": "another"},
        {"protocol": "one pass"},
        {"dtype": "bfloat16"},
        {"bytes_dtype": "float16"},
        {"model_revision": "v2"},
        {"options": {"recent_tokens": 8}},
        {"model": "gemma-3-270m"},
        {"text_digest": "another text of that name"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_rows_of_different_protocols_are_not_mixed(change):
    rows = [accuracy_row(), accuracy_row(**change, kl_mean=0.5), accuracy_row(cache="hqq_int4")]
    assert sorted(len(group.rows) for group in groups(rows)) == [1, 2]
    tables = [text for _, _, text in shown(rows).all("table") if "Every cache" in text]
    assert len(tables) == 2
    assert sorted("0.500" in text for text in tables) == [False, True]


@pytest.mark.parametrize(
    ("rows", "change"),
    [
        (task_rows()[:1], {"samples": 100}),
        (task_rows()[:1], {"num_fewshot": 5}),
        (needle_rows()[:1], {"seed": 1}),
        (needle_rows()[:1], {"task": "many keys"}),
        (memory_rows()[:1], {"context": 8192}),
        (memory_rows()[:1], {"machine": "another"}),
        (memory_rows()[:1], {"device": "cuda"}),
        (memory_rows()[:1], {"steps": 2}),
        (needle_rows()[:1], {"haystack": "noise"}),
        (sensitivity_rows("gemma-3-270m", ("int4",))[:1], {"options": {"sink_tokens": 0}}),
        (sensitivity_rows("gemma-3-270m", ("int4",))[:1], {"window": 64}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value[0]["kind"],
)
def test_cells_of_other_kinds_differ_by_what_was_measured(rows, change):
    both = [*rows, {**rows[0], **change}]
    assert sum(len(group.rows) for group in groups(both)) == 2


def test_every_number_in_a_table_is_in_a_row_or_follows_from_rows():
    rows = all_rows()
    measured, found = values_of(rows), shown(rows)
    checked = 0
    for _, attributes, text in found.all("td"):
        if attributes.get("class") not in ("number", "score"):
            continue
        given = [
            attributes[n]
            for n in attributes
            if n in ("data-value", "data-low", "data-high", "data-stderr")
        ]
        assert given or "data-derived" in attributes, text
        assert set(given) <= measured, (text, attributes)
        checked += len(given)
    assert checked > 1500
    heads = {text for _, _, text in found.all("dd")}
    assert "4,096" in heads and "0123abc" in heads and "2026-11-21" in heads


def test_columns_show_the_fields_that_they_are_named_after():
    row = accuracy_row(kl_low=0.5, kl_high=0.75)
    fields = {
        "mean KL (interval)": "kl_mean",
        "stored bits per number": "stored_bits",
        "bytes per token": "bytes_per_token",
        "median KL": "kl_median",
        "99th percentile": "kl_p99",
        "same top token": "top1",
        "perplexity": "perplexity",
        "change of perplexity (interval)": "perplexity_delta",
        "first different token (of 96), mean": "divergence_mean",
        "… median": "divergence_median",
        "bits of the format": "bits_per_element",
        "bytes held": "bytes",
    }
    assert len({row[name] for name in fields.values()}) == len(fields)
    found = shown([row])
    (table,) = [text for _, _, text in found.all("table") if text.startswith("Every cache")]
    heads = [text for _, a, text in found.all("th") if a.get("scope") == "col"]
    heads = heads[heads.index("mean KL (interval)") :]
    cells = found.all("td")[-len(heads) :]
    given = {h: a.get("data-value") for h, (_, a, _) in zip(heads, cells, strict=True)}
    assert {h: given[h] for h in fields} == {h: repr(row[n]) for h, n in fields.items()}
    interval = cells[0][1]
    assert (interval["data-low"], interval["data-high"]) == ("0.5", "0.75")
    assert "0.00300 0.500 … 0.750" in table


def test_a_kl_of_noise_counts_as_none():
    # 2.9e-9 is what float arithmetic leaves of an exact cache: at the same bits it is as good as 0
    rows = [accuracy_row(cache="dynamic"), accuracy_row(cache="paged_exact", stored_bits=16.0)]
    rows += [accuracy_row(cache="hqq_int8", kl_mean=4e-9, stored_bits=16.5, bytes_per_token=1e5)]
    lines = [text for _, _, text in shown(rows).all("tr")]
    assert (
        sum("on the front" in text and text.startswith(("dynamic", "paged")) for text in lines) == 2
    )
    assert any(text.startswith("hqq_int8pass: neither loses anything") for text in lines)


def test_numbers_that_are_derived_are_right():
    rows = [accuracy_row(cache=cache) for cache in CACHES]
    by_name = {row["cache"]: row for row in rows}
    table = next(
        text for _, _, text in shown(rows).all("section") if "At each peer's bytes" in text
    )
    assert "of its KL" in table
    lines = {}
    for _, _, text in shown(rows).all("tr"):
        lines.setdefault(text.split("\n")[0], text)
    ratio = by_name["paged_int4"]["kl_mean"] / by_name["quanto_int4"]["kl_mean"]
    assert any(text.startswith("quanto_int4pass" + short(ratio)) for text in lines)
    ratio = by_name["paged_int4"]["kl_mean"] / by_name["hqq_int4"]["kl_mean"]
    said = "hqq_int4FAIL: better, but more than 0.25 of its KL" + short(ratio)
    assert any(text.startswith(said) for text in lines)
    assert any(text.startswith("hqq_int8FAIL: ours is no better here1.50") for text in lines)
    assert any(text.startswith("smollm2-135mlincoln_18624 of 6 peers") for text in lines)


def test_a_peer_that_holds_less_than_all_of_ours_is_not_compared():
    rows = [accuracy_row(cache="paged_int8"), accuracy_row(cache="hqq_int4")]
    found = page(groups(rows), {}, [])
    assert "not compared: no cache of ours that was measured holds so few bytes" in found
    assert "FAIL" not in found


def test_tasks_are_compared_with_the_exact_cache():
    rows = task_rows()
    exact = next(r["value"] for r in rows if r["cache"] == "dynamic")
    cell = next(r for r in rows if r["cache"] == "hqq_int2")
    (found,) = [
        a for _, a, _ in shown(rows).all("td") if a.get("data-value") == repr(cell["value"])
    ]
    assert float(found["data-derived"]) == cell["value"] - exact
    assert found["data-stderr"] == repr(cell["stderr"])


@pytest.mark.parametrize("left", list(KINDS))
def test_kinds_without_rows_leave_nothing_behind(left):
    rows = [row for kind, own in ONE_OF_EACH.items() if kind != left for row in own]
    found = shown(rows)
    for kind, heading in HEADINGS.items():
        present = any(text.startswith(heading) for _, _, text in found.all("h3"))
        assert present == (kind != left), kind
    assert all(text.strip() for _, _, text in found.all("section"))
    assert all(text.strip() for _, _, text in found.all("tbody"))
    alone = shown(ONE_OF_EACH[left])
    headings = [text for _, _, text in alone.all("h3") if text != "Summary"]
    assert len(headings) == 1 and headings[0].startswith(HEADINGS[left])


def test_rows_with_only_what_is_needed_make_a_page():
    rows = [
        {"kind": "accuracy", "model": "m", "cache": "paged_int4", "kl_mean": 0.5},
        {"kind": "task", "model": "m", "cache": "c", "task": "t", "metric": "acc", "value": 0.5},
        {"kind": "needle", "model": "m", "cache": "c", "task": "t", "length": 8, "depth": 0.5, "score": 1.0},
        {"kind": "memory", "model": "m", "cache": "c"},
        {"kind": "sensitivity", "model": "m", "layer": 0, "side": "keys", "format": "int4", "kl_mean": 0.5},
    ]  # fmt: skip
    found = shown(rows)
    assert "Not in the first plot (no stored_bits was measured): paged_int4." in " ".join(
        text for _, _, text in found.all("p")
    )


EVIL = "\" onload=\"x\" ' onload='<script>alert(1)</script><b a='x'>&amp;"


def test_whatever_stands_in_a_row_is_text():
    rows = all_rows()[:20] + [own[0] for own in ONE_OF_EACH.values()]
    plain = shown(rows, ["kind"])

    def spoiled(value):
        if isinstance(value, str):
            return value + EVIL
        return (
            {k + EVIL: spoiled(v) for k, v in value.items()} if isinstance(value, dict) else value
        )

    keep = ("kind", "side")
    bad = [{k: v if k in keep else spoiled(v) for k, v in row.items()} for row in rows]
    found = shown(bad, ["kind" + EVIL])
    assert {name for name, _, _ in found.elements} == {name for name, _, _ in plain.elements}
    assert len(found.all("script")) == 1
    assert not any("onload" in attributes for _, attributes, _ in found.elements)
    text = "".join(text for _, _, text in found.all("body"))
    for name in (
        "smollm2-135m",
        "paged_int4",
        "lincoln_1862",
        "AMD EPYC, 2 cores",
        "0123abc",
        "torch",
    ):
        assert name + EVIL in text, name


def test_page_is_complete_by_itself():
    found = shown(all_rows())
    for name, attributes, _ in found.elements:
        for attribute in ("src", "href", "action", "data", "srcset"):
            assert attributes.get(attribute, "#").startswith("#"), (name, attributes)
        assert name not in ("link", "iframe", "object", "img")
    text = page(groups(all_rows()), {}, [])
    assert "http" not in text.lower() and "@import" not in text and "url(" not in text
    ids = [attributes["id"] for _, attributes, _ in found.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {"#" + each for each in ids} >= {a["href"] for _, a, _ in found.all("a")}


def test_unknown_kinds_are_named():
    assert "not shown: plan" in page(groups([accuracy_row()]), {}, ["plan"])
    with pytest.raises(ValueError, match="rows must hold rows of accuracy.*got 2 of others"):
        groups([{"kind": "plan"}, {}])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kl_mean": math.nan}, "row 2 .*kl_mean must be a finite number, got nan"),
        ({"perplexity": math.inf}, "row 2 .*perplexity must be a finite number, got inf"),
        ({"cache": None}, "row 2 .*must have a field 'cache'"),
        ({"kl_mean": None}, "row 2 .*must have a field 'kl_mean'"),
    ],
)
def test_rows_that_say_nothing_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        groups([accuracy_row(), {**accuracy_row(cache="hqq_int4"), **change}])


def test_groups_survive_the_way_through_a_file():
    rows = all_rows()
    random.Random(0).shuffle(rows)
    again = [json.loads(json.dumps(row)) for row in rows]
    assert page(groups(again), {}, []) == page(groups(rows), {}, [])


@given(st.floats(1e-12, 1e12), st.booleans())
def test_short_numbers_are_right_to_their_digits(value, negative):
    value = -value if negative else value
    text = short(value)
    number = float(text.replace(MINUS, "-").replace(",", ""))
    assert abs(number - value) <= abs(value) * (0.051 if "e" in text else 0.0051), text
    assert len(text) <= 11


@pytest.mark.parametrize(
    ("cache", "wanted"),
    [
        ("paged_int4:keys=int8", "ours"),
        ("recipe:mixed", "recipe"),
        ("hqq_int4:axis_key=1", "peer"),
        ("quantized_fp8", "peer"),
        ("dynamic", "exact"),
        ("paged_exact", "ours"),
    ],
)
def test_family(cache, wanted):
    assert family(cache) == wanted


def test_what_several_layers_cost_at_once_is_left_out_and_lists_have_no_depth():
    whole = {**sensitivity_rows("gemma-3-270m", ("int4",))[0], "layers": [0, 1]}
    del whole["layer"]
    asked = {**needle_rows()[0], "task": "common_words", "depth": None}
    found = shown([accuracy_row(), whole, asked])
    assert any("anywhere" in text for _, _, text in found.all("th"))


def test_rows_of_the_measurement_itself_show_their_bytes():
    """The table reads the fields that kv_hf.evaluation.footprint writes."""
    assert {f"{part}_bytes" for part in cache_parts.PARTS} <= {*PARTS}
    heads = [text for _, _, text in shown(memory_rows()).all("th")]
    assert {"payload", "scales"} <= {head.strip(" ↕") for head in heads}


def test_the_worst_text_stands_beside_the_pooled_figure():
    texts = {name: {"kl_mean": kl} for name, kl in (("novel", 0.001), ("german", 0.0125))}
    rows = [accuracy_row(cache="paged_int4", texts=texts, worst_text="german")]
    rows += [
        accuracy_row(cache="paged_int2", texts={"novel": {"kl_mean": 0.1}}, worst_text="novel")
    ]
    table = accuracy_table(groups(rows)[0])
    column = table.heads.index("worst text: mean KL")
    shown = {line[0].codes[0]: line[column] for line in table.lines}
    assert shown["paged_int4"].text == "0.0125 (german)"
    assert shown["paged_int2"] == NONE
    assert "worst text: mean KL" not in accuracy_table(groups([accuracy_row()])[0]).heads
