"""Real text to measure on: the bundled public-domain texts, or a file."""

from importlib.resources import files
from pathlib import Path

BUNDLED = ("lincoln_1862", "lincoln_1863")


def load_text(source: str | Path = "lincoln_1862") -> str:
    """Return a bundled text by name, or the contents of a UTF-8 file.

    Raises: ValueError naming the source when it is neither, or empty.
    """
    if str(source) in BUNDLED:
        return (files("kv_hf.evaluation") / "data" / f"{source}.txt").read_text("utf-8")
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"text must be a file or one of {', '.join(BUNDLED)}, got {str(source)!r}")
    text = path.read_text("utf-8")
    if not text.strip():
        raise ValueError(f"text file {str(path)!r} is empty")
    return text


def token_windows(token_ids: list[int], length: int, count: int) -> list[list[int]]:
    """Cut the first `count` windows of `length` tokens, one behind the other.

    Raises: ValueError when the text is too short for one window.
    """
    windows = [token_ids[i : i + length] for i in range(0, len(token_ids) - length + 1, length)]
    if not windows:
        raise ValueError(f"text of {len(token_ids)} tokens is shorter than one window of {length}")
    return windows[:count]
