"""The tensors of sealed pages: of one side, of one layer, and of all layers of the caches that share them.

A cache makes a memory of pages of its own (PageMemory). Copies of it, and all caches of one prefix store, share one: a page is
then held by several of them, and free when no one is left. Knows ids, not rows.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import CacheMismatchError
from ..quant.codec import decode, encode, order_of
from ..spec import PageFields, PageSpec, PageWrite, SideSpec
from .cpu_memory import RESERVE_FACTOR, HostMemory, Tensors, mapped_zeros, runs_of
from .moved import persistent_tensors
from .pool import PagePool
from .rows import Rows
from .step import TableView

ALIGNMENT = 64  # bytes, of every field in a piece of memory
RECODED = 64  # pages that are encoded in another format at a time: bounds the fp32 temporaries

Pair = tuple[torch.Tensor, torch.Tensor]  # of keys and of values
Sides = tuple[PageFields, PageFields]
Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # (shape in a page, dtype) by name


# -- both sides in one piece of memory: [ field 0 of pages 0 .. n ) [ field 1 of pages 0 .. n ) ...  keys before values -----


@functools.lru_cache(maxsize=256)
def fields_of(spec: PageSpec) -> tuple[tuple[int, tuple[int, ...], torch.dtype], ...]:
    """Return (bytes of one page, shape, dtype) of every field, keys before values."""
    return tuple(
        (torch.Size(shape).numel() * dtype.itemsize, shape, dtype)
        for side in spec.sides
        for shape, dtype in side.fields.values()
    )


def carved_bytes(spec: PageSpec, pages: int) -> int:
    """Return the bytes that `carve` needs for `pages` pages."""
    return sum(-(-pages * nbytes // ALIGNMENT) * ALIGNMENT for nbytes, _, _ in fields_of(spec))


def carve(raw: torch.Tensor, spec: PageSpec, pages: int) -> Sides:
    """Lay the fields of `pages` pages into one piece of memory.

    Args:
        raw: [bytes], uint8; at least `carved_bytes(spec, pages)`, aligned to ALIGNMENT.
    Returns: the fields of keys and those of values, views of `raw`: [pages, *shape of the field in a page].
    """
    found, start = [], 0
    for nbytes, shape, dtype in fields_of(spec):
        size = pages * nbytes
        found.append(raw[start : start + size].view(dtype).view(pages, *shape))
        start += -(-size // ALIGNMENT) * ALIGNMENT
    keys, values = (side.fields for side in spec.sides)
    return (
        PageFields(dict(zip(keys, found[: len(keys)], strict=True))),
        PageFields(dict(zip(values, found[len(keys) :], strict=True))),
    )


def new_fields(fields: Fields, pages: int, device: torch.device) -> PageFields:
    """Return new tensors for `pages` pages on `device`, zero; `fields`: as of SideSpec.fields."""
    return PageFields(
        {
            name: torch.zeros((pages, *shape), dtype=dtype, device=device)
            for name, (shape, dtype) in fields.items()
        }
    )


# -- one side, one layer ---------------------------------------------------------------------------------------------


class ReadablePages(NamedTuple):
    """Pages as kernels read them; see PagedKV for the fields, and for what `offloaded` offers."""

    spec: PageSpec
    keys: Tensors
    values: Tensors
    block_table: torch.Tensor
    hold: Callable[[], AbstractContextManager[Any]]
    offloaded: Any = None


class SideStorage:
    """Encoded pages of one side of one layer: the tensors of `SideSpec.fields`, indexed by page id.

    Attributes:
        fields: replaced as a whole: whoever reads has the tensors of before or those of after.
        host: the memory that they lie in, apart from the device; None while they are there.
    """

    host: HostMemory | None = None

    def __init__(self, spec: SideSpec, device: torch.device) -> None:
        self.spec, self.device = spec, device
        self.fields = new_fields(spec.fields, 0, device)
        self._mapped: dict[str, torch.Tensor] = {}  # fields in memory with addresses for more pages

    @property
    def capacity(self) -> int:
        """Pages that there is room for in every field."""
        return self.fields.room

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes allocated on the device, by tensor name."""
        here = self.host is None
        return {name: tensor.nbytes if here else 0 for name, tensor in self.fields.items()}

    def __getstate__(self) -> dict[str, Any]:
        """Copy fields out of host memory, and of memory that has addresses for more pages: a pickle holds the pages alone."""
        if self.host is None and not self._mapped:
            return vars(self)
        fields = PageFields({name: tensor.clone() for name, tensor in self.fields.items()})
        return {**vars(self), "fields": fields, "_mapped": {}, "host": None}

    def grown(self, capacity: int) -> PageFields:
        """Return fields with these pages and room for `capacity`; new pages are zero, so that reading them is finite."""
        return PageFields({name: self._grown(name, capacity) for name in self.fields})

    def _grown(self, name: str, capacity: int) -> torch.Tensor:
        old, whole = self.fields[name], self._mapped.get(name)
        held = len(old)
        if capacity <= held:
            return old
        if whole is not None and len(whole) >= capacity and whole.data_ptr() == old.data_ptr():
            return whole[:capacity]
        for room in (RESERVE_FACTOR * capacity, capacity):
            whole = mapped_zeros(old, room)
            if whole is not None:
                self._mapped[name], new = whole, whole[:capacity]
                break
        else:
            new = old.new_empty((capacity, *old.shape[1:]))
            new[held:].zero_()
        new[:held] = old
        return new

    def take(self, pages: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return copies of these pages as they are encoded, [n, ..] by field name, on the device."""
        if self.host is None:
            at = torch.tensor(list(pages), dtype=torch.long, device=self.device)
            return {name: field[at] for name, field in self.fields.items()}
        found = new_fields(self.spec.fields, len(pages), self.device)
        self.host.fetch(self.fields, runs_of(enumerate(pages)), found)
        return found

    def put(self, ids: Sequence[int], pages: Tensors) -> None:
        """Write encoded pages, [n, ..] by field name, to these n ids, which must have room."""
        if self.host is not None:
            return self.host.store(pages, runs_of(enumerate(ids)), self.fields)
        for name, held in pages.items():
            self.fields[name][list(ids)] = held.to(self.device)


@dataclass(frozen=True)
class Wider:
    """The formats that a layer has in place of those asked for.

    Attributes:
        formats: by side ("keys", "values"); sides that keep their format are not named.
        reasons: for each of them, the change and why.
    """

    formats: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


class Held(NamedTuple):
    """What pages are like, and where they lie: one object, so that whoever reads has all of before or all of after."""

    spec: PageSpec
    keys: SideStorage
    values: SideStorage


class PageStorage:
    """Both sides of one layer's pages.

    Attributes:
        asked: the spec by the options of the caches that share these pages.
        held: their spec, and both sides.
        wider: the formats that are others than those of `asked`, and why; None where there are none.
        keeps: why these pages keep their spec, where somebody has said so; None: the first may call for a wider one.
        sealed: pages that were ever sealed here, or brought.
        judged: whether some of them have told that their formats are wide enough, or were given wider ones.
        memory: the PageMemory that they belong to.
    """

    resident = True  # pages never leave the device
    keeps: str | None = None

    def __init__(self, spec: PageSpec, device: torch.device, memory: Any) -> None:
        self.asked = spec
        self.device, self.memory = device, memory
        self.wider: Wider | None = None
        self.sealed, self.judged = 0, False
        self.held = Held(spec, *(SideStorage(side, device) for side in spec.sides))

    @property
    def spec(self) -> PageSpec:
        """What the pages are like."""
        return self.held.spec

    @property
    def keys(self) -> SideStorage:
        """The side of the keys, or latents."""
        return self.held.keys

    @property
    def values(self) -> SideStorage:
        """The side of the values, or RoPE keys."""
        return self.held.values

    @property
    def lock(self) -> Any:
        """What is held while pages are written or storage grows."""
        return self.memory.lock

    def widen(self, spec: PageSpec, wider: Wider, new: int) -> None:
        """Hold pages of another spec from now on; where memory is short nothing has changed.

        Args:
            new: how many of the pages are sealed anew behind this. Those of before, if there are any, keep their numbers.
        """
        with persistent_tensors():
            pairs = zip(spec.sides, self.sides, strict=True)
            made = [old if old.spec == one else SideStorage(one, self.device) for one, old in pairs]
            for side, old in zip(made, self.sides, strict=True):
                if side is old:  # of the same format
                    continue
                side.fields = side.grown(old.capacity)
                order = None
                for first in range(0, old.capacity if self.sealed > new else 0, RECODED):
                    ids = range(first, min(first + RECODED, old.capacity))
                    held = old.take(ids)
                    numbers = decode(held, old.spec, old.spec.dtype)
                    if order is None:  # one for all pages: whose they are is not known here
                        order = order_of(numbers[:1], side.spec)
                    side.put(ids, encode(numbers, side.spec, held.get("order", order))[0])
        self.held, self.wider = Held(spec, *made), wider

    @property
    def sides(self) -> tuple[SideStorage, SideStorage]:
        """(keys, values)"""
        return self.held[1:]

    @property
    def capacity(self) -> int:
        """Pages that there is room for in every field of both sides."""
        return min(self.keys.capacity, self.values.capacity)

    @property
    def is_offloaded(self) -> bool:
        """Whether the pages lie in host memory or on a disk, apart from the device."""
        return self.values.host is not None

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of pages that do."""
        return self.capacity * self.spec.page_bytes if self.is_offloaded else 0

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` pages on both sides, or on none where memory is short.

        Nothing of the old is given up before all of the new is there: for a moment the layer's pages exist twice.
        """
        grown = self.keys.grown(capacity), self.values.grown(capacity)
        self.keys.fields, self.values.fields = grown

    def write(self, kernel: Any, call: PageWrite, jobs: torch.Tensor) -> None:
        """Have `kernel`, a Backend, do `call`, whose fields are these pages' and whose jobs are `jobs` [n, 4] on the device."""
        kernel.write(call)

    def readable(self, view: TableView) -> ReadablePages:
        """Return what kernels read of the pages of `view`, in the view's order."""
        table, (spec, keys, values) = view.on(self.device).block_table, self.held
        return ReadablePages(spec, keys.fields, values.fields, table, nullcontext)


# -- all layers ------------------------------------------------------------------------------------------------------


class PageMemory:
    """Pools of page ids, one for each group, and storage, one for each layer.

    Args:
        max_pages: bound of each pool, as in CacheConfig.
    Attributes:
        lock: of all storages; a pool's lock may be held around it.
    """

    def __init__(self, max_pages: int | None = None) -> None:
        self.max_pages = max_pages
        self.pools: dict[int | None, PagePool] = {}
        self.storages: dict[int, Any] = {}  # of what `make_storage` makes
        self.lock: Any = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the lock."""
        return {name: one for name, one in vars(self).items() if name != "lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, lock=threading.RLock())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the locks of all pools, then this one's: a store that evicts pages holds its pool's already."""
        with ExitStack() as stack:
            for pool in list(self.pools.values()):
                stack.enter_context(pool.lock)
            with self.lock:
                yield

    def pool(self, window: int | None) -> PagePool:
        """Return the pool of the group with this sliding window (None: full attention)."""
        return self.pools.setdefault(window, PagePool(self.max_pages))

    def storage(
        self, layer_idx: int, spec: PageSpec, device: torch.device, group: Rows
    ) -> PageStorage:
        """Return the storage of a layer of `group`, made on first use; from then on nobody takes it away.

        Raises: CacheMismatchError where another cache has or will have pages of another spec or device there.
        """
        with self._locked():
            found = self.storages.get(layer_idx)
            if found is None or (found.asked, found.device) != (spec, device):
                others = any(one is not group for one in self._users(group.pool))
                if found is not None and (others or self.num_held):
                    raise CacheMismatchError(
                        f"layer {layer_idx}: pages are shared with a cache of other formats, sizes, dtype or device: it "
                        f"holds {_words(found.asked, found.device)}, this one needs {_words(spec, device)}. Use one prefix_store per "
                        "dtype (torch.autocast gives keys or values another one) and device, or call its clear() when no cache uses it"
                    )
                self.storages[layer_idx] = found = self.make_storage(layer_idx, spec, device)
            group.has_storage = True
            return found

    def _users(self, pool: PagePool) -> list[Any]:
        """Return who has storage here, and tokens that will be sealed into it."""
        with pool.lock:
            return [one for one in pool.owners if getattr(one, "has_storage", False)]

    def make_storage(self, layer_idx: int, spec: PageSpec, device: torch.device) -> PageStorage:
        """Make the storage of a layer."""
        return PageStorage(spec, device, self)

    @property
    def staging_bytes(self) -> int:
        """Bytes on devices through which offloaded pages are read."""
        return 0

    @property
    def num_held(self) -> int:
        """Pages that somebody holds, over all pools."""
        return sum(pool.num_held for pool in self.pools.values())

    def clear(self) -> None:
        """Give all memory back where nobody holds a page, nor has tokens that will be sealed into one."""
        with self._locked():
            if not self.num_held and not any(map(self._users, self.pools.values())):
                self.storages.clear()
                for pool in self.pools.values():
                    pool.clear()

    def shared_parts(self) -> list[Any]:
        """Return the objects that a copy of a cache shares with it."""
        return [self, *self.pools.values(), *self.storages.values()]


def _words(spec: PageSpec, device: torch.device) -> str:
    return (
        " and ".join(
            f"{side.side} in {side.scheme.name} ({str(side.dtype).removeprefix('torch.')}, {side.num_kv_heads} heads of "
            f"{side.head_dim}, pages of {side.page_size})"
            for side in spec.sides
        )
        + f" on {device}"
    )
