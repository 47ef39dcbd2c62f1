"""Write the measured tables of README.md, docs/ and results/ from the rows of results/: `python scripts/tables.py [--check]`.

Which tables there are stands in tables.toml, each as it looks: a caption, heads, a rule and the cells of one line, with format
strings over a row's fields, and over FIELDS, which are computed from a row. Provenance is added to the caption.
"""

import argparse
import math
import re
import string
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from kv_hf.evaluation.needles import wilson
from kv_hf.evaluation.rows import Row, read_rows
from kv_hf.formats import cache_names

ROOT = Path(__file__).parent.parent
Rows = list[Row]

# what rows call a model -> what people do
MODELS = {
    "smollm2-135m": "SmolLM2-135M",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
    "gemma-3-270m": "Gemma-3-270M",
    "tinyllama-1.1b": "TinyLlama-1.1B",
    "stories15m": "stories15M",
}

# pages, their blocks and tables; and the forms of "words"
LISTED = tomllib.loads(Path(__file__).with_name("tables.toml").read_text("utf-8"))
# what the rows of one run have in common
RUN = ("date", "commit", "machine", "threads", "dtype")

# -- the engine ------------------------------------------------------------------------------------------------


def latest_run(rows: Rows, **wanted: Any) -> Rows:
    """Return the rows with these values that belong to the newest run: one date, commit, machine and thread count.

    Figures of different machines or versions never meet in one table.
    """
    found = [row for row in rows if has(row, wanted)]
    if not found:
        return []
    run = {name: found[-1].get(name) for name in RUN}
    return [row for row in found if has(row, run)]


def has(row: Row, wanted: Mapping[str, Any]) -> bool:
    """Say whether a row has these values in these fields."""
    return all(value_of(row, name) == value for name, value in wanted.items())


@dataclass(frozen=True)
class Table:
    """A table of one block of a page; a page may give several tables the same block. Names of fields have blanks between them.

    Rows are chosen by `where`, split, cut to the newest run, to the newest row of each `key`, sorted, and handed to `prepare`.
    The tables of a split stand with the newest first.

    Attributes:
        page: path from the repository's root.
        block: name of the marks `<!-- block -->` and `<!-- /block -->` on that page.
        files: names in results/, with blanks between them.
        form: caption, heads, rule and cells of one line.
        where: fields and their values.
        across: a field with a group of columns for each of its values, those whose heads have "{at}". Rows with equal cells
            ahead of them share a line. Numbers are sorted, other values stand as they come.
        split: a table for each combination of these fields.
        sort: fields, "-FIELD" for falling values.
        prepare: one of PREPARE.
    """

    page: str
    block: str
    files: str
    form: str
    where: Mapping[str, Any] = field(default_factory=dict)
    split: str = ""
    one_run: bool = False
    key: str = ""
    sort: str = ""
    across: str = ""
    prepare: str = ""

    def markdown(self, rows: Iterable[Row]) -> str:
        """Return the tables of these rows, each below its caption.

        Raises: ValueError where no row is chosen: a table without rows has no place on a page.
        """
        chosen = self.chosen(rows)
        if not chosen:
            raise ValueError(f"{self.files} must hold rows of table {self.block!r}, got none")
        newest_first = sorted(chosen, key=lambda group: group[-1]["date"], reverse=True)
        return "\n\n".join(map(self._one, newest_first))

    def chosen(self, rows: Iterable[Row]) -> list[Rows]:
        """Return the rows of each table, with the fields that `flat` adds."""
        found = []
        measured = [flat(row) for row in rows if row.get("kind") != "failed"]
        wanted = [row for row in measured if has(row, self.where)]
        for group in grouped(wanted, self.split).values():
            run = latest_run(group) if self.one_run else group
            if self.key:
                run = [own[-1] for own in grouped(run, self.key).values()]
            found.append(run)
        return found

    def _one(self, rows: Rows) -> str:
        title, *lines = self.form.strip().splitlines()
        for name in reversed(self.sort.split()):
            values = partial(value_of, name=name.lstrip("-"))
            rows = sorted(rows, key=values, reverse=name.startswith("-"))
        shown = PREPARE[self.prepare](rows) if self.prepare else rows
        cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
        return f"{caption(rows, filled(title, shown[0]))}\n\n{self._body(shown, *cells)}"

    def _body(self, rows: Rows, heads: list[str], rule: list[str], cells: list[str]) -> str:
        places = [place for place, head in enumerate(heads) if "{at" in head]
        ahead = places[0] if places else len(heads)
        behind = places[-1] + 1 if places else ahead
        values = [value_of(row, self.across) for row in rows] if places else []
        across = list(dict.fromkeys(values))
        if all(isinstance(at, int) for at in across):
            across.sort()
        # (column of the form, value of `across` or None)
        columns: list[tuple[int, Any]] = [(place, None) for place in range(ahead)]
        columns += [(place, at) for at in across for place in places]
        columns += [(place, None) for place in range(behind, len(heads))]
        lines: dict[Any, dict[Any, Row]] = {}
        for number, row in enumerate(rows):
            if places:
                name = tuple(filled(cell, row) for cell in cells[:ahead])
                lines.setdefault(name, {})[values[number]] = row
            else:
                lines[number] = {None: row}
        last = rows[-1]
        table = [[filled(heads[place], {**last, "at": at}) for place, at in columns]]
        table.append([rule[place] for place, _ in columns])
        for found in lines.values():
            own = {None: found[max(found, key=across.index) if across else None], **found}
            table.append([filled(cells[p], own[at]) if at in own else "-" for p, at in columns])
        return "\n".join(f"| {' | '.join(line)} |" for line in table)


