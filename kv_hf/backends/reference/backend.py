"""Registers the reference, which runs everywhere and reads every page."""

from ..base import Backend
from ..registry import register_backend
from .attention import paged_attention
from .dense import dense_side
from .pairs import seal_pair, write_pair
from .selection import choose_pages


def load() -> Backend:
    """Return the backend."""
    return Backend(
        "reference", paged_attention, write_pair, seal_pair, dense_side, choose_pages=choose_pages, reads_index=True,
    )  # fmt: skip


def register() -> None:
    """Register it as the last that "auto" tries."""
    register_backend("reference", load, priority=0)
