"""A cache's knowledge of its tokens' origin: a file, adapters, a prefix store."""

import torch

from ..errors import CacheMismatchError
from .adapters import Adapters


class Origin:
    """The origin of a cache's tokens.

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

    def note_file(self, token_ids: torch.Tensor | None) -> None:
        """Note that the cache was read from a file, and its token ids [rows, columns], int64 on the CPU, if it had any."""
        self.token_ids, self.from_file = token_ids, True
