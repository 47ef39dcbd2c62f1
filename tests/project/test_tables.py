"""The tables of README, docs and results: what the engine makes of rows, and that every page shows what its rows say."""

import json
import re

import pytest
import table_engine
import tables
from paths import ROOT
from table_engine import Pivot, Table

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "results").glob("*.md"),
]
ROW = {
    "date": "2026-11-21",
    "commit": "a",
    "machine": "AMD EPYC Processor, 2 cores",
    "threads": 1,
    "dtype": "float32",
    "model": "smollm2-135m",
    "model_file": "a.gguf",
    "weights_precision": "Q4_1",
    "device": "cpu",
}
SAID = "weights: Q4_1 (a.gguf); computed in float32; AMD EPYC, 2 cores, 1 thread; 2026-11-21:"
SPEED = Table(
    "page.md",
    "speed",
    "speed.jsonl",
    "Steps of {name}",
    {"cache": "`{cache}`"},
    Pivot(("cache",), "context", {"{at:,} tokens": "{ms:.1f}"}),
    {"held at {context:,}, MiB": "{held_mib:.1f}"},
    where=lambda row: row["kind"] == "speed",
    one_run=True,
)


def row(**changed):
    return {**ROW, **changed}


def speed(cache, context, ms, **changed):
    return row(kind="speed", cache=cache, context=context, ms=ms, held_bytes=2**20, **changed)


ROWS = [speed("dynamic", 4096, 2.0), speed("dynamic", 512, 1.0), speed("paged", 4096, 0.26)]


def test_table_of_three_rows_is_the_markdown_written_by_hand():
    assert SPEED.markdown(ROWS).splitlines() == [
        f"Steps of SmolLM2-135M; {SAID}",
        "",
        "| cache | 512 tokens | 4,096 tokens | held at 4,096, MiB |",
        "| --- | ---: | ---: | ---: |",
        "| `dynamic` | 1.0 | 2.0 | 1.0 |",
        "| `paged` | - | 0.3 | 1.0 |",
    ]


def test_table_takes_the_newest_run_and_refuses_to_be_empty():
    newer = [speed("paged", 512, 7.0, date="2026-12-01", commit="b")]
    text = SPEED.markdown([*ROWS, row(kind="other"), *newer])
    assert "7.0" in text and "dynamic" not in text and "2026-12-01" in text
    with pytest.raises(ValueError, match=r"speed\.jsonl must hold rows of table 'speed', got none"):
        SPEED.markdown([row(kind="other")])


def test_table_splits_orders_and_keeps_the_newest_row_of_a_key():
    split = Table(
        "page.md", "a", "a.jsonl", "Load {load}", {"cache": "{cache}", "s": "{seconds}", "none": "{absent:.1f}"},
        split=("load",), order=lambda rows: -rows[-1]["seconds"], key=("cache",), given={"kind": "x"},
    )  # fmt: skip
    rows = [row(load=load, cache="c", seconds=s) for load, s in (("a", 1), ("b", 2), ("a", 3))]
    rows.append({"kind": "failed", "failed": "out of memory"})
    first, second = split.markdown(rows).split("\n\nLoad b")
    assert first.startswith("Load a") and "| c | 3 | - |" in first and "| c | 1 |" not in first
    assert "| c | 2 | - |" in second


def test_caption_names_machines_with_rows_and_threads_and_what_is_not_recorded():
    xeon = row(machine="Intel(R) Xeon(R) Processor, 2 cores", date="2026-11-22")
    said = table_engine.caption([row(), xeon, {**xeon, "threads": 2}], "A table")
    machines = "rows of 2 machines: Intel Xeon, 2 cores (2 rows, 1 or 2 threads) and AMD EPYC, 2 cores (1 row, 1 thread)"
    assert f"; {machines}; newest row 2026-11-22:" in said
    gpu = table_engine.caption([row(machine="AMD EPYC, 16 cores, NVIDIA H200", device="cuda")], "A")
    assert "; NVIDIA H200, GPU; " in gpu
    old = table_engine.caption([{"date": "2026-11-21", "machine": "AMD EPYC"}], "A")
    assert (
        "weights: not recorded; computed in a dtype not recorded; AMD EPYC, threads not recorded"
        in old
    )


