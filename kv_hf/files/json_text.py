"""JSON of strangers: no name with two values, no nesting that breaks what reads it next."""

import json
from collections.abc import Sequence
from typing import Any

DEEPEST = 64  # lists and objects in each other; copies and comparisons of deeper ones exhaust Python's stack


def parse_json(text: bytes | str, *, strict: bool = False) -> Any:
    """Parse JSON.

    Args:
        strict: refuse every name that occurs twice, and NaN and Infinity, which some model configs hold. Otherwise a
            name may be repeated with the same value.
    Raises: ValueError for what is no JSON, a name with two values, numbers of thousands of digits, and nesting deeper
        than DEEPEST.
    """
    try:
        found = json.loads(
            text,
            object_pairs_hook=_unique if strict else _unambiguous,
            parse_constant=_no_constant if strict else None,
        )
    except RecursionError as error:
        raise ValueError(f"it is nested too deeply ({error})") from None
    _check_depth(found)
    return found


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _unambiguous(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        for name, value in pairs:
            if value != found[name]:
                raise ValueError(f"the name {name[:80]!r} occurs twice, with different values")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")


def _check_depth(value: Any) -> None:
    """Raise ValueError for lists and objects nested deeper than DEEPEST, without recursion."""
    level, depth = [value], 0
    while level:
        inner: list[Any] = []
        for one in level:
            held = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
            inner += (each for each in held if isinstance(each, (dict, list)))
        level, depth = inner, depth + 1
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} lists and objects")
