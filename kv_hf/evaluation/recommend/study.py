"""Choose the formats of every layer and side for a model: measure once, then solve for any budget."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ...cache.model_shape import decoder_config, signature
from ...cache.paged_cache import PagedCache
from ...config import CacheConfig
from ...notices import say_once
from ...recipe import MEASURED_OPTIONS, MODEL_SIZES, Recipe
from ...version import __version__
from ..rows import versions
from .calibration import Calibration, with_group_sizes
from .cost import (
    Budget,
    Serving,
    choices_of,
    layer_shapes,
    predict_layers,
    side_bytes,
    stored_numbers,
)
from .sensitivity import PROTOCOL, SIDES, Cell, Sensitivity, check_formats, measure_sensitivities
from .solve import Frontier, solve

FORMATS = ("int4", "int2")  # measured layer by layer
TOGETHER = ("int8",)  # measured in all layers at once


@dataclass(frozen=True)
class Recommendation:
    """A recipe and what is known about it; KL in nats per token on the calibration text.

    Attributes:
        recipe: what `cache_config={"recipe": ..}` takes.
        budget: what was asked for.
        bits_per_element: stored bits per number, scales included, without the exact tail.
        bytes_per_token: everything counted, at the context and batch that were asked for.
        predicted_kl: sum of the sensitivities of what was chosen.
        measured_kl: of a cache of this recipe.
        uniform: the best format that fits the budget in all layers, None where none does.
        uniform_predicted_kl, uniform_kl: its sum, and its measured KL.
        is_uniform: True where the recipe is that uniform format, because nothing measured better.
        frontier: (bits per element, predicted KL), the best that there is at every size, smallest first.
        sensitivities: what was measured.
    """

    recipe: Recipe
    budget: Budget
    bits_per_element: float
    bytes_per_token: float
    predicted_kl: float
    measured_kl: float
    uniform: str | None
    uniform_predicted_kl: float | None
    uniform_kl: float | None
    is_uniform: bool
    frontier: list[tuple[float, float]]
    sensitivities: list[Sensitivity]

    def save(self, path: str | Path) -> None:
        """Write the recipe. Raises OSError where the disk refuses."""
        self.recipe.save(path)


class Study:
    """Sensitivities of one model, from which recipes for any budget follow.

    Args:
        calibration: the model, the texts and the options that all caches share.
        formats, together: see `measure_sensitivities`. Exact storage is always among the choices.
        serving: what bytes are counted for.
        cells: JSONL file of finished cells.
        facts: of the calibration, for rows and recipes: model, text, ..
    Raises: ValueError for a model in training mode, CacheOptionError for bad options.
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
    ) -> None:
        model = calibration.model
        if model.training:
            raise ValueError("model is in training mode: call model.eval() first")
        check_formats(formats, together)
        self.calibration, self.formats, self.together = calibration, formats, together
        self.serving = serving or Serving()
        self.cells, self.facts, self._progress = cells, dict(facts or {}), progress
        # formats that read every option; those of single layers replace them
        self.options = CacheConfig(keys="int4", values="int4", **calibration.options)
        cache = PagedCache(model.config, **with_group_sizes(calibration.options, (), ()))
        with torch.no_grad():
            model(calibration.texts[0][None, :1], past_key_values=cache, use_cache=True)
        self.num_layers = len(cache.layers)
        self.shapes = layer_shapes(cache)
        if self.serving.pages(self.shapes[0], self.options) == 0:
            raise ValueError(
                f"context must be longer than sinks and a page together, got {self.serving.context}"
            )

    @property
    def choices(self) -> tuple[str, ...]:
        """All formats to choose from."""
        return ("exact", *self.together, *self.formats)

    @cached_property
    def sensitivities(self) -> list[Sensitivity]:
        """Measured at the first use, or read from `cells`."""
        return measure_sensitivities(
            self.calibration,
            [shape.layer for shape in self.shapes],
            self.formats,
            self.together,
            cells=self.cells,
            measured=lambda cell: {"bytes_per_token": self._bytes_per_token(cell)},
            facts={**self.facts, "bytes_dtype": str(self.serving.dtype).removeprefix("torch.")},
            progress=self._progress,
        )

    def _bytes_per_token(self, cell: Cell) -> float:
        shapes = [shape for shape in self.shapes if shape.layer in cell.layers]
        return sum(
            side_bytes(shape, cell.side, cell.format, self.options, self.serving)
            / (self.serving.pages(shape, self.options) * self.options.page_size)
            for shape in shapes
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

    def recommend(self, budget: object) -> Recommendation:
        """Return the recipe that loses least within a budget; see `recommend`.

        Raises: ValueError for a budget that cannot be read, or that nothing fits into.
        """
        asked = Budget.parse(budget)
        limit = asked.page_bytes(self.shapes, self.options, self.num_layers, self.serving)
        smallest = min(self._uniform_bytes(name) for name in self.choices)
        if limit < smallest:  # known before anything is measured
            least = 8 * smallest / self._numbers
            raise ValueError(
                f"budget {asked} is too small: the least that these formats need is {least:.3g} bits per number in "
                f"{smallest} bytes of pages, and {max(limit, 0)} bytes are left for them"
            )
        point = self.frontier.best(limit)
        assert point is not None
        chosen = {
            item: row[choice][0]
            for (item, row), choice in zip(self._items, self.frontier.selection(point), strict=True)
        }
        uniform = self._best_uniform(limit)
        mixed_kl = self._measured(chosen)
        uniform_kl = self._measured(uniform) if uniform else None
        is_uniform = bool(uniform) and uniform_kl is not None and uniform_kl <= mixed_kl
        if is_uniform and chosen != uniform:
            say_once(
                f"uniform {asked}",
                f"kv_hf: no mixed recipe for budget {asked} measured better than {self._name_of(uniform)} "
                f"({mixed_kl:.3g} against {uniform_kl:.3g}), which is recommended",
            )
        final, kl = (
            (uniform, uniform_kl) if is_uniform and uniform_kl is not None else (chosen, mixed_kl)
        )
        return self._recommendation(asked, final, kl, uniform, uniform_kl, is_uniform)

    # -- inside --------------------------------------------------------------------------------------------

    @cached_property
    def _numbers(self) -> int:
        return stored_numbers(self.shapes, self.options, self.serving)

    def _uniform_bytes(self, name: str) -> int:
        return sum(
            side_bytes(shape, side, name, self.options, self.serving)
            for shape in self.shapes
            for side in SIDES
        )

    def _best_uniform(self, limit: int) -> dict[tuple[int, str], str]:
        """Return the format for all layers that fits and loses least, as a selection; empty where none fits."""
        fitting = [name for name in self.choices if self._uniform_bytes(name) <= limit]
        if not fitting:
            return {}
        best = min(fitting, key=lambda name: self._predicted(self._all(name)))
        return self._all(best)

    def _all(self, name: str) -> dict[tuple[int, str], str]:
        return {(shape.layer, side): name for shape in self.shapes for side in SIDES}

    @staticmethod
    def _name_of(uniform: Mapping[tuple[int, str], str]) -> str:
        return f"paged_{next(iter(uniform.values()))}"

    def _predicted(self, chosen: Mapping[tuple[int, str], str]) -> float:
        return sum(self._table[layer, side, name] for (layer, side), name in chosen.items())

    def _measured(self, chosen: Mapping[tuple[int, str], str]) -> float:
        layers = {
            str(shape.layer): {side: chosen[shape.layer, side] for side in SIDES}
            for shape in self.shapes
        }
        return self.calibration.kl(layers, self.shapes[0].layer)

    def _recommendation(
        self,
        budget: Budget,
        chosen: Mapping[tuple[int, str], str],
        kl: float,
        uniform: Mapping[tuple[int, str], str],
        uniform_kl: float | None,
        is_uniform: bool,
    ) -> Recommendation:
        sides = {
            side: tuple(chosen.get((layer, side)) for layer in range(self.num_layers))
            for side in SIDES
        }
        options = self._recipe_options(sides)
        plain = Recipe(sides["keys"], sides["values"], options)
        size = sum(
            side_bytes(shape, side, chosen[shape.layer, side], self.options, self.serving)
            for shape in self.shapes
            for side in SIDES
        )
        report = predict_layers(
            self.shapes, CacheConfig(recipe=plain), self.num_layers, self.serving
        )
        bits = 8 * size / self._numbers
        known = {
            "budget": str(budget),
            "bits_per_element": bits,
            "bytes_per_token": report.per_token,
            "bytes_dtype": str(self.serving.dtype).removeprefix("torch."),
            "context": self.serving.context,
            "batch": self.serving.batch,
            "predicted_kl": self._predicted(chosen),
            "measured_kl": kl,
            "uniform": self._name_of(uniform) if uniform else None,
            "uniform_kl": uniform_kl,
        }
        about = {
            "protocol": PROTOCOL,
            "calibration": {**self.facts, "tokens": self.calibration.tokens},
            "versions": {"kv_hf": __version__, **versions()},
            "date": datetime.date.today().isoformat(),
        }
        return Recommendation(
            recipe=replace(plain, model=self._model(), facts={**known, **about}),
            budget=budget,
            bits_per_element=bits,
            bytes_per_token=report.per_token,
            predicted_kl=self._predicted(chosen),
            measured_kl=kl,
            uniform=self._name_of(uniform) if uniform else None,
            uniform_predicted_kl=self._predicted(uniform) if uniform else None,
            uniform_kl=uniform_kl,
            is_uniform=is_uniform,
            frontier=[
                (8 * int(size) / self._numbers, float(loss))
                for size, loss in zip(self.frontier.sizes, self.frontier.losses, strict=True)
            ],
            sensitivities=self.sensitivities,
        )

    def _recipe_options(self, sides: Mapping[str, Sequence[str | None]]) -> dict[str, Any]:
        """Return the options that a recipe has to name: those that are not the default."""
        read = with_group_sizes(
            self.calibration.options,
            *([name for name in sides[side] if name] for side in SIDES),
        )
        defaults = CacheConfig()
        return {
            name: read[name]
            for name in MEASURED_OPTIONS
            if name in read and read[name] != getattr(defaults, name)
        }

    def _model(self) -> dict[str, Any]:
        sizes = signature(decoder_config(self.calibration.model.config))
        found = {name: sizes[name] for name in MODEL_SIZES if sizes[name] is not None}
        return {"name": self.facts.get("model", ""), **found}
