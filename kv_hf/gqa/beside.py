"""The files of a checkpoint that are not weights: which go along, where they may lie, and how they are copied.

A checkpoint may come from a stranger, and its files may be links. A link is followed within the checkpoint's own folder,
and from a snapshot of the hub's cache to the blobs of the same model, which is how that cache is made. Every other link
would put a file of this machine into the result.
"""

import os
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

from ..errors import ConversionError, InputFileError, reason
from ..files.reading import BESIDE_BYTES, CARD_BYTES, is_within, opened, read_bytes
from ..files.writing import creating

# files beside the weights that a model needs, by pattern
BESIDE = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "*.tiktoken", "chat_template*", "additional_chat_templates/*.jinja", "*.model", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json", "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
CARD = "README.md"
_PIECE = 1 << 20  # bytes that are copied at once


def check_inside(path: Path, folder: Path) -> None:
    """Raise ConversionError for a file of a checkpoint that is a link out of it, or a link to nothing."""
    if path.is_symlink() and not path.exists():
        raise ConversionError(f"{path} is a link to a file that is not there")
    home = Path(os.path.realpath(folder))
    if is_within(path, home):
        return
    if home.parent.name == "snapshots" and is_within(path, home.parent.parent / "blobs"):
        return
    raise ConversionError(
        f"{path} leads out of the checkpoint, to {os.path.realpath(path)}: put the file itself there if it belongs to the model"
    )


def files_beside(folder: Path) -> list[Path]:
    """Return the files of a checkpoint that go with its weights.

    Raises: ConversionError for a link to nothing, a link out of the checkpoint, and a file too large to be one of these.
    """
    inside = sorted([*folder.glob("*"), *folder.glob("*/*")])
    found = [
        path for path in inside if any(fnmatch(str(path.relative_to(folder)), p) for p in BESIDE)
    ]
    for path in found:
        check_inside(path, folder)
        if path.is_file() and path.stat().st_size > BESIDE_BYTES:
            raise ConversionError(
                f"{path} has {path.stat().st_size:,} bytes; files beside weights have {BESIDE_BYTES:,} at most"
            )
    return found


def copy_files(source: Path, target: Path, paths: Iterable[Path]) -> None:
    """Copy files of `source`, into the same subfolders of `target`; what is no file is left out.

    Raises: ConversionError for a link out of `source`; OSError.
    """
    for path in paths:
        if not path.is_file():
            continue
        check_inside(path, source)
        place = target / path.relative_to(source)
        place.parent.mkdir(exist_ok=True)
        place.unlink(missing_ok=True)  # what save_pretrained has written of its own
        try:
            with opened(path, BESIDE_BYTES, "file") as old, creating(place) as new:
                while piece := old.read(_PIECE):
                    new.write(piece)
        except InputFileError as error:
            raise ConversionError(str(error)) from None


def read_card_text(folder: Path) -> str:
    """Return a checkpoint's card, "" where there is none. Raises ConversionError for one that cannot be read."""
    card = folder / CARD
    if not card.is_file():
        return ""
    check_inside(card, folder)
    try:
        return read_bytes(card, CARD_BYTES, "card").decode("utf-8", errors="replace")
    except (InputFileError, OSError) as error:
        raise ConversionError(f"{card} cannot be read: {reason(error)}") from error
