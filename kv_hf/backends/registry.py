"""Which backend runs where, and why not another. Compiles and computes nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from ..backend_names import (
    AUTO,
    OTHER_WORDS,
    add_backend_name,
    auto_names,
    backend_names,
    kernel_choices,
    remove_backend_name,
)
from ..checks import check_choice
from ..errors import CacheOptionError
from ..notices import warn_once
from ..spec import ROWS, PageSpec
from .base import AttentionCall, Backend

Place = Literal["cpu", "gpu", "any"]
WhyNot = Callable[[torch.device, PageSpec], str | None]


@dataclass(frozen=True)
class _Entry:
    """What `register_backend` was given."""

    load: Callable[[], Backend]
    why_not: WhyNot
    runs_on: Place
    layout: str | None


LAST = "reference"  # what "auto" comes to in the end

_entries: dict[str, _Entry] = {}


def register_backend(
    name: str,
    load: Callable[[], Backend],
    *,
    why_not: WhyNot = lambda device, spec: None,
    priority: float | None = None,
    runs_on: Place = "any",
    layout: str | None = None,
) -> None:
    """Let caches take a backend under `name`: `cache_config={"kernel": name}`, and by "auto" where it has a priority.

    Args:
        load: makes the backend; called when a cache takes it, so that heavy imports wait until then.
        why_not: returns why the backend cannot read such pages on a device, or None when it can. Imports little:
            it is asked for every cache.
        priority: "auto" takes the backend of the highest priority that can run (triton 300, c 200, sdpa 100,
            reference 0). None: the backend has to be asked for by name.
        runs_on: "cpu", "gpu" (every other device) or "any".
        layout: the layout of pages that the backend needs ("lanes" or "rows", see spec.py). Pages on a device are laid
            out for the backend of the highest priority that runs there and names a layout. None: reads any.
    Raises: CacheOptionError for a name that is taken or not a name.
    """
    if not isinstance(name, str) or not name.isidentifier() or name == AUTO:
        raise CacheOptionError(
            f"name of a backend must be an identifier other than 'auto', got {name!r}"
        )
    if name in _entries:
        raise CacheOptionError(
            f"name of a backend must be a new one, and {name!r} is registered; choose another, or call "
            "unregister_backend first"
        )
    _entries[name] = _Entry(load, why_not, runs_on, layout)
    add_backend_name(name, priority)


def unregister_backend(name: str) -> None:
    """Take a registered backend back; caches that have it keep it.

    Raises: CacheOptionError for an unknown name, and for "reference", which reads the pages that no other backend reads.
    """
    check_choice("name", name, backend_names())
    if name == LAST:
        raise CacheOptionError(
            f"name must not be {name!r}: this backend reads the pages that no other backend reads"
        )
    del _entries[name]
    remove_backend_name(name)


def layout_for(device: torch.device) -> str:
    """Return the layout of pages on `device`: that of the best backend which runs there and names one."""
    for name in auto_names():
        entry = _entries[name]
        if entry.layout is not None and entry.runs_on in (_place(device), "any"):
            return entry.layout
    return ROWS


def _place(device: torch.device) -> Place:
    return "cpu" if device.type == "cpu" else "gpu"


def why_not(name: str, device: torch.device, spec: PageSpec) -> str | None:
    """Return why backend `name` cannot read such pages on `device`, or None when it can."""
    return _entries[name].why_not(device, spec)


def load(name: str) -> Backend:
    """Return backend `name`; whether it can run is `why_not`'s to say."""
    return _entries[name].load()


def chooser(
    backend: Backend, by_index: bool = False
) -> Callable[[AttentionCall], tuple[torch.Tensor, torch.Tensor]]:
    """Return what chooses the pages that a step of `backend` reads: its own function, or the reference's.

    Args:
        by_index: whether the pages live outside, so that a part of their keys alone is there.
    Returns: a function that returns a block table [rows, width] and the pages of each row [rows].
    """
    own = backend.choose_pages
    if by_index and own is not None and not backend.reads_index:
        warn_once(
            f"choice by index {backend.name}",
            f"{backend.name!r} does not choose among pages that live outside of the device: 'reference' does it for read_tokens, "
            "read_share and read_top_p, slower",
        )
        own = None
    own = own or load("reference").choose_pages
    assert own is not None
    return own


def choose(asked: str, device: torch.device, spec: PageSpec) -> Backend:
    """Return backend `asked`, or for "auto" the best that can run; a lesser one is said once, with the reason.

    Raises: CacheOptionError when a backend asked for by name cannot run here, with the reason.
    """
    check_choice("kernel", asked, kernel_choices(), OTHER_WORDS)
    if asked != AUTO:
        reason = why_not(asked, device, spec)
        if reason:
            raise CacheOptionError(f"kernel={asked!r} cannot run here: {reason}")
        return load(asked)
    reasons = {name: why_not(name, device, spec) for name in auto_names()}
    name = next(name for name, reason in reasons.items() if reason is None)
    best = next(name for name in reasons if _entries[name].runs_on in (_place(device), "any"))
    if name != best:
        warn_once(
            f"kernel {best} {reasons[best]}",
            f"Paged attention runs as {name!r}, slower than {best!r} would: {reasons[best]}",
        )
    return load(name)
