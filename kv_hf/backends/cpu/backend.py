"""Registers the compiled C kernel; loads no library until it is asked for."""

import sys

import torch

from ...spec import LANES, PageSpec
from ..base import Backend
from ..compiled_formats import unread_formats
from ..reference.dense import dense_side
from ..registry import register_backend
from . import choose, decode, library, write
from .arguments import unsupported


def load() -> Backend:
    """Return the backend."""
    return Backend(
        "c",
        decode.paged_attention,
        write.write_pair,
        write.seal_pair,
        dense_side,
        max_queries=sys.maxsize,
        choose_pages=choose.choose_pages,
        reads_index=True,
    )


def why_not(device: torch.device, spec: PageSpec) -> str | None:
    """Return why the C kernel cannot read such pages on `device`, or None."""
    unread = unread_formats(spec)
    if unread:
        return unread
    if device.type != "cpu":
        return f"it runs on the CPU, the pages are on {device}"
    return library.missing() or unsupported(spec)


def register() -> None:
    """Register it."""
    register_backend("c", load, why_not=why_not, priority=200, runs_on="cpu", layout=LANES)
