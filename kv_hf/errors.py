"""Every error and warning class that kv_hf raises on purpose, and how others' errors are quoted.

All errors are ValueErrors, so that code that knows nothing of kv_hf can still catch bad input. Their messages quote
files and arguments, and may be printed by anyone: control characters in them are written out.
"""

from .printable import printable


class KVCacheError(ValueError):
    """Base class of the errors that kv_hf raises; its text is safe to print."""

    def __str__(self) -> str:  # not when it is made: torch.compile traces that
        return _one_line(super().__str__())


def _one_line(text: str) -> str:
    """Return a message without line ends, which a name of a file could begin a line of its own with."""
    return printable(" ".join(text.split("\n")))


class CacheOptionError(KVCacheError):
    """An option of the cache has a value that is not allowed, or is unknown."""


class UnsupportedModelError(KVCacheError):
    """The model has no key/value cache that pages could hold."""


class CacheMismatchError(KVCacheError):
    """The keys and values do not fit the cache: another batch size, model, shape, dtype or device."""


class PagePoolExhaustedError(KVCacheError):
    """The pool would need more pages than `max_pages`; nothing was changed."""


class DeviceBudgetError(KVCacheError):
    """Pages that have to be on the device do not fit into the budget for it; nothing was changed."""


class OffloadError(KVCacheError):
    """Pages cannot be put outside of the device: the disk is full, or no file can be made."""


class StaleHandleError(KVCacheError):
    """Keys or values of an earlier forward are read after the cache has moved on."""


class InterruptedForwardError(KVCacheError):
    """An earlier forward stopped between two layers, so that layers hold different lengths."""


class CacheFileError(KVCacheError):
    """A file is no saved cache, is damaged, or was saved with another model, dtype or file version."""


class InputFileError(KVCacheError):
    """A file that was named is not read: it is no regular file, too large, no text or no JSON."""


class ConversionError(KVCacheError):
    """A checkpoint cannot be converted: its model, files or the place for the result do not allow it."""


class PlanError(KVCacheError):
    """A memory plan cannot be made: there is no such model, preset or file, or a number in the question is wrong."""


class KVCacheWarning(UserWarning):
    """Something works, but slower or with less than the user may expect; said once."""


def reason(error: BaseException) -> str:
    """Return what went wrong in words: of an OSError what the system says, without the path."""
    return getattr(error, "strerror", None) or first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
