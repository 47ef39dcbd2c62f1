"""Say a thing once per process: slow paths (as warnings) and choices made for the user (as log lines)."""

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import KVCacheWarning
from .printable import printable

_said: set[str] = set()
_lock = threading.Lock()
logger = logging.getLogger("kv_hf")


def warn_once(key: str, message: str) -> None:
    """Emit `message` as a KVCacheWarning unless `key` was said before in this process."""
    if _is_new(key):
        warnings.warn(printable(message, keep="\n"), KVCacheWarning, stacklevel=3)


def say_once(key: str, message: str) -> None:
    """Log `message` at WARNING level (visible by default) unless `key` was said before."""
    if _is_new(key):
        logger.warning("%s", printable(message, keep="\n"))


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
