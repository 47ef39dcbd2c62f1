"""Tables of tasks, of needles in long texts, and of memory and speed."""

from typing import Any

from .accuracy_tables import columns_table, whole
from .cells import NONE, Cell, Table, measured, named, percent, score, short, signed, size
from .select import Group, Row, distinct, family


def task_table(group: Group) -> Table:
    """Return the score of each cache in each task, with its standard error and its difference from the exact cache."""
    names = ("task", "metric", "samples", "num_fewshot")
    columns = list(dict.fromkeys(tuple(row.get(name) for name in names) for row in group.rows))
    by_cell = {(row["cache"], *(row.get(name) for name in names)): row for row in group.rows}
    reference = group.reference()
    exact = reference["cache"] if reference else None
    heads = ["cache"]
    for task, metric, samples, shots in columns:
        parts = [f"{samples} samples" if samples is not None else ""]
        parts += [f"{shots} shots" if shots is not None else ""]
        heads.append(f"{task}, {metric}" + "".join(f"; {part}" for part in parts if part))
    if any(row.get("bytes_per_token") is not None for row in group.rows):
        heads.append("bytes per token")
    lines = []
    for cache in distinct(group.rows, "cache"):
        line = [named(cache, family(cache))]
        for column in columns:
            line.append(_score(by_cell.get((cache, *column)), by_cell.get((exact, *column)), cache))
        if heads[-1] == "bytes per token":
            own = [row for row in group.rows if row["cache"] == cache]
            held = [row for row in own if row.get("bytes_per_token") is not None]
            line.append(measured(held[-1] if held else {}, "bytes_per_token", whole))
        lines.append(line)
    against = f", and the difference from {exact}" if exact else ""
    return Table(f"Tasks: value ± standard error{against}", heads, lines)


def _score(row: Row | None, exact: Row | None, cache: str) -> Cell:
    if row is None:
        return NONE
    value, error = row["value"], row.get("stderr")
    data = {"data-value": repr(value)}
    if error is not None:
        data["data-stderr"] = repr(error)
    difference = (
        None if exact is None else ""
    )  # an empty place keeps the values of a column in line
    if exact is not None and exact["cache"] != cache:
        apart = value - exact["value"]
        difference, data["data-derived"] = f" {signed(apart, form=score)}", repr(apart)
    interval = "" if error is None else f" ± {score(error)}"
    return Cell(score(value), "number", interval=interval, difference=difference, data=data)


def needle_maps(group: Group) -> list[Table]:
    """Return a heat map per cache: part of the needles found, depth (down) by length (across)."""
    lengths = sorted({row["length"] for row in group.rows})
    # tasks on lists of words have no depth
    depths = sorted({row["depth"] for row in group.rows}, key=lambda depth: depth or 0.0)
    heads = ["depth", *(f"{length:,}" for length in lengths)]
    maps = []
    for cache in distinct(group.rows, "cache"):
        by_cell = {(r["length"], r["depth"]): r for r in group.rows if r["cache"] == cache}
        lines = [
            [
                Cell("anywhere" if depth is None else percent(depth), head=True),
                *(_heat(by_cell.get((length, depth))) for length in lengths),
            ]
            for depth in depths
        ]
        maps.append(Table(cache, heads, lines, sortable=False))
    return maps


def needle_note(group: Group) -> str:
    """Return what the heat maps show."""
    samples = group.protocol.get("samples")
    each = f", of {samples:,} in each field" if samples is not None else ""
    return (
        f"Part that is found{each}. Across: length in tokens; down: how deep in the text it lies."
    )


def _heat(row: Row | None) -> Cell:
    if row is None:
        return NONE
    part = min(1.0, max(0.0, row["score"]))
    data = {"data-value": repr(row["score"])}
    return Cell(percent(row["score"]), "score", data=data, style=f"--part:{part:.3f}")


# fields of kv_hf.evaluation.footprint, what a cache consists of first
PARTS = (
    *("payload_bytes", "scales_bytes", "tail_bytes", "tables_bytes", "staging_bytes"),
    *("other_bytes", "offloaded_bytes", "prefill_peak_bytes", "steps_grown_bytes"),
    "steps_peak_bytes",
)
SPEED = [
    ("prefill, tokens/s", "prefill_tokens_per_s", short),
    ("decoding, tokens/s", "decode_tokens_per_s", short),
]
TOTALS = [
    ("bytes held", "held_bytes", size),
    ("bytes per token", "bytes_per_token", whole),
    ("peak on the device", "peak_bytes", size),
    ("resident memory", "rss_bytes", size),
]


def memory_table(group: Group) -> Table:
    """Return bytes by part, memory and speed of each cache; parts that nobody has are left out."""
    parts = [name for name in PARTS if any(row.get(name) for row in group.rows)]
    columns: list[tuple[str, Any]] = [(head, _cell(name, text)) for head, name, text in SPEED]
    columns.append(
        (
            "ms per step: median (20th … 80th percentile)",
            lambda row: measured(row, "step_ms_p50", ends=("step_ms_p20", "step_ms_p80")),
        )
    )
    columns += [(head, _cell(name, text)) for head, name, text in TOTALS]
    columns += [(_head(name), _cell(name, size)) for name in parts]
    context, batch = group.protocol.get("context"), group.protocol.get("batch")
    at = [f"{context:,} tokens" if context is not None else ""]
    at.append(f"batch {batch:,}" if batch is not None else "")
    caption = ", ".join(["Every cache", *(part for part in at if part)])
    return columns_table(caption, group.rows, columns)


def _cell(name: str, text: Any) -> Any:
    return lambda row: measured(row, name, text)


def _head(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")
