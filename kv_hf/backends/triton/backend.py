"""Registers the Triton kernels; imports no triton until they are loaded."""

import torch

from ...spec import ROWS, PageSpec
from ..base import Backend
from ..compiled_formats import unread_formats
from ..registry import register_backend
from . import support


def load() -> Backend:
    """Return the backend; imports triton."""
    from . import dense_launch, launch, selection_launch, write_pair

    return Backend(
        "triton",
        launch.paged_attention,
        write_pair.write_pair,
        write_pair.seal_pair,
        dense_launch.dense_side,
        max_queries=64,
        choose_pages=selection_launch.choose_pages,
        reads_index=True,
    )


def why_not(device: torch.device, spec: PageSpec) -> str | None:
    """Return why the Triton kernels cannot read such pages on `device`, or None."""
    return unread_formats(spec) or support.why_not(device, spec.keys.dtype, spec)


def register() -> None:
    """Register it as the first that "auto" tries."""
    register_backend("triton", load, why_not=why_not, priority=300, runs_on="gpu", layout=ROWS)
