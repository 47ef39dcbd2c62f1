"""The way from a layer's pages to the attention function while torch.compile traces a forward.

A lazy handle cannot be traced. A traced layer returns a pair of hollow tensors instead (the right shape, nan
everywhere, no memory) and leaves its pages here; the attention function, which is called next, takes them if it is
given that very pair. Whoever else reads a hollow tensor gets nan, not a plausible number.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch

from ..backends.base import Backend
from ..backends.inputs import PagedKV
from ..errors import UnsupportedModelError


@dataclass(frozen=True)
class TracedView:
    """The pages of the layer that was updated last, and the pair that stands for them."""

    kv: PagedKV
    kernel: Backend
    keys: torch.Tensor
    values: torch.Tensor
    table: Any = None
    is_first: bool = False
    sliding_window: None = None


CHANGED = (
    "this model changes keys or values between its cache and its attention, or computes attention by itself, so that a "
    "compiled forward cannot read pages; leave max_length out of the cache's options, or pass disable_compile=True"
)


class _Waiting(threading.local):
    view: TracedView | None = None


_waiting = _Waiting()


def hand_over(view: TracedView) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave `view` for the attention function; return the pair [rows, num_kv_heads, columns, head_dim] that stands for it."""
    _waiting.view = view
    return view.keys, view.values


def forget() -> None:
    """Drop a view that nobody took: a forward stopped, or left compiled code, before its attention."""
    _waiting.view = None


def check_taken() -> None:
    """Raise UnsupportedModelError where attention did not take the view of the layer before."""
    if _waiting.view is not None:
        raise UnsupportedModelError(CHANGED)


def taken(keys: torch.Tensor, values: torch.Tensor) -> TracedView | None:
    """Return the view that was left with this pair [rows, num_kv_heads, columns, head_dim], or None when no traced layer left one.

    Raises: UnsupportedModelError when the pair given is made of the one that stands for it.
    """
    view = _waiting.view
    if view is None:
        return None
    _waiting.view = None
    if keys is view.keys and values is view.values:
        return view
    if keys.shape[2] != view.keys.shape[2]:
        return None  # another cache's keys: the view was left by a forward that never got here
    raise UnsupportedModelError(CHANGED)
