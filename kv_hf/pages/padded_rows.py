"""Rows of a batch that begin with padding, which is learnt from masks and never stored."""

from dataclasses import replace

import numpy as np
import torch

from .batch import Batch, Numbers
from .held_rows import HeldRows
from .step import Row


class PaddedRows(HeldRows):
    """Rows whose left padding is learnt before their first token.

    Attributes:
        seen: columns so far, padding included.
    """

    seen: int
    _padding_seen: list[int] | None

    def columns(self) -> int:
        """Return the columns so far, as StaticTable does."""
        return self.seen

    def left_padding(self) -> Numbers:
        """Return the columns of padding of each row."""
        return self.batch.padding

    def needs_padding(self) -> bool:
        """True while some row has no real token yet, so that its padding is still to be learnt."""
        return not len(self.batch) or not self.sizes.all_tokens(self.batch).all()

    def observe_padding(self, attention_mask: torch.Tensor) -> None:
        """Learn the left padding from a 2D mask [rows, columns] (0 or False = padding).

        Only rows without a real token are concerned; a mask seen later cannot change stored tokens.
        """
        if attention_mask.ndim == 2 and self.needs_padding():
            padded = attention_mask.to(torch.bool).cumsum(-1) == 0
            self._padding_seen = padded.sum(-1).tolist()

    def forget_padding(self) -> None:
        """Drop padding that was observed but not used yet (a forward without any mask follows)."""
        self._padding_seen = None

    def _padded_rows(self, batch: int) -> Batch:
        """Return the rows as the step finds them, with the padding that was learnt since."""
        rows = self.batch if len(self.batch) else Batch.of((Row(0, (), 0),) * batch)
        empty = self.sizes.all_tokens(rows) == 0
        if not empty.any():
            return rows
        known = self._padding_seen
        padding = known if known is not None and len(known) == batch else [0] * batch
        learnt = np.maximum(self.seen, np.array(padding, dtype=np.int64))
        return replace(rows, padding=np.where(empty, learnt, rows.padding))
