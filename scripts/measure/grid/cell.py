"""One cell of a grid: what is measured, of which model, with which cache. Decides when two cells are the same."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kv_hf.cache_names import cache_label, parse_cache_name
from kv_hf.evaluation.cache_kinds import cache_kind
from kv_hf.files.reading import TEXT_BYTES, read_bytes

KINDS = ("accuracy", "needle", "task", "memory")


@dataclass(frozen=True)
class Cell:
    """A measurement that is made once.

    Attributes:
        kind: one of KINDS.
        model: packaged model, hub id or folder.
        cache: name with options, see `cache_kinds.cache_kind`.
        settings: everything else that decides the figures: text, windows, dtype, seed and so on.
        tokens: about how many tokens the model reads for it; for the time that is left, not for the key.
    """

    kind: str
    model: str
    cache: str
    settings: Mapping[str, Any]
    tokens: int = field(default=1, compare=False)

    def key(self, revision: str) -> str:
        """Return what rows of this cell are found by: 16 hex digits.

        Args:
            revision: of the model's files, so that new weights are measured anew.
        """
        files = [
            cache_contents(self.cache),
            file_contents(self.settings.get("text")),
            folder_contents(self.settings.get("include_path")),
        ]
        # a recipe is what its file says, wherever it lies
        known = [self.kind, revision, cache_label(self.cache), files, dict(self.settings)]
        text = json.dumps(known, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.kind} of {self.cache} on {self.model}"


def cache_contents(name: str) -> str:
    """Return a digest of the recipe file that a cache's options name; empty without one."""
    return file_contents(parse_cache_name(name)[1].get("recipe"))


def file_contents(path: str | None) -> str:
    """Return a digest of a file; empty for None and for what is no file (a bundled text, a dataset)."""
    if path is None or not Path(path).is_file():
        return ""
    return hashlib.sha256(read_bytes(path, TEXT_BYTES, "file")).hexdigest()


def folder_contents(path: str | None) -> str:
    """Return a digest of the task files in a folder, and of the data beside them; empty for None."""
    if path is None or not Path(path).is_dir():
        return ""
    digest = hashlib.sha256()
    for file in sorted(Path(path).rglob("*")):
        if file.suffix in (".yaml", ".jsonl", ".json", ".py") and file.is_file():
            digest.update(file.name.encode() + read_bytes(file, TEXT_BYTES, "task file"))
    return digest.hexdigest()


def check_caches(names: list[str]) -> None:
    """Raise an error that names the first cache that cannot be built, before anything runs."""
    for name in names:
        cache_kind(name)
