"""Checks of single option values, with messages that name the option, and of the packages that only some features need."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .errors import CacheOptionError, first_line
from .printable import short

# largest values of options
MOST_PAGE_SIZE = 2**20
MOST_TOKENS = 2**30  # tables are int32, and sums of two of these numbers fit
MOST_BYTES = 2**62
MOST_NAMES = 5  # in a message that suggests one


def check_choice(
    argument: str, value: Any, choices: Iterable[str], meant: Mapping[str, str] | None = None
) -> None:
    """Raise CacheOptionError unless `value` is one of `choices`; the message names the nearest and some like it, or all.

    Args:
        meant: other words for choices -> the choice that they stand for, which the message then names.
    """
    names = list(choices)
    if isinstance(value, str) and value in names:
        return
    hint = nearest(value, names, meant)
    if hint and len(names) > MOST_NAMES:
        like = difflib.get_close_matches(str(value), names, n=MOST_NAMES - 1, cutoff=0)
        names = [*(name for name in names if name in like or repr(name) in hint), ".."]
    raise CacheOptionError(f"{argument} must be one of {', '.join(names)}, got {value!r}{hint}")


def nearest(value: Any, names: Iterable[str], meant: Mapping[str, str] | None = None) -> str:
    """Return " (did you mean 'int4'?)" with the name that is nearest to `value`, "" where none is near; see `check_choice`."""
    names = list(names)
    word = str(value).lower()
    word = (meant or {}).get(word, word)
    near = [word] if word in names else difflib.get_close_matches(str(value), names, n=1)
    near = near or [
        name
        for name in names
        if isinstance(value, str)
        and min(len(name), len(value)) > 1  # the name "c" lies in "cuda" by chance
        and (value in name or name in value)
    ]
    return f" (did you mean {near[0]!r}?)" if near else ""


def listed(names: Iterable[str]) -> str:
    """Return names as a sentence lists them: "int4", "int4 and int2", "int4, int2 and nf4"."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def check_int(argument: str, value: Any, minimum: int, maximum: int = MOST_TOKENS) -> None:
    """Raise CacheOptionError unless `value` is an integer of at least `minimum` (True and False are none).

    Args:
        maximum: largest value that is allowed.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CacheOptionError(
            f"{argument} must be an integer of at least {minimum}, got {value!r}"
        )
    if value > maximum:
        raise CacheOptionError(
            f"{argument} must be an integer of at most {maximum}, got {short(value)}"
        )


def usable_device(device: str | None) -> str:
    """Return a device by name; where none is given a GPU if torch sees one, else the CPU.

    Raises: CacheOptionError for a device on which torch can make no tensor here.
    """
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # by device and build
        raise CacheOptionError(
            f"device {device!r} cannot be used here: {first_line(error)}; 'cpu' always can"
        ) from error
    return device


def is_power_of_two(value: int) -> bool:
    """Say whether a positive integer is a power of two."""
    return value & (value - 1) == 0


@contextmanager
def extra(name: str, needs: str) -> Iterator[None]:
    """Say which extra to install where an import inside of the block finds a package missing.

        with extra("eval", "the report"):
            import matplotlib

    Args:
        name: the extra, as in `pip install -e '.[name]'`.
        needs: the feature that needs the package.
    Raises: ImportError naming feature, package and remedy.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "kv_hf":  # a fault of ours
            raise
        raise ImportError(
            f"{needs} needs {error.name}: pip install -e '.[{name}]' in the clone", name=error.name
        ) from error
