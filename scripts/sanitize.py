"""Run the tests of the C kernel on builds that check themselves: addresses and undefined behaviour, then threads.

Each build goes into a folder of its own (build/sanitizers/), never into the package, and is loaded through
KV_HF_LIBRARY. The interpreter and torch stay as they are: the sanitizer's runtime is loaded in front of them.

Example: python scripts/sanitize.py address thread
"""

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "sanitizers"


@dataclass(frozen=True)
class Sanitizer:
    """One build: what the compiler checks, what has to be loaded first, and which tests run on it."""

    flags: tuple[str, ...]
    runtimes: tuple[str, ...]
    tests: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict)


SANITIZERS = {
    "address": Sanitizer(
        flags=("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
        runtimes=("libasan.so", "libubsan.so"),
        tests=(
            "tests/backends/test_cpu_kernels.py",
            "tests/backends/test_cpu_latent.py",
            "tests/backends/test_cpu_bounds.py",
            "tests/backends/test_cpu_outliers.py",
            "tests/backends/test_cpu_write.py",
            "tests/formats/test_mixed_and_rotated.py",
        ),
        # Python keeps memory for the whole process, which is no leak; a test expects SIGSEGV; freed memory that is
        # held back would look like a leak to the test that watches the process's size
        options={
            "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:quarantine_size_mb=16",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
        },
    ),
    "thread": Sanitizer(
        flags=("-fsanitize=thread", "-DKV_HF_OWN_THREADS"),
        runtimes=("libtsan.so",),
        tests=(
            "tests/backends/test_threads.py",
            "tests/backends/test_cpu_kernels.py",
            "tests/backends/test_cpu_latent.py",
            "tests/backends/test_cpu_write.py",
            "-k",
            "thread and not fork",  # it does not know threads that start in a forked process
        ),
        options={"TSAN_OPTIONS": f"suppressions={ROOT / 'scripts' / 'tsan.supp'}:exitcode=66"},
    ),
}


def runtimes_of(compiler: str, sanitizer: Sanitizer) -> list[str]:
    """Return the paths of the runtimes, or [] where the compiler has not all of them."""
    found = []
    for name in sanitizer.runtimes:
        command = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if not os.path.isabs(path) or not Path(path).is_file():
            return []
        found.append(path)
    return found


def build(compiler: str, name: str, sanitizer: Sanitizer) -> Path:
    """Compile the sources that pyproject.toml lists; return the library."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extension = project["tool"]["setuptools"]["ext-modules"][0]
    BUILD.mkdir(parents=True, exist_ok=True)
    library = BUILD / f"{name}.so"
    flags = [flag for flag in extension["extra-compile-args"] if flag not in ("-O3", "-g0")]
    sources = [str(ROOT / source) for source in extension["sources"]]
    links = [f"-l{one}" for one in extension["libraries"]]
    command = [compiler, "-shared", "-fPIC", "-O1", "-g", "-fno-omit-frame-pointer", *flags]
    command += [*sanitizer.flags, *sources, *links, "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def run(name: str, compiler: str) -> int:
    """Build and test with one sanitizer; return the exit status, 0 where there is nothing to run it with."""
    sanitizer = SANITIZERS[name]
    runtimes = runtimes_of(compiler, sanitizer)
    if not runtimes:
        print(f"skipped: {compiler} has no {' and '.join(sanitizer.runtimes)} for {name!r}")
        return 0
    print(f"{name}: building", flush=True)
    library = build(compiler, name, sanitizer)
    environment = {
        **os.environ,
        **sanitizer.options,
        "LD_PRELOAD": " ".join(runtimes),
        "KV_HF_LIBRARY": str(library),
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    # -s: a report goes to stderr, where pytest would swallow it
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-s",
        "-p",
        "no:xdist",
        *sanitizer.tests,
    ]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    """Run the sanitizers named on the command line, all of them where none is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sanitizers", nargs="*", help=f"of {', '.join(SANITIZERS)}; default: all")
    parser.add_argument("--compiler", default=os.environ.get("CC", "gcc"))
    arguments = parser.parse_args()
    for name in arguments.sanitizers:
        if name not in SANITIZERS:
            parser.error(f"sanitizers must be among {', '.join(SANITIZERS)}, got {name!r}")
    if sys.platform != "linux" or not shutil.which(arguments.compiler):
        print(
            f"skipped: sanitizers need Linux and a compiler, and {arguments.compiler} is not here"
        )
        return 0
    names = arguments.sanitizers or list(SANITIZERS)
    return max([run(name, arguments.compiler) for name in names])


if __name__ == "__main__":
    sys.exit(main())
