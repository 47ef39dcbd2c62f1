"""Memory that ends where a page of memory begins that nobody may read or write: one byte too far ends the process."""

import ctypes
import mmap

import torch

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
