"""Rows of results/*.jsonl: one line per measurement, with what is needed to repeat it."""

import datetime
import functools
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers


def machine() -> str:
    """Return the processor (and GPU) in words."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].split(":", 1)[1].strip() if lines else name
    name = f"{name}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        name += f", {torch.cuda.get_device_name()}"
    return name


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


# what the rows of one run have in common
RUN = ("date", "commit", "machine", "threads", "dtype")
# packages beside torch and transformers whose versions change a measurement, where they are installed
COUNTED = ("triton", "optimum-quanto", "hqq")


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
    """Return a row of `measured` with date, commit, machine and versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        **measured,
    }


def append_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a JSONL file in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("a", encoding="utf-8") as out:
        out.write(text)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file, oldest first; an absent file has none."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def latest_run(rows: list[dict[str, Any]], **wanted: Any) -> list[dict[str, Any]]:
    """Return the rows with these values that belong to the newest run: one date, commit, machine and thread count.

    Figures of different machines or versions never meet in one table.
    """
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    if not found:
        return []
    run = [found[-1].get(name) for name in RUN]
    return [row for row in found if [row.get(name) for name in RUN] == run]
