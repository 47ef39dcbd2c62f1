"""Accuracy and memory of caches, measured through what they really store.

The functions below are imported when they are asked for; what needs more packages names the extra that brings them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accuracy import measure_accuracy
    from .by_text import measure_texts
    from .cache_bytes import measure_held
    from .cache_kinds import cache_kind, register_peer, unregister_peer
    from .divergence import measure_divergence
    from .footprint import measure_footprint
    from .harness.tasks import run_tasks
    from .retrieval import needle_grid, retrieval_tasks
    from .rows import read_rows

__all__ = [
    "cache_kind",
    "measure_accuracy",
    "measure_divergence",
    "measure_footprint",
    "measure_held",
    "measure_texts",
    "needle_grid",
    "read_rows",
    "register_peer",
    "retrieval_tasks",
    "run_tasks",
    "unregister_peer",
]
_HOMES = {
    "cache_kind": "cache_kinds",
    "measure_accuracy": "accuracy",
    "measure_divergence": "divergence",
    "measure_footprint": "footprint",
    "measure_held": "cache_bytes",
    "measure_texts": "by_text",
    "needle_grid": "retrieval",
    "read_rows": "rows",
    "register_peer": "cache_kinds",
    "retrieval_tasks": "retrieval",
    "run_tasks": "harness.tasks",
    "unregister_peer": "cache_kinds",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public function when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
