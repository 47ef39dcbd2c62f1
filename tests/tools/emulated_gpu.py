"""A GPU whose kernels run: `pretend_gpu` with launches that ptx carries out on the memory of the tensors that they are given.

Everything between a tensor and a kernel is what runs on a GPU: kv_hf's plans and addresses, Triton's front end and its
compiler. In place of Triton's launcher, arguments are packed here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ptx
import torch
from fake_driver import FakeGpu, pretend_gpu
from triton.runtime.cache import get_cache_manager

from kv_hf.backends.triton import direct

MOST = (2**31 - 1, 65535, 65535)  # programs of each dimension of a grid


@contextmanager
def emulated_gpu(capability: int) -> Iterator[FakeGpu]:
    """Take the CPU for an NVIDIA GPU within the context, as pretend_gpu does, and run its kernels.

    Args:
        capability: compute capability * 10.
    Raises: AssertionError in the end, where nothing orders two accesses; PtxError where a GPU would fault.
    """
    hazards: list[str] = []
    blocks: dict[
        int, int
    ] = {}  # bytes of the storages whose tensors the next launch is given, by address

    def noted(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        blocks[storage.data_ptr()] = storage.nbytes()
        return tensor.data_ptr()

    def carry_out(source, metadata, grid: tuple[int, int, int], given: tuple[Any, ...]):
        if any(count > most for count, most in zip(grid, MOST, strict=True)):
            raise ptx.PtxError(f"{metadata.name}: CUDA refuses the grid {grid}")
        kernel = compiled(metadata.hash, metadata.name)
        numbers = packed(source, given)
        numbers += [0] * (len(kernel.params) - len(numbers))  # scratch, which no kernel here takes
        hazards.extend(ptx.launch(kernel, grid, metadata.shared, numbers, blocks))
        blocks.clear()

    with (
        patch.object(direct, "address", noted),
        pretend_gpu(capability, carry_out=carry_out) as gpu,
    ):
        yield gpu
    assert not hazards, "\n".join(hazards[:5])


@lru_cache(maxsize=64)
def compiled(digest: str, name: str) -> ptx.Kernel:
    """Return what Triton has compiled, out of its cache."""
    return ptx.Kernel(Path(get_cache_manager(digest).get_file(f"{name[:150]}.ptx")).read_text())


def packed(source, given):
    """Return the numbers that a kernel takes, as Triton's launcher hands them over.

    Raises: PtxError where they are not of the kind that the kernel was compiled for, which no GPU would notice.
    """
    numbers = []
    for place, kind, number in arguments(tuple(source.signature.values()), given, ()):
        why = ""
        if kind == "constexpr":
            constant = source.constants.get(place)
            if isinstance(constant, int | float | str) and number != constant:
                why = f"compiled as {constant}"
        else:
            numbers.append(number)
            multiples = [
                by for what, by in source.attrs.get(place, ()) if what == "tt.divisibility"
            ]
            if any(number % by for by in multiples):
                why = f"compiled for multiples of {multiples}"
            elif kind in ("i32", "i64") and abs(2 * number + 1) >= 1 << int(kind[1:]):
                why = f"no {kind}"
        if why:
            raise ptx.PtxError(f"{source.name}: argument {place} is {number}, and {why}")
    return numbers


def arguments(kinds, given, place: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], str, Any]]:
    """Yield place, kind and value of arguments, of which some are tuples of arguments."""
    for number, (kind, value) in enumerate(zip(kinds, given, strict=True)):
        if isinstance(kind, tuple):
            yield from arguments(kind, value, (*place, number))
        else:
            yield (*place, number), kind, value
