"""The pages of one layer outside of the device, and how they are copied in and out.

    extent 0                          extent 1
    [ page 0 .. a ) of every field    [ page a .. b ) of every field    ...

An extent holds, one after the other, the fields of both sides (`SideSpec.fields`) for a run of page ids. Extents
never move: growing adds one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ..spec import PageFields, PageSpec, SideSpec
from .host_memory import HostMemory
from .slab import Fields, carve, carved_bytes

SMALLEST_EXTENT = 8  # pages
MANY_RUNS = 5  # of pages, which are gathered field by field in place of copied one by one
NEAR_BYTES = 128 << 10  # between two pages that are read ahead as one


def runs(pages: Iterable[int]) -> list[tuple[int, int, int]]:
    """Return runs of consecutive ids as (place of the first in `pages`, first id, count)."""
    found: list[tuple[int, int, int]] = []
    for place, page in enumerate(pages):
        if found and found[-1][1] + found[-1][2] == page:
            first, start, count = found[-1]
            found[-1] = (first, start, count + 1)
        else:
            found.append((place, page, 1))
    return found


@dataclass(frozen=True)
class Extent:
    """Pages first .. first + count - 1 of both sides."""

    first: int
    count: int
    sides: tuple[Fields, Fields]


class HostPages:
    """The host pages of one layer: their place while they are not on the device.

    Args:
        spec: sizes and formats.
        outside: memory to lie in, shared with other layers.
    """

    def __init__(self, spec: PageSpec, outside: HostMemory) -> None:
        self.spec = spec
        self.outside = outside
        self.extents: list[Extent] = []

    @property
    def capacity(self) -> int:
        """Pages that there is room for."""
        return self.extents[-1].first + self.extents[-1].count if self.extents else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that there is room for."""
        return self.capacity * self.spec.page_bytes

    def grow(self, capacity: int) -> None:
        """Make room for at least `capacity` pages. Raises OffloadError where there is none."""
        first = self.capacity
        if capacity > first:
            count = max(capacity - first, first // 4, SMALLEST_EXTENT)
            raw = self.outside.allocate(carved_bytes(self.spec, count))
            self.extents.append(Extent(first, count, carve(raw, self.spec, count)))

    def fetch(
        self, page: int, count: int, targets: Sequence[Fields], place: int, sides: Sequence[int]
    ) -> None:
        """Copy pages page .. page + count - 1 of `sides` to `targets`, from `place` on.

        Raises: OffloadError in a process that was forked from the one whose file the pages lie in.
        """
        self.outside.check_process()
        for side, target in zip(sides, targets, strict=True):
            for out, here in self._pairs(side, page, count, target, place):
                here.copy_(out, non_blocking=self.outside.pinned)
                self.outside.forget(out)

    def fetch_runs(
        self,
        places: Sequence[tuple[int, int, int]],
        targets: Sequence[Fields],
        sides: Sequence[int],
    ) -> None:
        """Copy runs of pages of `sides`, each (place in `targets`, first id, count).

        Raises: as `fetch`.
        """
        if self.outside.pinned or len(places) < MANY_RUNS:
            for place, page, count in places:
                self.fetch(page, count, targets, place, sides)
            return
        self.outside.check_process()
        for extent in self.extents:
            here: list[int] = []
            there: list[int] = []
            for place, page, count in places:
                for _, start, number, done in self._parts(page, count, (extent,)):
                    there += range(start, start + number)
                    here += range(place + done, place + done + number)
            for side, target in zip(sides, targets, strict=True):
                for name, field in target.items():
                    self._gather(extent.sides[side][name], there, field, here)

    def _gather(
        self, out: torch.Tensor, there: list[int], field: torch.Tensor, here: list[int]
    ) -> None:
        """Copy pages `there` of one field outside to the places `here`; one by one, most of the time went to the calls."""
        if not here or not out[0].nbytes:
            return
        rows, target = _in_units(out), _in_units(field)
        for at, size in self._pieces(len(here), out[0].nbytes):
            some, places = there[at : at + size], here[at : at + size]
            ids = torch.tensor(some)
            first, last = places[0], places[-1] + 1
            if target.device == rows.device and places == list(range(first, last)):
                torch.index_select(rows, 0, ids, out=target[first:last])
            else:
                moved = rows.index_select(0, ids).to(target.device)
                target.index_copy_(0, torch.tensor(places, device=target.device), moved)
            self.outside.forget(out[min(some) : max(some) + 1])

    def store(self, side: int, page: int, count: int, source: Fields, place: int) -> None:
        """Copy `count` pages of one side from `source`, from `place` on, to ids page .. page + count - 1.

        Fields that `source` lacks are left as they are. Raises: as `fetch`, before anything is written.
        """
        self.outside.check_process()
        for out, here in self._pairs(side, page, count, source, place):
            out.copy_(here, non_blocking=self.outside.pinned)
            self.outside.forget(out)

    def expect_runs(self, places: Iterable[tuple[int, int, int]]) -> None:
        """Say that runs of pages (any place, first id, count) will be fetched soon, and with them what lies between near ones."""
        near = NEAR_BYTES // max(1, self.spec.page_bytes)
        first = last = 0
        for page, count in sorted((page, count) for _, page, count in places):
            if page > last + near and last > first:
                self.expect(first, last - first)
            if page > last + near or last == first:
                first = page
            last = page + count
        if last > first:
            self.expect(first, last - first)

    def expect(self, page: int, count: int) -> None:
        """Say that these pages will be fetched soon."""
        for extent, start, number, _ in self._parts(page, count):
            for fields in extent.sides:
                for tensor in fields.values():
                    self.outside.expect(tensor[start : start + number])

    def _pairs(
        self, side: int, page: int, count: int, fields: Fields, place: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield pieces of these pages here, each with its place in `fields`."""
        for extent, start, number, done in self._parts(page, count):
            for name in fields:
                tensor = extent.sides[side][name]
                for at, size in self._pieces(number, tensor[0].nbytes):
                    here = place + done + at
                    out = tensor[start + at : start + at + size]
                    yield out, fields[name][here : here + size]

    def _pieces(self, number: int, page_bytes: int) -> Iterator[tuple[int, int]]:
        most = self.outside.piece_bytes
        step = (
            number if most is None else max(1, most // max(1, page_bytes))
        )  # 0 bytes: RoPE keys of a NoPE layer
        for at in range(0, number, step):
            yield at, min(step, number - at)

    def _parts(
        self, page: int, count: int, extents: Iterable[Extent] | None = None
    ) -> Iterator[tuple[Extent, int, int, int]]:
        """Yield (extent, first page in it, pages, pages before) of a run of ids, of all or of some extents."""
        for extent in self.extents if extents is None else extents:
            first, last = max(page, extent.first), min(page + count, extent.first + extent.count)
            if first < last:
                yield extent, first - extent.first, last - first, first - page


def _in_units(field: torch.Tensor) -> torch.Tensor:
    """Return a field [pages, ..] as [pages, units] of eight bytes, or as many as divide a page: of any dtype, copied fast."""
    flat = field.flatten(1).view(torch.uint8)
    units = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    unit = next((dtype for size, dtype in units.items() if flat.shape[1] % size == 0), torch.uint8)
    return flat.view(unit)


def scratch_fields(spec: SideSpec, pages: int, device: torch.device) -> PageFields:
    """Return new fields of one side for `pages` pages on `device`; they hold anything."""
    return PageFields(
        {
            name: torch.empty((pages, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in spec.fields.items()
        }
    )
