"""Run tests once in each environment that they must not depend on: instruction sets, threads, and variables of a user's shell.

usage: environments.py [--only WORD] [options of pytest]

An instruction set decides in which order numbers are added up, and so what rounding makes of them: results differ between
processors, and every one must be within the tests' bounds. A variable decides where files lie, what is said and what may be
asked: tests/known_environment.py clears it, and shows that with each row of SHELLS. KV_HF_ISA=none and all of SHELLS together are
the last row, with every test that is not slow.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from kv_hf.backends.cpu import library

Variables = dict[str, str | None]  # None: not set

ROOT = Path(__file__).parent.parent
TORCH = ("default", "avx2", "avx512")  # of ATEN_CPU_CAPABILITY, which is not checked by torch
NOWHERE = "/proc/nowhere"  # a folder that nobody can make
# compared with fp64, with the codec's bytes, or with another kernel
COMPILED = [
    "backends/test_attention",
    "backends/test_attention_variants",
    "backends/test_choose_pages",
    "backends/test_cpu_write",
    "backends/test_latent_fallbacks",
    "cache/test_latent",
    "cache/test_reading",
    "cache/test_layer_kinds",
    "doctor",
    "formats/test_codec",
    "hf/test_families",
    "hf/test_generate",
    "hf/test_masks",
]
# in numpy; torch computes what is expected
INTERPRETED = ["backends/test_triton_decode", "backends/test_triton_dense"]
# start children, look for files, ask for models, or print
OUTWARD = [
    "backends/test_cpu_library",
    "backends/test_triton_launch",
    "cache/test_options",
    "doctor",
    "hf/test_devices",
    "hf/test_dispatch",
    "pages/test_cpu_memory",
    "planner/test_source",
    "project/test_development",
    "project/test_files",
    "project/test_messages",
    "serving/test_serve_command",
]
FOLDERS = ("HF_HOME", "HF_HUB_CACHE", "KV_HF_HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
SHELLS: dict[str, Variables] = {
    "offline": {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
    "proxy": {"HTTPS_PROXY": "http://127.0.0.1:9", "ALL_PROXY": "http://127.0.0.1:9"},
    "folders": dict.fromkeys(FOLDERS, NOWHERE),
    "threads": {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"},
    "devices": {"CUDA_VISIBLE_DEVICES": "7", "TRITON_INTERPRET": "1"},
    "own": {"KV_HF_MALLOC_TRIM": "never", "KV_HF_ACCEPT_GEMMA_TERMS": "1"},
    "processes": {"RANK": "1", "WORLD_SIZE": "2", "ACCELERATE_MIXED_PRECISION": "bf16"},
    "language": {"LANG": "C", "LC_ALL": "POSIX", "TZ": "Asia/Kathmandu"},
    "terminal": {"COLUMNS": "20", "NO_COLOR": "1", "FORCE_COLOR": "1"},
    "warnings": {"PYTHONWARNINGS": "error"},
    "no home": {"HOME": None},
    "home": {"HOME": NOWHERE},
}


def rows() -> Iterator[tuple[str, Variables, list[str]]]:
    """Yield (name, variables, test files or folders below tests/) of each run."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    for name in TORCH[: TORCH.index(best) + 1] if best in TORCH else TORCH[:1]:
        yield f"torch {name}", {"ATEN_CPU_CAPABILITY": name}, COMPILED + INTERPRETED
    if library.missing() is None:
        for isa, name in enumerate(library.ISA_NAMES[: library.isa() + 1]):
            yield f"kernel {name}", {library.ISA_VARIABLE: str(isa)}, COMPILED
    yield "2 threads", {"KV_HF_TEST_THREADS": "2"}, COMPILED + INTERPRETED
    for name, variables in SHELLS.items():
        yield name, variables, OUTWARD
    every: Variables = {library.ISA_VARIABLE: "none"}
    for variables in SHELLS.values():
        every |= variables
    yield "all, no kernel", every, [""]


def run(variables: Variables, names: list[str], options: list[str]) -> bool:
    """Run tests with these variables; say whether all passed. `options` go to pytest."""
    paths = [ROOT / "tests" / name for name in names]
    files = [str(path) if path.is_dir() else f"{path}.py" for path in paths]
    # passive: threads that wait for each other on busy cores would spin for minutes
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", **variables}
    given = {name: value for name, value in environment.items() if value is not None}
    command = [sys.executable, "-m", "pytest", "-m", "not slow", *options, *files]
    return subprocess.run(command, cwd=ROOT, env=given).returncode == 0


def main(arguments: list[str]) -> int:
    """Run every row, or those with a word in their name; return the number of rows that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a word: rows that have it in their name")
    known, options = parser.parse_known_args(arguments)
    failed = []
    for name, variables, names in rows():
        if known.only in name:
            print(f"{name}: {variables}", flush=True)
            if not run(variables, names, options):
                failed.append(name)
    print("failed:", ", ".join(failed) or "none")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
