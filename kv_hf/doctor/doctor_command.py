"""What the doctor finds on this machine, and the command `kv-hf doctor` that prints it."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch.utils import collect_env

from ..backends.cpu import library
from ..checks import usable_device
from ..errors import CacheOptionError, KVCacheError
from ..printable import tell, tell_error
from ..text_table import text_width, wrap
from ..version import __version__
from .kernels import PREFIX, FormatReport, Subject, paged_names, report_formats, report_model
from .self_test import BROKEN, NOTE, OK, SelfTest, Trial, self_test

WARNING = "warning"  # may work, but slowly, or nobody has tried
TESTED = (
    "5.17.0",
    "5.23.0",
    "5.24.0",
)  # versions of transformers that the whole test suite ran with
PACKAGES = ("torch", "transformers", "safetensors", "accelerate", "triton")
VARIABLES = ("KV_HF_", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
SYMBOLS = {OK: "[ok]", NOTE: "[--]", WARNING: "[!!]", BROKEN: "[XX]"}
# first column and the rest of a line; a heading has no first column
Lines = Iterator[tuple[str, str]]


class Finding(NamedTuple):
    """One thing that was looked at: "ok", "note" (absent, which is no fault), "warning" or "broken", and why in words."""

    name: str
    status: str
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """All findings.

    Attributes:
        subject: what pages were looked at.
        environment: versions, devices, the C kernel and variables.
        formats: the kernel of every format.
        layers: (layers, how they are cached) of the model, where one is named.
        self_test: its results, or None where it was left out.
    """

    subject: Subject
    environment: list[Finding]
    formats: list[FormatReport]
    layers: list[tuple[str, str]]
    self_test: SelfTest | None = None

    @property
    def broken(self) -> list[str]:
        """Return the broken parts, in words; nothing if all is well."""
        found = [f"{one.name}: {one.detail}" for one in self.environment if one.status == BROKEN]
        for one in self.self_test.failed if self.self_test else ():
            found.append(f"self-test: {one.format}, {one.what}, {one.kernel}: {one.detail}")
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            **asdict(self),
            "healthy": not self.broken,
            "broken": self.broken,
            "formats": [{**vars(one), "others": dict(one.others)} for one in self.formats],
            "environment": [one._asdict() for one in self.environment],
        }


def examine(subject: Subject) -> Diagnosis:
    """Look at everything but the self-test, which may take its time and runs kernels.

    Raises: CacheOptionError for sizes that no cache has, a device that torch does not see, or a model without config.
    """
    formats = report_formats(subject)
    layers = report_model(subject.model) if subject.model is not None else []
    found = [*environment(), check_device(subject.device, formats)]
    return Diagnosis(subject, found, formats, layers)


def environment() -> list[Finding]:
    """Return versions, devices, the C kernel and the variables that change any of it."""
    run = collect_env.run
    shown = {
        "python": sys.version,
        "system": collect_env.get_os(run),
        "cpu": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads of torch",
        "gpu": collect_env.get_gpu_info(run) or "none",
        "gpu driver": collect_env.get_nvidia_driver_version(run) or "none",
    }
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            shown[name] = value
    return [
        Finding("kv_hf", OK, f"{__version__}, in {Path(__file__).parents[1]}"),
        *map(check_package, PACKAGES),
        check_c_kernel(),
        *(Finding(name, OK, " ".join(detail.split())) for name, detail in shown.items()),
    ]


def check_package(name: str) -> Finding:
    """Return the version of an installed package; a transformers that is newer than the tested ones is a warning."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return Finding(name, NOTE, "not installed")
    if name == "transformers" and Version(found) > Version(TESTED[-1]):
        return Finding(name, WARNING, f"{found} is newer than kv_hf was tested with: {TESTED[-1]}")
    return Finding(name, OK, found)


def check_c_kernel() -> Finding:
    """Say whether the C kernel is there: a warning where it was not compiled, broken where it was and cannot be used."""
    reason = library.missing()
    if reason is None:
        return Finding("C kernel", OK, f"{library.ISA_NAMES[library.isa()]}, {library.threads()}")
    turned_off = os.environ.get(library.ISA_VARIABLE) == "none"
    status = NOTE if turned_off else BROKEN if library.compiled_files() else WARNING
    return Finding("C kernel", status, reason)


