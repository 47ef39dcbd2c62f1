"""Real text to measure on: the bundled public-domain texts, a file, or a dataset of the hub."""

from importlib.resources import files
from pathlib import Path
from typing import Any

BUNDLED = ("lincoln_1862", "lincoln_1863")
DATASET = "dataset:"
FIELDS = ("text", "content", "document", "story")  # where datasets of plain text keep it


def load_text(source: str | Path = "lincoln_1862") -> str:
    """Return a bundled text by name, the contents of a UTF-8 file, or of "dataset:PATH[,CONFIG[,SPLIT[,FIELD]]]".

    Raises: ValueError naming the source when it is none of them, or empty.
    """
    if str(source).startswith(DATASET):
        return dataset_text(*str(source).removeprefix(DATASET).split(","))
    if str(source) in BUNDLED:
        return (files("kv_hf") / "evaluation" / "data" / f"{source}.txt").read_text("utf-8")
    path = Path(source)
    if not path.is_file():
        raise ValueError(
            f"text must be a file, {DATASET}PATH,CONFIG,SPLIT,FIELD or one of {', '.join(BUNDLED)}, got {str(source)!r}"
        )
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text file {str(path)!r} is not UTF-8: {error}") from error
    if not text.strip():
        raise ValueError(f"text file {str(path)!r} is empty")
    return text


def dataset_text(
    path: str,
    config: str = "",
    split: str = "",
    field: str = "",
    *,
    characters: int = 2_000_000,
) -> str:
    """Return the first `characters` of a dataset's texts, one behind the other with an empty line between them.

    The dataset is streamed, so that no more is fetched than is read.

    Args:
        path: of `datasets.load_dataset`: a name on the hub, or a folder with data files.
        config: its configuration, such as wikitext-2-raw-v1; empty takes the only one.
        split: empty takes "test", or the last split that there is.
        field: the column with the text; empty takes the first of FIELDS that there is.
    Raises: ValueError naming what is missing: the package, the dataset, the split, the column, or any text.
    """
    source = f"{DATASET}{','.join(part for part in (path, config, split, field) if part)}"
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"text {source!r} needs a package: pip install datasets") from error
    try:
        splits: Any = datasets.load_dataset(path, config or None, streaming=True)
    except Exception as error:  # whatever the hub, the network or a loader raises
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"text {source!r} cannot be read: {first}") from error
    chosen = split or ("test" if "test" in splits else list(splits)[-1])
    if chosen not in splits:
        raise ValueError(f"text {source!r} has no split {chosen!r}, only {', '.join(splits)}")
    parts: list[str] = []
    length = 0
    for record in splits[chosen]:
        column = field or next((name for name in FIELDS if name in record), "")
        if column not in record or not isinstance(record[column], str):
            raise ValueError(
                f"text {source!r} has no column of text{f' {field!r}' if field else ''}: its columns are "
                f"{', '.join(record)}"
            )
        part = record[column].strip()
        if part:
            parts.append(part)
            length += len(part) + 2
        if length >= characters:
            break
    text = "\n\n".join(parts)[:characters]
    if not text:
        raise ValueError(f"text {source!r} is empty")
    return text


def longest_context(config: Any) -> int:
    """Return the tokens that a model of this config was made for; a very large number where it does not say."""
    own = config.get_text_config(decoder=True)
    return int(getattr(own, "max_position_embeddings", None) or 1 << 60)


def text_windows(tokenizer: Any, source: str | Path, length: int, count: int) -> list[list[int]]:
    """Return the first `count` windows of `length` tokens of a text, each begun as the tokenizer begins texts.

    A model that was trained with a token ahead of every text (Gemma) is lost without it.

    Raises: ValueError as `load_text` and `token_windows` do.
    """
    ids = tokenizer(load_text(source), add_special_tokens=False, verbose=False).input_ids
    ahead = [i for i in tokenizer("").input_ids if i == tokenizer.bos_token_id]
    return [[*ahead, *window] for window in token_windows(ids, length - len(ahead), count)]


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
