"""Which implementation of the kernels runs where, and why not another. Compiles and computes nothing."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ..checks import check_choice, listed
from ..config import KERNEL_CHOICES
from ..errors import CacheOptionError
from ..notices import warn_once
from ..spec import LANES, ROWS, PageSpec
from . import pairs, reference, sdpa
from .cpu import library
from .dense import dense_side
from .inputs import PagedKV

COMPILED = ("triton", "c")  # which read the formats that have a native_number
NAMES = KERNEL_CHOICES[1:]  # without "auto"; the order in which "auto" tries them


@dataclass(frozen=True)
class Kernel:
    """One implementation: its functions do what those of the same meaning in `reference` do.

    Attributes:
        dense: writes one side of a layer out, as `dense.dense_side` does.
        longest: queries up to which reading the pages is better than writing one layer out for SDPA.
        write_pair, seal_pair: as pairs.write_pair and pairs.seal_pair without their first arguments; made of `append`
            and `seal` where none are given.
    """

    name: str
    attend: Callable[..., torch.Tensor]
    seal: Callable[..., torch.Tensor]
    append: Callable[..., None] = reference.append_tokens
    dense: Callable[[PagedKV, str], torch.Tensor] = dense_side
    longest: int = 16
    write_pair: Callable[..., None] = None  # type: ignore[assignment]
    seal_pair: Callable[..., None] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.write_pair is None:
            write = partial(pairs.write_pair, self.append, self.seal)
            object.__setattr__(self, "write_pair", write)
        if self.seal_pair is None:
            object.__setattr__(self, "seal_pair", partial(pairs.seal_pair, self.seal))


def layout_for(device: torch.device) -> str:
    """Return the layout of pages whose kernels run on `device`."""
    return LANES if device.type == "cpu" else ROWS


def why_not(name: str, device: torch.device, spec: PageSpec) -> str | None:
    """Return why implementation `name` cannot read such pages on `device`, or None when it can."""
    if name == "reference":
        return None
    if name in COMPILED:
        unread = [side for side in spec.sides if side.scheme.format.native_number is None]
        if unread:
            formats = dict.fromkeys(side.scheme.name for side in unread)
            return (
                f"no compiled kernel reads the format {listed(repr(one) for one in formats)} of "
                f"{listed(side.side for side in unread)}"
            )
    if name == "triton":
        from .triton import support  # which imports no triton

        return support.why_not(device, spec.keys.dtype, spec)
    if device.type != "cpu":
        return f"it runs on the CPU, the pages are on {device}"
    if name == "c":
        from .cpu.arguments import unsupported

        return library.missing() or unsupported(spec)
    if spec.is_latent:
        return "SDPA cannot read one latent as key and value"
    doubles = [side.side for side in spec.sides if side.dtype == torch.float64]
    return f"{doubles[0]} of torch.float64 are read by the reference only" if doubles else None


def load(name: str) -> Kernel:
    """Return implementation `name`; whether it can run is `why_not`'s to say."""
    if name == "triton":
        from .triton import dense_launch, launch, write_pair
        from .triton import write as one_sided

        return Kernel(
            name,
            launch.paged_attention,
            one_sided.seal_pages,
            one_sided.append_tokens,
            dense=dense_launch.dense_side,
            longest=64,
            write_pair=write_pair.write_pair,
            seal_pair=write_pair.seal_pair,
        )
    if name == "c":
        from .cpu import decode, seal, write

        return Kernel(
            name,
            decode.paged_attention,
            seal.seal_pages,
            longest=sys.maxsize,
            write_pair=write.write_pair,
            seal_pair=write.seal_pair,
        )
    if name == "sdpa":
        return Kernel(name, sdpa.paged_attention, reference.seal_pages)
    return Kernel("reference", reference.paged_attention, reference.seal_pages)


def choose(asked: str, device: torch.device, spec: PageSpec) -> Kernel:
    """Return implementation `asked`, or for "auto" the best that can run; a lesser one is said once, with the reason.

    Raises: CacheOptionError when an implementation asked for by name cannot run here, with the reason.
    """
    check_choice("kernel", asked, KERNEL_CHOICES)
    if asked != "auto":
        reason = why_not(asked, device, spec)
        if reason:
            raise CacheOptionError(f"kernel={asked!r} cannot run here: {reason}")
        return load(asked)
    best = "c" if device.type == "cpu" else "triton"
    reasons = {name: why_not(name, device, spec) for name in NAMES}
    name = next(name for name, reason in reasons.items() if reason is None)
    if name != best:
        warn_once(
            f"kernel {best} {reasons[best]}",
            f"Paged attention runs as {name!r} in torch, slower than the compiled kernel {best!r} would: "
            f"{reasons[best]}",
        )
    return load(name)
