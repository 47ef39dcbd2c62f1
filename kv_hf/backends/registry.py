"""Which backend runs where, and why not another. Compiles and computes nothing."""

import torch

from ..checks import check_choice
from ..config import AUTO, KERNELS, OTHER_KERNEL_WORDS
from ..errors import CacheOptionError
from ..notices import warn_once
from ..spec import LANES, ROWS, PageSpec
from . import cpu, reference, triton
from .base import Backend

# each has load() and why_not(device, spec); the best first
BACKENDS = dict(zip(KERNELS[1:], (triton, cpu, reference), strict=True))


def layout_for(device: torch.device) -> str:
    """Return the layout of pages on `device`: that of the compiled kernel which runs there."""
    return LANES if device.type == "cpu" else ROWS


def why_not(name: str, device: torch.device, spec: PageSpec) -> str | None:
    """Return why backend `name` cannot read such pages on `device`, or None when it can."""
    return BACKENDS[name].why_not(device, spec)


def load(name: str) -> Backend:
    """Return backend `name`; whether it can run is `why_not`'s to say."""
    return BACKENDS[name].load()


def choose(asked: str, device: torch.device, spec: PageSpec) -> Backend:
    """Return backend `asked`, or for "auto" the compiled one of the device, and else the reference; that is said once.

    Raises: CacheOptionError when a backend asked for by name cannot run here, with the reason.
    """
    check_choice("kernel", asked, KERNELS, OTHER_KERNEL_WORDS)
    best = asked if asked != AUTO else "c" if device.type == "cpu" else "triton"
    reason = why_not(best, device, spec)
    if reason is None:
        return load(best)
    if asked != AUTO:
        raise CacheOptionError(f"kernel={asked!r} cannot run here: {reason}")
    warn_once(
        f"kernel {best} {reason}",
        f"Paged attention runs as 'reference', slower than {best!r} would: {reason}",
    )
    return load("reference")
