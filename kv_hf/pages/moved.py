"""Small tensors of a step on their way to a device, without waiting for it."""

import torch


def is_host(device: torch.device | str) -> bool:
    """Say whether numbers on `device` can be read without waiting for anything."""
    return torch.device(device).type == "cpu"


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` [any shape], which lies on the CPU, on `device`.

    A copy from pageable memory to a GPU makes the host wait; one from pinned memory is queued. torch keeps the pinned
    block until the copy is done.
    """
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
