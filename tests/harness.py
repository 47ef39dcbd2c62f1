"""What tests run with: slow cases, where files lie, processes, interrupts, and threads that begin at the same moment."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases for parametrize, those that are not in `quick` with the slow marker; a tuple is several arguments."""
    quick = list(quick)
    return [one if one in quick else slow(one) for one in cases]


def slow(case: Any) -> Any:
    """Return a case for parametrize with the slow marker; a tuple is several arguments."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)


def run_python(*words: object) -> str:
    """Run Python in a process that finds the package and the tests' helpers, with one thread; return what it prints."""
    path = os.pathsep.join([str(ROOT), str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return done.stdout


def interrupt(*_: object, **__: object) -> None:
    """Be stopped by Ctrl-C, in place of a layer's forward."""
    raise KeyboardInterrupt


def at_once(work: Callable[[int], object], count: int) -> list[object]:
    """Run work(0) .. work(count - 1), each in a thread, from the same moment on; return what each gave or raised."""
    results: list[object] = [None] * count
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        barrier.wait(60)
        try:
            results[index] = work(index)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    return results
