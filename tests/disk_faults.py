"""System calls that change a disk, counted, and made to fail or to be the last of their process.

Everything of kv_hf that writes goes through these functions of `os` (kv_hf/files.py), so replacing them reaches every call.
"""

import contextlib
import errno
import os
from pathlib import Path

CALLS = (
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
)
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
