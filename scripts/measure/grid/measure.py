"""Measure a cell: load its model, kept for the cells that follow, and call the measurement of its kind."""

import gc
from collections.abc import Callable
from typing import Any

import torch
from transformers import set_seed

from kv_hf.cache_names import cache_label
from kv_hf.evaluation.footprint import measure_footprint
from kv_hf.evaluation.loaded_model import TextSettings
from kv_hf.evaluation.retrieval.grid import needle_grid, retrieval_tasks
from kv_hf.evaluation.retrieval.puzzles import AT_A_DEPTH
from measure.grid.cell import Cell
from measure.grid.loaded import PackagedModel
from measure.models.packaged import resolve_model

TEXT_FIELDS = ("text", "windows", "window", "prompt")


class Bench:
    """The one model that is loaded at a time, and the measurements of it.

    Args:
        device: where models run.
        say: told which model is loaded.
    """

    def __init__(
        self, device: str | torch.device = "cpu", say: Callable[[str], object] = print
    ) -> None:
        self.device = torch.device(device)
        self.say = say
        self._loaded: PackagedModel | None = None
        self._dtype = ""

    def loaded(self, name: str, dtype: str) -> PackagedModel:
        """Return a model in a dtype; the one before is let go."""
        if self._loaded is None or (self._loaded.name, self._dtype) != (name, dtype):
            self._loaded = None
            gc.collect()
            self.say(f"loading {name} in {dtype}")
            self._loaded = PackagedModel(name, getattr(torch, dtype), self.device)
            self._dtype = dtype
        return self._loaded

    def measure(self, cell: Cell) -> list[dict[str, Any]]:
        """Return the measured fields of a cell's rows.

        Raises: ValueError for what cannot be measured; see the measurement of each kind.
        """
        settings = dict(cell.settings)
        set_seed(settings["seed"])
        kinds = {
            "accuracy": self._accuracy,
            "memory": self._memory,
            "needle": self._needle,
            "task": self._task,
        }
        return kinds[cell.kind](cell, settings)

    def _accuracy(self, cell: Cell, settings: dict[str, Any]) -> list[dict[str, Any]]:
        loaded = self.loaded(cell.model, settings["dtype"])
        texts = TextSettings(**{name: settings[name] for name in TEXT_FIELDS})
        return [loaded.accuracy(cell.cache, texts, settings["divergence_tokens"])]

    def _memory(self, cell: Cell, settings: dict[str, Any]) -> list[dict[str, Any]]:
        self._loaded = None  # a model that lies beside would take memory and time
        gc.collect()
        sizes = {name: settings[name] for name in ("context", "batch", "steps", "dtype")}
        return [
            measure_footprint(
                resolve_model(cell.model), cell.cache, device=str(self.device), **sizes
            )
        ]

    def _needle(self, cell: Cell, settings: dict[str, Any]) -> list[dict[str, Any]]:
        loaded = self.loaded(cell.model, settings["dtype"])
        asked = (loaded.model, loaded.tokenizer, cell.cache)
        samples, seed, rows = settings["samples"], settings["seed"], []
        lists = [task for task in settings["tasks"] if task not in AT_A_DEPTH]
        for task in settings["tasks"]:
            if task in AT_A_DEPTH:
                where = (settings["lengths"], settings["depths"], samples, seed, task)
                rows += needle_grid(*asked, *where)
        for length in settings["lengths"] if lists else ():
            rows += retrieval_tasks(*asked, lists, length, samples, seed)
        return [{**row, "cache": cache_label(cell.cache)} for row in rows]

    def _task(self, cell: Cell, settings: dict[str, Any]) -> list[dict[str, Any]]:
        from kv_hf.evaluation.harness.tasks import (
            run_tasks,  # lm-eval is asked for by these cells alone
        )

        loaded = self.loaded(cell.model, settings["dtype"])
        return run_tasks(
            loaded.model,
            loaded.tokenizer,
            cell.cache,
            settings["tasks"],
            limit=settings["limit"],
            num_fewshot=settings["num_fewshot"],
            include_path=settings["include_path"],
            seed=settings["seed"],
        )
