"""Rows of results/*.jsonl: one line per measurement, with what is needed to repeat it."""

import datetime
import functools
import json
import os
import platform
import re
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..files import ROWS_BYTES, lock, read_text

# packages whose versions change a measurement, where they are installed
COUNTED = ("torch", "transformers", "triton", "optimum-quanto", "hqq", "lm_eval", "datasets")
# name of a model -> what rows say of its weights: "model_file" in words, "weights_precision" of the numbers in it. A script
# that brings models fills it
WEIGHTS: dict[str, dict[str, str]] = {}
Row = dict[str, Any]  # a measurement: fields and their values, as JSON


def machine() -> str:
    """Return the processor (and GPU) in words."""
    path = Path("/proc/cpuinfo")  # of Linux
    named = re.search(r"^model name\s*: (.+)$", path.read_text(), re.M) if path.is_file() else None
    name = named[1] if named else platform.processor() or platform.machine()
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {os.cpu_count()} cores{gpu}"


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
    found = {"python": platform.python_version()}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    for name in COUNTED:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def make_row(**measured: Any) -> Row:
    """Return a row of `measured` with what is needed to repeat it.

    That is date, commit, machine, the instructions that torch uses, versions and torch's threads, and what WEIGHTS says of the model;
    "random weights" where `measured` says weights="random". `measured` wins where it says one of these itself.
    """
    known = WEIGHTS.get(str(measured.get("model")), {})
    drawn = measured.get("weights") == "random"
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        **({"weights_precision": "random weights"} if drawn else known),
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


def append_rows(path: Path, rows: list[Row]) -> None:
    """Append rows to a JSONL file: all of them or, where the disk is full, none.

    Several processes may append to one file at a time. A line that a killed process left unfinished is dropped.

    Raises: ValueError for figures that are not finite, OSError when the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
    with path.open("ab", buffering=0) as out:  # nothing is left to be written behind an error
        lock(out.fileno())
        end = path.read_bytes().rfind(b"\n") + 1  # of the last whole line
        out.truncate(end)
        try:
            written = out.write(text)
            if written < len(text):  # the next write says why
                out.write(text[written:])
        except OSError:
            out.truncate(end)
            raise


def read_rows(path: Path) -> list[Row]:
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
