"""Rows of results/*.jsonl: one line per measurement, with what is needed to repeat it."""

import datetime
import functools
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import transformers

from ..files import ROWS_BYTES, read_text
from .models import RANDOM, weights_of

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


# what the rows of one run have in common
RUN = ("date", "commit", "machine", "threads", "dtype")
# packages beside torch and transformers whose versions change a measurement, where they are installed
COUNTED = ("triton", "optimum-quanto", "hqq", "lm_eval", "datasets")
# instructions that decide how fast a CPU computes in 16 and 8 bits, as Linux names them
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def _cpuinfo(field: str) -> str | None:
    """Return what Linux says of the processor; None where the system does not tell."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), None)


def machine() -> str:
    """Return the processor (and GPU) in words."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {os.cpu_count()} cores{gpu}"


@functools.cache
def instructions() -> list[str] | None:
    """Return which of INSTRUCTIONS the processor has; None where the system does not tell."""
    flags = _cpuinfo("flags")
    return None if flags is None else [name for name in INSTRUCTIONS if name in flags.split()]


@functools.cache
def commit() -> str:
    """Return the commit of the working tree, with "+" when its code has changes; "" outside of a checkout.

    Rows and tables that an earlier part of the same run has written are no changes of the code.
    """
    folder = Path(__file__).parent
    code = ["--", ":/", ":(top,exclude)results", ":(top,exclude)README.md"]

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", *args], cwd=folder, check=True, capture_output=True, text=True, timeout=10
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", *code)
        return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def versions() -> dict[str, str]:
    """Return the versions of everything that a measurement depends on."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    for name in COUNTED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def make_row(**measured: Any) -> dict[str, Any]:
    """Return a row of `measured` with what is needed to repeat it.

    That is date, commit, machine, its instructions, versions and torch's threads, and the file and the precision of the weights: those of the
    model named by `measured`, "random weights" where it says weights="random". `measured` wins where it says one of these itself.
    """
    if measured.get("weights") == "random":
        weights = RANDOM._asdict()
    elif measured.get("model") is None:  # of sizes alone, or of no model
        weights = {}
    else:
        weights = weights_of(str(measured["model"]))._asdict()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "instructions": instructions(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        **weights,
        **measured,
    }


def check_writable(path: Path) -> None:
    """Raise ValueError when no row can be appended to a file, before anything is measured for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.exists()
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise ValueError(f"file {str(path)!r} cannot be written: {error.strerror}") from error


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a JSONL file: all of them or, where the disk is full, none.

    Several processes may append to one file at a time. A line that a killed process left unfinished is dropped.

    Raises: ValueError for figures that are not finite, OSError when the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    with path.open("a+b", buffering=0) as out:  # nothing is left to be written behind an error
        if fcntl is not None:  # held until the file is closed
            fcntl.flock(out, fcntl.LOCK_EX)
        end = _end_of_whole_lines(out)
        out.truncate(end)
        try:
            while text:
                text = text[out.write(text) :]
        except OSError:
            out.truncate(end)
            raise


def _end_of_whole_lines(file: FileIO) -> int:
    """Return the bytes of a file up to its last line end."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 4096)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file, oldest first; an absent file has none.

    A last line without an end is a row that was never finished, and is left out.

    Raises: ValueError naming the file and the line that is no row.
    """
    if not path.is_file():
        return []
    lines = read_text(path, ROWS_BYTES, "rows").split("\n")[:-1]
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not a row ({error})") from error
    return rows


def latest_run(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows with these values that belong to the newest run: one date, commit, machine and thread count.

    Figures of different machines or versions never meet in one table.
    """
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    if not found:
        return []
    run = [found[-1].get(name) for name in RUN]
    return [row for row in found if [row.get(name) for name in RUN] == run]
