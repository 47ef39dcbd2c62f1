"""How tensors are made that outlive a forward, and how small ones of a step go to a device without waiting for it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def persistent_tensors() -> Iterator[None]:
    """Make ordinary tensors without gradients in every mode of the caller: those made in inference mode could not be written to later."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_host(device: torch.device | str) -> bool:
    """Say whether numbers on `device` can be read without waiting for anything."""
    return torch.device(device).type == "cpu"


def is_recorded(device: torch.device) -> bool:
    """Say whether kernels on `device` are recorded as a CUDA graph now, and not run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` [any shape], which lies on the CPU or on `device`, on `device`.

    A copy from pageable memory to a GPU makes the host wait; one from pinned memory is queued. torch keeps the pinned
    block until the copy is done.
    """
    if tensor.device == device:
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def give_back_replaced() -> None:
    """Return memory that torch keeps unused to the driver, once storage has grown on a GPU.

    The old tensors have no room for what replaces them the next time: torch's allocator would keep all that there ever were.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