class Cells(string.Formatter):
    """Format strings over a row and FIELDS; "{x:kl}" is a divergence, "{x:.1%}" a part of one with a blank."""

    def get_value(self, key: Any, args: Any, row: Any) -> Any:
        """Return a field. Raises KeyError where the row does not have it, or None in it."""
        value = value_of(row, key)
        if value is None:
            raise KeyError(key)
        return value

    def format_field(self, value: Any, form: str) -> str:
        """Return a value's text."""
        if form == "kl":
            return digits(value)
        text = str(super().format_field(value, form))
        return text.replace("%", " %") if form.endswith("%") else text


CELLS = Cells()


def filled(form: str, row: Row) -> str:
    """Return a format string's text; a dash where a field is missing."""
    try:
        return CELLS.vformat(form, (), row)
    except KeyError:
        return "-"


def flat(row: Row) -> Row:
    """Return a row with the fields that cells need: `*_mib` of its bytes, `name` of its model, `transformers` for its version."""
    found = dict(row)
    for name, value in row.items():
        if "bytes" in name and isinstance(value, int | float):
            found[name.replace("bytes", "mib")] = value / 2**20
    name = str(row.get("model"))
    found["name"] = MODELS.get(name, name)
    found["transformers"] = row.get("versions", {}).get("transformers")
    return found


def value_of(row: Row, name: str) -> Any:
    """Return a field of a row, or one of FIELDS; None where the row does not have it."""
    return FIELDS[name](row) if name in FIELDS else row.get(name)


def grouped(rows: Iterable[Row], names: str) -> dict[tuple[Any, ...], Rows]:
    """Return the rows of each combination of values of these fields, in order of appearance."""
    found: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        found.setdefault(tuple(value_of(row, name) for name in names.split()), []).append(row)
    return found


def caption(rows: Rows, title: str) -> str:
    """Return one line: `title`, then what rows say of weights, dtypes and machines, and the date of the newest row."""
    weights = dict.fromkeys(weights_of(row) for row in rows if row.get("weights_precision"))
    dtypes = dict.fromkeys(row["dtype"] for row in rows if row.get("dtype"))
    dates = sorted({row["date"] for row in rows})
    parts = [title]
    if weights:
        parts.append(f"weights: {', '.join(weights)}")
    if dtypes:
        parts.append(f"computed in {' and '.join(dtypes)}")
    parts.append(" and ".join(dict.fromkeys(map(machine, rows))))
    parts.append(dates[-1] if len(dates) == 1 else f"newest row {dates[-1]}")
    return f"{'; '.join(parts)}:"


