"""Tables and sentences that fit a number of columns."""

import pytest

from kv_hf.text_table import table_lines, wrap

NAME = "paged_int4:key_group_size=32,value_group_size=32,offload=cpu,device_bytes=1073741824"


@pytest.mark.parametrize("width", [20, 60, 200])
def test_table_lines_loses_no_cell(width):
    figures = [(f"figure {i}", [f"{i}.0", f"{i}.5"]) for i in range(9)]
    lines = table_lines([("cache", ["dynamic", "paged_int4"]), *figures], width)
    words = " ".join(lines).split()
    assert all(words.count(cell) == 1 for _, cells in figures for cell in cells)
    assert max(map(len, lines)) <= max(width, len("paged_int4  figure 0"))


def test_table_lines_folds_a_long_name_and_keeps_its_signs():
    columns = [("cache", ["dynamic", NAME]), ("n", ["0.0", "0.5"]), ("figure 1", ["1.0", "1.5"])]
    assert table_lines(columns, 73) == [
        "cache                                 n  figure 1",
        "dynamic                             0.0       1.0",
        "paged_int4:key_group_size=32,",
        "  value_group_size=32,offload=cpu,",
        "  device_bytes=1073741824           0.5       1.5",
    ]


def test_wrap_keeps_words_and_hangs():
    text = "note: what fits with an offload is what the device holds"
    lines = wrap(text, 30, 6)
    assert lines == ["note: what fits with an", "      offload is what the", "      device holds"]
    assert wrap("a " + "b" * 99, 30) == ["a", "  " + "b" * 99]
