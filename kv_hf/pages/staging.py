"""Room on the device through which offloaded pages are read: one layer at a time, the next one in advance.

A kernel reads pages by number out of one tensor per field. So the pages that a batch holds are laid, in the order of
their ids, into the slots 0, 1, .. of a buffer, and the block table is written anew in slots: once per table, for all
layers of a group. With two buffers the layer that was read next the last time is copied while this one is used.

Where a step chooses pages, every layer has a plan of its own for them. Those that a buffer holds already stay in their
slots, so that the others alone are copied: what was copied in advance are the pages that the layer read the last time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..spec import PageSpec
from .cpu_memory import runs_of
from .moved import moved, persistent_tensors
from .storage import Sides, carve, carved_bytes

NO_PAGE = -1  # in a slot that nobody reads


Layer = Any  # an OffloadedStorage: its layer_idx and spec, `written` and `fetch`


class Copies:
    """The order of copies and kernels of a device: on a GPU copies run on a stream beside kernels, on a CPU at once.

    Attributes:
        buffers: staging buffers that make sense: two where a copy can run while the other one is read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers = 1 if self.stream is None else 2

    def mark(self) -> Any:
        """Return an event behind everything that kernels and writes have been given to do so far."""
        return self.stream and torch.cuda.current_stream(self.device).record_event()

    def run(self, copy: Callable[[], None], after: Iterable[Any]) -> Any:
        """Copy behind the events `after`; return an event behind the copy."""
        if self.stream is None:
            return copy()
        for event in after:
            if event is not None:
                self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            copy()
        return self.stream.record_event()

    def join(self, event: Any) -> None:
        """Let kernels that come now wait for `event`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def keep(self, target: torch.Tensor) -> None:
        """Keep the memory of `target` [any shape] from being used again before the copies into it are done.

        A cache is often dropped while its next layer is being fetched.
        """
        if self.stream is not None:
            target.record_stream(self.stream)

    def wait(self) -> None:
        """Wait until everything is done, for reading host memory on the host."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, eq=False)
class SlotPlan:
    """The slots of the pages of one block table.

    Attributes:
        source: the block table that this plan was made of.
        ids: page of each slot, ascending where no buffer held any; NO_PAGE for slots that are not read.
        table: the block table in slots, on the device; entries past a row's last page hold slot 0 or any other.
    """

    source: torch.Tensor
    ids: list[int]
    table: torch.Tensor

    @classmethod
    def of(
        cls,
        table: torch.Tensor,
        num_pages: torch.Tensor,
        device: torch.device,
        slots: int | None = None,
        held: Sequence[int | None] = (),
    ) -> "SlotPlan":
        """Give the pages of a table slots, those that a buffer holds the slots that they are in.

        Args:
            table: [rows, width], int32, on the CPU.
            num_pages: [rows], int32, on the CPU.
            slots: that there are, at least as many as different pages; None: just as many.
            held: page in each slot of the buffer that holds pages of this layer; anything else where none does.
        """
        pages = table.numpy()
        used = np.arange(pages.shape[1]) < num_pages.numpy()[:, None]
        ids, places = np.unique(pages[used], return_inverse=True)
        wanted = set(ids.tolist())
        slots = len(wanted) if slots is None else slots
        if len(held) != slots:
            held = [NO_PAGE] * slots
        found = [page if page in wanted and page is not None else NO_PAGE for page in held]
        slot_of = {page: slot for slot, page in enumerate(found)}
        free = (slot for slot, page in enumerate(found) if page == NO_PAGE)
        for page in ids.tolist():
            if page not in slot_of:
                slot_of[page] = slot = next(free)
                found[slot] = page
        numbers = np.array([slot_of[page] for page in ids.tolist()] or [0], dtype=np.int32)
        in_slots = np.full(pages.shape, numbers[0], dtype=np.int32)
        in_slots[used] = numbers[places.reshape(-1)]
        return cls(table, found, moved(torch.from_numpy(in_slots), device))


