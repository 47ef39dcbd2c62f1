"""Faults at every place: system calls that change a disk, and lines and calls of kv_hf's own Python.

Everything of kv_hf that writes goes through these functions of `os` (kv_hf/files.py), so replacing them reaches every call.
"""

import contextlib
import errno
import functools
import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kv_hf

CALLS = [
    "open",
    "write",
    "fsync",
    "close",
    "fchmod",
    "chmod",
    "replace",
    "rename",
    "mkdir",
    "unlink",
]
ERRORS = (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EACCES)
KILLED = 77  # exit code of a process that was ended at a call


class Faults:
    """The calls below a folder, numbered from 0; the one numbered `at` does `what`.

    Attributes:
        seen: names of the calls so far.
    """

    def __init__(self, folder, at=-1, what=None, lasting=False):
        self.folder, self.at, self.what, self.lasting = str(folder), at, what, lasting
        self.seen, self.files = [], set()

    def concerns(self, name, given):
        """Say whether a call is about a file below the folder, and keep track of descriptors."""
        first = given[0]
        if isinstance(first, int):
            return first in self.files
        return isinstance(first, (str, Path)) and str(first).startswith(self.folder)

    def wrap(self, name, real):
        def call(*given, **options):
            if not self.concerns(name, given):
                return real(*given, **options)
            if name == "open" and not given[1] & (os.O_WRONLY | os.O_CREAT | os.O_DIRECTORY):
                number = real(*given, **options)
                self.files.add(number)
                return number
            self.seen.append(name)
            here = len(self.seen) - 1
            failing = self.what is not None and (
                here == self.at or (self.lasting and here > self.at >= 0)
            )
            if name == "close":
                self.files.discard(given[0])
                real(*given)  # the system closes it in any case
                if failing:
                    self.what(name, given)
                return None
            if failing:
                self.what(name, given)
            found = real(*given, **options)
            if name == "open":
                self.files.add(found)
            return found

        return call


@contextlib.contextmanager
def faults(folder, at=-1, what=None, lasting=False):
    """Count the calls below `folder`; at number `at` do what(name, arguments); with `lasting` at all that follow too."""
    found = Faults(folder, at, what, lasting)
    before = {name: getattr(os, name) for name in CALLS if hasattr(os, name)}
    for name, real in before.items():
        setattr(os, name, found.wrap(name, real))
    try:
        yield found
    finally:
        for name, real in before.items():
            setattr(os, name, real)


def failing(number):
    """What a call does that fails with an errno; a write may have written a part."""

    def fail(name, given):
        raise OSError(number, os.strerror(number))

    return fail


def ending(name, given):
    """End this process at once, as a kill does: nothing is cleaned up."""
    os._exit(KILLED)


def killed_at(folder, at, work):
    """Run `work` in a forked child that ends at call number `at`; say whether it ended there."""
    child = os.fork()
    if not child:
        code = 1
        try:
            with faults(folder, at, ending):
                work()
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), code
    return code == KILLED


FOLDER = str(Path(kv_hf.__file__).parent)


@functools.cache
def _is_with(path: str, line: int) -> bool:
    """Say whether a `with` begins there.

    Its line comes once more between the body and the release of a lock. Python itself never looks for Ctrl-C there, and
    what is thrown there leaves the lock locked.
    """
    return linecache.getline(path, line).lstrip().startswith("with ")


class Places:
    """Counts the places that a call runs through, and throws at one of them.

    A place is a line that is about to run (except the first of a `with`), or a function that was just entered: more than
    the places at which Python looks for Ctrl-C, or an allocation can fail.
    """

    def __init__(self, at: int | None = None, error: type[BaseException] = KeyboardInterrupt):
        self.at, self.error, self.passed, self.thrown = at, error, 0, ""

    def run(self, call: Callable[[], Any]) -> Any:
        """Call, throwing at place `at`; return what the call returns."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return call()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(FOLDER) or code.co_name == "<genexpr>":
            return None  # Python ignores what is thrown where it closes a generator, and pytest keeps it alive
        if event in ("call", "line"):
            if event == "line" and _is_with(code.co_filename, frame.f_lineno):
                return self._trace
            self.passed += 1
            if self.passed == self.at:
                self.thrown = f"{code.co_filename[len(FOLDER) + 1 :]}:{frame.f_lineno} ({event})"
                raise self.error(f"thrown in {self.thrown}")
        return self._trace


def throw(call: Callable[[], Any], at: int, error: type[BaseException]) -> str:
    """Call, throwing at place `at`; return the place, empty where the call ended before it."""
    places = Places(at, error)
    try:
        places.run(call)
    except error as thrown:
        # what the frames of the call hold must not live longer than the call
        while thrown is not None:
            thrown.__traceback__, thrown = None, thrown.__context__
    return places.thrown
