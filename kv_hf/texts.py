"""Real text to measure on and to train on: the bundled texts, files, datasets of the hub."""

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from .checks import nearest
from .errors import first_line
from .files import TEXT_BYTES, read_text

# Five kinds of text that accuracy is measured on: a speech, a novel, code, another language, a table of numbers.
HELD_OUT = ("lincoln_1862", "novel", "code", "german", "tables")
# The same five kinds from other sources, to fit anything on. Nothing is fitted on HELD_OUT.
CALIBRATION = ("lincoln_1863", "moby_dick", "sqlite", "french", "wages")
BUNDLED = (*HELD_OUT, *CALIBRATION)
LINCOLN = ("lincoln_1862", "lincoln_1863")
SETS = {"held_out": HELD_OUT, "calibration": CALIBRATION, "lincoln": LINCOLN}
DATASET = "dataset:"
RECORDS = f"{DATASET}PATH,CONFIG,SPLIT,FIELD"
FIELDS = ("text", "content", "document", "story")  # where datasets of plain text keep it


def load_text(source: str | Path = "lincoln_1862", characters: int = 2_000_000) -> str:
    """Return a bundled text by name, the contents of a UTF-8 file, or of "dataset:PATH[,CONFIG[,SPLIT[,FIELD]]]".

    Of a dataset the first `characters` are taken, with an empty line between its records; no more is fetched than that.

    Raises: ValueError as `documents` does, and for a source without any text.
    """
    parts: list[str] = []
    length = 0
    for part in documents(source):
        parts.append(part)
        length += len(part) + 2
        if length >= characters:
            break
    if not parts:
        raise ValueError(f"text {str(source)!r} is empty")
    return "\n\n".join(parts)[: characters if str(source).startswith(DATASET) else None]


def documents(
    source: str | Path,
    *,
    between: str | None = None,
    training: bool = False,
    what: str = "text",
    choices: str = f"a file, {RECORDS} or one of {', '.join(BUNDLED)}",
) -> Iterator[str]:
    """Yield the documents of a source, without those that are blank. Records of a dataset are streamed.

    Args:
        source: a bundled text by name, a UTF-8 file, or "dataset:PATH[,CONFIG[,SPLIT[,FIELD]]]": a name on the hub, or a folder
            with data files. Without FIELD the first column of FIELDS that there is.
        between: what separates the documents of a file; None takes the file as it is.
        training: without SPLIT, take "train" or the first split; otherwise "test" or the last one.
        what, choices: what messages call the source, and what it may be.
    Raises: ValueError naming the source and what is missing or wrong: the file, its encoding, the package, the dataset, the
        split, the column.
    """
    found: Iterator[str]
    if str(source).startswith(DATASET):
        found = _records(str(source), training, what)
    else:
        text = _contents(source, what, choices)
        found = iter([text]) if between is None else map(str.strip, text.split(between))
    yield from (document for document in found if document.strip())


def is_source(text: str) -> bool:
    """Say whether a text names a source, which need not be there: a word, a dataset, or one line that ends in ".txt" or the like."""
    if text.startswith(DATASET) or not any(map(str.isspace, text)):
        return True
    return len(text) < 256 and "\n" not in text and Path(text).suffix[1:].isalpha()


def _contents(source: str | Path, what: str, choices: str) -> str:
    if str(source) in BUNDLED:
        return (files("kv_hf") / "evaluation" / "data" / f"{source}.txt").read_text("utf-8")
    if not Path(source).is_file():
        hint = nearest(str(source), (*BUNDLED, *SETS))
        raise ValueError(f"{what} must be {choices}, got {str(source)!r}{hint}")
    return read_text(source, TEXT_BYTES, what)


def _records(source: str, training: bool, what: str) -> Iterator[str]:
    path, config, split, field, *more = [*source.removeprefix(DATASET).split(","), "", "", ""]
    if not path or any(more):
        raise ValueError(f"{what} must be {RECORDS}, got {source!r}")
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"{what} {source!r} needs datasets: pip install -e '.[eval]' in the clone"
        ) from error
    try:
        splits: Any = datasets.load_dataset(path, config or None, streaming=True)
    except Exception as error:  # whatever the hub, the network or a loader raises
        raise ValueError(f"{what} {source!r} cannot be read: {first_line(error)}") from error
    usual = ["train", *splits] if training else ["test", *reversed(list(splits))]
    chosen = split or next(name for name in usual if name in splits)
    if chosen not in splits:
        raise ValueError(f"{what} {source!r} has no split {chosen!r}, only {', '.join(splits)}")
    for record in splits[chosen]:
        column = field or next((name for name in FIELDS if name in record), "")
        if not isinstance(record.get(column), str):
            raise ValueError(
                f"{what} {source!r} has no column of text{f' {field!r}' if field else ''}: its columns are {', '.join(record)}"
            )
        yield record[column].strip()


def text_names(source: str | Path) -> tuple[str, ...]:
    """Return the texts of a set by name ("held_out", "calibration"); any other source is the only one."""
    return SETS.get(str(source), (str(source),))


def longest_context(config: Any) -> int:
    """Return the tokens that a model of this config was made for; a very large number where it does not say."""
    own = config.get_text_config(decoder=True)
    return int(getattr(own, "max_position_embeddings", None) or 1 << 60)


def text_windows(tokenizer: Any, source: str | Path, length: int, count: int) -> list[list[int]]:
    """Return the first `count` windows of `length` tokens of a source, as `cut_text` does.

    Raises: ValueError as `load_text` and `token_windows` do.
    """
    return cut_text(tokenizer, load_text(source), length, count)


def cut_text(tokenizer: Any, text: str, length: int, count: int) -> list[list[int]]:
    """Return the first `count` windows of `length` tokens of a text, each begun as the tokenizer begins texts.

    A model that was trained with a token ahead of every text (Gemma) is lost without it.

    Raises: ValueError as `token_windows` does.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    bos = [i for i in tokenizer("").input_ids if i == tokenizer.bos_token_id]
    return [[*bos, *window] for window in token_windows(ids, length - len(bos), count)]


def token_windows(token_ids: list[int], length: int, count: int) -> list[list[int]]:
    """Cut the first `count` windows of `length` tokens, one behind the other.

    Raises: ValueError when the text is too short for one window.
    """
    windows = [token_ids[i : i + length] for i in range(0, len(token_ids) - length + 1, length)]
    if not windows:
        raise ValueError(
            f"text of {len(token_ids)} tokens is shorter than one window of {length}: take more text, or a smaller window"
        )
    return windows[:count]
