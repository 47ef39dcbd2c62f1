"""Memory, watched: what torch's CUDA caching allocator would do, the bytes of new tensors, and tensors with a forbidden page behind.

The rules of the allocator are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.11 to 2.13), without expandable segments and with
its default settings: round_size, get_pool, get_allocation_size, get_free_block (best fit), should_split, free_block (merging with
free neighbours of the same segment) and release_cached_blocks (segments that are free as a whole).
"""

import ctypes
import mmap
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SMALLEST_BLOCK = 512  # kMinBlockSize
SMALL = 1 << 20  # kSmallSize: larger requests come from the pool of large blocks
SMALL_SEGMENT = 2 << 20  # kSmallBuffer
LARGE_SEGMENT = 20 << 20  # kLargeBuffer: of requests below ..
OWN_SEGMENT = 10 << 20  # .. kMinLargeAlloc, from which on a request gets a segment of its own,
ROUND_SEGMENT = 2 << 20  # rounded up to kRoundLarge


def rounded(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


@dataclass(eq=False)
class Block:
    """A piece of a segment; `before` and `behind` are its neighbours there."""

    nbytes: int
    large: bool
    before: "Block | None" = None
    behind: "Block | None" = None
    free: bool = True


@dataclass
class CachingAllocator:
    """One device, one stream.

    Attributes:
        reserved, allocated: bytes of all segments; of blocks in use.
        most_reserved: the most that were ever reserved.
        calls: segments asked for and given back.
    """

    reserved: int = 0
    allocated: int = 0
    most_reserved: int = 0
    calls: int = 0
    _free: set[Block] = field(default_factory=set)

    def malloc(self, nbytes: int) -> Block:
        size = max(SMALLEST_BLOCK, rounded(nbytes, SMALLEST_BLOCK))
        large = size > SMALL
        fitting = [one for one in self._free if one.large == large and one.nbytes >= size]
        block = min(fitting, key=lambda one: one.nbytes, default=None) or self._segment(size, large)
        self._free.discard(block)
        rest = block.nbytes - size
        if rest > SMALL if large else rest >= SMALLEST_BLOCK:
            self._split(block, size)
        block.free = False
        self.allocated += block.nbytes
        return block

    def _segment(self, size: int, large: bool) -> Block:
        nbytes = SMALL_SEGMENT
        if large:
            nbytes = LARGE_SEGMENT if size < OWN_SEGMENT else rounded(size, ROUND_SEGMENT)
        self.reserved += nbytes
        self.calls += 1
        self.most_reserved = max(self.most_reserved, self.reserved)
        return Block(nbytes, large)

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.nbytes - size, block.large, block, block.behind)
        if rest.behind is not None:
            rest.behind.before = rest
        block.behind, block.nbytes = rest, size
        self._free.add(rest)

    def free(self, block: Block) -> None:
        self.allocated -= block.nbytes
        block.free = True
        for first, second in ((block, block.behind), (block.before, block)):
            if first is not None and second is not None and first.free and second.free:
                self._free -= {first, second}
                first.nbytes += second.nbytes
                first.behind = second.behind
                if first.behind is not None:
                    first.behind.before = first
                block = first
        self._free.add(block)

    def empty_cache(self) -> None:
        for block in [one for one in self._free if one.before is None and one.behind is None]:
            self._free.discard(block)
            self.reserved -= block.nbytes
            self.calls += 1


class Watched(TorchDispatchMode):
    """While this mode is on, `allocator` is told of every storage on `device` that is made, and when it goes."""

    def __init__(self, allocator: CachingAllocator, device: torch.device) -> None:
        super().__init__()
        self.allocator, self.device = allocator, device
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(one, torch.Tensor) and one.device == self.device:
                self._note(one.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        place = storage._cdata
        if place in self._known or not storage.nbytes():
            return
        self._known.add(place)
        block = self.allocator.malloc(storage.nbytes())
        weakref.finalize(storage, self._gone, place, block)

    def _gone(self, place: int, block: Block) -> None:
        self._known.discard(place)
        self.allocator.free(block)


class NewTensors(TorchDispatchMode):
    """While entered, adds up what operators allocate; views of what they were given do not count.

    Attributes:
        largest, total: bytes of the largest new tensor, and of all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_address(one) for one in tree_leaves((args, kwargs)) if _is_real(one)}
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if _is_real(one) and _address(one) not in given:
                self.largest = max(self.largest, one.untyped_storage().nbytes())
                self.total += one.untyped_storage().nbytes()
        return out


def _is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_meta


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


LIBC = ctypes.CDLL(None, use_errno=True)
PROT_NONE = 0


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of `tensor` whose last byte lies in front of a forbidden page of memory."""
    tensor = tensor.contiguous()
    size = tensor.numel() * tensor.element_size()
    room = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
    memory = mmap.mmap(-1, room + mmap.PAGESIZE)
    at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if LIBC.mprotect(ctypes.c_void_p(at + room), mmap.PAGESIZE, PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    if not size:
        return tensor
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=room - size)
    copy = bytes_.view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