class StagingBuffer:
    """Bytes on the device that hold pages of one layer at a time.

    Attributes:
        owner: the layer whose pages it holds.
        ids: page in each slot, None where it holds nothing, or a newer one was written since.
        fields: the slots as fields of keys and of values.
        ready: event behind the last copy into it.
    """

    def __init__(self, nbytes: int, copies: Copies) -> None:
        self.copies = copies
        with persistent_tensors():
            self.raw = torch.empty(nbytes, dtype=torch.uint8, device=copies.device)
        self.owner: Layer = None
        self.ids: list[int | None] = []
        self.fields: Any = None
        self.ready: Any = None
        self._used = copies.mark()  # kernels given before may still read that memory
        copies.keep(self.raw)

    def load(self, layer: Layer, plan: SlotPlan) -> None:
        """Have the pages of `plan` copied into their slots, those that are not there; where it fails, there are none."""
        slots = len(plan.ids)
        if self.owner is not layer or len(self.ids) != slots:
            self.owner = None  # should this be stopped half-way
            with persistent_tensors():
                used = self.raw[: carved_bytes(layer.spec, slots)]
                self.fields, self.ids = carve(used, layer.spec, slots), [None] * slots
            self.owner = layer
        pairs = list(zip(plan.ids, self.ids, strict=True))
        lacking = ((at, new) for at, (new, old) in enumerate(pairs) if new not in (old, NO_PAGE))
        if runs := runs_of(lacking):
            self.ids, fields = [None] * slots, self.fields
            self.ready = self.copies.run(
                lambda: layer.fetch(runs, fields), (self._used, layer.written)
            )
            self.ids = [old if new == NO_PAGE else new for new, old in pairs]

    def invalidate(self, pages: Sequence[int]) -> None:
        """Note that newer ones of these pages were written."""
        self.ids = [None if page in pages else page for page in self.ids]

    def note_use(self) -> None:
        """Note that the last kernel that reads it was launched."""
        self._used = self.copies.mark()


class Staging:
    """The staging buffers of one device.

    Args:
        copies: how they run beside kernels; says how many buffers there are.
    """

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self.size = 0  # bytes of a buffer
        self._buffers: list[StagingBuffer] = []
        self._last: StagingBuffer | None = None
        self._before: Layer = None
        self._next: dict[int, Layer] = {}  # layer -> the one that was read behind it
        self._plans: dict[int, SlotPlan] = {}  # layer -> what it was last read by

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(buffer.raw.nbytes for buffer in self._buffers)

    def resize(self, nbytes: int) -> None:
        """Let buffers have `nbytes` bytes from their next use on; the old ones go first."""
        if nbytes != self.size:
            self._buffers, self._last = [], None
            self.size = nbytes

    def holds(self, spec: PageSpec, slots: int) -> bool:
        """Say whether so many pages fit into a buffer."""
        return carved_bytes(spec, slots) <= self.size

    def invalidate(self, layer: Layer, pages: Sequence[int]) -> None:
        """Note that `pages` of a layer were written: what lies here is stale."""
        for buffer in self._buffers:
            if buffer.owner is layer:
                buffer.invalidate(pages)

    def held(self, layer: Layer) -> Sequence[int | None]:
        """Return the page in each slot of the buffer that holds pages of a layer; nothing where none does."""
        return next((one.ids for one in self._buffers if one.owner is layer), ())

    @contextmanager
    def reading(self, layer: Layer, plan: SlotPlan) -> Iterator[Sides]:
        """Give the pages of `plan` in their slots to the kernels launched inside, then fetch what comes next."""
        buffer = self._last = self._loaded(layer, plan)
        self.copies.join(buffer.ready)
        try:
            yield buffer.fields
        finally:
            buffer.note_use()
        before = self._plans.get(layer.layer_idx)
        self._plans[layer.layer_idx] = plan
        if self._before is not None and self._before is not layer:
            self._next[self._before.layer_idx] = layer
        self._before = layer
        following = self._next.get(layer.layer_idx)
        if self.copies.buffers > 1 and following is not None and following is not layer:
            # layers of one group share their table: what this one has just got, the next one will
            usual = self._plans[following.layer_idx]
            chosen = plan if usual is before else usual
            if self.holds(following.spec, len(chosen.ids)):
                self._loaded(following, chosen)

    def _loaded(self, layer: Layer, plan: SlotPlan) -> StagingBuffer:
        """Return the buffer of `layer`, or else the one that was not read last; the pages of `plan` are on their way to it."""
        while len(self._buffers) < self.copies.buffers:
            self._buffers.append(StagingBuffer(self.size, self.copies))
        own = [buffer for buffer in self._buffers if buffer.owner is layer]
        others = [buffer for buffer in self._buffers if buffer is not self._last]
        buffer = (own or others or self._buffers)[0]
        buffer.load(layer, plan)
        return buffer
