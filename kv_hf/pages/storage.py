"""The tensors of one layer's sealed pages, growing by steps. Knows ids, not rows."""

import threading
from typing import Any

import torch

from ..quant.codec import decode
from ..spec import PageSpec, SideSpec


class SideStorage:
    """Encoded pages of one side of one layer: the tensors of `SideSpec.fields`, indexed by page id."""

    def __init__(self, spec: SideSpec, device: torch.device) -> None:
        self.spec = spec
        self.fields = {
            name: torch.zeros((0, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in spec.fields.items()
        }

    @property
    def capacity(self) -> int:
        """Pages that there is room for."""
        return self.fields["codes"].shape[0]

    @property
    def nbytes(self) -> dict[str, int]:
        """Allocated bytes by tensor name."""
        return {name: tensor.nbytes for name, tensor in self.fields.items()}

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` pages; new pages are zero, so that reading them gives finite numbers.

        One tensor at a time, so that the peak is the old storage plus one grown tensor.
        """
        for name, old in self.fields.items():
            if old.shape[0] < capacity:
                new = old.new_zeros((capacity, *old.shape[1:]))
                new[: old.shape[0]] = old
                self.fields[name] = new

    def read(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decode the pages of these ids (any shape [..]) to [.., num_kv_heads, page_size, head_dim]."""
        flat = pages.reshape(-1)
        tokens = decode({name: t[flat] for name, t in self.fields.items()}, self.spec, dtype)
        return tokens.reshape(*pages.shape, *tokens.shape[1:])

    def to(self, device: torch.device) -> None:
        """Move all tensors to `device`."""
        self.fields = {name: tensor.to(device) for name, tensor in self.fields.items()}


class PageStorage:
    """Both sides of one layer's pages."""

    def __init__(self, spec: PageSpec, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.lock = threading.RLock()  # held while pages are written or storage grows
        self.keys = SideStorage(spec.keys, device)
        self.values = SideStorage(spec.values, device)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock."""
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock = threading.RLock()

    @property
    def sides(self) -> tuple[SideStorage, SideStorage]:
        """(keys, values)"""
        return self.keys, self.values

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` pages on both sides."""
        for side in self.sides:
            side.grow(capacity)

    def to(self, device: torch.device) -> None:
        """Move both sides to `device`."""
        for side in self.sides:
            side.to(device)
