"""Requirements, the C kernel and the chosen device: broken, absent or well."""

import os
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from packaging.requirements import Requirement

from ..backends.cpu import library
from ..backends.registry import why_not
from ..user_dir import user_dir
from .environment import home_problem
from .findings import BROKEN, NOTE, OK, WARNING, Finding
from .kernels import spec_of

OPTIONAL = ("triton", "accelerate")  # of the extras: what kv_hf itself uses where it is there


def check_requirements() -> list[Finding]:
    """Compare the installed packages with what kv_hf was packaged to need; optional ones only where they are there."""
    try:
        lines = requires("kv_hf") or []
    except PackageNotFoundError:
        return [Finding("requirements", NOTE, "kv_hf is not installed as a package, so none known")]
    found: dict[str, Finding] = {}
    for line in lines:
        needed = Requirement(line)
        optional = needed.marker is not None and "extra" in str(needed.marker)
        if optional and needed.name not in OPTIONAL:
            continue
        asked = f"{needed.name}{needed.specifier}"
        try:
            installed = version(needed.name)
        except PackageNotFoundError:
            status = NOTE if optional else BROKEN
            detail = f"not installed; {'optional' if optional else 'needed'}: {asked}"
            found.setdefault(needed.name, Finding(needed.name, status, detail))
            continue
        fits = needed.specifier.contains(installed, prereleases=True)
        status = OK if fits else BROKEN
        detail = f"{installed}, {'as needed' if fits else 'but needed is'}: {asked}"
        if needed.name not in found or not fits:
            found[needed.name] = Finding(needed.name, status, detail)
    return list(found.values())


def check_c_kernel() -> Finding:
    """Say whether the C kernel is there: a warning where it was not compiled, broken where it was and cannot be used."""
    reason = library.missing()
    if reason is None:
        chosen = library.ISA_NAMES[library.isa()]
        return Finding("C kernel", OK, f"loaded, {chosen}, {library.threads()}")
    if os.environ.get(library.ISA_VARIABLE) == "none":
        return Finding("C kernel", NOTE, reason)
    return Finding("C kernel", BROKEN if library.compiled_files() else WARNING, reason)


def check_home() -> Finding:
    """Say whether what is made once can be kept: converted models, texts sampled from models."""
    reason = home_problem()
    if reason is None:
        return Finding("KV_HF_HOME", OK, "can be written to")
    return Finding(
        "KV_HF_HOME", WARNING, f"{user_dir()}, {reason}: nothing that is made once is kept"
    )


def check_device(device: torch.device) -> Finding:
    """Say whether the compiled kernels for `device` can run on it, with sizes that they all take."""
    name = f"device {device}"
    if device.type == "cpu":
        if torch.cuda.is_available():
            return Finding(name, OK, "chosen, though torch sees a GPU")
        return Finding(name, OK, "torch sees no GPU")
    spec = spec_of("int4", device, torch.bfloat16, 64, 128, 128, latent=False)
    reason = why_not("triton", device, spec)
    if reason is None:
        return Finding(name, OK, "the Triton kernels can run on it")
    return Finding(name, BROKEN if device.type == "cuda" else NOTE, reason)
