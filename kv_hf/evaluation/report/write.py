"""Make the report of rows and put it on the disk, all or nothing."""

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...files.writing import replacing
from .headers import below_title
from .levers import find_levers
from .page import page
from .points import kl_marks, perplexity_marks
from .select import Group, Row, groups, unknown_kinds

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

PAGE = "report.html"
FORMS = ("png", "svg")


def write_report(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write report.html and its plots (pareto_*, ppl_*, sensitivity_*, levers_*; PNG and SVG) into `folder`, which is made.

    A model's newest protocol has plots of the model's name; more protocols of it have numbers behind.

    Args:
        rows: as `rows.read_rows` gives them, of kinds accuracy, sensitivity, task, needle and memory; what is not there
            is left out of the report.
    Returns: the files, the page first.
    Raises: ValueError for no rows, or naming a row that lacks a field or holds a number that is not finite; ImportError
        without matplotlib; OSError, with the files of an earlier report left as they were.
    """
    rows = list(rows)
    if not rows:
        raise ValueError("rows must hold at least one measurement, got none")
    found = groups(rows)
    files: dict[str, bytes] = {PAGE: b""}
    pictures: dict[int, list[Markup]] = {}
    sets = find_levers(found)
    # a conversion is drawn beside its original, and has tables of its own
    drawn = {id(group) for levers in sets for group in levers.groups[1:]}
    for group in found:
        for stem, says, figure in [] if id(group) in drawn else _figures(group):
            name = _free(f"{stem}_{slug(group.model)}", files)
            made, element = _rendered(figure, name, says)
            files |= made
            pictures.setdefault(id(group), []).append(element)
    both = []
    for levers in sets:
        title = f"{levers.original.model}: kv heads and bits"
        below = below_title(levers.original)
        made, element = _rendered(
            lambda: _lever_plot()(levers, title, below),  # noqa: B023 (drawn at once)
            _free(f"levers_{slug(levers.original.model)}", files),
            title,
        )
        files |= made
        both.append((levers, element))
    files[PAGE] = page(found, pictures, unknown_kinds(rows), both).encode()

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:  # renamed when all are written, the page last
        for name, data in files.items():
            stack.enter_context(replacing(folder / name)).write(data)
    return [folder / name for name in files]


def slug(model: str) -> str:
    """Return a model's name as part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", model, flags=re.ASCII).strip(".-") or "model"


def _free(name: str, files: dict[str, bytes]) -> str:
    number, free = 1, name
    while f"{free}.{FORMS[0]}" in files:
        number += 1
        free = f"{name}_{number}"
    return free


def _figures(group: Group) -> list[tuple[str, str, "Callable[[], Figure]"]]:
    """Return (start of the file's name, what it shows in words, function that draws it) of a group's plots."""
    found: list[tuple[str, str, Callable[[], Any]]] = []
    below = below_title(group)
    if group.kind == "accuracy":
        kl, perplexity = kl_marks(group.rows), perplexity_marks(group.rows)
        if any(mark.family != "exact" for mark in kl):
            title = f"{group.model}: KL against memory"
            found.append(("pareto", title, lambda: _scatter().pareto_plot(kl, title, below)))
        if any(mark.family != "exact" for mark in perplexity):
            other = f"{group.model}: perplexity against memory"
            found.append(
                ("ppl", other, lambda: _scatter().perplexity_plot(perplexity, other, below))
            )
    if group.kind == "sensitivity":
        says = f"{group.model}: what each layer costs"
        found.append(
            ("sensitivity", says, lambda: _bars().sensitivity_plot(group.rows, says, below))
        )
    return found


def _rendered(
    draw: "Callable[[], Figure]", name: str, says: str
) -> tuple[dict[str, bytes], "Markup"]:
    from . import canvas

    with canvas.settings():
        figure = draw()
        made = {f"{name}.{form}": canvas.render(figure, form) for form in FORMS}
    # an id has no dots or other signs that CSS would read
    prefix = re.sub(r"\W", "-", name)
    return made, canvas.inline(
        made[f"{name}.svg"], prefix, f"{says}. The figures are in the tables."
    )


def _scatter() -> Any:
    from . import scatter

    return scatter


def _lever_plot() -> Any:
    from .lever_plot import lever_plot

    return lever_plot


def _bars() -> Any:
    from . import bars

    return bars
