"""Where training text comes from: files, datasets (of the hub or a folder), or texts given by the caller."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConversionError

SELF = "self"
DATASET = "dataset:"
BETWEEN = "<|endoftext|>"  # what separates the documents of a text file
FIELDS = ("text", "content", "document", "story")
Source = str | Path | Sequence[str]


def documents(source: Source) -> Iterator[str]:
    """Yield the documents of a source, without those that are empty.

    Args:
        source: a UTF-8 text file (documents between <|endoftext|>), "dataset:PATH[,CONFIG[,SPLIT[,FIELD]]]" (streamed, one
            document per record), or documents.
    Raises: ConversionError naming the source and what is wrong with it.
    """
    if not isinstance(source, str | Path):
        found: Iterator[str] = iter(source)
    elif str(source).startswith(DATASET):
        found = _records(str(source), *str(source).removeprefix(DATASET).split(","))
    else:
        found = iter(_file(Path(source)).split(BETWEEN))
    for text in found:
        if text.strip():
            yield text.strip()


def check_source(source: Source) -> None:
    """Raise ConversionError unless a source has a document; at most one of it is read."""
    if source != SELF and next(documents(source), None) is None:
        raise ConversionError(f"data {name_of(source)!r} is empty: it holds no text")


def name_of(source: Source) -> str:
    """Return what a source is called in messages and records."""
    if isinstance(source, str | Path):
        return str(source)
    return f"{len(source)} documents"


def _file(path: Path) -> str:
    if not path.is_file():
        raise ConversionError(
            f"data must be a text file, {DATASET}PATH,CONFIG,SPLIT,FIELD or {SELF!r}, got {str(path)!r}"
        )
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConversionError(f"data {str(path)!r} is not UTF-8: {error}") from error


def _records(
    source: str, path: str = "", config: str = "", split: str = "", field: str = "", *more: str
) -> Iterator[str]:
    if not path or more:
        raise ConversionError(f"data must be {DATASET}PATH,CONFIG,SPLIT,FIELD, got {source!r}")
    try:
        import datasets
    except ImportError as error:
        raise ConversionError(f"data {source!r} needs a package: pip install datasets") from error
    try:
        splits: Any = datasets.load_dataset(path, config or None, streaming=True)
    except Exception as error:  # whatever the hub, the network or a loader raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConversionError(f"data {source!r} cannot be read: {first}") from error
    chosen = split or ("train" if "train" in splits else next(iter(splits)))
    if chosen not in splits:
        raise ConversionError(f"data {source!r} has no split {chosen!r}, only {', '.join(splits)}")
    for record in splits[chosen]:
        column = field or next((name for name in FIELDS if name in record), "")
        if not isinstance(record.get(column), str):
            raise ConversionError(
                f"data {source!r} has no column of text{f' {field!r}' if field else ''}: its columns are {', '.join(record)}"
            )
        yield record[column]
