"""From a study and a budget to a recommendation: the best selection, measured against the uniform formats."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...cache.model_shape import decoder_config, signature
from ...config import CacheConfig
from ...formats import readers_of, value_scheme
from ...notices import say_once
from ...recipe import MODEL_SIZES, Recipe
from ...version import __version__
from ..rows import versions
from .cost import Budget, predict_layers
from .sensitivity import PROTOCOL, Sensitivity
from .study import Selection, Study

RECENT = 32  # newest tokens that a standard variant keeps exact


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
        sensitivities: what was measured (with the first options, where several were tried).
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


@dataclass(frozen=True)
class _Candidate:
    study: Study
    chosen: Selection
    kl: float


class Search:
    """Recommends recipes for any budget.

    Args:
        study: of the options that the uniform caches have too.
        variants: other options to try, e.g. {"recent_tokens": 32}. They get as many bytes as the study's, exact
            windows included, and its sensitivities scaled. None takes `standard_variants`.
    """

    def __init__(self, study: Study, variants: Sequence[Mapping[str, Any]] | None = None) -> None:
        self.study = study
        variants = standard_variants(study) if variants is None else variants
        self.variants = [study.variant(options) for options in variants]

    def recommend(self, budget: object) -> Recommendation:
        """Return the recipe that loses least within a budget.

        Raises: ValueError for a budget that cannot be read, or that nothing fits into, before anything is measured.
        """
        asked = Budget.parse(budget)
        study = self.study
        limit = asked.page_bytes(study.shapes, study.options, study.num_layers, study.serving)
        self._check(asked, limit)
        uniform = study.best_uniform(limit)
        found = []
        for one in (study, *self.variants):
            left = limit + study.outside_bytes - one.outside_bytes
            chosen = one.best(left) if _least_bytes(one) <= left else None
            if chosen is not None:
                found.append(_Candidate(one, chosen, one.measured(chosen)))
        plain = None if uniform is None else _Candidate(study, uniform, study.measured(uniform))
        best = min(found, key=lambda one: one.kl, default=plain)
        assert best is not None  # _check has seen to it
        is_uniform = plain is not None and plain.kl <= best.kl
        if plain is not None and is_uniform:
            if best.chosen != plain.chosen:
                say_once(
                    f"uniform {asked}",
                    f"kv_hf: no mixed recipe for budget {asked} measured better than {_name_of(plain)} ({best.kl:.3g} "
                    f"against {plain.kl:.3g}), which is recommended",
                )
            best = plain
        return self._recommendation(asked, best, plain, is_uniform)

    def _check(self, budget: Budget, limit: int) -> None:
        """Raise ValueError where nothing fits."""
        needs = []
        for study in (self.study, *self.variants):
            needs.append(_least_bytes(study) + study.outside_bytes - self.study.outside_bytes)
        if limit < min(needs):
            least = 8 * min(needs) / self.study.numbers
            raise ValueError(
                f"budget {budget} is too small: the least that these formats need is {least:.3g} bits per number in "
                f"{min(needs)} bytes of pages, and {max(limit, 0)} bytes are left for them"
            )

    @cached_property
    def _model(self) -> dict[str, Any]:
        sizes = signature(decoder_config(self.study.calibration.model.config))
        found = {name: sizes[name] for name in MODEL_SIZES if sizes[name] is not None}
        return {"name": self.study.facts.get("model", ""), **found}

    def _recommendation(
        self, budget: Budget, best: _Candidate, plain: _Candidate | None, is_uniform: bool
    ) -> Recommendation:
        study, serving = best.study, best.study.serving
        recipe = study.recipe(best.chosen)
        report = predict_layers(study.shapes, CacheConfig(recipe=recipe), study.num_layers, serving)
        figures: dict[str, Any] = {
            "bits_per_element": 8 * study.page_bytes(best.chosen) / study.numbers,
            "bytes_per_token": report.per_token,
            "predicted_kl": study.predicted(best.chosen),
            "measured_kl": best.kl,
            "uniform": None if plain is None else _name_of(plain),
            "uniform_predicted_kl": None if plain is None else self.study.predicted(plain.chosen),
            "uniform_kl": None if plain is None else plain.kl,
        }
        facts = {
            "budget": str(budget),
            **figures,
            "bytes_dtype": str(serving.dtype).removeprefix("torch."),
            "context": serving.context,
            "batch": serving.batch,
            "protocol": PROTOCOL,
            "calibration": {**study.facts, "tokens": study.calibration.tokens},
            "versions": {"kv_hf": __version__, **versions()},
            "date": datetime.date.today().isoformat(),
        }
        points = zip(study.frontier.sizes, study.frontier.losses, strict=True)
        return Recommendation(
            recipe=replace(recipe, model=self._model, facts=facts),
            budget=budget,
            is_uniform=is_uniform,
            frontier=[(8 * int(size) / study.numbers, float(loss)) for size, loss in points],
            sensitivities=self.study.sensitivities,
            **figures,
        )


def standard_variants(study: Study) -> list[dict[str, Any]]:
    """Return the options that are worth trying: newest tokens exact, and small groups of 2 bits as wide as those of 4.

    Options that the study sets itself are left alone.
    """
    given, options = study.calibration.options, study.options
    found = []
    exact = {} if "recent_tokens" in given else {"recent_tokens": RECENT}
    if exact:
        found.append(exact)
    dims = {shape.value_dim for shape in study.shapes}
    if any(map(_groups_small, study.choices)) and len(dims) == 1:
        sizes = {"key_group_size": options.page_size, "value_group_size": dims.pop()}
        if not set(sizes) & set(given):
            found.append({**exact, **sizes})
    return found


def _groups_small(name: str) -> bool:
    """Say whether the default groups of a format are smaller than a page and a head, and options make them larger."""
    group = value_scheme(name).scale_group
    return group is not None and group[1] < 0 and name in readers_of("value_group_size")


def _least_bytes(study: Study) -> int:
    return min(study.page_bytes(study.uniform(name)) for name in study.choices)


def _name_of(plain: _Candidate) -> str:
    return f"paged_{next(iter(plain.chosen.values()))}"