def test_pages_notice_a_row_that_changed_and_a_page_without_marks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(table_engine, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "TABLES", [SPEED])
    rows = tmp_path / "results" / "speed.jsonl"
    rows.parent.mkdir()
    rows.write_text("".join(json.dumps(one) + "\n" for one in ROWS))
    page = tmp_path / "page.md"
    page.write_text("Before\n<!-- speed -->\n<!-- /speed -->\nbehind\n")

    def main(*arguments):
        monkeypatch.setattr("sys.argv", ["tables.py", *arguments])
        return tables.main()

    assert main("--check") == 1 and "page.md is not what results/ says" in capsys.readouterr().out
    assert main() == 0 and main("--check") == 0
    assert (
        page.read_text().startswith("Before\n<!-- speed -->\nSteps of")
        and "behind" in page.read_text()
    )
    rows.write_text(rows.read_text().replace("0.26", "0.36"))
    assert main("--check") == 1
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="marks <!-- speed -->"):
        main()


def test_every_block_of_every_page_is_in_the_list_and_is_what_its_rows_say():
    shown = {
        (path, name)
        for path in PAGES
        for name in re.findall(r"<!-- (\w+) -->", path.read_text("utf-8"))
    }
    assert shown == {(ROOT / one.page, one.block) for one in tables.TABLES}
    stale = [
        path.name
        for path, text in table_engine.pages(tables.TABLES).items()
        if path.read_text("utf-8") != text
    ]
    assert not stale, "run scripts/tables.py"


def find(page, block, number=0):
    return [one for one in tables.TABLES if (one.page, one.block) == (page, block)][number]


def accuracy(cache, kl, text="held_out", **changed):
    texts = {name: {"kl_mean": kl * (1 + (name == "german"))} for name in ("novel", "german")}
    figures = {"kl_mean": kl, "kl_low": kl / 2, "kl_high": kl * 2, "stored_bits": 5.0}
    run = {"kind": "accuracy", "window": 1600, "prompt": 512, "windows": 2, "tokens": 100}
    return row(
        cache=cache, text=text, texts=texts, worst_text="german", **figures, **run, **changed
    )


def test_accuracy_shows_the_worst_text_and_prefers_the_held_out_texts():
    old = accuracy("paged_int4", 9.0, "lincoln_1862")
    lines = (
        find("README.md", "accuracy").markdown([old, accuracy("paged_int4", 0.003)]).splitlines()
    )
    assert lines[0].startswith("SmolLM2-135M, 2 texts, 2 windows, 100 scored tokens; ")
    assert lines[4:] == [
        "| `paged_int4` | 5.00 | 0.00300 (0.00150 to 0.00600) | 0.00600 (german) |"
    ]


def test_speed_puts_the_machine_with_the_smaller_gain_first():
    def step(machine, cache, ratio, context=2048):
        times = {"step_ms_p50": 20.0, "ratio_to_dynamic": ratio}
        return row(kind="generate", batch=1, machine=machine, cache=cache, context=context, **times)

    rows = [
        step("Fast", "paged_int4", 5.0),
        step("Slow", "paged_int4", 1.5),
        step("Slow", "paged_int4", 9.0, 512),
    ]
    text = find("docs/speed_and_memory.md", "speed").markdown(rows)
    assert text.index("Slow") < text.index("Fast")


def test_needles_pool_the_prompts_of_all_rows_once():
    def needle(scores, first=0):
        asked = {"task": "single", "length": 8192, "depth": None, "seed": 0, "first_sample": first}
        return row(
            kind="needle",
            cache="dynamic",
            scores=scores,
            nlls=[0.5] * len(scores),
            samples=len(scores),
            **asked,
        )

    text = find("docs/long_context.md", "needles").markdown(
        [needle([1.0, 0.5]), needle([1.0, 0.5]), needle([1.0, 1.0], 2)]
    )
    # 3 of 4: Wilson's interval by hand is (0.750 + 0.480 -+ 0.646) / 1.960
    assert (
        "4 prompts of a task and length" in text
        and "| `dynamic` | 75 % (30 to 95) | 0.500 |" in text
    )


def test_reading_means_are_of_the_texts_that_all_contenders_have():
    def reading(contender, text, kl, read=1024):
        run = {"window": 8192, "tokens": 256, "read_from": 4096, "read_top_p": None}
        return row(contender=contender, text=text, kl_mean=kl, read_tokens=read, **run)

    rows = [reading("paged_int4", "novel", 0.02), reading("paged_int4", "code", 0.04)]
    rows += [
        reading("oracle", "novel", 0.01),
        reading("oracle", "code", 0.01),
        reading("paged_int4", "german", 9.0),
    ]
    lines = find("docs/long_context.md", "reading").markdown(rows).splitlines()
    assert "2 texts (code, novel)" in lines[0]
    assert lines[4] == "| `paged_int4` | 0.0300 (0.0400, code) | - |"
    assert lines[5].startswith("| the truth: each page's attention mass | 0.0100") and lines[
        5
    ].endswith("| 0 |")
