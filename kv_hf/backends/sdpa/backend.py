"""Registers attention through SDPA: for CPUs where no kernel was compiled."""

from dataclasses import replace

import torch

from ...spec import PageSpec
from ..base import Backend
from ..reference import backend as reference
from ..registry import register_backend
from . import attention


def load() -> Backend:
    """Return the backend: pages are written as the reference writes them."""
    return replace(reference.load(), name="sdpa", attend=attention.paged_attention)


def why_not(device: torch.device, spec: PageSpec) -> str | None:
    """Return why SDPA cannot read such pages on `device`, or None."""
    if device.type != "cpu":
        return f"it runs on the CPU, the pages are on {device}"
    if spec.is_latent:
        return "SDPA cannot read one latent as key and value"
    doubles = [side.side for side in spec.sides if side.dtype == torch.float64]
    return f"{doubles[0]} of torch.float64 are read by the reference only" if doubles else None


def register() -> None:
    """Register it."""
    register_backend("sdpa", load, why_not=why_not, priority=100, runs_on="cpu")
