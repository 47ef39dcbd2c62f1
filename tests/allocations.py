"""Memory, watched: the bytes of new tensors, and tensors with a forbidden page behind."""

import ctypes
import mmap
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
