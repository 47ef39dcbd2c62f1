"""A process that measures: jobs come in as lines of JSON, rows and the end of each job go out the same way.

    in:   {"name": .., "kind": .., "settings": {..}}
    out:  {"row": {..}} as often as something is known, then {"end": "", "unusable": false}, or the error in words

A process is unusable when its GPU answers no longer, as behind an access out of bounds.
"""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

import torch
from kv_hf.evaluation.child import expendable, in_words

from kv_hf.evaluation.rows import make_row
from measure.gpu.measure import KINDS

Kinds = Mapping[str, Callable[..., Iterator[dict[str, Any]]]]


def work(lines: TextIO, out: TextIO, kinds: Kinds = KINDS) -> None:
    """Do the jobs of `lines` until there are no more, or this process is unusable."""

    def say(**message: Any) -> None:
        json.dump(message, out)
        out.write("\n")
        out.flush()

    for line in lines:
        job = json.loads(line)
        error = _do(job, kinds, lambda row: say(row=row))
        unusable = bool(error) and not _answers()
        say(end=error, unusable=unusable)
        if unusable:
            return


def _do(job: dict[str, Any], kinds: Kinds, say: Callable[[dict[str, Any]], None]) -> str:
    """Do one job; return its error in words, "" where there was none."""
    settings = job["settings"]
    error = ""
    try:
        for fields in kinds[job["kind"]](**settings):
            made = {"weights": "random"} if "model" in settings else {}
            row = make_row(job=job["name"], **made, **{**settings, **fields})
            json.dumps(row, allow_nan=False)
            say(row)
    except Exception as raised:  # whatever a kernel, a compiler or a driver raises
        error = in_words(raised) or type(raised).__name__
    gc.collect()  # the exception held what it was measuring
    if torch.cuda.is_initialized():
        _tried(torch.cuda.empty_cache)  # the next job begins with nothing reserved
    return error


def _answers() -> bool:
    """Say whether the GPU of this process still answers."""
    return not torch.cuda.is_initialized() or _tried(torch.cuda.synchronize)


def _tried(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError:
        return False
    return True


def follow_parent() -> None:
    """End this process when the one that started it is gone: nobody would read what it measures."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Be a worker; whatever libraries print goes to standard error."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    expendable()
    follow_parent()
    with out:
        work(sys.stdin, out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
