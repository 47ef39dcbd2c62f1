"""Fields of CacheConfig that are sizes: given as a number or as text with a unit ("2GiB", "32k"), held as a number."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .units import parse_bytes, parse_tokens

Held = TypeVar("Held", int, int | None)


class SizeField(Generic[Held]):
    """A field of a frozen dataclass that turns "2GiB" into the number that everyone else reads.

    Numbers are held as they were given: the dataclass checks their range, as it does for its other fields.

    Args:
        parse: called with the field's name and the text; raises CacheOptionError for text that is no size.
        default: of the field.
    """

    def __init__(self, parse: Callable[[str, str], int], default: Held) -> None:
        self._parse = parse
        self._default: Held = default
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type | None = None) -> Held:
        held: Held = self._default if instance is None else vars(instance)[self._name]
        return held

    def __set__(self, instance: object, value: Held | str) -> None:
        parsed = self._parse(self._name, value) if isinstance(value, str) else value
        vars(instance)[self._name] = parsed


def byte_size() -> Any:
    """Return a field of bytes: a number, "2GiB" or "2GB", None by default."""
    return SizeField[int | None](parse_bytes, None)


def token_count(default: int | None) -> Any:
    """Return a field of tokens: a number or "32k"."""
    return SizeField(_tokens, default)


def _tokens(argument: str, given: str) -> int:
    return parse_tokens(argument, given)
