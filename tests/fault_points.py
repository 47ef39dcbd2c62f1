"""Exceptions thrown at every place of an operation: each line and each call of kv_hf's own Python that it runs through."""

import functools
import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import kv_hf

FOLDER = str(Path(kv_hf.__file__).parent)
FINALIZERS = (
    "release_pages",
    "let_go",
)  # Python ignores what they throw, and pytest keeps it alive


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

    @staticmethod
    def _is_finalizer(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_filename.startswith(FOLDER):
            if frame.f_code.co_name in FINALIZERS:
                return True
            frame = frame.f_back
        return False

    def _trace(self, frame: FrameType, event: str, _arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(FOLDER) or self._is_finalizer(frame):
            return None
        if event in ("call", "line"):
            if event == "line" and _is_with(code.co_filename, frame.f_lineno):
                return self._trace
            self.passed += 1
            if self.passed == self.at:
                self.thrown = f"{code.co_filename[len(FOLDER) + 1 :]}:{frame.f_lineno} ({event})"
                raise self.error(f"thrown in {self.thrown}")
        return self._trace


def count_places(call: Callable[[], Any]) -> int:
    """Return how many places a call runs through."""
    places = Places()
    places.run(call)
    return places.passed


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
