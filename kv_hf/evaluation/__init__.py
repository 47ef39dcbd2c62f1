"""Accuracy and memory of caches, measured through what they really store.

The functions below are imported when they are asked for; what needs more packages names the extra that brings them.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "cache_kind": "caches",
    "measure_accuracy": "accuracy",
    "measure_footprint": "memory",
    "needle_grid": "needles",
    "pareto": "recommend",
    "read_rows": "rows",
    "register_peer": "caches",
    "unregister_peer": "caches",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import the module of a public function when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
