"""What the launches need to know of the device that tensors lie on. Call these through the module, which tests patch."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch

from .meta_params import HIP

RESERVED = 1024  # bytes of a multiprocessor's shared memory that CUDA keeps for each program


def target_isa(device: torch.device) -> int:
    """Return compute capability * 10 of an NVIDIA device, HIP for an AMD one, 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    if torch.version.hip:
        return HIP
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def shared_memory(device: torch.device) -> int | None:
    """Return the bytes of shared memory that one program may take there, or None where nothing limits it."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return int(properties.shared_memory_per_block)
    optin = getattr(
        properties, "shared_memory_per_block_optin", None
    )  # newer versions of torch have it
    return int(optin or properties.shared_memory_per_multiprocessor - RESERVED)


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the GPU of a tensor [any shape] the current one: Triton launches there, wherever the tensors lie."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
