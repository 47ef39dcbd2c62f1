"""Run the tests of kernels once with each instruction set that this processor has, and with one thread and two.

An instruction set decides in which order numbers are added up, and so what rounding makes of them: results differ between
processors, and every one must be within the tests' bounds.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from kv_hf.backends.cpu import library

ROOT = Path(__file__).parent.parent
TORCH = ("default", "avx2", "avx512")  # of ATEN_CPU_CAPABILITY, which is not checked by torch
# compared with fp64, or with the codec's bytes
COMPILED = (
    "backends/test_attention_variants",
    "backends/test_cpu_kernels",
    "backends/test_cpu_latent",
    "backends/test_cpu_write",
    "backends/test_error_bound",
    "backends/test_latent_fallbacks",
    "backends/test_reference_attention",
    "doctor/test_doctor_self_test",
    "formats/test_codec",
    "hf/test_chunks",
)
# in numpy; torch computes what is expected
INTERPRETED = ("backends/test_triton_decode", "backends/test_triton_latent")


def settings() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (environment variable, value, test files) of each run."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    for name in TORCH[: TORCH.index(best) + 1] if best in TORCH else TORCH[:1]:
        yield "ATEN_CPU_CAPABILITY", name, COMPILED + INTERPRETED
    if library.missing() is None:
        for isa in range(library.isa() + 1):
            yield library.ISA_VARIABLE, str(isa), COMPILED
    yield library.ISA_VARIABLE, "none", COMPILED
    for threads in (1, 2):
        yield "KV_HF_TEST_THREADS", str(threads), COMPILED + INTERPRETED


def main(arguments: list[str]) -> int:
    """Run everything; `arguments` go to pytest. Return the number of runs that failed."""
    failed = []
    for variable, value, names in settings():
        print(f"{variable}={value}", flush=True)
        files = [str(ROOT / "tests" / f"{name}.py") for name in names]
        command = [sys.executable, "-m", "pytest", "-m", "not slow", *arguments, *files]
        # passive: threads that wait for each other on busy cores would spin for minutes
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", variable: value}
        if subprocess.run(command, cwd=ROOT, env=environment).returncode:
            failed.append(f"{variable}={value}")
    print(f"failed with {', '.join(failed)}" if failed else "every instruction set passes")
    return len(failed)


if __name__ == "__main__":
    left = {"ATEN_CPU_CAPABILITY", library.ISA_VARIABLE, "KV_HF_TEST_THREADS"} & set(os.environ)
    if left:
        sys.exit(
            f"{', '.join(sorted(left))} must not be set: each is set here, one after the other"
        )
    sys.exit(main(sys.argv[1:]))
