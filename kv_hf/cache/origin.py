"""A cache's knowledge of its tokens' origin: a file, a model, a prefix store, and the text as far as it is known.

Token ids stay on the device that they came on. Nothing here is called in a decode step.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CacheMismatchError
from .identity import Adapters, ModelId
from .model_shape import decoder_config, signature


def check_token_ids(token_ids: Any, rows: int, seen: int) -> None:
    """Raise CacheMismatchError unless `token_ids` is an integer tensor [rows, at least seen], as a cache of such a text has them."""
    got = type(token_ids).__name__
    if isinstance(token_ids, torch.Tensor):
        got = f"{token_ids.dtype} {list(token_ids.shape)}"
        integers = token_ids.dtype in (torch.int64, torch.int32) and token_ids.ndim == 2
        if integers and token_ids.shape[0] == rows and token_ids.shape[1] >= seen:
            return
    raise CacheMismatchError(
        f"token_ids must be an integer tensor [{rows}, at least {seen}], as the cache has seen {seen} columns "
        f"(padding included) of {rows} rows; got {got}"
    )


class Origin:
    """The model that a cache was built for, and the origin of its tokens.

    Args:
        sizes: of the model, as of identity.signature.
    Attributes:
        sizes: as given.
        token_ids: of the text whose first columns this cache holds, [rows, columns] int64, padding included; None where
            nothing is known.
        known_columns: how many columns that the cache holds have a known id. Later columns of `token_ids`, the last generated
            token among them, may have gone another way since.
        computed_by: the different states of adapters in which generate() filled this cache, in order; empty where
            it never did. Tokens of direct calls of a model are not noted.
        prefix_spaces: the different spaces of its prefix_store that it was filled in; None among them: by more than tokens.
        from_file: whether `load` made it and generate() has not continued it yet.
        weights: of the model that generate() filled it with, see ModelId; None where not known.
    """

    def __init__(self, sizes: dict[str, Any]) -> None:
        self.sizes = sizes
        self.forget()

    def forget(self) -> None:
        """Forget by what the cache was filled: it is empty."""
        self.token_ids: torch.Tensor | None = None
        self.known_columns = 0
        self.computed_by: tuple[Adapters, ...] = ()
        self.prefix_spaces: tuple[str | None, ...] = ()
        self.from_file = False
        self.weights: dict[str, str] | None = None

    def check_model(self, config: Any) -> None:
        """Raise CacheMismatchError where the cache was built for a model of other sizes."""
        self.check_filled_by(ModelId(signature(decoder_config(config))))

    def check_filled_by(self, own: ModelId) -> None:
        """Raise CacheMismatchError where this cache was built for a model of other sizes, or another one has filled it.

        Adapters may change from call to call; those that a loaded cache was saved with may not.
        """
        adapters = self.computed_by[-1] if self.from_file else None
        found = ModelId(self.sizes, adapters, self.weights).difference(own)
        if found is not None:
            raise CacheMismatchError(
                f"this cache is of {found}. Use one cache per model, dtype and adapters; where they have changed "
                "call cache.reset() and pass the whole text"
            )

    def note_model(self, own: ModelId) -> None:
        """Note the model that computes the tokens that come. Raises CacheMismatchError as `check_filled_by` does."""
        self.check_filled_by(own)
        self.from_file = False
        self.weights = own.weights or self.weights
        if own.adapters is not None and own.adapters not in self.computed_by:
            self.computed_by = (*self.computed_by, own.adapters)

    def note_space(self, space: str | None) -> None:
        """Note the space of its prefix_store that the tokens that come belong to; None: to none."""
        if space not in self.prefix_spaces:
            self.prefix_spaces = (*self.prefix_spaces, space)

    # -- the text ------------------------------------------------------------------------------------------

    def note_text(self, token_ids: torch.Tensor, columns_in_front: int, columns_held: int) -> None:
        """Note ids [rows, columns] that follow the first columns known, as a copy that nobody else writes to.

        Args:
            columns_in_front: how many of the columns known are kept.
            columns_held: by the cache.
        """
        with torch.inference_mode(False), torch.no_grad():
            kept = token_ids[:, :0]
            if columns_in_front and self.token_ids is not None:
                kept = self.token_ids[:, :columns_in_front].to(token_ids.device)
            self.token_ids = torch.cat([kept, token_ids.long()], dim=1)
        self.known_columns = min(self.token_ids.shape[1], columns_held)

    def crop(self, columns: int) -> None:
        """Forget the text after the first `columns`: a crop removed it."""
        self.known_columns = min(self.known_columns, columns)
        if self.token_ids is not None:
            self.token_ids = self.token_ids[:, :columns]

    def select(self, rows: Sequence[int]) -> None:
        """Let the text of row i be that of the former row rows[i]."""
        if self.token_ids is not None:
            self.token_ids = self.token_ids[list(rows)]
