"""The tensors of one layer's sealed pages, growing by steps. Knows ids, not rows."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from ..notices import warn_once
from ..quant.codec import decode
from ..spec import PageFields, PageSpec, SideSpec
from . import blocks
from .host_pages import HostPages
from .page_memory import PageMemory
from .persistent import persistent_tensors
from .step import SealJobs, TableView

Pair = tuple[torch.Tensor, torch.Tensor]  # of keys and of values


class PairWriter(Protocol):
    """A backend's functions that write pages; backends/reference/pairs.py documents both."""

    @property
    def write_pair(self) -> Callable[..., None]:
        """Append to both windows, and seal pages from them."""
        ...

    @property
    def seal_pair(self) -> Callable[..., None]:
        """Seal pages of both sides."""
        ...


class ReadablePages(NamedTuple):
    """Pages as kernels read them; see PagedKV for the fields, and for what `outside` offers."""

    keys: Mapping[str, torch.Tensor]
    values: Mapping[str, torch.Tensor]
    block_table: torch.Tensor
    hold: Callable[[], AbstractContextManager[Any]]
    outside: Any = None


class SideStorage:
    """Encoded pages of one side of one layer: the tensors of `SideSpec.fields`, indexed by page id."""

    _memory: PageMemory | None = None  # that `grown` made last

    def __init__(self, spec: SideSpec, device: torch.device) -> None:
        self.spec = spec
        # replaced as a whole: whoever reads has the tensors of before or those of after
        self.fields = PageFields(
            {
                name: torch.zeros((0, *shape), dtype=dtype, device=device)
                for name, (shape, dtype) in spec.fields.items()
            }
        )

    @property
    def capacity(self) -> int:
        """Pages that there is room for in every field."""
        return self.fields.room

    @property
    def nbytes(self) -> dict[str, int]:
        """Allocated bytes by tensor name."""
        return {name: tensor.nbytes for name, tensor in self.fields.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Copy fields out of memory that has addresses for more pages: a pickle holds the pages alone."""
        if self._memory is None:
            return vars(self)
        fields = PageFields({name: tensor.clone() for name, tensor in self.fields.items()})
        return {**vars(self), "fields": fields, "_memory": None}

    def grown(self, capacity: int) -> PageFields:
        """Return fields with these pages and room for `capacity`; new pages are zero, so that reading them is finite.

        On a CPU large fields lie in memory of their own, which may have the room already (page_memory.py).
        """
        old = self.fields
        memory = self._memory
        if memory is not None and self.capacity < capacity <= memory.most and memory.holds(old):
            return PageFields(memory.pages(capacity, written=self.capacity))
        memory = PageMemory.of(old, capacity) if self.capacity < capacity else None
        if memory is not None:
            self._memory, room = memory, memory.pages(capacity)
        else:
            small = {name: one for name, one in old.items() if one.shape[0] < capacity}
            room = {name: one.new_empty((capacity, *one.shape[1:])) for name, one in small.items()}
        for name, new in room.items():
            held = old[name].shape[0]
            new[:held] = old[name]
            if memory is None:
                new[held:].zero_()
        return PageFields({**old, **room})

    def check_integrity(self) -> None:
        """Raise ValueError unless every field has room for equally many pages."""
        room = {name: tensor.shape[0] for name, tensor in self.fields.items()}
        if len(set(room.values())) > 1:
            raise ValueError(f"{self.spec.side} have room for different numbers of pages: {room}")

    def take(
        self, pages: Sequence[int], names: Sequence[str] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return copies of these pages as they are encoded, [n, ..] by field name, on the device.

        Args:
            names: the fields that are wanted; None takes all.
        """
        return {name: self.fields[name][list(pages)] for name in names or self.fields}

    def put(self, first: int, field: str, pages: torch.Tensor) -> None:
        """Write one field of encoded pages [n, ..] to the ids first .. first + n - 1, which must have room."""
        self.fields[field][first : first + len(pages)].copy_(pages)

    def spread(
        self, first: int, field: str, pages: torch.Tensor, places: Sequence[Sequence[int]]
    ) -> None:
        """Write one field of encoded pages [n, ..], of which page i goes to each of the ids `places[first + i]`."""
        pairs = [(at, page) for at in range(len(pages)) for page in places[first + at]]
        if pairs:
            sources, targets = (list(part) for part in zip(*pairs, strict=True))
            self.fields[field][targets] = pages[sources].to(self.fields[field].device)

    def read(self, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Decode the pages of these ids (any shape [..]) to [.., num_kv_heads, page_size, head_dim]."""
        flat = pages.reshape(-1)
        tokens = decode({name: t[flat] for name, t in self.fields.items()}, self.spec, dtype)
        return tokens.reshape(*pages.shape, *tokens.shape[1:])

    def to(self, device: torch.device) -> None:
        """Move all tensors to `device`."""
        self.fields = PageFields({name: one.to(device) for name, one in self.fields.items()})
        self._memory = None


class PageStorage:
    """Both sides of one layer's pages.

    Attributes:
        neighbours: the layers that this one grows with, and its own position; None where it grows alone.
        asked: the spec by the options of the caches that share these pages.
        wider: the formats that are others than those of `asked`, and why; None where there are none (widened.Wider).
        keeps: why these pages keep their spec, where somebody has said so; None: they may get a wider one.
        successor: storage of a wider spec that took over all pages; from then on nothing is written here.
    """

    def __init__(self, spec: PageSpec, device: torch.device) -> None:
        self.spec = self.asked = spec
        self.wider: Any = None
        self.keeps: str | None = None
        self.successor: PageStorage | None = None
        self.device = device
        self.neighbours: tuple[blocks.Neighbours, int] | None = None
        self._wishes = True  # False: memory was too short for more than a step needs
        self.lock: Any = threading.RLock()  # held while pages are written or storage grows
        self.keys = SideStorage(spec.keys, device)
        self.values = SideStorage(spec.values, device)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock."""
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.lock = threading.RLock()
        if self.neighbours is not None and self.successor is None:
            neighbours, layer = self.neighbours
            neighbours.join(layer, self)

    def became(self, asked: PageSpec, wider: Any) -> None:
        """Note that pages of `asked` were asked for, and why there are others (widened.Wider)."""
        self.asked, self.wider = asked, wider

    def share_lock(self, other: "PageStorage") -> None:
        """Be written under the lock of `other` from now on."""
        self.lock = other.lock

    def hand_over(self, successor: "PageStorage") -> None:
        """Leave all pages to `successor`, which holds them; nobody writes here from now on."""
        self.successor = successor
        if self.neighbours is not None:
            neighbours, layer = self.neighbours
            neighbours.leave(layer)

    @property
    def sides(self) -> tuple[SideStorage, SideStorage]:
        """(keys, values)"""
        return self.keys, self.values

    @property
    def newest(self) -> "PageStorage":
        """The storage that these pages lie in now: this one, or one of a wider spec that took over."""
        found = self
        while found.successor is not None:
            found = found.successor
        return found

    @property
    def why_not_wider(self) -> str | None:
        """Return why these pages cannot get a wider spec, or None."""
        return self.keeps

    @property
    def fields(self) -> tuple[PageFields, PageFields]:
        """The tensors of keys and of values."""
        return self.keys.fields, self.values.fields

    @property
    def capacity(self) -> int:
        """Pages that there is room for in every field of both sides."""
        return min(self.keys.capacity, self.values.capacity)

    def grow(self, capacity: int, ahead: int = 0) -> None:
        """Make room for `capacity` pages on both sides, or on none where memory is short.

        Nothing of the old is given up before all of the new is there: for a moment the layer's pages exist twice.

        Args:
            ahead: pages to make room for instead, where that is more and there is memory for it.
        """
        if ahead > capacity and self._wishes:
            try:
                return self._grow(ahead)
            except (torch.OutOfMemoryError, MemoryError):
                self._wishes = False
                warn_once(
                    "room ahead",
                    f"There is no memory for the {ahead:,} pages per layer that the expected length of the text takes: "
                    "storage grows step by step, as the text does, and may still run out of memory",
                )
        self._grow(capacity)

    def _grow(self, capacity: int) -> None:
        if self.neighbours is not None and blocks.in_blocks(self.device):
            neighbours, layer = self.neighbours
            if neighbours.holds(layer, self):
                return neighbours.grow(layer, capacity)
        self.take_over((self.keys.grown(capacity), self.values.grown(capacity)))

    def grow_with(self, neighbours: blocks.Neighbours, layer: int) -> None:
        """Grow as `layer` of `neighbours` from now on, under the lock that they share."""
        self.neighbours, self.lock = (neighbours, layer), neighbours.lock

    def take_over(self, sides: tuple[PageFields, PageFields]) -> None:
        """Hold these fields of keys and of values from now on, which contain the pages so far."""
        self.keys.fields, self.values.fields = sides

    def grow_ahead(self, capacity: int, ahead: int = 0) -> None:
        """Make room as `grow` does before a step that needs it is in force."""
        with persistent_tensors(), self.lock:
            self.grow(capacity, ahead)

    def check_integrity(self) -> None:
        """Raise ValueError unless all fields of both sides have room for equally many pages."""
        for side in self.sides:
            side.check_integrity()
        if self.keys.capacity != self.values.capacity:
            raise ValueError(
                f"{self.keys.spec.side} have room for {self.keys.capacity} pages, {self.values.spec.side} for "
                f"{self.values.capacity}"
            )

    @property
    def home(self) -> HostPages | None:
        """The pages' memory outside of the device, or None where they lie on the device."""
        return None

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of pages that live outside of the device."""
        return 0

    def write_pair(
        self,
        kernel: PairWriter,
        windows: Pair,
        new: Pair,
        view: TableView,
        jobs: SealJobs | None,
        damaged: torch.Tensor,
        launches: dict[Any, Any],
    ) -> None:
        """Have `kernel` append `new` to the windows, and seal pages from them (see backends/reference/pairs.py).

        Args:
            windows: keys and values [rows, heads, slots, channels], written in place.
            new: keys and values [rows, heads, q_len, channels] of this forward.
            damaged: [], uint8; set to 1 where numbers had to be made finite.
            launches: what the backend keeps for this layer.
        """
        assert view.starts is not None and view.skips is not None
        outside = jobs is not None and self.home is not None
        table = None if jobs is None or outside else jobs.on(self.device)
        fields = self.keys.fields, self.values.fields
        kernel.write_pair(
            windows, new, view.starts, view.skips, table, fields, self.spec, damaged, launches
        )
        if outside:
            assert jobs is not None
            self.seal_pair(kernel, windows, jobs, damaged, launches)

    def seal_pair(
        self,
        kernel: PairWriter,
        tokens: Pair,
        jobs: SealJobs,
        damaged: torch.Tensor,
        launches: dict[Any, Any],
    ) -> None:
        """Have `kernel` seal pages of both sides from `tokens` (see backends/reference/pairs.py).

        Args:
            tokens: keys and values [rows, heads, slots, channels] that hold the runs of `jobs`.
            damaged: [], uint8; set to 1 where numbers had to be made finite.
        """
        kernel.seal_pair(tokens, jobs.on(self.device), self.fields, self.spec, damaged, launches)

    def readable(self, view: TableView) -> ReadablePages:
        """Return what kernels read of the pages of `view`, in the view's order."""
        table = view.on(self.device).block_table
        return ReadablePages(self.keys.fields, self.values.fields, table, nullcontext)

    def to(self, device: torch.device) -> None:
        """Move both sides to `device`."""
        for side in self.sides:
            side.to(device)
