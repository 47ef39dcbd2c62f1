"""A kv_length that knows its cache: the road by which a mask function reaches the pages."""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import CacheMismatchError
from ..formats import ATTENTION_NAME
from ..pages.rows import Rows
from .mask_watch import MaskWatch


def takes_length(implementation: str | None) -> bool:
    """Say whether the mask function of attention of this name knows what a MaskLength is (hf/dispatch.py)."""
    return implementation in ("sdpa", "eager", ATTENTION_NAME) or "flash" in (implementation or "")


class MaskLength(int):
    """The kv_length of a mask, with what a mask function needs to tell the cache and to know from it.

    The cache cannot see the 2D mask by itself: `update()` gets keys and values only.

    Attributes:
        groups: all page groups of the cache, which learn the left padding.
        skippable: whether the mask may be left out: the kernels of all layers that it is made for apply causality,
            left padding and their sliding window by themselves.
        watch: compares masks with the padding that is known.
    """

    groups: Sequence[Rows]
    skippable: bool
    watch: MaskWatch

    def __new__(
        cls, length: int, groups: Sequence[Rows], skippable: bool, watch: MaskWatch
    ) -> "MaskLength":
        """Make the length `length` that belongs to `groups`."""
        self = super().__new__(cls, length)
        self.groups = groups
        self.skippable = skippable
        self.watch = watch
        return self

    @property
    def preallocated(self) -> bool:
        """Return whether the cache is of the preallocated form."""
        return not any(isinstance(group, Rows) for group in self.groups)

    @property
    def stored(self) -> bool:
        """Return whether the cache holds tokens, so that attention gets handles."""
        return any(group.seen for group in self.groups if isinstance(group, Rows))

    @property
    def padded(self) -> bool:
        """Return whether some row is known to begin with padding."""
        return any(bool(group.batch.padding.any()) for group in self.groups)

    def observe(self, attention_mask: torch.Tensor | None, single: bool = False) -> None:
        """Tell the groups which columns are left padding; None: there is no padding.

        Args:
            attention_mask: [rows, columns], 0 in columns of padding; masks of four dimensions tell the groups nothing.
            single: the forward is of one token.
        Raises: CacheMismatchError where the mask shows columns that were left out as padding before.
        """
        if attention_mask is None:
            self._check_unpadded()
        elif attention_mask.ndim == 2:
            later = self.skippable and self.watch.later(attention_mask, single)
            if not later:
                self._check_hidden(attention_mask)
        for group in self.groups:
            if attention_mask is None:
                group.forget_padding()
                continue
            group.observe_padding(attention_mask)
            if isinstance(group, Rows):
                group.note_mask(bool(group.batch.padding.any()), group.epoch + 1)

    def _check_unpadded(self) -> None:
        """Raise CacheMismatchError where a forward without any mask would see padding that was not stored."""
        for group in self.groups:
            if not isinstance(group, Rows) or not group.seen:
                continue
            padding = group.batch.padding
            if (padding > group.offset).any():
                raise CacheMismatchError(
                    f"attention_mask is None, but the rows begin with {padding.tolist()} columns of left padding, which was "
                    "hidden when the cache took it in, and was not stored: without a mask they would be attended to. Pass the "
                    "mask [batch, columns] of the whole text so far, or call cache.reset() and start again"
                )

    def _check_hidden(self, attention_mask: torch.Tensor) -> None:
        growing = (group for group in self.groups if isinstance(group, Rows))
        group = next((group for group in growing if group.seen and len(group.batch)), None)
        if group is None:
            return
        padding = group.batch.padding
        longest = min(int(padding.max()), attention_mask.shape[1], group.seen)
        if not longest or attention_mask.shape[0] != len(padding):
            return
        known = torch.from_numpy(padding.copy()).to(attention_mask.device)
        columns = torch.arange(longest, device=attention_mask.device)
        shown = attention_mask[:, :longest].bool() & (columns < known[:, None])
        if bool(shown.any()):
            row, column = shown.nonzero()[0].tolist()
            raise CacheMismatchError(
                f"attention_mask shows column {column} of row {row}, which was hidden as left padding when the cache took it "
                f"in, and was not stored (padding of that row: {padding[row]} columns). Pass the mask of the whole text so "
                "far, with the same padding, or call cache.reset() and start again"
            )

    def needs_no_mask(self, attention_mask: torch.Tensor | None, single: bool = False) -> bool:
        """Say whether `attention_mask` [rows, columns] hides nothing but the padding that the rows know.

        Args:
            single: the forward is of one token.
        """
        if not self.skippable:
            return False
        group = next((group for group in self.groups if group.seen), None)
        if attention_mask is None:
            return group is not None
        if group is None:  # without earlier tokens attention gets plain tensors
            return False
        padding = group.batch.padding
        if attention_mask.ndim != 2 or attention_mask.shape[0] != len(padding):
            return False
        return self.watch.hides_padding_only(attention_mask, padding, single)


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
