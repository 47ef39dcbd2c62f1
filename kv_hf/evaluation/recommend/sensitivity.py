"""The loss of each layer and side in each format, alone: KL of the next-token distributions, everything else exact."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..rows import append_rows, make_row, read_rows
from .calibration import Calibration

SIDES = ("keys", "values")
Formats = Mapping[str, tuple[str, ...]]  # side -> formats
PROTOCOL = "teacher forced, decode semantics; one layer and side stored, all else exact"


@dataclass(frozen=True)
class Cell:
    """One thing to measure: `layers` store `side` in `format`, everything else is exact."""

    layers: tuple[int, ...]
    side: str
    format: str

    @property
    def overrides(self) -> dict[str, Any]:
        """CacheConfig.layers that say so."""
        return {str(layer): {self.side: self.format} for layer in self.layers}


@dataclass(frozen=True)
class Sensitivity:
    """KL(exact || one layer's one side in `format`), in nats per token.

    Attributes:
        estimated: True where all layers were measured together and the sum was shared out (see
            `measure_sensitivities`).
    """

    layer: int
    side: str
    format: str
    kl_mean: float
    estimated: bool = False


class CellFile:
    """Finished cells in a JSONL file: a run that was killed goes on where it stopped.

    Args:
        path: the file, or None to keep nothing in a file.
        setting: everything that a cell's figure depends on; cells of other settings are passed over.
        facts: for the rows.
        found: the KL of cells by their keys, which this process has measured; new ones are added.
    """

    def __init__(
        self,
        path: Path | None,
        setting: Mapping[str, Any],
        facts: Mapping[str, Any],
        found: dict[str, float],
    ) -> None:
        self.path = path
        self.facts = facts
        self.options = setting.get("options") or {}
        self._setting = json.dumps(setting, sort_keys=True, default=str)
        rows = read_rows(path) if path is not None else []
        self._known = found
        self._known.update(
            {row["cell"]: row["kl_mean"] for row in rows if row.get("kind") == "sensitivity"}
        )

    def key(self, cell: Cell) -> str:
        """Return what a cell of this setting is found by."""
        text = f"{self._setting} {cell.layers} {cell.side} {cell.format}"
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    def get(self, cell: Cell) -> float | None:
        """Return the KL of a finished cell, None for another."""
        return self._known.get(self.key(cell))

    def put(self, cell: Cell, kl_mean: float, **measured: Any) -> None:
        """Keep the KL of a cell."""
        self._known[self.key(cell)] = kl_mean
        if self.path is None:
            return
        options = {"options": self.options} if self.options else {}
        alone = {"layer": cell.layers[0]} if len(cell.layers) == 1 else {"layers": cell.layers}
        row = make_row(
            kind="sensitivity",
            **self.facts,
            **alone,
            **options,
            side=cell.side,
            format=cell.format,
            kl_mean=kl_mean,
            protocol=PROTOCOL,
            **measured,
            cell=self.key(cell),
        )
        append_rows(self.path, [row])


def measure_cells(
    calibration: Calibration,
    wanted: Sequence[Cell],
    *,
    cells: Path | None = None,
    measured: Callable[[Cell], Mapping[str, Any]] = lambda cell: {},
    facts: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[Cell, float]:
    """Return the KL of each cell, measured or read from a file.

    Args:
        calibration: the model and the texts.
        cells: JSONL file of finished cells; those of the same model, texts and options are not measured again.
        measured, facts: more fields for the rows in `cells`: of each cell, and of all.
        progress: called with (layers run, layers to run) before the first cell and after each.
    Raises: ValueError where logits are not finite.
    """
    done = CellFile(cells, calibration.setting(), facts or {}, calibration.found)
    missing = [cell for cell in wanted if done.get(cell) is None]
    work = [calibration.work(min(cell.layers)) for cell in missing]
    progress(0, sum(work))
    above = {min(cell.layers): cell for cell in missing if min(cell.layers) > 0}
    numbers = sorted(above)
    for lowest in {*numbers[len(numbers) // 2 :][:1], *numbers[-1:]}:
        calibration.check_replay(above[lowest].overrides, lowest)
    for index, cell in enumerate(missing):
        kl = calibration.kl(cell.overrides, min(cell.layers))
        done.put(cell, kl, tokens=calibration.tokens, **measured(cell))
        progress(sum(work[: index + 1]), sum(work))
    return {cell: done.get(cell) or 0.0 for cell in wanted}


def measure_sensitivities(
    calibration: Calibration,
    layers: Sequence[int],
    formats: Formats,
    together: Formats,
    **how: Any,
) -> list[Sensitivity]:
    """Measure layers and sides in every format, each alone.

    Args:
        calibration: the model and the texts.
        layers: those that live in pages.
        formats: of each side, those to measure layer by layer; the first of them serves to share out those of
            `together`.
        together: of each side, formats that hardly lose anything: all layers of a side are measured at once, and the KL
            is shared out in proportion to what the layers lose in the first of `formats`. (Both errors go with the square
            of a scale, so their ratio is much the same in all layers; where nothing is at stake, this is enough.)
        how: cells, measured, facts, progress of `measure_cells`.
    Raises: ValueError for a side without `formats`, and where logits are not finite.
    """
    for side in SIDES:
        if not formats[side]:
            raise ValueError(
                f"formats must name at least one format of {side} to measure layer by layer"
            )
    alone = [(layer, side, name) for layer in layers for side in SIDES for name in formats[side]]
    wanted = [Cell((layer,), side, name) for layer, side, name in alone]
    wanted += [Cell(tuple(layers), side, name) for side in SIDES for name in together[side]]
    found = measure_cells(calibration, wanted, **how)
    return [
        Sensitivity(layer, side, name, found[Cell((layer,), side, name)])
        for layer, side, name in alone
    ] + _shared_out(layers, formats, together, found)


def scaled(
    sensitivities: Sequence[Sensitivity],
    before: Calibration,
    after: Calibration,
    **how: Any,
) -> list[Sensitivity]:
    """Carry sensitivities over to other options of the cache, without measuring each layer again.

    All layers of a side are stored at once, in each format, with the options of both calibrations; each layer is
    taken to gain or lose by the same factor as all of them together.

    Args:
        how: cells, facts, progress of `measure_cells`.
    """
    layers = tuple(dict.fromkeys(one.layer for one in sensitivities))
    wanted = list(dict.fromkeys(Cell(layers, one.side, one.format) for one in sensitivities))
    old, new = (measure_cells(which, wanted, **how) for which in (before, after))
    ratios = {
        (cell.side, cell.format): new[cell] / old[cell] if old[cell] else 1.0 for cell in wanted
    }
    return [
        replace(one, kl_mean=one.kl_mean * ratios[one.side, one.format], estimated=True)
        for one in sensitivities
    ]


def _shared_out(
    numbers: Sequence[int], formats: Formats, together: Formats, found: dict[Cell, float]
) -> list[Sensitivity]:
    """Split the KL of all layers of a side among them, in proportion to what they lose in the first of `formats`."""
    made = []
    for side in SIDES:
        each = {layer: found[Cell((layer,), side, formats[side][0])] for layer in numbers}
        whole = sum(each.values())
        for name in together[side]:
            kl = found[Cell(tuple(numbers), side, name)]
            for layer in numbers:
                part = each[layer] / whole if whole else 1 / len(numbers)
                made.append(Sensitivity(layer, side, name, kl * part, estimated=True))
    return made
