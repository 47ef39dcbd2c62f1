"""Run the tests of the C kernel on builds that check themselves: addresses and undefined behaviour, then threads.

Each build goes into a folder of its own (build/sanitizers/), never into the package, and is loaded through
KV_HF_LIBRARY. The interpreter and torch stay as they are: the sanitizer's runtime is loaded in front of them.
Instruction sets need no build of their own: `make help` names the target that runs the tests on each.

Example: python scripts/check_kernels.py address thread
"""

import argparse
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "sanitizers"


class Sanitizer(NamedTuple):
    """One build: what the compiler checks, what has to be loaded first, what pytest runs on it, variables, and tests that are selected."""

    flags: str
    runtimes: str
    tests: str
    variables: dict[str, str]
    selected: str = ""


KERNELS = "backends/test_attention.py backends/test_cpu_library.py backends/test_cpu_write.py"
SANITIZERS = {
    "address": Sanitizer(
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
        "libasan.so libubsan.so",
        f"{KERNELS} backends/test_choose_pages.py",
        # Python keeps memory for the whole process, which is no leak; a test expects SIGSEGV; freed memory that is
        # held back would look like a leak to the test that watches the process's size
        {
            "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:quarantine_size_mb=16",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
        },
    ),
    "thread": Sanitizer(
        "-fsanitize=thread -DKV_HF_OWN_THREADS",
        "libtsan.so",
        KERNELS,
        {"TSAN_OPTIONS": f"suppressions={ROOT / 'scripts' / 'tsan.supp'}:exitcode=66"},
        "thread and not fork",  # it does not know threads that start in a forked process
    ),
}


def runtimes_of(compiler: str, names: list[str]) -> list[str]:
    """Return the paths of the runtimes of these names, as far as the compiler has them."""
    commands = [[compiler, f"-print-file-name={name}"] for name in names]
    told = [subprocess.run(one, capture_output=True, text=True).stdout.strip() for one in commands]
    return [path for path in told if os.path.isabs(path) and Path(path).is_file()]


def build(compiler: str, name: str, sanitizer: Sanitizer) -> Path:
    """Compile the sources that pyproject.toml lists; return the library."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extension = project["tool"]["setuptools"]["ext-modules"][0]
    BUILD.mkdir(parents=True, exist_ok=True)
    library = BUILD / f"{name}.so"
    flags = [flag for flag in extension["extra-compile-args"] if flag not in ("-O3", "-g0")]
    command = [compiler, "-shared", "-fPIC", "-O1", "-g", "-fno-omit-frame-pointer", *flags]
    command += [*sanitizer.flags.split(), *extension["sources"]]
    command += [*(f"-l{one}" for one in extension["libraries"]), "-o", str(library)]
    subprocess.run(command, check=True, cwd=ROOT)
    return library


def run(name: str, compiler: str) -> int:
    """Build and test with one sanitizer; return the exit status, 0 where there is nothing to run it with."""
    sanitizer = SANITIZERS[name]
    wanted = sanitizer.runtimes.split()
    runtimes = runtimes_of(compiler, wanted)
    if len(runtimes) < len(wanted):
        print(f"skipped: {compiler} has no {' and '.join(wanted)} for {name!r}")
        return 0
    print(f"{name}: building", flush=True)
    library = build(compiler, name, sanitizer)
    environment = {
        **os.environ,
        **sanitizer.variables,
        "LD_PRELOAD": " ".join(runtimes),
        "KV_HF_LIBRARY": str(library),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_WAIT_POLICY": "passive",
    }
    # -s: a report goes to stderr, where pytest would swallow it
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:xdist"]
    command += ["-k", sanitizer.selected]
    tests = [f"tests/{file}" for file in sanitizer.tests.split()]
    return subprocess.run([*command, *tests], cwd=ROOT, env=environment).returncode


def main() -> int:
    """Run the sanitizers named on the command line, all of them where none is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sanitizers", nargs="*", help=f"of {', '.join(SANITIZERS)}; default: all")
    compiler = os.environ.get("CC", "gcc")
    asked = parser.parse_args().sanitizers or SANITIZERS
    if unknown := set(asked) - set(SANITIZERS):
        parser.error(f"sanitizers must be among {', '.join(SANITIZERS)}, got {unknown}")
    if sys.platform != "linux" or not shutil.which(compiler):
        print(f"skipped: sanitizers need Linux and a compiler, and {compiler} is not here")
        return 0
    return max(run(name, compiler) for name in asked)


if __name__ == "__main__":
    sys.exit(main())
