"""Which request has which row: rows of all layers come, go and change places together."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..pages.step import Row
from .batch_rows import BatchRows
from .batch_store import BatchStore


class RequestRows:
    """The rows of requests, side by side from row 0 on, the same in all layers.

    Args:
        groups: sliding window (None: full attention) -> rows of its layers.
        stores: layer -> its tensors.
        device: of the tensors.
    Attributes:
        names: the request of each row.
        stream: of the forwards, on devices that have streams: all work on the tensors goes there, in order.
    """

    stream: Any = None

    def __init__(
        self,
        groups: Mapping[int | None, BatchRows],
        stores: Mapping[int, BatchStore],
        device: torch.device,
    ) -> None:
        self.groups, self.stores, self.device = groups, stores, device
        self.names: list[str] = []
        self._row: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row

    def index_of(self, request_id: str) -> int:
        """Return the row of a request, which has one."""
        return self._row[request_id]

    def find(self, request_id: str) -> int | None:
        """Return the row of a request, or None."""
        return self._row.get(request_id)

    def admit(self, request_id: str, rows: Mapping[int | None, Row] | None = None) -> int:
        """Give a request a row behind the others; return its number.

        Args:
            rows: what it then holds, by sliding window; None: nothing.
        """
        for window, group in self.groups.items():
            group.admit(Row(0, (), 0) if rows is None else rows[window])
        return self.name_last(request_id)

    def name_last(self, request_id: str) -> int:
        """Note that a row which was just added belongs to a request; return its number."""
        self._row[request_id] = index = len(self.names)
        self.names.append(request_id)
        return index

    def copy(self, request_id: str, new_id: str) -> None:
        """Give a new request a row that holds what another one does; pages are shared."""
        source = self._row[request_id]
        rows = {window: group.batch.rows[source] for window, group in self.groups.items()}
        self._move([(self.admit(new_id, rows), source)])

    def drop(self, request_id: str) -> None:
        """Let go of what a request holds; the last row takes its place."""
        index, last = self._row[request_id], len(self.names) - 1
        order = list(range(last))
        if index != last:
            order[index] = last
        self.arrange(order)

    def arrange(self, order: Sequence[int]) -> None:
        """Let row i continue the former row order[i]; rows that are not named let go of their pages."""
        self._move([(target, source) for target, source in enumerate(order) if target != source])
        for group in self.groups.values():
            group.arrange(order)
        self.names = [self.names[source] for source in order]
        self._row = {request_id: index for index, request_id in enumerate(self.names)}

    def _move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copy exact windows from row to row, all at once: (target, source)."""
        if not moves:
            return
        with self.in_order():
            pairs = torch.tensor(moves, dtype=torch.int64).T.contiguous().to(self.device)
            for store in self.stores.values():
                store.move(pairs[0], pairs[1])

    def in_order(self) -> AbstractContextManager[Any]:
        """Return a context in which work on tensors comes behind that of the forwards so far, and before that of the next."""
        if self.stream is None:
            return nullcontext()
        context: AbstractContextManager[Any] = torch.get_device_module(self.device).stream(
            self.stream
        )
        return context

    def side_by_side(self, requests: Sequence[str]) -> None:
        """Let the rows of `requests` be the first ones."""
        chosen = {self._row[request_id] for request_id in requests}
        count = len(chosen)
        if not chosen or max(chosen) == count - 1:
            return
        order = list(range(len(self.names)))
        late = sorted(row for row in chosen if row >= count)
        for target in (row for row in range(count) if row not in chosen):
            source = late.pop()
            order[target], order[source] = source, target
        self.arrange(order)

    def check_integrity(self) -> None:
        """Raise ValueError where a request has two rows."""
        rows = {request_id: index for index, request_id in enumerate(self.names)}
        if self._row != rows or len(rows) != len(self.names):
            raise ValueError("a request has two rows")
