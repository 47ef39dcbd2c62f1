"""Classes without grouped kv heads, as classes that have them and compute the same."""

from collections.abc import Callable

from .plan import Plan

CROSS_CLASS: dict[str, Callable[..., Plan]] = {}
