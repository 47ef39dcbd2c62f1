"""The definition in readable torch: what every other backend is tested against. Runs everywhere and reads every page."""

import torch

from ...spec import PageSpec
from ..base import Backend
from .attention import paged_attention
from .pages import dense_side, write
from .selection import choose_pages


def load() -> Backend:
    """Return the backend."""
    return Backend("reference", paged_attention, write, dense_side, choose_pages)


def why_not(device: torch.device, spec: PageSpec) -> str | None:
    """Return None: there is nothing that it cannot read."""
    return None
