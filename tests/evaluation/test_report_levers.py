"""kv heads and bits in one table and one plot: which models belong together, and what is derived from their rows."""

import pytest
from report_rows import accuracy_row

from kv_hf.evaluation.lineage import lineage
from kv_hf.evaluation.report import write_report
from kv_hf.evaluation.report.levers import find_levers, kv_heads, levers_table, origin
from kv_hf.evaluation.report.select import groups

# cache -> (bytes per token, perplexity) of the original, and of its conversion to a third of the heads
ORIGINAL = {"paged_exact": (2400, 20.0), "paged_int4": (750, 20.4), "paged_int2": (500, 24.0)}
CONVERTED = {"paged_exact": (800, 24.5), "paged_int4": (250, 25.0)}


def rows_of(model, figures, **changed):
    return [
        accuracy_row(
            model, cache, perplexity=ppl, perplexity_exact=figures["paged_exact"][1],
            bytes_per_token=held, bytes=held * 100, bytes_exact=figures["paged_exact"][0] * 98, **changed,
        )
        for cache, (held, ppl) in figures.items()
    ]  # fmt: skip


def converted(model="small-1", figures=CONVERTED, **changed):
    told = {"kv_heads": 1, "kv_heads_before": 3, "conversion": "svd", **changed}
    return rows_of(model, figures, **told)


def test_a_conversion_joins_its_original():
    (levers,) = find_levers(groups([*converted(), *rows_of("small", ORIGINAL)]))
    assert [group.model for group in levers.groups] == ["small", "small-1"]
    assert levers.exact == 20.0 and levers.exact_bytes == pytest.approx(2352)
    assert [kv_heads(levers, group) for group in levers.groups] == [3, 1]
    assert [origin(group) for group in levers.groups] == ["original", "svd"]


def test_the_front_is_taken_over_all_models():
    (levers,) = find_levers(groups([*rows_of("small", ORIGINAL), *converted()]))
    front = [(group.model, row["cache"]) for group, row in levers.front()]
    assert front == [
        ("small-1", "paged_int4"),
        ("small", "paged_int2"),
        ("small", "paged_int4"),
        ("small", "paged_exact"),
    ]  # the conversion's exact cache holds more than the original's int4 and is worse


def test_figures_of_the_table_follow_from_rows():
    (levers,) = find_levers(groups([*rows_of("small", ORIGINAL), *converted()]))
    lines = levers_table(levers).lines
    assert len(lines) == 5
    least = lines[0]
    assert least[0].codes == ["paged_int4"] and least[1].text == "small-1"
    assert least[-1].strong == "on the front"
    derived = [float(c.data["data-derived"]) for c in least if "data-derived" in c.data]
    assert derived == pytest.approx([250 / 2352, 25.0 / 20.0])


def test_trained_models_stand_behind_untrained_ones_and_say_so():
    rows = [*rows_of("small", ORIGINAL), *converted("b", uptrained_tokens=5000), *converted("c")]
    (levers,) = find_levers(groups(rows))
    assert [group.model for group in levers.groups] == ["small", "c", "b"]
    assert origin(levers.groups[2]) == "svd, trained on 5,000 tokens"


@pytest.mark.parametrize(
    "rows",
    [
        rows_of("small", ORIGINAL),
        [*rows_of("small", ORIGINAL), *rows_of("other", ORIGINAL)],  # no conversion at all
        converted(),  # nothing to compare with
        [*converted(), *converted("small-2", kv_heads=2)],
        [*rows_of("small", ORIGINAL), *converted(text_digest="another")],
        [*rows_of("small", ORIGINAL), *converted(window=99)],
        # two originals: perplexities of different models are not to be compared
        [*rows_of("small", ORIGINAL), *rows_of("other", ORIGINAL), *converted()],
    ],
)
def test_what_does_not_belong_together_is_not_shown_together(rows):
    assert find_levers(groups(rows)) == []


def test_page_has_the_plot_and_the_table(tmp_path):
    written = write_report([*rows_of("small", ORIGINAL), *converted()], tmp_path)
    assert (tmp_path / "levers_small.png") in written and (
        tmp_path / "levers_small.svg"
    ).stat().st_size
    assert not (tmp_path / "pareto_small-1.png").exists()  # it is drawn beside its original
    page = written[0].read_text()
    assert "kv heads and bits: small" in page and "Every model with every cache" in page
    alone = write_report(rows_of("small", ORIGINAL), tmp_path / "alone")
    assert "kv heads and bits" not in alone[0].read_text()


class Config:
    kv_hf_conversion = {
        "method": "svd",
        "num_key_value_heads": [2, 1],
        "before": {"method": "mean", "num_key_value_heads": [6, 2]},
    }
    kv_hf_uptraining = {"tokens": 123}


def test_lineage_is_read_from_the_records():
    assert lineage(Config(), [(1, 48, 48), None, (1, 48, 48)]) == {
        "kv_heads": 1,
        "conversion": "svd",
        "kv_heads_before": 6,
        "uptrained_tokens": 123,
    }
    assert lineage(object(), [(2, 8, 8), (4, 8, 8)]) == {}
