"""What a request holds while it waits on the host: its pages as they are stored, and its exact tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from ..pages.step import Row
from .batch_requests import RequestRows


@dataclass(frozen=True)
class HeldRequest:
    """The pages and exact tokens of a request on the host, by layer.

    Attributes:
        rows: sliding window -> the row as it was.
        pages: layer -> side -> field -> encoded pages [n, ..].
        windows: layer -> exact keys and values [num_kv_heads, slots, head_dim].
        nbytes: bytes of all of them.
    """

    rows: Mapping[int | None, Row]
    pages: Mapping[int, Sequence[Mapping[str, torch.Tensor]]]
    windows: Mapping[int, Sequence[torch.Tensor]]
    nbytes: int

    @classmethod
    def of(cls, requests: RequestRows, request_id: str, nbytes: int) -> Self:
        """Return copies on the host of what a request holds, which keeps it."""
        index = requests.index_of(request_id)
        rows = {window: group.batch.rows[index] for window, group in requests.groups.items()}
        pages, windows = {}, {}
        with requests.in_order():
            for layer, store in requests.stores.items():
                ids = rows[store.window].pages
                pages[layer] = [
                    {name: field.cpu() for name, field in side.take(ids).items()}
                    for side in store.pages.sides
                ]
                windows[layer] = [one.tokens[index].to("cpu", copy=True) for one in store.residuals]
        return cls(rows, pages, windows, nbytes)

    def come_back(self, requests: RequestRows, request_id: str) -> None:
        """Give the request a row with pages of its own that hold what it held."""
        pages = {
            window: group.admit_copy(self.rows[window]) for window, group in requests.groups.items()
        }
        index = requests.name_last(request_id)
        with requests.in_order():
            for layer, store in requests.stores.items():
                places = [[page] for page in pages[store.window]]
                for side, fields in zip(store.pages.sides, self.pages[layer], strict=True):
                    for name, encoded in fields.items():
                        side.spread(0, name, encoded, places)
                for residual, tokens in zip(store.residuals, self.windows[layer], strict=True):
                    residual.tokens[index].copy_(tokens)
