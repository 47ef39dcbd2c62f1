"""Make a table of Markdown from rows of results/*.jsonl. Which tables there are stands in tables.py."""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_hf.evaluation.rows import latest_run, read_rows

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]
Rows = list[Row]
Cell = (
    str | Callable[[Row], object]
)  # a format string over a row's fields, or a function of the row

# what rows call a model -> what people do
MODELS = {
    "smollm2-135m": "SmolLM2-135M",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
    "gemma-3-270m": "Gemma-3-270M",
    "tinyllama-1.1b": "TinyLlama-1.1B",
}


@dataclass(frozen=True)
class Pivot:
    """Several rows on one line: those with equal `by` fields, a column for each value of `across`.

    Attributes:
        cells: head -> cell; "{at}" in a head is the value of `across`.
        sort: order of the columns; None leaves that of the rows.
    """

    by: tuple[str, ...]
    across: str
    cells: Mapping[str, Cell]
    sort: Callable[[Any], Any] | None = lambda value: value


@dataclass(frozen=True)
class Table:
    """A table of one block of a page; a page may give several tables the same block.

    Rows are read and given their derived fields (`flat`), then chosen by `where`, split, cut to the newest run, to the newest row of
    each `key`, sorted, and handed to `prepare`. A row that `prepare` marks as `hidden` stands in the caption alone.

    Attributes:
        page: path from the repository's root.
        block: name of the marks `<!-- block -->` and `<!-- /block -->` on that page.
        files: names in results/, with spaces between.
        title: format string over the first row, or a function of all rows.
        columns, pivot, after: the cells of a line; heads are format strings over the last row of the table.
        split: a table for each combination of these fields.
        order: order of the tables, by their rows; None leaves that of the rows.
        given: fields of all rows of these files that the rows do not say.
        left: columns with text.
    """

    page: str
    block: str
    files: str
    title: str | Callable[[Rows], str]
    columns: Mapping[str, Cell] = field(default_factory=dict)
    pivot: Pivot | None = None
    after: Mapping[str, Cell] = field(default_factory=dict)
    where: Callable[[Row], object] = lambda row: True
    split: tuple[str, ...] = ()
    order: Callable[[Rows], Any] | None = None
    one_run: bool = False
    key: tuple[str, ...] = ()
    sort: Callable[[Row], Any] | None = None
    prepare: Callable[[Rows], Rows] = list
    given: Mapping[str, Any] = field(default_factory=dict)
    left: int = 1

    def markdown(self, rows: Iterable[Row]) -> str:
        """Return the tables of these rows, each below its caption.

        Raises: ValueError where no row is chosen: a table without rows has no place on a page.
        """
        measured = (flat({**self.given, **row}) for row in rows if row.get("kind") != "failed")
        chosen = [row for row in measured if self.where(row)]
        groups = list(grouped(chosen, self.split).values())
        if self.one_run:
            groups = [latest_run(group) for group in groups]
        parts = []
        for group in sorted(groups, key=self.order) if self.order else groups:
            newest = list({tuple(row.get(n) for n in self.key): row for row in group}.values())
            found = newest if self.key else group
            found = self.prepare(sorted(found, key=self.sort) if self.sort else found)
            shown = [row for row in found if not row.get("hidden")]
            if shown:
                said = self.title(found) if callable(self.title) else filled(self.title, found[0])
                parts.append(f"{caption(found, said)}\n\n{self._body(shown)}")
        if not parts:
            raise ValueError(f"{self.files} must hold rows of table {self.block!r}, got none")
        return "\n\n".join(parts)

    def _body(self, rows: Rows) -> str:
        lines: list[list[str]] = []
        pivot = self.pivot or Pivot((), "", {})
        across = list(dict.fromkeys(row.get(pivot.across) for row in rows))
        across = sorted(across, key=pivot.sort) if pivot.sort else across
        heads = [filled(head, rows[-1]) for head in self.columns]
        heads += [filled(h, {"at": at}) for at in across for h in pivot.cells]
        heads += [filled(head, rows[-1]) for head in self.after]
        for line in grouped(rows, pivot.by).values() if self.pivot else [[row] for row in rows]:
            of = {row.get(pivot.across): row for row in line}
            cells = [filled(cell, line[0]) for cell in self.columns.values()]
            for at in across:
                cells += [filled(c, of[at]) if at in of else "-" for c in pivot.cells.values()]
            cells += [filled(cell, line[-1]) for cell in self.after.values()]
            lines.append(cells)
        return table(heads, lines, self.left)


def table(heads: Sequence[str], lines: Iterable[Sequence[str]], left: int = 1) -> str:
    """Return a table of Markdown, with `left` columns of text before those of numbers."""
    bars = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, bars, *lines])


