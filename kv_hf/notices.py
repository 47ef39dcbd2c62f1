"""Say a thing once per process: slow paths (as warnings) and choices made for the user (as log lines).

Both follow transformers' verbosity (`transformers.logging.set_verbosity_error()` silences them), and log lines take
its handlers: the logger is a child of transformers' own. While a text is streamed to the terminal they wait for its end.
"""

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .errors import KVCacheWarning
from .printable import printable

_said: set[str] = set()
_lock = threading.Lock()
_waiting: ContextVar[list[Callable[[], None]] | None] = ContextVar("kv_hf_notices", default=None)
logger = logging.getLogger("transformers.kv_hf")
_own = logging.getLogger("kv_hf")  # a program that turns this one down means the same


def warn_once(key: str, message: str) -> None:
    """Emit `message` as a KVCacheWarning unless `key` was said before in this process."""
    if not _is_heard() or not _is_new(key):
        return
    text, held = printable(message, keep="\n"), _waiting.get()
    if held is None:
        warnings.warn(text, KVCacheWarning, stacklevel=3)
        return
    caller = sys._getframe(2)
    place = caller.f_code.co_filename, caller.f_lineno
    held.append(lambda: warnings.warn_explicit(text, KVCacheWarning, *place))


def say_once(key: str, message: str) -> None:
    """Log `message` at WARNING level (visible by default) unless `key` was said before."""
    if not _is_heard() or not _is_new(key):
        return
    text, held = printable(message, keep="\n"), _waiting.get()
    if held is None:
        logger.warning("%s", text)
    else:
        held.append(lambda: logger.warning("%s", text))


@contextmanager
def held_back() -> Iterator[None]:
    """Let what this thread would say within the block be said at its end."""
    held: list[Callable[[], None]] = []
    before = _waiting.set(held)
    try:
        yield
    finally:
        _waiting.reset(before)
        for say in held:
            say()


def _is_heard() -> bool:
    """Say whether warnings are shown; what is not is no "said once"."""
    return logger.isEnabledFor(logging.WARNING) and _own.level <= logging.WARNING


def _is_new(key: str) -> bool:
    """Remember `key`; True for one caller only, whatever the threads."""
    with _lock:
        before = len(_said)
        _said.add(key)
        return len(_said) > before


def forget() -> None:
    """Forget what was said, so that it is said again (uninstall and tests call this)."""
    _said.clear()


@contextmanager
def silenced() -> Iterator[None]:
    """Silence warnings within this block, and remember none of them: the user did not choose these settings."""
    before, quiet = set(_said), logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", KVCacheWarning)
            yield
    finally:
        logger.disabled = quiet
        _said.intersection_update(before)
