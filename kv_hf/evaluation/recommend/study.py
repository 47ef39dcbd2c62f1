"""Sensitivities of one model under one set of options, and the best selection of formats at every size."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...cache.paged_cache import PagedCache
from ...config import CacheConfig
from ...recipe import MEASURED_OPTIONS, Recipe
from .calibration import Calibration, with_group_sizes
from .candidates import TOGETHER_BITS, Asked, fitting, per_side, unbeaten
from .cost import Serving, choices_of, layer_shapes, predict_layers, side_bytes, stored_numbers
from .sensitivity import (
    SIDES,
    Cell,
    Formats,
    Sensitivity,
    measure_cells,
    measure_sensitivities,
    scaled,
)
from .solve import Frontier, solve

Selection = Mapping[tuple[int, str], str]  # (layer, side) -> format


class Study:
    """Sensitivities of one model, from which recipes for any budget follow.

    Args:
        calibration: the model, the texts and the options that all caches share.
        formats: those to measure layer by layer, for both sides or {side: formats}. None takes all registered ones of
            less than TOGETHER_BITS bits that no other beats in bytes and in the loss of all layers together.
        together: those that lose so little that all layers are measured at once; None: likewise, of more bits.
            Exact storage is always among the choices.
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
        formats: Asked = None,
        together: Asked = None,
        serving: Serving | None = None,
        cells: Path | None = None,
        facts: Mapping[str, Any] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
        base: "Study | None" = None,
    ) -> None:
        model = calibration.model
        if model.training:
            raise ValueError("model is in training mode: call model.eval() first")
        self._asked = {
            "formats": per_side("formats", formats),
            "together": per_side("together", together),
        }
        self._check_asked()
        self.calibration = calibration
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
        self._totals: dict[tuple[str, str], int] = {}
        for (
            asked
        ) in self._asked.values():  # every format fits every layer, before anything is measured
            for side, names in (asked or {}).items():
                for name in names:
                    self.side_total(side, name)
        self.candidates: Formats = fitting(self.side_total, calibration.options)
        if not all(self.serving.pages(shape, self.options) for shape in self.shapes):
            raise ValueError(
                f"context must be longer than sinks and a page together, got {self.serving.context}"
            )

    def _check_asked(self) -> None:
        """Raise ValueError where a side has nothing to measure layer by layer."""
        for side in SIDES:
            if self._asked["formats"] is not None and not self._asked["formats"][side]:
                raise ValueError(
                    f"formats must name at least one format of {side} to measure layer by layer"
                )

    def variant(self, options: Mapping[str, Any]) -> "Study":
        """Return the study of the same model with other options, which takes its sensitivities from this one."""
        cal = self.calibration
        other = Calibration(
            cal.model, cal.texts, cal.prompt_tokens, {**cal.options, **options}, cal.fast
        )
        return Study(
            other,
            formats=self._asked["formats"],
            together=self._asked["together"],
            serving=self.serving,
            cells=self.cells,
            facts=self.facts,
            progress=self.progress,
            base=self,
        )

    # -- formats -------------------------------------------------------------------------------------------

    @cached_property
    def screened(self) -> dict[tuple[str, str], float]:
        """KL of all layers of one side in one format, by (side, format): of all candidates, or of a base's choices."""
        names = self.candidates
        if self.base is not None:
            names = {side: tuple(n for n in self.choices[side] if n != "exact") for side in SIDES}
        layers = tuple(shape.layer for shape in self.shapes)
        wanted = [Cell(layers, side, name) for side in SIDES for name in names[side]]
        found = measure_cells(self.calibration, wanted, **self._how)
        exact = {(side, "exact"): 0.0 for side in SIDES}
        return {**{(cell.side, cell.format): kl for cell, kl in found.items()}, **exact}

    @cached_property
    def formats(self) -> Formats:
        """Of each side, the formats that are measured layer by layer, the largest first."""
        return self._chosen("formats")

    @cached_property
    def together(self) -> Formats:
        """Of each side, the formats that are measured in all layers at once."""
        return self._chosen("together")

    def _chosen(self, argument: str) -> Formats:
        asked = self._asked[argument]
        if asked is not None:
            return asked
        if self.base is not None:
            found: Formats = getattr(self.base, argument)
            return found
        return {side: self._unbeaten(side, argument == "formats") for side in SIDES}

    def _unbeaten(self, side: str, small: bool) -> tuple[str, ...]:
        """Return the formats of a side, of few bits or of many, that no other beats and that were not asked for."""
        names = [name for name in self.candidates[side] if name not in self._named(side)]
        kept = unbeaten(
            names,
            {name: self.side_total(side, name) for name in names},
            {name: self.screened[side, name] for name in names},
        )
        found = [name for name in kept if (self._bits(side, name) < TOGETHER_BITS) == small]
        return tuple(found or kept[-1:] if small else found)

    def _named(self, side: str) -> list[str]:
        """Return the formats of a side that were asked for."""
        return [name for asked in self._asked.values() if asked for name in asked[side]]

    def _open(self, side: str) -> list[str]:
        """Return the formats of a side that may turn out to be choices, exact apart, before anything is measured."""
        any_format = self._asked["formats"] is None
        return [*self._named(side), *(self.candidates[side] if any_format else ())]

    @property
    def possible(self) -> list[str]:
        """The formats that may turn out to be choices of either side, before anything is measured."""
        return list(dict.fromkeys(name for side in SIDES for name in self._open(side)))

    def _bits(self, side: str, name: str) -> float:
        """Return the bits per number of a side in one format; exact storage of `serving.dtype` has its bits."""
        exact = 8 * self.serving.dtype.itemsize
        return exact * self.side_total(side, name) / self.side_total(side, "exact")

    @cached_property
    def choices(self) -> Formats:
        """All formats to choose from."""
        return {side: ("exact", *self.together[side], *self.formats[side]) for side in SIDES}

    # -- bytes ---------------------------------------------------------------------------------------------

    @cached_property
    def numbers(self) -> int:
        """Return the count of numbers that the pages hold."""
        return stored_numbers(self.shapes, self.options, self.serving)

    @cached_property
    def outside_bytes(self) -> int:
        """Bytes beside the pages, the same for all formats: exact windows and tables."""
        report = predict_layers(self.shapes, self.options, self.num_layers, self.serving)
        return report.tail + report.tables

    def side_total(self, side: str, name: str) -> int:
        """Return the bytes of all pages of a side in one format.

        Raises: CacheOptionError where a layer cannot have it.
        """
        if (side, name) not in self._totals:
            self._totals[side, name] = sum(
                side_bytes(shape, side, name, self.options, self.serving) for shape in self.shapes
            )
        return self._totals[side, name]

    @property
    def least_bytes(self) -> int:
        """Bytes of the smallest pages that the choices allow, known before anything is measured."""
        return sum(
            min(self.side_total(side, name) for name in (*self._open(side), "exact"))
            for side in SIDES
        )

    def page_bytes(self, chosen: Selection) -> int:
        """Return the bytes of all pages of a selection."""
        return sum(
            side_bytes(shape, side, chosen[shape.layer, side], self.options, self.serving)
            for shape in self.shapes
            for side in SIDES
        )

    def uniform(self, keys: str, values: str) -> Selection:
        """Return the selection of one format for all keys and one for all values."""
        names = {"keys": keys, "values": values}
        return {(shape.layer, side): names[side] for shape in self.shapes for side in SIDES}

    # -- losses --------------------------------------------------------------------------------------------

    @property
    def _how(self) -> dict[str, Any]:
        return {
            "cells": self.cells,
            "facts": {**self.facts, "bytes_dtype": str(self.serving.dtype).removeprefix("torch.")},
            "progress": self.progress,
        }

    @cached_property
    def sensitivities(self) -> list[Sensitivity]:
        """Measured at the first use, read from `cells`, or carried over from `base`."""
        if self.base is not None:
            return scaled(
                self.base.sensitivities, self.base.calibration, self.calibration, **self._how
            )
        return measure_sensitivities(
            self.calibration,
            [shape.layer for shape in self.shapes],
            self.formats,
            self.together,
            measured=lambda cell: {"bytes_per_token": self._bytes_per_token(cell)},
            **self._how,
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

    def predicted(self, chosen: Selection) -> float:
        """Return the sum of the sensitivities of a selection."""
        return sum(self._table[layer, side, name] for (layer, side), name in chosen.items())

    def layers_of(self, chosen: Selection) -> dict[str, dict[str, str]]:
        """Return a selection as CacheConfig.layers."""
        return {
            str(shape.layer): {side: chosen[shape.layer, side] for side in SIDES}
            for shape in self.shapes
        }

    def measured(self, chosen: Selection) -> float:
        """Return the KL of a cache of this selection, on the texts of the calibration."""
        return self.calibration.kl(self.layers_of(chosen), self.shapes[0].layer)

    def recipe(self, chosen: Selection) -> Recipe:
        """Return a selection as a recipe, with the options that are not the default."""
        keys, values = (
            tuple(chosen.get((layer, side)) for layer in range(self.num_layers)) for side in SIDES
        )
        return Recipe(keys, values, self.options_of(chosen))

    def options_of(self, chosen: Selection) -> dict[str, Any]:
        """Return the options of a cache of this selection that are not the default."""
        names = ([name for (_, own), name in chosen.items() if own == side] for side in SIDES)
        read = with_group_sizes(self.calibration.options, *names)
        defaults = CacheConfig()
        return {
            name: read[name]
            for name in MEASURED_OPTIONS
            if name in read and read[name] != getattr(defaults, name)
        }
