"""Trials of kernels: every format sealed and attended to by every kernel that can, against the reference."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..backends.base import AttentionCall
from ..backends.cpu.library import ISA_NAMES, isa
from ..backends.dispatch import paged_attention
from ..backends.error_bound import Rounding
from ..backends.registry import load
from ..spec import PageSpec
from .findings import BROKEN, NOTE, OK
from .kernels import FormatReport, spec_of
from .random_pages import KV_HEADS, Case, attended, empty_fields, make_case, moved

RANK, ROPE = 512, 64  # of latents, where no model says otherwise: DeepSeek's


@dataclass(frozen=True)
class Trial:
    """The result of one trial.

    Attributes:
        format: a format of pages ("paged_int4"), of latents ("latents in int4"), or the model and cache that generate.
        what: what was tried: "seal", "attend" or "generate".
        kernel: the implementation that did it.
        status: OK, BROKEN, or NOTE where it was left out.
        detail: why, where it is not OK.
        error: largest difference, or None where nothing was compared.
        bound: largest difference that rounding explains.
    """

    format: str
    what: str
    kernel: str
    status: str
    detail: str = ""
    error: float | None = None
    bound: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, for JSON, which knows no nan."""
        fields = asdict(self)
        for name in ("error", "bound"):
            if fields[name] is not None and not math.isfinite(fields[name]):
                fields[name] = None
        return fields


@dataclass(frozen=True)
class Planned:
    """A trial to come; `run` returns (detail of a failure or "", error, bound)."""

    format: str
    what: str
    kernel: str
    run: Callable[[], tuple[str, float | None, float | None]]

    def tried(self) -> Trial:
        """Run it; whatever it raises is its result."""
        try:
            detail, error, bound = self.run()
        except Exception as raised:  # a broken kernel may raise anything
            lines = str(raised).splitlines() or [""]
            detail = f"failed with {type(raised).__name__}: {lines[0]}"
            return Trial(self.format, self.what, self.kernel, BROKEN, detail)
        status = BROKEN if detail else OK
        return Trial(self.format, self.what, self.kernel, status, detail, error, bound)

    def left_out(self, why: str) -> Trial:
        """Return the result of a trial that was not run."""
        return Trial(self.format, self.what, self.kernel, NOTE, why)


def plan_trials(
    reports: list[FormatReport],
    device: torch.device,
    dtype: torch.dtype,
    page_size: int,
    key_dim: int,
    value_dim: int,
    latent: bool,
) -> Iterator[tuple[bool, Planned]]:
    """Yield (whether "auto" takes this kernel, trial) for all formats that can be stored and kernels that can run."""
    for report in reports:
        if report.kernel is None:
            continue
        heads = 1 if latent else KV_HEADS
        spec = spec_of(report.format, device, dtype, page_size, key_dim, value_dim, latent, heads)
        name = f"latents in {report.format}" if latent else f"paged_{report.format}"
        case = _Shared(spec)
        able = [report.kernel, *(other for other, reason in report.others if reason is None)]
        for kernel in able:
            best = kernel == report.kernel
            if load(kernel).seal_pair is not load("reference").seal_pair:
                yield best, Planned(name, "seal", kernel, _Sealing(case, kernel, device))
            yield best, Planned(name, "attend", kernel, _Attending(case, kernel, device))


class _Shared:
    """A case that is made when the first trial asks for it."""

    def __init__(self, spec: PageSpec) -> None:
        self.spec = spec
        self._made: Case | None = None

    def get(self) -> Case:
        """Return the case."""
        if self._made is None:
            self._made = make_case(self.spec)
        return self._made


@dataclass(frozen=True)
class _Sealing:
    """Sealed pages are the same bytes, whoever seals them (see quant/codec.py)."""

    case: _Shared
    kernel: str
    device: torch.device

    def __call__(self) -> tuple[str, float | None, float | None]:
        case = self.case.get()
        spec, rights = case.kv.spec, (case.kv.key_pages, case.kv.value_pages)
        tokens = tuple(one.to(self.device) for one in case.tokens)
        sides = [
            {n: t.to(self.device) for n, t in empty_fields(side, right["codes"].shape[0]).items()}
            for side, right in zip(spec.sides, rights, strict=True)
        ]
        damaged = torch.zeros((), dtype=torch.uint8, device=self.device)
        seal_pair = load(self.kernel).seal_pair
        seal_pair(tokens, case.jobs.to(self.device), tuple(sides), spec, damaged, {})
        if bool(damaged):
            names = " or ".join(side.side for side in spec.sides)
            return f"it calls finite {names} not finite", None, None
        differing = total = 0
        for fields, right in zip(sides, rights, strict=True):
            for name, expected in right.items():
                got = fields[name].cpu().contiguous().view(torch.uint8)
                differing += int((got != expected.contiguous().view(torch.uint8)).sum())
                total += expected.nbytes
        if differing:
            return f"{differing} of {total} bytes differ from the reference's", differing, 0.0
        return "", 0.0, 0.0


@dataclass(frozen=True)
class _Attending:
    """Attention errs by no more than rounding explains (see backends/error_bound.py)."""

    case: _Shared
    kernel: str
    device: torch.device

    def __call__(self) -> tuple[str, float | None, float | None]:
        case = self.case.get()
        spec = case.kv.spec
        integers = self.kernel == "c" and ISA_NAMES[isa()] == "AVX-512 VNNI"
        rounding = Rounding.of(self.kernel, case.query.dtype, integers)
        expected, bounds = attended(case, rounding)
        out = paged_attention(
            AttentionCall(
                case.query.to(self.device), moved(case.kv, self.device), spec.query_dim**-0.5
            ),
            self.kernel,
        )
        if out.shape != expected.shape:
            shapes = f"{list(out.shape)}, not {list(expected.shape)}"
            return f"its result has the shape {shapes}", None, None
        errors = (out.cpu().double() - expected).abs()
        worst = int((errors / bounds).nan_to_num(nan=float("inf")).argmax())
        error, bound = float(errors.flatten()[worst]), float(bounds.flatten()[worst])
        if not error <= bound:  # nan too
            return f"differs from the reference by {error:.2g}, more than {bound:.2g}", error, bound
        return "", error, bound
