"""Long contexts: what can be found again, read through the store that a cache keeps of them.

After the needle test (G. Kamradt, LLMTest_NeedleInAHaystack) and RULER (arXiv 2404.06654); made here, from a seed.
"""

from .grid import needle_cells, needle_grid, retrieval_tasks, task_cells
from .haystack import load_haystack
from .puzzles import TASKS

__all__ = [
    "TASKS",
    "load_haystack",
    "needle_cells",
    "needle_grid",
    "retrieval_tasks",
    "task_cells",
]
