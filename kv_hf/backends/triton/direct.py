"""Launch compiled kernels without Triton's front end, which takes a hundred microseconds for as many arguments.

A kernel is compiled once for arguments of one kind and then launched with addresses in place of tensors: Triton's
launchers take integers for pointers as they are (backends/*/driver.py of 3.6 and 3.9). Whoever launches sees to it
that dtypes, strides (1, multiples of 16) and alignment are those that the kernel was compiled for. Knows nothing of
what kernels compute.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
import triton
from triton import knobs
from triton.runtime import driver

ALIGNED = 16  # bytes: Triton compiles anew for pointers that are no multiples of it

address = torch.Tensor.data_ptr


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` [any shape] as kernels are compiled for it: numbers of 8 bits as uint8."""
    return tensor if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8)


def interpreted(kernel: Any) -> bool:
    """Return whether `kernel` runs in Triton's interpreter."""
    return not isinstance(kernel, triton.JITFunction)


def current_stream(index: int) -> int:
    """Return the stream that a launch on GPU `index` goes to; it must be the current one."""
    stream: int = driver.active.get_current_stream(max(index, 0))
    return stream


def is_current(index: int) -> bool:
    """Return whether GPU `index` is the current one; negative: no GPU, which is no reason to change it."""
    return index < 0 or index == driver.active.get_current_device()


def is_capturing(index: int) -> bool:
    """Return whether launches on GPU `index` go into a CUDA graph."""
    return index >= 0 and torch.cuda.is_current_stream_capturing()


class Compiled:
    """A kernel compiled for arguments of one kind.

    Args:
        kernel: a jitted function whose compile-time arguments come last; arguments: the others, as tensors and
            numbers; constants: compile-time arguments by name; options: num_warps and the like.
    """

    __slots__ = ("function", "kernel", "metadata", "run", "tail")

    def __init__(
        self, kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], **options: Any
    ) -> None:
        self.kernel = kernel.run(*arguments, grid=(1, 1, 1), warmup=True, **constants, **options)
        self.run = self.kernel.run  # loads the code: may raise OutOfResources
        self.function, self.metadata = self.kernel.function, self.kernel.packed_metadata
        self.tail = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])

    def __call__(self, x: int, y: int, z: int, stream: int, *arguments: Any) -> None:
        """Launch x * y * z programs with addresses and numbers."""
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):  # a profiler's
            about = self.kernel.launch_metadata((x, y, z), stream, *arguments, *self.tail)
        else:
            about = enter = leave = None
        self.run(
            x, y, z, stream, self.function, self.metadata, about, enter, leave, *arguments, *self.tail
        )  # fmt: skip


class Workspace:
    """Room for partial results and counters of the kernels of one stream, which run one after another.

    All caches of a stream share it; it goes with the last of them. Kernels leave the counters zero.
    """

    __slots__ = ("__weakref__", "counters", "numbers")
    _known: "WeakValueDictionary[tuple[int, int], Workspace]" = WeakValueDictionary()

    def __init__(self, numbers: int, counters: int, where: torch.device) -> None:
        self.numbers = torch.empty(numbers, dtype=torch.float32, device=where)
        self.counters = torch.zeros(counters, dtype=torch.int32, device=where)

    @classmethod
    def of(cls, index: int, stream: int, where: torch.device) -> "Workspace":
        """Return the one of a stream of GPU `index`."""
        found = cls._known.get((index, stream))
        if found is None:
            found = cls._known[index, stream] = cls(0, 0, where)
        return found

    def reserve(self, numbers: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for float32 numbers [numbers or more] and int32 counters [counters or more] that are zero.

        Whoever launches a kernel keeps both until the kernel is launched.
        """
        if self.numbers.shape[0] < numbers:
            self.numbers = self.numbers.new_empty(numbers)
        if self.counters.shape[0] < counters:
            self.counters = self.counters.new_zeros(counters)
        return self.numbers, self.counters
