"""From a study and a budget to a recommendation: the best selection, judged against the uniform caches on other text."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...cache.model_shape import decoder_config, recipe_sizes
from ...config import CacheConfig
from ...formats import readers_of, value_scheme
from ...notices import say_once
from ...recipe import MODEL_SIZES, Recipe
from ...version import __version__
from ..rows import versions
from .cost import Budget, predict_layers
from .held_out import Comparison, Contestant, compare, measure
from .recommendation import Recommendation, verdict_of
from .sensitivity import PROTOCOL
from .study import Selection, Study
from .uniform import Uniform, fitting_uniforms, opponents
from .windows import Windows

RECENT = 32  # newest tokens that a standard variant keeps exact
OPPONENTS = (
    3  # uniform caches that are measured on the held-out text: those of the least predicted loss
)


@dataclass(frozen=True)
class _Candidate:
    study: Study
    chosen: Selection
    kl: float


@dataclass(frozen=True)
class _Judged:
    """What the held-out text says: the best uniform cache there, and how the recipe compares with it."""

    uniform: Uniform
    comparison: Comparison | None  # None where the best selection is uniform itself
    opponents: Mapping[str, float]


class Search:
    """Recommends recipes for any budget.

    Args:
        study: of the options that the uniform caches have too.
        held_out: other text, on which a recipe has to beat the uniform caches.
        variants: other options to try, e.g. {"recent_tokens": 32}. They get as many bytes as the study's, exact
            windows included, and its sensitivities scaled. None takes `standard_variants`.
    """

    def __init__(
        self,
        study: Study,
        held_out: Windows,
        variants: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self.study, self.held_out = study, held_out
        variants = standard_variants(study) if variants is None else variants
        self.variants = [study.variant(options) for options in variants]

    def recommend(self, budget: object) -> Recommendation:
        """Return the recipe that loses least within a budget, or the uniform cache that it does not beat.

        Raises: ValueError for a budget that cannot be read, or that nothing fits into, before anything is measured.
        """
        asked = Budget.parse(budget)
        study = self.study
        limit = asked.page_bytes(study.shapes, study.options, study.num_layers, study.serving)
        self._check(asked, limit)
        total = limit + study.outside_bytes
        found = []
        for one in (study, *self.variants):
            left = total - one.outside_bytes
            chosen = one.best(left) if one.least_bytes <= left else None
            if chosen is not None:
                found.append(_Candidate(one, chosen, one.measured(chosen)))
        uniforms = fitting_uniforms([study, *self.variants], total)
        best = min(found, key=lambda one: one.kl)
        return self._recommendation(asked, best, self._judge(best, opponents(uniforms, OPPONENTS)))

    def _judge(self, best: _Candidate, uniforms: Sequence[Uniform]) -> _Judged:
        """Measure the best selection and the uniform caches on the held-out text."""
        is_one = {name for (_, side), name in best.chosen.items() if side == "keys"}
        other = {name for (_, side), name in best.chosen.items() if side == "values"}
        mixed = len(is_one) > 1 or len(other) > 1
        if not mixed:
            own = Uniform(best.study, is_one.pop(), other.pop(), best.study.predicted(best.chosen))
            uniforms = [own, *(one for one in uniforms if one.name != own.name)]
        plain = [_contestant(one.study, one.chosen) for one in uniforms]
        contestants = [_contestant(best.study, best.chosen), *plain] if mixed else plain
        calibration = self.study.calibration
        found = measure(calibration.model, self.held_out, calibration.prompt_tokens, contestants)
        theirs = found[1:] if mixed else found
        means = [sum(kl.sum().item() for kl in one) / sum(map(len, one)) for one in theirs]
        first = means.index(min(means))
        return _Judged(
            uniforms[first],
            compare(found[0], theirs[first], self.held_out.texts) if mixed else None,
            {one.name: mean for one, mean in zip(uniforms, means, strict=True)},
        )

    def _check(self, budget: Budget, limit: int) -> None:
        """Raise ValueError where nothing fits."""
        needs = [
            study.least_bytes + study.outside_bytes - self.study.outside_bytes
            for study in (self.study, *self.variants)
        ]
        if limit < min(needs):
            least = 8 * min(needs) / self.study.numbers
            raise ValueError(
                f"budget {budget} is too small: the least that these formats need is {least:.3g} bits per number in "
                f"{min(needs)} bytes of pages, and {max(limit, 0)} bytes are left for them"
            )

    @cached_property
    def _model(self) -> dict[str, Any]:
        sizes = recipe_sizes(decoder_config(self.study.calibration.model.config))
        found = {name: sizes[name] for name in MODEL_SIZES if sizes[name] is not None}
        return {"name": self.study.facts.get("model", ""), **found}

    def _recommendation(self, budget: Budget, best: _Candidate, judged: _Judged) -> Recommendation:
        plain, comparison = judged.uniform, judged.comparison
        is_uniform = comparison is None or not comparison.wins
        verdict = verdict_of(str(budget), plain.name, comparison)
        if is_uniform:
            say_once(f"uniform {budget}", f"kv_hf: {verdict}")
        plain_kl = plain.study.measured(plain.chosen)
        study, chosen = (plain.study, plain.chosen) if is_uniform else (best.study, best.chosen)
        figures: dict[str, Any] = {
            **_size(study, chosen),
            "predicted_kl": plain.predicted if is_uniform else study.predicted(chosen),
            "measured_kl": plain_kl if is_uniform else best.kl,
            "uniform": plain.name,
            "uniform_bytes_per_token": _size(plain.study, plain.chosen)["bytes_per_token"],
            "uniform_predicted_kl": plain.predicted,
            "uniform_kl": plain_kl,
            "is_uniform": is_uniform,
            "verdict": verdict,
        }
        facts = {
            "budget": str(budget),
            **figures,
            **self._facts(study),
            "held_out": {
                "texts": list(self.held_out.names),
                "windows": len(self.held_out.ids),
                "uniform_kl": dict(judged.opponents),
                "comparison": None if comparison is None else comparison.to_json(),
            },
        }
        lost = best.study.recipe(best.chosen) if is_uniform and comparison is not None else None
        points = zip(best.study.frontier.sizes, best.study.frontier.losses, strict=True)
        return Recommendation(
            recipe=self._complete(study.recipe(chosen), facts),
            budget=budget,
            held_out=comparison,
            opponents=judged.opponents,
            rejected=None if lost is None else self._complete(lost, {"verdict": verdict}),
            frontier=[(8 * int(size) / best.study.numbers, float(loss)) for size, loss in points],
            sensitivities=self.study.sensitivities,
            **figures,
        )

    def _complete(self, recipe: Recipe, facts: Mapping[str, Any]) -> Recipe:
        return Recipe(recipe.keys, recipe.values, recipe.options, self._model, facts)

    @staticmethod
    def _facts(study: Study) -> dict[str, Any]:
        """Return how a recipe came about, for its file."""
        return {
            "bytes_dtype": str(study.serving.dtype).removeprefix("torch."),
            "context": study.serving.context,
            "batch": study.serving.batch,
            "protocol": PROTOCOL,
            "calibration": {**study.facts, "tokens": study.calibration.tokens},
            "versions": {"kv_hf": __version__, **versions()},
            "date": datetime.date.today().isoformat(),
        }


def _contestant(study: Study, chosen: Selection) -> Contestant:
    return "paged_exact", {"layers": study.layers_of(chosen), **study.options_of(chosen)}


def _size(study: Study, chosen: Selection) -> dict[str, float]:
    """Return the size of a cache, as its memory() counts it."""
    options = CacheConfig(recipe=study.recipe(chosen))
    report = predict_layers(study.shapes, options, study.num_layers, study.serving)
    return {
        "bits_per_element": 8 * study.page_bytes(chosen) / study.numbers,
        "bytes_per_token": report.per_token,
    }


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
    small = any(map(_groups_small, study.possible))
    if small and len(dims) == 1:
        sizes = {"key_group_size": options.page_size, "value_group_size": dims.pop()}
        if not set(sizes) & set(given):
            found.append({**exact, **sizes})
    return found


def _groups_small(name: str) -> bool:
    """Say whether the default groups of a format are smaller than a page and a head, and options make them larger."""
    if name not in readers_of("value_group_size"):
        return False
    group = value_scheme(name).scale_group
    return group is not None and group[1] < 0
