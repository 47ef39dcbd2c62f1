"""The tables of README, docs and results: every page shows what its rows say, and every row is shown."""

import re

import tables
from harness import ROOT

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / "results").glob("*.md"),
]


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


def test_times_in_the_readme_stand_in_a_table_of_rows():
    times = re.findall(r"(\d+\.\d) ms", PAGES[0].read_text("utf-8"))
    text = (ROOT / "docs" / "speed_and_memory.md").read_text("utf-8")
    block = text.partition("<!-- gpu -->")[2].partition("<!-- /gpu -->")[0]
    assert times and all(f"| {time} |" in block for time in times)


def test_no_row_is_kept_that_no_table_shows():
    shown = []
    for one in tables.tables():
        for rows in one.chosen(tables.rows_of(one.files)):
            shown += rows
    # results/gpu/ is left out: a GPU's checks and launch parameters are kept beside its times
    for path in (ROOT / "results").glob("*.jsonl"):
        rows = map(tables.flat, tables.rows_of(path.name))
        assert not [row for row in rows if row not in shown], path.name
