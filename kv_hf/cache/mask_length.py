"""A kv_length that knows its cache: the road by which a mask function reaches the pages."""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CacheMismatchError
from ..pages.group import PageGroup


class MaskLength(int):
    """The kv_length of a mask, with what a mask function needs to tell the cache and to know from it.

    The cache cannot see the 2D mask by itself: `update()` gets keys and values only.

    Attributes:
        groups: all page groups of the cache, which learn the left padding.
        skippable: whether the mask may be left out: the kernels of all layers that it is made for apply causality,
            left padding and their sliding window by themselves.
    """

    groups: Sequence[PageGroup]
    skippable: bool

    def __new__(cls, length: int, groups: Sequence[PageGroup], skippable: bool) -> "MaskLength":
        """Make the length `length` that belongs to `groups`."""
        self = super().__new__(cls, length)
        self.groups = groups
        self.skippable = skippable
        return self

    @property
    def padded(self) -> bool:
        """Whether some row is known to begin with padding."""
        return any(row.padding for group in self.groups for row in group.rows)

    def observe(self, attention_mask: torch.Tensor | None) -> None:
        """Tell the groups which columns are left padding; None: there is no padding.

        Raises: CacheMismatchError where the mask shows columns that were left out as padding before.
        """
        if attention_mask is not None and attention_mask.ndim == 2:
            self._check_hidden(attention_mask)
        for group in self.groups:
            if attention_mask is None:
                group.forget_padding()
            else:
                group.observe_padding(attention_mask)

    def _check_hidden(self, attention_mask: torch.Tensor) -> None:
        growing = (group for group in self.groups if isinstance(group, PageGroup))
        group = next((group for group in growing if group.seen and group.rows), None)
        if group is None:
            return
        rows = group.rows
        longest = min(max(row.padding for row in rows), attention_mask.shape[1], group.seen)
        if not longest or attention_mask.shape[0] != len(rows):
            return
        known = torch.tensor([row.padding for row in rows], device=attention_mask.device)
        columns = torch.arange(longest, device=attention_mask.device)
        shown = attention_mask[:, :longest].bool() & (columns < known[:, None])
        if bool(shown.any()):
            row, column = shown.nonzero()[0].tolist()
            raise CacheMismatchError(
                f"attention_mask shows column {column} of row {row}, which was hidden as left padding when the cache took it "
                f"in, and was not stored (padding of that row: {rows[row].padding} columns). Pass the mask of the whole text so "
                "far, with the same padding, or call cache.reset() and start again"
            )

    def needs_no_mask(self, attention_mask: torch.Tensor | None) -> bool:
        """Say whether `attention_mask` [rows, columns] hides nothing but the padding that the rows know."""
        if not self.skippable:
            return False
        group = next((group for group in self.groups if group.seen), None)
        if group is None:
            return False  # without earlier tokens attention gets plain tensors
        if attention_mask is None:
            return True
        padding = [row.padding for row in group.rows]
        if attention_mask.ndim != 2 or attention_mask.shape[0] != len(padding):
            return False
        known = torch.tensor(padding, device=attention_mask.device)[:, None]
        columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        return torch.equal(attention_mask.bool(), columns >= known)


def check_padding_mask(mask: Any, rows: int, late: bool) -> None:
    """Raise CacheMismatchError unless `mask` is a 2D mask, and of `rows` rows (0: any) that are not `late`."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        got = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise CacheMismatchError(f"attention_mask must be a tensor [batch, columns], got {got}")
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise CacheMismatchError(
            f"attention_mask must hold 0 and 1 (or be bool), got {mask.dtype} from {mask.min()} to {mask.max()}"
        )
    if rows and (rows != mask.shape[0] or late):
        raise CacheMismatchError(
            f"attention_mask of {mask.shape[0]} rows comes too late or to another batch: this cache holds the tokens of "
            f"{rows} rows; call observe_padding before the first forward"
        )
