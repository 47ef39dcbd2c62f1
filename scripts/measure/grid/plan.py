"""The cells of a run, model by model, so that what cells share is computed once."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kv_hf.evaluation.loaded_model import TextSettings
from kv_hf.texts import text_names
from measure.grid.cell import Cell, check_caches

# what users can choose today: transformers' caches and ours
CACHES = (
    "paged_exact",
    "paged_fp8",
    "paged_int8",
    "paged_int4:keys=int8",
    "paged_int4:key_group_size=32,value_group_size=32",
    "paged_int4",
    "paged_int2:keys=int4",
    "paged_int2",
    "paged_int2:key_group_size=64,value_group_size=64",
    "hqq_int8",
    "quantized_fp8",
    "quanto_int4",
    "hqq_int4",
    "quanto_int2",
    "hqq_int2",
)


def plan_cells(
    models: Sequence[str],
    caches: Sequence[str],
    common: dict[str, Any],
    *,
    texts: Sequence[TextSettings] = (),
    divergence_tokens: int = 64,
    tasks: dict[str, Any] | None = None,
    needle: dict[str, Any] | None = None,
    memory: dict[str, Any] | None = None,
) -> list[Cell]:
    """Return the cells of every model and cache, for what is asked.

    Args:
        common: settings of every cell: dtype, device, seed.
        texts: the scored texts of "accuracy" cells: a cell for each.
        tasks: settings of "task" cells: tasks (list), limit, num_fewshot.
        needle: settings of "needle" cells: tasks, lengths, depths, samples.
        memory: settings of "memory" cells: contexts (one cell each), batch, steps, dtype.
    Raises: an error that names the first model or cache that is wrong.
    """
    if not models:
        raise ValueError("models must name at least one model, got none")
    if not caches:
        raise ValueError("caches must name at least one cache, got none")
    check_caches(list(caches))
    cells: list[Cell] = []
    for model in models:

        def add(kind: str, cache: str, settings: dict[str, Any], tokens: int) -> None:
            cells.append(Cell(kind, model, cache, {**common, **settings}, tokens))  # noqa: B023

        for scored in texts:  # all caches on one text: they share its exact distributions
            windows = scored.windows * len(text_names(scored.text))
            read = windows * (scored.window + 4 * divergence_tokens)
            settings = {**asdict(scored), "divergence_tokens": divergence_tokens}
            for cache in caches:
                add("accuracy", cache, settings, read)
        if needle is not None:
            read = sum(needle["lengths"]) * len(needle["depths"]) * needle["samples"]
            for cache in ("dynamic", *caches):
                add("needle", cache, needle, read * len(needle["tasks"]))
        if tasks is not None:
            read = 300 * (tasks["limit"] or 1000) * len(tasks["tasks"])
            for cache in ("dynamic", *caches):
                add("task", cache, tasks, read)
        if memory is not None:
            for context in memory["contexts"]:
                rest = {name: value for name, value in memory.items() if name != "contexts"}
                for cache in ("dynamic", *caches):
                    add("memory", cache, {"context": context, **rest}, context)
    return cells
