"""What the launches need to know of the device that tensors lie on."""

from contextlib import AbstractContextManager, nullcontext

import torch

from .variant import HIP


def target_isa(device: torch.device) -> int:
    """Return compute capability * 10 of an NVIDIA device, HIP for an AMD one, 0 for the interpreter."""
    if device.type != "cuda":
        return 0
    if torch.version.hip:
        return HIP
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU the current one: Triton launches there, wherever the tensors lie."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()
