"""The Triton kernels. Only this file and `support` may be imported without Triton."""

import torch

from ...spec import PageSpec
from ..base import Backend, unread_formats
from . import support


def load() -> Backend:
    """Return the backend; imports triton."""
    from . import decode, pages, selection

    return Backend(
        "triton",
        decode.paged_attention,
        pages.write,
        pages.dense_side,
        selection.choose_pages,
        max_queries=64,
    )


def why_not(device: torch.device, spec: PageSpec) -> str | None:
    """Return why the Triton kernels cannot read such pages on `device`, or None."""
    return unread_formats(spec) or support.why_not(device, spec)