def filled(cell: Cell, row: Row) -> str:
    """Return a cell's text; a dash where the row has no such field, or None in it."""
    if callable(cell):
        return str(cell(row))
    names = [name for _, name, _, _ in string.Formatter().parse(cell) if name]
    if any(row.get(re.split(r"[.\[]", name)[0]) is None for name in names):
        return "-"
    return cell.format_map(row)


def flat(row: Row) -> Row:
    """Return a row with the fields that cells need: `config_*` of its config, `*_mib` of its bytes, `name` of its model,
    `transformers` for its version."""
    found = {**row, **{f"config_{name}": value for name, value in row.get("config", {}).items()}}
    for name, value in list(found.items()):
        if "bytes" in name and isinstance(value, int | float):
            found[name.replace("bytes", "mib")] = value / 2**20
    found["dtype"] = row.get("dtype") or row.get("settings", {}).get("dtype")
    found["name"] = MODELS.get(str(row.get("model")), row.get("model"))
    return {**found, "transformers": row.get("versions", {}).get("transformers")}


def grouped(rows: Iterable[Row], names: Sequence[str]) -> dict[tuple[Any, ...], Rows]:
    """Return the rows of each combination of values of these fields, in order of appearance."""
    found: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        found.setdefault(tuple(row.get(name) for name in names), []).append(row)
    return found


def merged(rows: Rows, by: Sequence[str], name: str, *fields: str) -> Rows:
    """Return one row for each combination of `by`, with the `fields` of all of its rows as FIELD_VALUE (of field `name`)."""
    return [
        {**own[0], **{f"{one}_{row[name]}": row[one] for row in own for one in fields}}
        for own in grouped(rows, by).values()
    ]


def caption(rows: Sequence[Row], title: str) -> str:
    """Return one line: `title`, then weights, dtype, machines with their rows and threads, and the date of the newest row."""
    dates = sorted({row["date"] for row in rows})
    dtypes = dict.fromkeys(row.get("dtype") or "a dtype not recorded" for row in rows)
    files: dict[str, dict[str, None]] = {}
    for row in rows:
        named = files.setdefault(row.get("weights_precision") or "not recorded", {})
        if row.get("model_file"):
            named[row["model_file"]] = None
    weights = [
        f"{precision} ({'; '.join(named)})" if named else precision.removesuffix(" weights")
        for precision, named in files.items()
    ]
    newest = dates[-1] if len(dates) == 1 else f"newest row {dates[-1]}"
    return f"{title}; weights: {', '.join(weights)}; computed in {' and '.join(dtypes)}; {machines(rows)}; {newest}:"


def machines(rows: Sequence[Row]) -> str:
    """Return the rows' machines with their threads; several with the number of rows of each, the most rows first."""
    counted = Counter(map(short_machine, rows))
    said = {name: threads([r for r in rows if short_machine(r) == name]) for name in counted}
    if len(counted) == 1:
        return ", ".join(*said.items())
    each = [
        f"{name} ({count} row{'s' if count > 1 else ''}, {said[name]})"
        for name, count in counted.most_common()
    ]
    return f"rows of {len(each)} machines: {' and '.join(each)}"


def short_machine(row: Row) -> str:
    """Return a row's processor without trade marks; of a row that a GPU gave, the GPU."""
    words = str(row["machine"]).replace("(R)", "").replace(" Processor", "")
    return words if row.get("device", "cpu") == "cpu" else words.split(",")[-1].strip()


def threads(rows: Sequence[Row]) -> str:
    """Return the threads of the rows of one machine in words."""
    if all(row.get("device", "cpu") != "cpu" for row in rows):
        return "GPU"
    given = sorted({row["threads"] for row in rows if row.get("threads") is not None})
    counts = " or ".join(map(str, given)) or "threads not recorded"
    return counts + (f" thread{'s' if given != [1] else ''}" if given else "")


def rows_of(files: str) -> Rows:
    """Return the rows of some files of results/, with spaces between their names."""
    return [row for name in files.split() for row in read_rows(ROOT / "results" / name)]


def pages(tables: Sequence[Table]) -> dict[Path, str]:
    """Return the pages that have tables, as the rows of results/ make them.

    Raises: ValueError for a page without the marks of a table.
    """
    blocks: dict[tuple[Path, str], list[str]] = {}
    for one in tables:
        made = one.markdown(rows_of(one.files))
        blocks.setdefault((ROOT / one.page, one.block), []).append(made)
    texts = {path: path.read_text("utf-8") for path, _ in blocks}
    for (path, name), parts in blocks.items():
        block = "\n\n".join(parts)
        texts[path] = replaced(texts[path], name, block)
    return texts


def replaced(text: str, name: str, block: str) -> str:
    """Return a text with `block` between the marks `<!-- name -->` and `<!-- /name -->`.

    Raises: ValueError for a text without these marks.
    """
    found = re.search(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the text must have the marks <!-- {name} --> and <!-- /{name} -->")
    return f"{text[: found.start()]}{block}\n{text[found.end() :]}"
