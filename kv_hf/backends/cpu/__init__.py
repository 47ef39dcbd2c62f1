"""The compiled CPU kernel: C behind ctypes. The only place that knows of a C library; loads none until it is asked for."""

import sys

import torch

from ...spec import PageSpec
from ..base import Backend
from ..compiled_formats import unread_formats
from ..reference.dense import dense_side
from . import arguments, choose, decode, library, write


def load() -> Backend:
    """Return the backend."""
    return Backend(
        "c",
        decode.paged_attention,
        write.write_pair,
        write.seal_pair,
        dense_side,
        choose.choose_pages,
        max_queries=sys.maxsize,
    )


def why_not(device: torch.device, spec: PageSpec) -> str | None:
    """Return why the C kernel cannot read such pages on `device`, or None."""
    unread = unread_formats(spec)
    if unread:
        return unread
    if device.type != "cpu":
        return f"it runs on the CPU, the pages are on {device}"
    return library.missing() or arguments.unsupported(spec)
