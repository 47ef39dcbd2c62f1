"""Read what a user names: regular files only, and no more of them than their kind may have.

A path may lead anywhere: to a pipe that nobody writes to, to /dev/zero, to a file of a terabyte. All of these are
refused before anything is read.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputFileError
from .json_text import parse_json

# the most bytes that are read of a file, by its kind
CONFIG_BYTES = (
    16 << 20
)  # config.json, adapter_config.json, settings; the largest known ones have 1 MB
INDEX_BYTES = 128 << 20  # an index of tensors; of the largest models 30 MB
CARD_BYTES = 16 << 20  # a model card
BESIDE_BYTES = 512 << 20  # a tokenizer, a licence: what is copied beside weights
ROWS_BYTES = 1 << 30  # rows of measurements
TEXT_BYTES = 16 << 30  # text that is measured or trained on, which lies in memory as a whole
_PIECE = 1 << 20  # bytes that are asked for at once


@contextmanager
def opened(path: str | os.PathLike[str], limit: int, what: str) -> Iterator[BinaryIO]:
    """Open a regular file of at most `limit` bytes for reading; a pipe is not waited for.

    Args:
        what: what messages call it, such as "config".
    Raises: InputFileError naming the path, its size and the limit; OSError where it cannot be opened.
    """
    # the link of the last name is followed; what it leads to is looked at once it is open, so that nobody can swap it
    number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        _check(os.fstat(number), limit, f"{what} {os.fspath(path)!r}")
    except BaseException:
        os.close(number)
        raise
    with open(number, "rb") as file:
        yield file


def read_bytes(path: str | os.PathLike[str], limit: int, what: str) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes. Raises as `opened` does."""
    pieces, count = [], 0
    with opened(path, limit, what) as file:
        while piece := file.read(_PIECE):
            pieces.append(piece)
            count += len(piece)
            if count > limit:  # /proc says 0 bytes; another process may write meanwhile
                raise InputFileError(
                    f"{what} {os.fspath(path)!r} is too large: more than {limit:,} bytes, the most that are read"
                )
    return b"".join(pieces)


def read_text(path: str | os.PathLike[str], limit: int, what: str) -> str:
    """Return the text of a UTF-8 file, without the mark that some editors put at its begin, line ends as "\\n".

    Raises: InputFileError for a file that is not UTF-8, and as `opened` does.
    """
    data = read_bytes(path, limit, what)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputFileError(f"{what} {os.fspath(path)!r} is not UTF-8: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: str | os.PathLike[str], limit: int, what: str) -> Any:
    """Return what a JSON file holds. Raises InputFileError for what is no JSON, and as `read_text` does."""
    text = read_text(path, limit, what)
    try:
        return parse_json(text)
    except ValueError as error:
        raise InputFileError(f"{what} {os.fspath(path)!r} is no JSON: {error}") from None


def read_json_object(path: str | os.PathLike[str], limit: int, what: str) -> dict[str, Any]:
    """Return a JSON object from a file. Raises InputFileError for any other value, and as `read_json` does."""
    found = read_json(path, limit, what)
    if not isinstance(found, dict):
        raise InputFileError(
            f"{what} {os.fspath(path)!r} must hold a JSON object, got {type(found).__name__}"
        )
    return found


def is_within(path: Path, folder: Path) -> bool:
    """Say whether a path, all links followed, lies in a folder (which is taken as it is)."""
    return Path(os.path.realpath(path)).is_relative_to(folder)


def _check(found: os.stat_result, limit: int, name: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise InputFileError(f"{name} must be a regular file, got {_kind(found)}")
    if found.st_size > limit:
        raise InputFileError(
            f"{name} is too large: {found.st_size:,} bytes, at most {limit:,} are read"
        )


def _kind(found: os.stat_result) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for test, name in kinds if test(found.st_mode)), "something else")
