"""Tables and sentences as lines of text that fit the terminal, and 80 columns in a pipe. Knows no colours."""

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from .printable import tell

GAP = 2  # blanks between columns
LEAST_FIRST = 24  # characters of a first column that is folded

Columns = Sequence[tuple[str, Sequence[str]]]  # (heading, cells), the cells from top to bottom


def text_width() -> int:
    """Return the terminal's columns: $COLUMNS where it is set, 80 where the output is no terminal."""
    return shutil.get_terminal_size().columns


def table_lines(columns: Columns, width: int | None = None) -> list[str]:
    """Return a table as lines, the first column on the left and the others on the right.

    Columns that do not fit beside the others go into a further table, behind an empty line, which begins with the first
    column again. Cells of the first column that are wider than half a line are folded behind commas, colons and blanks.

    Args:
        columns: all with as many cells.
        width: characters of a line at most, as far as one figure beside the first column allows; None: no limit.
    """
    first, others = columns[0], columns[1:]
    if width is not None:
        first = (first[0], [_fold(cell, max(LEAST_FIRST, width // 2)) for cell in first[1]])
    lines: list[str] = []
    for part in _parts(_width(first), others, width):
        lines += [*([""] if lines else []), *_one_table([first, *part])]
    return lines


def wrap(line: str, width: int | None = None, hang: int = 2) -> list[str]:
    """Return a line as lines of at most `width` characters; all but the first are indented by `hang` blanks.

    Blanks within the line stay, and words longer than a line are not cut.
    """
    if width is None or len(line) <= width:
        return [line]
    return textwrap.wrap(
        line,
        max(width, hang + LEAST_FIRST),
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )


def say(text: str) -> None:
    """Print a sentence, as wide as the terminal."""
    tell("\n".join(wrap(text, text_width())))


def _parts(first: int, others: Columns, width: int | None) -> Iterator[Columns]:
    """Yield the columns beside the first one, as many at a time as fit: at least one."""
    part: list[tuple[str, Sequence[str]]] = []
    used = first
    for column in others:
        wide = GAP + _width(column)
        if part and width is not None and used + wide > width:
            yield part
            part, used = [], first
        part.append(column)
        used += wide
    yield part


def _one_table(columns: Columns) -> Iterator[str]:
    widths = [_width(column) for column in columns]
    headings = [heading for heading, _ in columns]
    for first, *cells in (headings, *zip(*(cells for _, cells in columns), strict=True)):
        *folded, last = first.split("\n")
        yield from folded
        figures = (cell.rjust(wide) for cell, wide in zip(cells, widths[1:], strict=True))
        yield (" " * GAP).join([last.ljust(widths[0]), *figures]).rstrip()


def _width(column: tuple[str, Sequence[str]]) -> int:
    heading, cells = column
    return max(len(line) for cell in (heading, *cells) for line in cell.split("\n"))


def _fold(cell: str, width: int) -> str:
    """Return a cell as lines of at most `width` characters, broken where a comma, colon or blank is."""
    lines: list[str] = []
    while len(cell) > width:
        room = width if not lines else width - GAP
        cut = max((cell.rfind(sign, 0, room) + 1 for sign in ",: "), default=0)
        cut = cut if cut > GAP else room
        lines.append(cell[:cut])
        cell = " " * GAP + cell[cut:]
    return "\n".join([*lines, cell])
