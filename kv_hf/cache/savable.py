"""What a cache knows of its origin, and the way of its state into a file and back."""

import os
from typing import Any, Self

import torch

from ..errors import CacheMismatchError
from .adapters import Adapters
from .saved.load import opened_state
from .saved.save import check_model_argument, save_state
from .state import CacheState


class Savable:
    """A cache that gives its state (`state`) and takes one (`from_state`), so that it can be written into a file and read again.

    Attributes:
        token_ids: those that a loaded cache was saved with, [rows, columns] int64 on the CPU; else None.
        computed_by: the different states of adapters in which generate() filled this cache, in order; empty where
            it never did. Tokens of direct calls of a model are not noted.
        prefix_spaces: the different spaces of its prefix_store that it was filled in; None among them: by more than tokens.
        from_file: whether `load` made it and generate() has not continued it yet.
    """

    token_ids: torch.Tensor | None = None
    computed_by: tuple[Adapters, ...] = ()
    prefix_spaces: tuple[str | None, ...] = ()
    from_file: bool = False

    def note_adapters(self, adapters: Adapters) -> None:
        """Note that the tokens that come are computed with these adapters.

        Raises: CacheMismatchError where a loaded cache was saved with others.
        """
        if self.from_file and self.computed_by[-1].effective() != adapters.effective():
            raise CacheMismatchError(
                f"this cache was saved with {self.computed_by[-1].effective()}; the model has {adapters} now. Activate the "
                "same adapters again, or compute the text anew"
            )
        self.from_file = False
        if adapters not in self.computed_by:
            self.computed_by = (*self.computed_by, adapters)

    def note_space(self, space: str | None) -> None:
        """Note the space of its prefix_store that the tokens that come belong to; None: to none."""
        if space not in self.prefix_spaces:
            self.prefix_spaces = (*self.prefix_spaces, space)

    def forget_origin(self) -> None:
        """Forget by what this cache was filled: it is empty."""
        self.token_ids = None
        self.computed_by = self.prefix_spaces = ()
        self.from_file = False

    def keep_token_ids(self, token_ids: torch.Tensor | None) -> None:
        """Keep the token ids that came with a state."""
        self.token_ids = token_ids

    def save(
        self, path: str | os.PathLike[str], model: Any, token_ids: torch.Tensor | None = None
    ) -> None:
        """Write this cache of `model` into a safetensors file, which takes the place of `path` when it is complete.

        Args:
            model: whose keys and values these are; only the same weights and active adapters can load them.
            token_ids: [rows, columns seen or more], padding included, for the loaded cache's `token_ids`.
        Raises: CacheMismatchError for an empty cache, a model of other sizes or other token ids, and where generate()
            filled the cache with other adapters than the model has now;
            InterruptedForwardError after a forward that stopped half-way; UnsupportedModelError where transformers
            keeps states of layers; OSError where the disk refuses. The old file then is what it was.
        """
        check_model_argument(model)
        self.check_model(model.config)
        save_state(self.state(), path, model, token_ids)

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
        with opened_state(path, model, device, kernel) as (state, token_ids):
            cache = cls.from_state(model.config, state)
            cache.keep_token_ids(token_ids)
        return cache

    def state(self) -> CacheState:
        """Return what this cache holds."""
        raise NotImplementedError

    @classmethod
    def from_state(cls, config: Any, state: CacheState, kernel: str | None = None) -> Self:
        """Build a cache that goes on as the one would have that gave `state`."""
        raise NotImplementedError

    def check_model(self, config: Any) -> None:
        """Raise CacheMismatchError when this cache was built for a model of other sizes."""
        raise NotImplementedError
