"""The files of a report: pictures that parse and do not overlap, and a folder that is never half written."""

import os
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations, pairwise

import pytest
from markupsafe import Markup
from report_rows import CACHES, accuracy_row, sensitivity_rows, task_rows

from kv_hf.evaluation.report import write_report
from kv_hf.evaluation.report.report_command import main
from kv_hf.evaluation.rows import append_rows

pytest.importorskip("matplotlib")
EVIL = 'a/b <i>$x_"&'


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of two protocols of a model with a hostile name, and what was written."""
    rows = [accuracy_row(model=EVIL, cache=cache) for cache in CACHES]
    rows += [accuracy_row(model=EVIL, cache="paged_int4", window=1280, perplexity_delta=None)]
    rows += [{**row, "model": EVIL} for row in sensitivity_rows("gemma-3-270m", ("int4", "int2"))]
    folder = tmp_path_factory.mktemp("report") / "made" / "here"
    return folder, write_report(rows, folder)


def test_write_report_returns_what_it_wrote(report):
    folder, written = report
    stems = ["pareto_{}", "ppl_{}", "pareto_{}_2", "sensitivity_{}"]
    plots = {f"{stem.format('a-b-i-x_')}.{form}" for stem in stems for form in ("png", "svg")}
    assert written[0] == folder / "report.html"
    assert {path.name for path in written} == {"report.html"} | plots
    assert sorted(written) == sorted(folder.iterdir())


def test_pictures_are_pictures(report):
    for path in report[1][1:]:
        data = path.read_bytes()
        if path.suffix == ".svg":
            root = ElementTree.fromstring(data)
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert float(root.get("width").removesuffix("pt")) > 300
        else:
            assert data.startswith(b"\x89PNG\r\n\x1a\n")


def test_pictures_inside_of_the_page_parse_and_follow_its_colours(report):
    page = (report[0] / "report.html").read_text("utf-8")
    pictures = [part.split("</svg>")[0] + "</svg>" for part in page.split("<figure")[1:]]
    assert len(pictures) == 4
    ids = []
    for picture in pictures:
        root = ElementTree.fromstring(picture[picture.index("<svg") :])
        assert EVIL in root.get("aria-label")
        own = [element.get("id") for element in root.iter() if element.get("id")]
        links = [element.get("href") for element in root.iter() if element.get("href")]
        assert links and {link.removeprefix("#") for link in links} <= set(own)
        assert "var(--ink)" in picture and "var(--grid)" in picture
        assert "#ffffff" not in picture and "#000000" not in picture
        ids += own
    assert len(ids) == len(set(ids))
    assert "http" not in page.lower()


def test_same_rows_give_the_same_bytes(tmp_path):
    rows = [
        accuracy_row(cache=cache, perplexity_delta=None) for cache in ("paged_int4", "hqq_int4")
    ]
    first = [path.read_bytes() for path in write_report(rows, tmp_path / "a")]
    assert [path.read_bytes() for path in write_report(rows, tmp_path / "b")] == first


def test_names_do_not_overlap_nor_leave_the_plot():
    from kv_hf.evaluation.report import canvas, scatter
    from kv_hf.evaluation.report.points import kl_marks

    rows = [accuracy_row(cache=cache) for cache in CACHES]
    rows += [  # and some on a heap
        accuracy_row(
            cache=f"paged_int4:recent_tokens={8 * i}",
            stored_bits=5.3 + 0.02 * i,
            kl_mean=0.0028 - 0.0001 * i,
            kl_low=0.0025,
            kl_high=0.003,
        )
        for i in range(6)
    ]
    with canvas.settings():
        figure = scatter.pareto_plot(kl_marks(rows), "title", "below")
        figure.canvas.draw()
        (axes,) = figure.axes
        texts = [text for text in axes.texts if text.get_text() in {row["cache"] for row in rows}]
        boxes = {text.get_text(): text.get_window_extent() for text in texts}
        assert len(boxes) == len(rows)
        frame = axes.get_window_extent()
        for one, other in combinations(boxes, 2):
            assert not boxes[one].overlaps(boxes[other]), (one, other)
        for name, box in boxes.items():
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0, name
            assert box.y1 <= frame.y1, name


def test_front_is_drawn_through_the_caches_on_it_and_exact_ones_lie_on_the_floor():
    from kv_hf.evaluation.report import canvas, scatter
    from kv_hf.evaluation.report.points import front_marks, kl_marks

    marks = kl_marks([accuracy_row(cache=cache) for cache in CACHES])
    with canvas.settings():
        (axes,) = scatter.pareto_plot(marks, "title", "below").axes
    line = axes.lines[0].get_xydata().tolist()
    floor = min(y for _, y in line)
    front = front_marks(marks)
    assert front[0].name == "paged_int2"
    for mark in front:
        assert [mark.cost, mark.value if mark.value >= 1e-6 else floor] in line
    for (x0, y0), (x1, y1) in pairwise(line):  # steps: right, or down
        assert (x0 == x1 and y1 < y0) or (y0 == y1 and x0 < x1)
    assert front[-1].name == "dynamic" and 0 < floor < 1e-5
    assert axes.get_ylim()[0] < floor
    behind = next(mark for mark in marks if mark.name == "quanto_int4")
    assert [behind.cost, behind.value] not in line


def test_no_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="rows must hold at least one"):
        write_report([], tmp_path / "none")
    with pytest.raises(ValueError, match="rows must hold rows of"):
        write_report([{"kind": "plan"}], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_group_of_exact_caches_has_no_plot(tmp_path):
    (only,) = write_report([accuracy_row(cache="dynamic")], tmp_path)
    assert "<svg" not in only.read_text("utf-8")


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError], ids=["killed", "disk full"])
@pytest.mark.parametrize("at", ["write", "fsync"])
def test_a_write_that_stops_leaves_the_old_report(tmp_path, monkeypatch, stop, at):
    import kv_hf.evaluation.report.write as writing

    def rendered(draw, name, says):  # drawing takes a second each
        return {f"{name}.svg": rows[0]["cache"].encode()}, Markup()

    monkeypatch.setattr(writing, "_rendered", rendered)
    rows = first = [accuracy_row(cache="paged_int4", perplexity_delta=None)]
    before = {path: path.read_bytes() for path in write_report(first, tmp_path)}
    rows = second = [accuracy_row(cache="hqq_int4", perplexity_delta=None)]
    if at == "fsync":

        def failing(*_):
            raise stop("no space left on device")

        monkeypatch.setattr(os, "fsync", failing)
    else:
        real, opened = writing.replacing, []

        def failing(path):
            if opened:
                raise stop("no space left on device")
            opened.append(path)
            return real(path)

        monkeypatch.setattr(writing, "replacing", failing)
    with pytest.raises(stop):
        write_report(second, tmp_path)
    monkeypatch.undo()
    assert len(before) == 2
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.setattr(writing, "_rendered", rendered)
    write_report(second, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} != before


def test_a_plot_that_fails_writes_nothing(tmp_path, monkeypatch):
    from kv_hf.evaluation.report import scatter

    def failing(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(scatter, "perplexity_plot", failing)
    with pytest.raises(RuntimeError, match="broken"):
        write_report([accuracy_row(cache="paged_int4")], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    import kv_hf.evaluation.report as package

    for name in ("canvas", "scatter", "bars", "labels"):
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
        monkeypatch.delattr(package, name, raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"needs matplotlib: pip install -e '\.\[eval\]'"):
        write_report([accuracy_row(cache="paged_int4")], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_command_reads_several_files(tmp_path, capsys):
    append_rows(tmp_path / "a.jsonl", task_rows()[:3])
    append_rows(tmp_path / "b.jsonl", task_rows("gemma-3-270m")[:3])
    files = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert main(["--rows", *files, "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / "report.html")]
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "smollm2-135m" in page and "gemma-3-270m" in page


def test_command_gives_a_reason_and_no_report(tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    out = tmp_path / "out"
    assert main(["--rows", str(tmp_path / "absent.jsonl"), "--out", str(out)]) == 2
    assert "not found" in capsys.readouterr().err
    assert main(["--rows", str(tmp_path / "empty.jsonl"), "--out", str(out)]) == 2
    assert "kv-hf report: error: rows must hold at least one" in capsys.readouterr().err
    assert not out.exists()
