"""Versions, devices and settings: what a bug report should hold."""

import json
import os
import platform
import shutil
import subprocess
import tempfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

import torch
import transformers

from ..backends.cpu import library
from ..user_dir import user_dir
from ..version import __version__

PACKAGE = Path(__file__).resolve().parent.parent
# what the C kernel asks the processor for (decode.c: best_isa), and what else tells processors apart
CPU_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
    *("avx512_bf16", "amx_tile", "asimd", "sve"),
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")


def environment() -> list[tuple[str, str]]:
    """Return (what, found) for versions, devices, the C library and the variables that change any of it."""
    return [
        ("kv_hf", __version__),
        ("installed", installed()),
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", platform.platform()),
        ("torch", torch.__version__),
        ("transformers", transformers.__version__),
        *((name, _version(name)) for name in ("accelerate", "safetensors", "triton")),
        ("cpu", _cpu()),
        ("cpu threads", f"{torch.get_num_threads()} of {os.cpu_count()}"),
        ("C kernel", _c_kernel()),
        *_gpus(),
        ("KV_HF_HOME", _home()),
        *_variables(),
    ]


def installed(name: str = "kv_hf", folder: Path = PACKAGE) -> str:
    """Return where this package runs from, and as what it was installed: the tags of its wheel, or "editable".

    A wheel without the C kernel is called py3-none-any.
    """
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return f"not as a package; runs from {folder}"
    if json.loads(found.read_text("direct_url.json") or "{}").get("dir_info", {}).get("editable"):
        return f"editable, runs from {folder}"
    if Path(str(found.locate_file(name))).resolve() != folder:
        return f"elsewhere, as {found.version}; runs from {folder}"
    return f"wheel {wheel_tags(found)}, in {folder}"


def wheel_tags(found: Distribution) -> str:
    """Return the tags of the wheel that a package was installed from: cp311-abi3-linux_x86_64."""
    lines = (found.read_text("WHEEL") or "").splitlines()
    tags = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    return ", ".join(tags) or "of unknown tag"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    """Return the processor's name and those of its abilities that matter, as far as the system says."""
    name, flags = platform.machine(), ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return name
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = f"{platform.machine()}, {value.strip()}"
        elif key.strip() in ("flags", "Features"):
            flags = " ".join(flag for flag in CPU_FLAGS if flag in value.split())
            break
    return f"{name}: {flags}" if flags else name


def _c_kernel() -> str:
    return library.missing() or f"{library.ISA_NAMES[library.isa()]}, {library.threads()}"


def _gpus() -> list[tuple[str, str]]:
    built = [f"{name} {found}" for name, found in _builds().items() if found]
    if not torch.cuda.is_available():
        how = f"torch is built for {', '.join(built)}" if built else "torch is built for the CPU"
        return [("gpu", f"none that torch sees; {how}")]
    rows = [("gpu runtime", ", ".join([*built, f"driver {_driver() or 'of unknown version'}"]))]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.1f} GiB"
        ability = f"compute capability {properties.major}.{properties.minor}"
        rows.append((f"gpu {index}", f"{properties.name}, {ability}, {memory}"))
    return rows


def _builds() -> dict[str, str | None]:
    return {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}


def _driver() -> str | None:
    """Return the version of NVIDIA's driver, which torch does not say, or None where nobody does."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    asked = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split() if done.returncode == 0 else []
    return lines[0] if lines else None


def _home() -> str:
    at = user_dir()
    how = "" if "KV_HF_HOME" in os.environ else " (the default)"
    state = home_problem() or ("" if at.is_dir() else "not made yet")
    return f"{at}{how}" + (state and f", {state}")


def home_problem() -> str | None:
    """Return why nothing can be kept in kv_hf's folder, or None. A folder is made in it, or in its place, and removed."""
    at = user_dir()
    there = next((part for part in (at, *at.parents) if os.path.lexists(part)), Path())
    if not there.is_dir():
        return (
            "which is no folder" if there == at else f"which cannot be made: {there} is no folder"
        )
    try:
        with tempfile.TemporaryDirectory(dir=there):
            return None
    except OSError as error:
        what = "written to" if there == at else "made"
        return f"which cannot be {what}: {error.strerror or error} ({there})"


def _variables() -> list[tuple[str, str]]:
    own = sorted(name for name in os.environ if name.startswith("KV_HF_"))
    return [
        (name, os.environ[name])
        for name in (*own, *THREAD_VARIABLES)
        if name in os.environ and name != "KV_HF_HOME"
    ]
