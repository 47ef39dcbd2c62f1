"""The tables of README, docs and results: what the engine makes of rows, and that every page shows what its rows say."""

import json
import re
from dataclasses import replace

import pytest
import tables
from paths import ROOT
from tables import Table

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
}
FORM = """
Steps of {name}
| cache | {at:,} tokens | of {at:,} | held at {context:,}, MiB |
| --- | ---: | --- | ---: |
| `{cache}` | {ms:.1f} | {ratio} | {held_mib:.1f} |
"""
SPEED = Table(
    "page.md", "speed", "speed.jsonl", FORM, {"kind": "speed"}, one_run=True, across="context"
)


PLAIN = Table("page.md", "a", "a.jsonl", "A\n| c | s |\n| --- | ---: |\n| {cache} | {s:.1%} |")


def row(**changed):
    return {**ROW, **changed}


def speed(cache, context, ms, **changed):
    held = {"held_bytes": (context >> 10) << 20, **changed}
    return row(kind="speed", cache=cache, context=context, ms=ms, **held)


ROWS = [
    speed("dynamic", 4096, 2.0),
    speed("dynamic", 512, 1.0),
    speed("paged", 4096, 0.26, ratio=8, held_bytes=5 << 20),
]


def test_table_takes_the_newest_run_and_refuses_to_be_empty():
    newer = [speed("paged", 512, 7.0, date="2026-12-01", commit="b")]
    text = SPEED.markdown([*ROWS, row(kind="other"), *newer])
    assert "7.0" in text and "dynamic" not in text and "2026-12-01" in text
    with pytest.raises(ValueError, match=r"speed\.jsonl must hold rows of table 'speed', got none"):
        SPEED.markdown([row(kind="other")])


def test_table_splits_sorts_and_keeps_the_newest_row_of_a_key():
    rows = [row(load="a", cache=c, s=s) for c, s in (("x", 0.1), ("y", 0.2), ("x", 0.3))]
    rows += [row(load="b", cache="z", s=None, date="2026-11-22")]
    rows.append({"kind": "failed", "failed": "out of memory"})
    newest, older = (
        replace(PLAIN, split="load", key="cache", sort="-s").markdown(rows).split("A;")[1:]
    )
    assert newest.endswith("| z | - |\n\n")  # the newest table first; a dash where nothing is known
    assert older.endswith("| x | 30.0 % |\n| y | 20.0 % |")
    assert "| y | 20.0 % |\n| x |" in replace(PLAIN, key="cache", sort="s").markdown(rows[:3])


def test_pages_notice_a_row_that_changed_and_a_page_without_marks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "tables", lambda: [SPEED])
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
    text = page.read_text()
    assert text.startswith("Before\n<!-- speed -->\nSteps of") and text.endswith("-->\nbehind\n")
    rows.write_text(rows.read_text().replace("0.26", "0.36"))
    assert main("--check") == 1
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="marks <!-- speed -->"):
        main()


def test_every_block_of_every_page_is_in_the_list_and_is_what_its_rows_say():
    listed = tables.tables()
    shown = {
        (path, name)
        for path in PAGES
        for name in re.findall(r"<!-- (\w+) -->", path.read_text("utf-8"))
    }
    assert shown == {(ROOT / one.page, one.block) for one in listed}
    made = tables.pages(listed)
    stale = [path.name for path, text in made.items() if path.read_text("utf-8") != text]
    assert not stale, "run scripts/tables.py"


def test_no_row_is_kept_that_no_table_shows():
    shown = []
    for one in tables.tables():
        for rows in one.chosen(tables.rows_of(one.files)):
            shown += rows
    # results/gpu/ is left out: a GPU's checks and launch parameters are kept beside its times
    for path in (ROOT / "results").glob("*.jsonl"):
        rows = map(tables.flat, tables.rows_of(path.name))
        assert not [row for row in rows if row not in shown], path.name
