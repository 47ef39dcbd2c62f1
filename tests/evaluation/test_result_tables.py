"""The tables of README and docs/ show the pooled and the worst text, drift, and rates with their intervals."""

import sys

import pytest
from captions import CAPTION
from paths import ROOT
from report_rows import COMMON, accuracy_row

from kv_hf.evaluation.retrieval.rate import Rate, newest_rows, rates
from kv_hf.texts import HELD_OUT


@pytest.fixture(scope="module")
def tables():
    sys.path.insert(0, str(ROOT / "scripts"))
    import eval_tables
    import long_tables

    return eval_tables, long_tables


def held_out_row(cache, kl, worst="german", **changed):
    """Return a row of five texts, one of which loses twice as much as the others."""
    texts = {
        name: {"kl_mean": kl * (1 + (name == worst)), "kl_low": kl * 0.9, "kl_high": kl * 1.1}
        for name in HELD_OUT
    }
    blocks = {name: [[kl * (1 + at % 3) for at in range(17)]] for name in HELD_OUT}
    return accuracy_row(
        cache=cache,
        **{"text": "held_out", "window": 1600, "windows": 5, "text_digest": "d", "tokens": 5440},
        **{"kl_mean": kl, "texts": texts, "worst_text": worst, "kl_blocks": blocks, **changed},
    )


def needle_row(cache="paged_int4", task="single", scores=(1.0, 0.5), **changed):
    return {
        **COMMON,
        **{"kind": "needle", "model": "smollm2-135m", "task": task, "cache": cache},
        **{"length": 8192, "depth": None, "seed": 0, "samples": len(scores), "first_sample": 0},
        **{"scores": list(scores), "nlls": [0.5] * len(scores), **changed},
    }


def test_accuracy_table_shows_the_pooled_and_the_worst_text_and_the_rates(tables):
    eval_tables, _ = tables
    old = accuracy_row(cache="paged_int4", window=1600, kl_mean=0.0001)
    rows = [old, held_out_row("paged_int4", 0.003), held_out_row("paged_int8", 0.0001, "code")]
    needles = [needle_row(scores=[1.0] * 19 + [0.5]), needle_row("paged_int8", "copy", [0.0] * 20)]
    text = eval_tables.accuracy_table(rows + needles)
    lines = text.splitlines()
    assert lines[0].startswith("SmolLM2-135M, 5 texts, 5 windows, 5,440 scored tokens; weights: ")
    assert CAPTION.search(lines[0])
    assert lines[2].endswith("| worst text | needle found at 8k | list copied at 8k |")
    int8, int4 = lines[4:6]
    assert int4.startswith("| `paged_int4` | ") and "0.00600 (german)" in int4
    assert int4.endswith("| 95 % (76 to 99) | - |")
    assert int8.endswith("| 0.00020 (code) | - | 0 % (0 to 16) |")


def test_tables_that_recommend_show_the_rates(tables):
    eval_tables, _ = tables
    rows = [held_out_row("paged_int4", 0.003, bytes=1000)]
    rows += [held_out_row("recipe:smollm2-135m-4.5-bits", 0.004, bytes=900)]
    rows += [needle_row(scores=[1.0] * 20), needle_row(task="copy", scores=[0.0] * 20)]
    both = "| 100 % (84 to 100) | 0 % (0 to 16) |"
    assert both in eval_tables.details_table(rows) and both in eval_tables.formats_table(rows)
    assert "recipe" not in eval_tables.formats_table(rows)
    assert "recipe, 4.5 bits" in eval_tables.accuracy_table(rows)
    assert "`single` 100 % (84 to 100), `copy` 0 % (0 to 16)" in eval_tables.recipes_table(rows)


def test_accuracy_table_says_that_one_text_was_measured(tables):
    text = tables[0].accuracy_table([accuracy_row(cache="paged_int4", window=1600)])
    assert "one text (lincoln_1862)" in text and "worst" not in text


def test_recipes_table_compares_the_same_tokens(tables):
    eval_tables, _ = tables
    rows = [
        held_out_row("paged_int4", 0.003, bytes=1000),
        held_out_row("recipe:smollm2-4.5bits", 0.004, bytes=900),
    ]
    # blocks differ by 0.001, 0.002, 0.003 in turn, 17 to a window
    assert "| +0.00194 (+0.00" in eval_tables.recipes_table(rows)
    rows[1]["text_digest"] = "another"
    assert eval_tables.recipes_table(rows).endswith("| - |")


def drift_row(cache, text, slope=0.0):
    blocks = [0.001 + slope * at for at in range(120)]
    changed = {"text": text, "window": 8192, "windows": 1, "kl_blocks": {text: [blocks]}}
    return accuracy_row(cache=cache, **changed)


def test_drift_table_gives_kl_by_position(tables):
    _, long_tables = tables
    rows = [drift_row("paged_int4", text) for text in HELD_OUT]
    rows += [drift_row("paged_int2", text, slope=0.001) for text in HELD_OUT]
    rows += [drift_row("paged_int8", "novel")]  # of one text alone
    lines = long_tables.drift_table(rows).splitlines()
    assert lines[0].startswith(f"SmolLM2-135M, {', '.join(HELD_OUT)}; weights: ")
    assert lines[2].startswith("| cache | bits | 512 to 1,024 | 1,024 to 2,048 |")
    assert lines[4].count("0.00100 (0.00100 to 0.00100)") == 5
    means = [cell.split()[0] for cell in lines[5].split("|")[3:8]]
    assert means == ["0.00450", "0.0165", "0.0405", "0.0725", "0.10"]
    assert len(lines) == 6
    assert long_tables.drift_table([accuracy_row()]).startswith("No run has been recorded yet")


def test_needle_table_pools_the_samples_of_all_rows(tables):
    _, long_tables = tables
    rows = [needle_row(), needle_row(scores=[1.0, 1.0], first_sample=2)]
    text = long_tables.needle_table(rows)
    assert "SmolLM2-135M, 4 prompts of a task and length; weights: " in text
    assert "| `paged_int4` | 75 % (30 to 95) | 0.500 |" in text
    assert long_tables.needle_table([accuracy_row()]).startswith("No run has been recorded yet")


def test_rates_count_a_prompt_once():
    again = needle_row(scores=[1.0, 1.0])
    rows = [needle_row(), again, needle_row(scores=[0.0], first_sample=2), accuracy_row()]
    assert newest_rows(rows)[0] is again
    key = ("smollm2-135m", "single", "paged_int4")
    assert rates(rows, 8192) == {key: Rate(2, 3)}
    assert rates(rows, 1024) == {}