def weights_of(row: Row) -> str:
    """Return the precision of a row's weights, and the file that they were read from."""
    precision = str(row["weights_precision"])
    file = row.get("model_file")
    return f"{precision} ({file})" if file else precision.removesuffix(" weights")


def machine(row: Row) -> str:
    """Return a row's processor without trade marks, and its threads; of a row that a GPU gave, the GPU."""
    words = str(row["machine"]).replace("(R)", "").replace(" Processor", "")
    if row.get("device", "cpu") != "cpu":
        return f"{words.split(',')[-1].strip()}, GPU"
    threads = row.get("threads")
    if threads is None:
        return f"{words}, threads not recorded"
    return f"{words}, {threads} thread{'s' * (threads != 1)}"


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
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        head, _, rest = texts[path].partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"{path} must have the marks <!-- {name} --> and {end}")
        texts[path] = "".join([head, begin, "\n\n".join(parts), "\n", end, tail])
    return texts


# -- fields that are computed ----------------------------------------------------------------------------------


def title(row: Row) -> str:
    """Return a row's cache for people: ours as code, others with their maker."""
    cache = row["cache"].replace("read_tokens=", "read=")  # as options are called today
    cache = re.sub(r"key_group_size=(\d+),value_group_size=\1", r"group_size=\1", cache)
    if cache.startswith("paged_") or cache in ("dynamic", "static"):
        return f"`{cache}`"
    earlier = dict.fromkeys(("uniform", "mixed"), "earlier bytes")
    makers = {"kivi": "KIVI", "turboquant": "TurboQuant", **earlier}
    maker = makers.get(cache.partition("_")[0], "transformers")
    channel = ", keys per channel" if cache.partition(":")[0].endswith("_channel") else ""
    return f"`{cache}` ({maker}{channel})"


def digits(kl: float) -> str:
    """Return a divergence with two digits that count, and never less than five places of none."""
    if kl < 5e-6:
        return "0.00000"
    return f"{kl:.5f}" if kl < 0.01 else f"{kl:.4f}" if kl < 0.1 else f"{kl:.2f}"


def worst(row: Row) -> float | None:
    """Return the KL of the text that a cache loses most on; None where one text was measured."""
    texts = row.get("texts", {})
    return texts[row["worst_text"]]["kl_mean"] if len(texts) > 1 else None


def scored(row: Row) -> str:
    """Return the texts of a row in words."""
    texts = list(row.get("texts") or [row["text"]])
    return f"{len(texts)} texts" if len(texts) > 1 else f"one text ({texts[0]})"


def in_words(row: Row, forms: Sequence[Sequence[str]]) -> str:
    """Return the text of the first form whose field a row has, neither empty nor 0; a form without a field is for all."""
    return next(filled(form, row) for name, form in forms if not name or value_of(row, name))


def batches(row: Row) -> str:
    """Return whose continuous batching a row is of."""
    return "transformers' own" if row["cache"] == "transformers" else f"`{row['cache']}`"


READERS = {
    1: "kernels read the pages",
    0: "layers are written out for attention",
    None: "no step reads the pages",
}


def how(row: Row) -> str:
    """Return a family's verdict, and of equal ones what reads the pages."""
    if row["verdict"] != "equal":
        return str(row["verdict"])
    readers = READERS.get(
        row["reads"], "kernels read the pages, and layers are written out as well"
    )
    return f"equal, {readers}"


def why(row: Row) -> str:
    """Return the operations that decided a family's verdict, and the message of the first."""
    decided = {name: one for name, one in row["others"].items() if one["verdict"] == row["verdict"]}
    first: Row = next(iter(decided.values()), {})
    names = "every operation" if decided and not row["equal"] else ", ".join(decided)
    message = first.get("message") or row["message"]
    if not message and "stock_to_plain" in first:
        message = "DynamicCache lies {stock_to_plain:.2g} of the largest logit from the model without a cache, pages {ours_to_plain:.2g}"
        message = message.format_map(first)
    text = f"{names}: {message}" if names else message
    return str(text.replace("|", "\\|").replace("<", "&lt;"))


