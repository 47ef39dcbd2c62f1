"""Sensitivities of one model under one set of options, and the best selection of formats at every size."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...cache.paged_cache import PagedCache
from ...config import CacheConfig
from ...recipe import MEASURED_OPTIONS, Recipe
from .calibration import Calibration, with_group_sizes
from .cost import Serving, choices_of, layer_shapes, predict_layers, side_bytes, stored_numbers
from .sensitivity import SIDES, Cell, Sensitivity, check_formats, measure_sensitivities, scaled
from .solve import Frontier, solve

FORMATS = ("int4", "int2")  # measured layer by layer
TOGETHER = ("int8",)  # measured in all layers at once

Selection = Mapping[tuple[int, str], str]  # (layer, side) -> format


class Study:
    """Sensitivities of one model, from which recipes for any budget follow.

    Args:
        calibration: the model, the texts and the options that all caches share.
        formats, together: see `measure_sensitivities`. Exact storage is always among the choices.
        serving: what bytes are counted for.
        cells: JSONL file of finished cells.
        facts: of the calibration, for rows and recipes: model, text, ..
        base: a study of other options, whose sensitivities are carried over in place of being measured.
    Raises: ValueError for a model in training mode, a context shorter than a page and formats that there are not,
        CacheOptionError for bad options.
    """

    def __init__(
        self,
        calibration: Calibration,
        *,
        formats: Sequence[str] = FORMATS,
        together: Sequence[str] = TOGETHER,
        serving: Serving | None = None,
        cells: Path | None = None,
        facts: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        base: "Study | None" = None,
    ) -> None:
        model = calibration.model
        if model.training:
            raise ValueError("model is in training mode: call model.eval() first")
        check_formats(formats, together)
        self.calibration, self.formats, self.together = calibration, formats, together
        self.serving = serving or Serving()
        self.cells, self.facts, self.progress = cells, dict(facts or {}), progress
        self.base = base
        # formats that read every option; those of single layers replace them
        self.options = CacheConfig(keys="int4", values="int4", **calibration.options)
        cache = PagedCache(model.config, **with_group_sizes(calibration.options, (), ()))
        with torch.no_grad():
            model(calibration.texts[0][None, :1], past_key_values=cache, use_cache=True)
        self.num_layers = len(cache.layers)
        self.shapes = layer_shapes(cache)
        for name in self.choices:  # every format fits every layer, before anything is measured
            self.page_bytes(self.uniform(name))
        if not all(self.serving.pages(shape, self.options) for shape in self.shapes):
            raise ValueError(
                f"context must be longer than sinks and a page together, got {self.serving.context}"
            )

    def variant(self, options: Mapping[str, Any]) -> "Study":
        """Return the study of the same model with other options, which takes its sensitivities from this one."""
        cal = self.calibration
        other = Calibration(
            cal.model, cal.texts, cal.prompt_tokens, {**cal.options, **options}, cal.fast
        )
        return Study(
            other,
            formats=self.formats,
            together=self.together,
            serving=self.serving,
            cells=self.cells,
            facts=self.facts,
            progress=self.progress,
            base=self,
        )

    @property
    def choices(self) -> tuple[str, ...]:
        """All formats to choose from."""
        return ("exact", *self.together, *self.formats)

    @cached_property
    def numbers(self) -> int:
        """Return the count of numbers that the pages hold."""
        return stored_numbers(self.shapes, self.options, self.serving)

    @cached_property
    def outside_bytes(self) -> int:
        """Bytes beside the pages, the same for all formats: exact windows and tables."""
        report = predict_layers(self.shapes, self.options, self.num_layers, self.serving)
        return report.tail + report.tables

    def page_bytes(self, chosen: Selection) -> int:
        """Return the bytes of all pages of a selection."""
        return sum(
            side_bytes(shape, side, chosen[shape.layer, side], self.options, self.serving)
            for shape in self.shapes
            for side in SIDES
        )

    def uniform(self, name: str) -> Selection:
        """Return the selection of one format for everything."""
        return {(shape.layer, side): name for shape in self.shapes for side in SIDES}

    @cached_property
    def sensitivities(self) -> list[Sensitivity]:
        """Measured at the first use, read from `cells`, or carried over from `base`."""
        how: dict[str, Any] = {
            "cells": self.cells,
            "facts": {**self.facts, "bytes_dtype": str(self.serving.dtype).removeprefix("torch.")},
            "progress": self.progress,
        }
        if self.base is not None:
            return scaled(self.base.sensitivities, self.base.calibration, self.calibration, **how)
        return measure_sensitivities(
            self.calibration,
            [shape.layer for shape in self.shapes],
            self.formats,
            self.together,
            measured=lambda cell: {"bytes_per_token": self._bytes_per_token(cell)},
            **how,
        )

    def _bytes_per_token(self, cell: Cell) -> float:
        return sum(
            side_bytes(shape, cell.side, cell.format, self.options, self.serving)
            / (self.serving.pages(shape, self.options) * self.options.page_size)
            for shape in self.shapes
            if shape.layer in cell.layers
        )

    @cached_property
    def _table(self) -> dict[tuple[int, str, str], float]:
        table = {(one.layer, one.side, one.format): one.kl_mean for one in self.sensitivities}
        exact = {(shape.layer, side, "exact"): 0.0 for shape in self.shapes for side in SIDES}
        return {**table, **exact}

    @cached_property
    def _items(self) -> list[tuple[tuple[int, str], list[tuple[str, int, float]]]]:
        return choices_of(self.shapes, self._table, self.choices, self.options, self.serving)

    @cached_property
    def frontier(self) -> Frontier:
        """The best selections at every size in bytes of pages."""
        return solve([[(size, kl) for _, size, kl in row] for _, row in self._items])

    def best(self, limit: int) -> Selection | None:
        """Return the selection of the least predicted KL whose pages fit into `limit` bytes; None where none fits."""
        point = self.frontier.best(limit)
        if point is None:
            return None
        chosen = zip(self._items, self.frontier.selection(point), strict=True)
        return {item: row[choice][0] for (item, row), choice in chosen}

    def best_uniform(self, limit: int) -> Selection | None:
        """Return the best of one format for everything, likewise."""
        fitting = [self.uniform(name) for name in self.choices]
        fitting = [chosen for chosen in fitting if self.page_bytes(chosen) <= limit]
        return min(fitting, key=self.predicted, default=None)

    def predicted(self, chosen: Selection) -> float:
        """Return the sum of the sensitivities of a selection."""
        return sum(self._table[layer, side, name] for (layer, side), name in chosen.items())

    def measured(self, chosen: Selection) -> float:
        """Return the KL of a cache of this selection."""
        layers = {
            str(shape.layer): {side: chosen[shape.layer, side] for side in SIDES}
            for shape in self.shapes
        }
        return self.calibration.kl(layers, self.shapes[0].layer)

    def recipe(self, chosen: Selection) -> Recipe:
        """Return a selection as a recipe, with the options that are not the default."""
        keys, values = (
            tuple(chosen.get((layer, side)) for layer in range(self.num_layers)) for side in SIDES
        )
        read = with_group_sizes(
            self.calibration.options, *([name for name in side if name] for side in (keys, values))
        )
        defaults = CacheConfig()
        options = {
            name: read[name]
            for name in MEASURED_OPTIONS
            if name in read and read[name] != getattr(defaults, name)
        }
        return Recipe(keys, values, options)