def check_device(device: torch.device, formats: list[FormatReport]) -> Finding:
    """Say whether a compiled kernel reads any format on `device`; a CUDA device without one is broken."""
    taken = sorted({str(one.kernel) for one in formats} & {"c", "triton"})
    status = BROKEN if device.type == "cuda" and "triton" not in taken else OK
    return Finding(f"device {device}", status, f"compiled kernels: {', '.join(taken) or 'none'}")


def described(diagnosis: Diagnosis) -> Lines:
    """Yield the lines of all sections but the self-test."""
    subject, why = diagnosis.subject, dict[tuple[str, str], None]()
    for one in diagnosis.environment:
        yield f"{SYMBOLS[one.status]} {one.name:<14}", one.detail
    heads = f"head_dim {subject.head_dim}"
    if subject.latent is not None:
        rank, rope = subject.latent
        heads = f"latents of {rank} and RoPE keys of {rope}"
    sizes = f"{_name(subject.dtype)}, {heads}, page_size {subject.page_size}"
    yield "", f"Pages on {subject.device}: {sizes}"
    for report in diagnosis.formats:
        name = PREFIX * (report.format in paged_names()) + report.format
        yield f"  {name:<13}", report.kernel or "none"
        for kernel, reason in report.others:
            why[kernel, reason or "can run, but a faster one is there"] = None
    yield "", "Why not another kernel:"
    yield from ((f"  {kernel:<13}", reason) for kernel, reason in sorted(why))
    if diagnosis.layers:
        yield "", f"Layers of {subject.model}:"
    yield from ((f"  {layers:<13}", how) for layers, how in diagnosis.layers)


def tested(result: SelfTest) -> Lines:
    """Yield the lines of the self-test: one for each format, and one for each trial that is not ok."""
    yield "", "Self-test, against the reference:"
    for name in dict.fromkeys(one.format for one in result.trials):
        trials = [one for one in result.trials if one.format == name]
        for status in (OK, BROKEN):
            said = [_said(one) for one in trials if one.status == status]
            if said:
                yield f"  {SYMBOLS[status]} {name:<25}", ", ".join(said)
    left = [one.detail for one in result.trials if one.status == NOTE]
    if left:
        yield f"  {SYMBOLS[NOTE]}", f"{len(left)} trials left out: {left[0]}; see --seconds"
    yield "  ", f"{len(result.trials) - len(left)} trials in {result.seconds:.1f} s"


def _said(one: Trial) -> str:
    return f"{one.what}, {one.kernel}: {one.detail}" if one.detail else f"{one.what} {one.kernel}"


def verdict(diagnosis: Diagnosis) -> Lines:
    """Yield what is broken, or that nothing is."""
    broken = diagnosis.broken
    yield "", f"{len(broken)} broken:" if broken else "Nothing is broken."
    yield from (("  ", line) for line in broken)


def _name(kind: object) -> str:
    return str(kind).removeprefix("torch.")


def _tell(lines: Lines) -> None:
    """Print lines that fit the terminal, at once: a kernel that is tried next may crash."""
    for first, rest in lines:
        line = f"{first} {rest}" if first else rest
        shown = "\n".join(wrap(line, text_width(), len(first) + 1))
        tell(shown if first else f"\n{shown}", flush=True)


def diagnose(args: argparse.Namespace, prog: str) -> int:
    """Print a diagnosis; return the exit code: 0 where nothing is broken, 1 where something is, 2 for bad arguments.

    Args:
        args: of `kv-hf doctor`, as kv_hf_cli.py reads them.
        prog: what errors begin with.
    """
    try:
        if not args.seconds > 0:
            raise CacheOptionError(f"--seconds must be more than 0, got {args.seconds:g}")
        subject = Subject.of(
            torch.device(usable_device(args.device)),
            model=args.model,
            dtype=args.dtype and getattr(torch, args.dtype),
            head_dim=args.head_dim,
            page_size=args.page_size,
        )
        diagnosis = examine(subject)
    except KVCacheError as error:
        tell_error(prog, error)
        return 2
    show = (lambda lines: None) if args.json else _tell
    show(described(diagnosis))
    if not args.quick:
        result = self_test(subject, args.seconds)
        diagnosis = replace(diagnosis, self_test=result)
        show(tested(result))
    show(verdict(diagnosis))
    if args.json:
        tell(json.dumps(diagnosis.as_dict(), indent=2, default=_name))
    return int(bool(diagnosis.broken))