# what rows do not have themselves; tables.toml has more of them, in words
FIELDS: dict[str, Callable[[Row], Any]] = {
    "title": title,
    "base": lambda row: row["cache"].partition(":")[0],
    "worst": worst,
    "scored": scored,
    "scored_tokens": lambda row: row["window"] - row["prompt"],
    "shipped": lambda row: row["cache"] in cache_names() and row["cache"] != "paged_exact",
    "of_16_bits": lambda row: row["stored_bits"] / 16,
    "exact_per_token": lambda row: row["bytes_exact"] / row["window"],
    "most_read": lambda row: row["read_tokens"] or math.inf,
    "packed": lambda row: row["contender"] == "sdpa-packed",
    "us": lambda row: 1e3 * row["ms_p50"],
    # bytes are those of all pages, whatever a step reads of them
    "of_copy": lambda row: None if row["read_tokens"] else row["part_of_copy"],
    "is_equal": lambda row: row["verdict"] == "equal",
    "batch_cache": batches,
    "transient": lambda row: max(0, row["transient_mib"]),
    "timed": lambda row: {"attention": "attention of 30 layers"}.get(row["kind"], "whole step"),
    "how": how,
    "why": why,
    "tests": lambda row: (
        row["suite"].removeprefix("tests/").removeprefix("models/").split("/test_modeling")[0]
    ),
    **{name: partial(in_words, forms=forms) for name, forms in LISTED.pop("words").items()},
}

# -- rows that are made of several -----------------------------------------------------------------------------


def pooled(rows: Rows) -> Rows:
    """Return a needle row for each (cache, task, length), with the rate and the nats of all prompts."""
    found = []
    for own in grouped(rows, "cache task length").values():
        scores = [score for row in own for score in row["scores"]]
        right, asked = scores.count(1), len(scores)
        nlls = [nll for row in own for nll in row["nlls"]]
        low, high = wilson(right, asked)
        said = f"{100 * right / asked:.0f} % ({100 * low:.0f} to {100 * high:.0f})"
        found.append({**own[0], "rate": said, "nats": fmean(nlls), "prompts": len(nlls)})
    counts = {row["prompts"] for row in found}
    prompts = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return [{**row, "prompts": prompts, "asked": (row["length"], row["task"])} for row in found]


def suites(rows: Rows) -> Rows:
    """Return the rows of files of tests, and one with their sums."""
    counts = [name for name, value in rows[0].items() if isinstance(value, int)]
    total = {name: sum(row[name] or 0 for row in rows) for name in counts}
    return [*rows, {**rows[0], **total, "suite": "**all**"}]


def families(rows: Rows) -> Rows:
    """Return a row for each verdict, with its families; the most frequent first."""
    found = []
    for own in grouped(rows, "how").values():
        names = dict.fromkeys(row["family"] for row in own)
        found.append({**own[0], "number": len(own), "names": ", ".join(names)})
    return sorted(found, key=lambda row: -row["number"])


def smallest(rows: Rows) -> Rows:
    """Return the smallest cache of each model within each bound of the mean KL, of rows by rising size."""
    return [
        {**next(row for row in found if row["kl_mean"] <= bound), "bound": bound}
        for bound in (0.0005, 0.0025, 0.025)
        for found in grouped(rows, "model").values()
    ]


PREPARE = {"pooled": pooled, "suites": suites, "families": families, "smallest": smallest}


def tables() -> list[Table]:
    """Return the tables of tables.toml."""
    return [
        Table(page, block, **fields)
        for page, own in LISTED.items()
        for block, found in own.items()
        for fields in found
    ]


def main() -> int:
    """Write the tables; with --check 1 where a page is not what the rows say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, name stale pages")
    check = parser.parse_args().check
    made = pages(tables())
    stale = {path: text for path, text in made.items() if path.read_text("utf-8") != text}
    for path, text in stale.items():
        name = path.relative_to(ROOT)
        print(f"{name} is not what results/ says" if check else name)
        if not check:
            path.write_text(text, "utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
