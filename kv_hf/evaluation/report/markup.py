"""HTML as text: every string that is not Markup is escaped, wherever it goes."""

import html
from typing import Any


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


EMPTY = {"br", "col", "meta"}


def tag(name: str, /, *children: Any, **attributes: Any) -> Markup:
    """Return an element. Children: Markup as it is, None left out, anything else escaped.

    Attributes: None and False are left out, True has no value; "_" becomes "-" and a trailing one is dropped (class_).
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in EMPTY:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{join(*children)}</{name}>")


def join(*children: Any) -> Markup:
    """Return children one behind the other, escaped where they are not Markup."""
    return Markup(
        "".join(child if isinstance(child, Markup) else escape(child) for child in children)
    )


def escape(value: Any) -> str:
    """Return a value as text that is safe inside of elements and of quoted attributes; None is empty."""
    return "" if value is None else html.escape(str(value), quote=True)
