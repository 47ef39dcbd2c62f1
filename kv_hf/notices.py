"""Say a thing once per process: slow paths (as warnings) and choices made for the user (as log lines)."""

import logging
import warnings

from .errors import KVCacheWarning

_said: set[str] = set()
logger = logging.getLogger("kv_hf")


def warn_once(key: str, message: str) -> None:
    """Emit `message` as a KVCacheWarning unless `key` was said before in this process."""
    if key not in _said:
        _said.add(key)
        warnings.warn(message, KVCacheWarning, stacklevel=3)


def say_once(key: str, message: str) -> None:
    """Log `message` at WARNING level (visible by default) unless `key` was said before."""
    if key not in _said:
        _said.add(key)
        logger.warning(message)


def forget() -> None:
    """Forget what was said, so that it is said again (uninstall and tests call this)."""
    _said.clear()
