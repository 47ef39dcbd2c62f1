"""A cache's knowledge of its tokens' origin: a file, adapters, a prefix store, and the text as far as it is known.

Token ids stay on the device that they came on. Nothing here is called in a decode step.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CacheMismatchError
from .identity import Adapters


def first_difference(
    known: torch.Tensor, given: torch.Tensor, mask: torch.Tensor | None
) -> tuple[int, int] | None:
    """Return (row, column) of the first token that differs, None where all agree; waits for the device once.

    Args:
        known: [rows, columns] token ids.
        given: [rows, columns] token ids; what one of the two is longer is not compared.
        mask: [rows, columns of `given`], 0 or False = hidden: such columns are not compared; None hides none.
    """
    columns = min(known.shape[1], given.shape[1])
    differs = known[:, :columns].to(given.device) != given[:, :columns]
    if mask is not None:
        differs &= mask[:, :columns].to(given.device, torch.bool)
    if not bool(differs.any()):
        return None
    column = int(differs.any(0).nonzero()[0])
    return int(differs[:, column].nonzero()[0]), column


def joined(known: torch.Tensor, columns: int, behind: torch.Tensor | None = None) -> torch.Tensor:
    """Return the first `columns` of known ids with others behind them, as a copy that nobody else writes to.

    Args:
        known: [rows, at least columns] token ids.
        behind: [rows, any] token ids on the device that the result goes to; None: nothing.
    Returns: [rows, columns + those behind], int64.
    """
    with torch.inference_mode(False), torch.no_grad():
        kept = known[:, :columns]
        if behind is None:
            return kept.clone()
        return torch.cat([kept.to(behind.device, torch.long), behind.long()], dim=1)


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
    """The origin of a cache's tokens.

    Attributes:
        token_ids: of the text whose first columns this cache holds, [rows, columns] int64, padding included: those that
            a loaded cache was saved with (on the CPU), or that went through generate(). More columns than it holds may
            be there, and fewer behind direct calls of the model. None where they are not known.
        known_columns: columns of `token_ids` that the cache held when they were noted, or was about to be given. Those behind,
            the last generated token among them, may have gone another way since.
        computed_by: the different states of adapters in which generate() filled this cache, in order; empty where
            it never did. Tokens of direct calls of a model are not noted.
        prefix_spaces: the different spaces of its prefix_store that it was filled in; None among them: by more than tokens.
        from_file: whether `load` made it and generate() has not continued it yet.
        weights: mark of the weights that generate() filled it with, see model_mark; None where not known.
    """

    token_ids: torch.Tensor | None = None
    computed_by: tuple[Adapters, ...] = ()
    prefix_spaces: tuple[str | None, ...] = ()
    from_file: bool = False
    weights: str | None = None
    known_columns: int = 0
    _columns_in_front: int | None = (
        None  # of the text that a call of generate() was given; None: none is going on
    )

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

    def note_weights(self, mark: str | None, model: str) -> None:
        """Note the weights that the tokens that come are computed with.

        Args:
            mark: see model_mark; None where weights cannot be told.
            model: the model's class, for the message.
        Raises: CacheMismatchError where generate() filled this cache with other weights.
        """
        if mark is not None and self.weights is not None and mark != self.weights:
            raise CacheMismatchError(
                f"this cache holds keys and values of other weights than this {model} has: another model filled it, or the "
                "weights were changed since. Use one cache per model and dtype, or call cache.reset() and pass the whole text"
            )
        self.weights = mark or self.weights

    def note_space(self, space: str | None) -> None:
        """Note the space of its prefix_store that the tokens that come belong to; None: to none."""
        if space not in self.prefix_spaces:
            self.prefix_spaces = (*self.prefix_spaces, space)

    def forget_origin(self) -> None:
        """Forget by what this cache was filled: it is empty."""
        self.token_ids = self.weights = self._columns_in_front = None
        self.computed_by = self.prefix_spaces = ()
        self.from_file = False
        self.known_columns = 0

    def note_file(self, token_ids: torch.Tensor | None, columns: int) -> None:
        """Note that the cache was read from a file, and its token ids [rows, columns], int64 on the CPU, if it had any.

        Args:
            columns: how many the cache holds.
        """
        self.token_ids, self.from_file, self.known_columns = token_ids, True, columns

    # -- the text ------------------------------------------------------------------------------------------

    def note_prompt(self, token_ids: torch.Tensor | None, columns_in_front: int = 0) -> None:
        """Note the text that a call of generate() is given; None: it is not known any more.

        Args:
            token_ids: [rows, columns], behind those columns that are known already.
            columns_in_front: how many of these the cache holds.
        """
        self._columns_in_front = None if token_ids is None else columns_in_front
        if token_ids is None:
            self.token_ids = None
        elif columns_in_front and self.token_ids is not None:
            self.token_ids = joined(self.token_ids, columns_in_front, token_ids)
        else:
            self.token_ids = joined(token_ids, token_ids.shape[1])
        self.known_columns = 0 if self.token_ids is None else self.token_ids.shape[1]

    def note_generated(self, token_ids: torch.Tensor | None, columns_held: int) -> None:
        """Note that generate() has ended, and its prompt and new tokens [rows, columns]; None where they are not known.

        Args:
            columns_held: by the cache: the last token is not among them.
        """
        columns, known = self._columns_in_front, self.token_ids
        self._columns_in_front = None
        if columns is None or known is None or token_ids is None:
            return
        if token_ids.ndim == 2 and token_ids.shape[0] == known.shape[0]:
            self.token_ids = joined(known, columns, token_ids)
            self.known_columns = min(self.token_ids.shape[1], columns_held)

    def forget_tokens(self, columns: int) -> None:
        """Forget the text behind the first `columns`: a crop removed it."""
        self.known_columns = min(self.known_columns, columns)
        if self.token_ids is not None and self.token_ids.shape[1] > columns:
            self.token_ids = self.token_ids[:, :columns]

    def select_tokens(self, rows: Sequence[int]) -> None:
        """Let the text of row i be that of the former row rows[i]."""
        if self.token_ids is not None:
            self.token_ids = self.token_ids[list(rows)]
