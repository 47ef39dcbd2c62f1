"""Accuracy and memory of caches, measured through what they really store.

The functions below are imported when they are asked for; what needs more packages names the extra that brings them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accuracy import measure_accuracy
    from .footprint import measure_footprint
    from .harness.tasks import run_tasks
    from .report import write_report
    from .retrieval import needle_grid, retrieval_tasks
    from .rows import read_rows

__all__ = [
    "measure_accuracy",
    "measure_footprint",
    "needle_grid",
    "read_rows",
    "retrieval_tasks",
    "run_tasks",
    "write_report",
]
_HOMES = {
    "measure_accuracy": "accuracy",
    "measure_footprint": "footprint",
    "needle_grid": "retrieval",
    "read_rows": "rows",
    "retrieval_tasks": "retrieval",
    "run_tasks": "harness.tasks",
    "write_report": "report",
}


def __getattr__(name: str) -> Any:
    """Import the module of a public function when it is asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
