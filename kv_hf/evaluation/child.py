"""Run one measurement in a process of its own, and say clearly how it failed where it did.

What a process has freed, it may still hold: two caches measured in one process hide in each other's memory.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


class MeasurementError(RuntimeError):
    """A measurement gave no figures: out of memory, killed, or its results contradict each other."""


def run_child(
    module: str,
    request: dict[str, Any],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Run `python -m module` with `request` on its standard input; return what it answered (see `answer`).

    `env` is added to the environment.

    Raises: ValueError with the child's message for input that it refuses; MeasurementError when it fails, is
        killed, takes more than `timeout` seconds, or says nothing.
    """
    return run_command(
        [sys.executable, "-m", module],
        request,
        env={**os.environ, **(env or {}), "PYTHONPATH": search_path(module)},
        timeout=timeout,
    )


def search_path(module: str) -> str:
    """Return the PYTHONPATH with which a child finds this package and `module`, whatever folder it starts in."""
    folders = []
    for package in (__name__, module):
        found = sys.modules[package.partition(".")[0]].__path__
        folders.append(str(Path(found[0]).resolve().parent))
    return os.pathsep.join(filter(None, [*dict.fromkeys(folders), os.environ.get("PYTHONPATH")]))


def run_command(
    command: Sequence[str],
    request: dict[str, Any],
    env: dict[str, str] | None = None,
    timeout: float | None = None,
) -> dict[str, Any]:
    """Do what `run_child` says with any command."""
    try:
        done = subprocess.run(
            command,
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=env,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise MeasurementError(f"it took more than {timeout:g} seconds") from None
    try:
        found = json.loads(done.stdout)
    except ValueError:
        found = None
    if isinstance(found, dict) and "result" in found and done.returncode == 0:
        result: dict[str, Any] = found["result"]
        return result
    if isinstance(found, dict) and "error" in found:
        error = ValueError if found.get("refused") else MeasurementError
        raise error(str(found["error"]))
    raise MeasurementError(_how_it_ended(done))


def _how_it_ended(done: "subprocess.CompletedProcess[str]") -> str:
    said = done.stderr.strip().splitlines()
    last = f"; its last words: {said[-1][:200]}" if said else ""
    if done.returncode >= 0:
        return f"its process ended with exit code {done.returncode} and no result{last}"
    try:
        name = signal.Signals(-done.returncode).name
    except ValueError:
        name = f"signal {-done.returncode}"
    why = " (out of memory, most likely)" if name == "SIGKILL" else ""
    return f"its process was killed by {name}{why}{last}"


def answer(run: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Be the child: read a request, run it, write {"result": ...} or {"error": ...}; return the exit code.

    Whatever libraries print goes to standard error, so that only the answer is on standard output.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    expendable()
    try:
        found: dict[str, Any] = {"result": run(json.load(sys.stdin))}
    except Exception as error:
        found = {"error": in_words(error), "refused": _refused(error)}
    with out:
        json.dump(found, out)
    return int("error" in found)


def expendable() -> None:
    """Have Linux end this process first when memory runs out, not the one that waits for it."""
    path = Path("/proc/self/oom_score_adj")
    try:
        path.write_text("1000")
    except OSError:  # another system, or not allowed: no harm
        return


def ran_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that there is no memory left; torch raises a RuntimeError of words on a CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _refused(error: Exception) -> bool:
    return isinstance(error, ValueError) and not isinstance(error, torch.OutOfMemoryError)


def in_words(error: Exception) -> str:
    """Return an error in one line, out of memory in plain words."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if ran_out_of_memory(error):
        return f"out of memory: {lines[0][:200]}"
    if isinstance(error, (ValueError, MeasurementError)):
        return " ".join(lines)
    return f"{type(error).__name__}: {' '.join(lines)[:600]}"
