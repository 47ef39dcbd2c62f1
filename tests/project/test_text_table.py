"""Tables and sentences that fit a number of columns."""

import pytest

from kv_hf.text_table import table_lines, text_width, wrap

NAME = "paged_int4:key_group_size=32,value_group_size=32,offload=cpu,device_bytes=1073741824"


def figures(count):
    return [(f"figure {i}", [f"{i}.0", f"{i}.5"]) for i in range(count)]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
@pytest.mark.parametrize("count", [0, 1, 9])
def test_table_lines_loses_no_cell(width, count):
    lines = table_lines([("cache", ["dynamic", "paged_int4"]), *figures(count)], width)
    words = " ".join(lines).split()
    for _, cells in figures(count):
        assert all(words.count(cell) == 1 for cell in cells)
    assert max(map(len, lines)) <= max(width, len("paged_int4  figure 0"))
    assert lines.count("") == sum(line.startswith("cache") for line in lines) - 1


def test_table_lines_folds_a_long_name_and_keeps_its_signs():
    lines = table_lines([("cache", ["dynamic", NAME]), *figures(2)], 80)
    assert lines == [
        "cache                               figure 0  figure 1",
        "dynamic                                  0.0       1.0",
        "paged_int4:key_group_size=32,",
        "  value_group_size=32,offload=cpu,",
        "  device_bytes=1073741824                0.5       1.5",
    ]
    (_, line) = table_lines([("name", ["x" * 99]), ("n", ["1"])], 60)[-2:]
    assert len(line) <= 60
    assert sum(line.count("x") for line in table_lines([("name", ["x" * 99])], 60)) == 99


def test_wrap_keeps_words_and_hangs():
    text = "note: what fits with an offload is what the device holds"
    lines = wrap(text, 30, 6)
    assert lines == ["note: what fits with an", "      offload is what the", "      device holds"]
    assert wrap(text) == wrap(text, 200) == [text]
    assert wrap("a " + "b" * 99, 30) == ["a", "  " + "b" * 99]


def test_text_width_is_80_where_nobody_says(monkeypatch):
    monkeypatch.setenv("COLUMNS", "123")
    assert text_width() == 123
