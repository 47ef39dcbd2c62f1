"""Run the cells of a grid: what is finished is not repeated, what fails leaves no row."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from kv_hf.cache_names import cache_label
from kv_hf.evaluation.child import in_words
from kv_hf.evaluation.rows import append_rows, make_row, read_rows
from measure.grid.cell import Cell

Measure = Callable[[Cell], list[dict[str, Any]]]


def finished_cells(path: Path) -> set[str]:
    """Return the keys of all cells that have rows in a file."""
    return {row["cell"] for row in read_rows(path) if "cell" in row}


def run_cells(
    cells: Sequence[tuple[Cell, str]],
    measure: Measure,
    out: Path,
    done: Callable[[Cell], object] = lambda cell: None,
    say: Callable[[str], object] = print,
) -> list[str]:
    """Measure cells one by one and append each one's rows as soon as it is finished.

    Args:
        cells: (cell, revision of its model); those that have rows in `out` already are left out.
        measure: returns the measured fields of a cell's rows.
        out: a JSONL file.
        done: called after each cell, measured or not.
        say: told what could not be measured.
    Returns: what could not be measured, in words; nothing was written of it.
    Raises: OSError when rows cannot be written (a full disk): going on would measure for nothing.
    """
    failures = []
    finished = finished_cells(out)
    for cell, revision in cells:
        key = cell.key(revision)
        if key not in finished:
            start = time.monotonic()
            try:
                found = measure(cell)
                if not found:
                    raise ValueError("nothing was measured")
                rows = [_row(cell, key, revision, start, fields) for fields in found]
                json.dumps(rows, allow_nan=False)
            except (
                Exception
            ) as error:  # whatever a cache, a task or its library raises; the others go on
                failures.append(f"{cell}: {in_words(error)}")
                say(f"no row for {failures[-1]}")
            else:
                append_rows(out, rows)
                finished.add(key)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        done(cell)
    return failures


def _row(
    cell: Cell, key: str, revision: str, start: float, fields: dict[str, Any]
) -> dict[str, Any]:
    return make_row(
        **{
            **cell.settings,
            "seconds": round(
                time.monotonic() - start, 2
            ),  # of the cell, where a row has none of its own
            **fields,
            "cell": key,
            "kind": cell.kind,
            "model": cell.model,
            "model_revision": revision,
            "cache": cache_label(cell.cache),
        }
    )
