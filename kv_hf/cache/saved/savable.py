"""What saving adds to a cache: two methods and the token ids that go along."""

import os
from typing import Any, Self

import torch

from .load import load_cache
from .save import save_cache


class Savable:
    """A PagedCache that can be written into a file and read again.

    Attributes:
        token_ids: those that a loaded cache was saved with, [rows, columns] int64 on the CPU; else None.
    """

    token_ids: torch.Tensor | None = None

    def save(
        self, path: str | os.PathLike[str], model: Any, token_ids: torch.Tensor | None = None
    ) -> None:
        """Write this cache of `model` into a safetensors file, which takes the place of `path` when it is complete.

        Args:
            model: whose keys and values these are; only the same weights can load them.
            token_ids: [rows, columns seen or more], padding included, for the loaded cache's `token_ids`.
        Raises: CacheMismatchError for an empty cache, a model of other sizes or other token ids;
            InterruptedForwardError after a forward that stopped half-way; UnsupportedModelError where transformers
            keeps states of layers; OSError where the disk refuses. The old file then is what it was.
        """
        save_cache(self, path, model, token_ids)  # type: ignore[arg-type]

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Any,
        device: torch.device | str | None = None,
        kernel: str | None = None,
    ) -> Self:
        """Read what `save` wrote. The cache goes on bit by bit as the saved one would have.

        Args:
            model: the model that it was saved with.
            device: where the layers go; None: where those of `model` are.
            kernel: as in CacheConfig, in place of the saved one.
        Raises: CacheFileError for a damaged, foreign or forged file and for another model, before pages or windows
            are allocated; OSError where it cannot be opened.
        """
        return load_cache(cls, path, model, device, kernel)  # type: ignore[type-var]
