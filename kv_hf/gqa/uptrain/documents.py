"""Sources of training text: texts that kv_hf.texts reads, or documents given by the caller."""

import os
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

from ... import texts
from ...errors import ConversionError

SELF = "self"
BETWEEN = "<|endoftext|>"  # what separates the documents of a text file
HELD = "held (the text to evaluate on)"
Source = str | Path | Sequence[str]


def documents(source: Source, what: str = "data") -> Iterator[str]:
    """Yield the documents of a source, without those that are empty.

    Args:
        source: what texts.documents takes (files hold documents between <|endoftext|>), or documents.
        what: the argument, as messages call it: "data" may be more than HELD.
    Raises: ConversionError naming the source and what is wrong with it.
    """
    if not isinstance(source, str | Path):
        yield from (text.strip() for text in source if text.strip())
        return
    choices = f"a text file, {texts.RECORDS}{', ' + repr(SELF) if what == 'data' else ''} or one of {', '.join(texts.BUNDLED)}"
    try:
        yield from texts.documents(
            source, between=BETWEEN, training=True, what=what, choices=choices
        )
    except ValueError as error:
        raise ConversionError(str(error)) from error


def check_source(source: Source, what: str = "data") -> None:
    """Raise ConversionError unless a source has a document; at most one of it is read."""
    if not (what == "data" and source == SELF) and next(documents(source, what), None) is None:
        raise ConversionError(f"{what} {name_of(source)!r} is empty: it holds no text")


def name_of(source: Source) -> str:
    """Return what a source is called in messages and records."""
    if isinstance(source, str | Path):
        return str(source)
    return f"{len(source)} documents"


def place_of(source: Source) -> Hashable:
    """Return where a source's text lies: the same however its path is spelt."""
    if not isinstance(source, str | Path):
        return tuple(source)
    name = str(source)
    if name.startswith(texts.DATASET):
        path, config, split, *_ = [*name.removeprefix(texts.DATASET).split(","), "", ""]
        place = os.path.realpath(path) if os.path.exists(path) else path
        return texts.DATASET, place, config, split or "train"
    try:
        found = os.stat(name)
    except OSError:
        return name
    return found.st_dev, found.st_ino
