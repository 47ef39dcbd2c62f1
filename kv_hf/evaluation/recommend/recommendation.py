"""What `kv_hf.recommend` returns: a recipe or a uniform cache, and the figures that decided."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...recipe import Recipe
from .cost import Budget
from .held_out import Comparison
from .sensitivity import Sensitivity


@dataclass(frozen=True)
class Recommendation:
    """A recipe and what is known about it; KL in nats per token, on the calibration texts where nothing else is said.

    Attributes:
        recipe: what `cache_config={"recipe": ..}` takes. Where no mixture won it holds the uniform cache's formats.
        budget: what was asked for.
        bits_per_element: stored bits per number, scales included, without the exact tail.
        bytes_per_token: everything counted, at the context and batch that were asked for.
        predicted_kl: sum of the sensitivities of what was chosen.
        measured_kl: of a cache of this recipe.
        uniform: the uniform cache within the budget that loses least on the held-out texts, as commands write it.
        uniform_bytes_per_token: its size.
        uniform_predicted_kl, uniform_kl: the sum for its keys and its values, and its measured KL.
        is_uniform: True where the recipe is that uniform cache, because no mixture beat it on the held-out texts.
        verdict: a sentence that says so, or by how much the recipe won.
        held_out: the best mixture against the uniform cache; None where the best selection is uniform itself.
        opponents: the uniform caches that were measured on the held-out texts, and their KL there.
        rejected: the mixture that did not win, None where one did or where there was none.
        frontier: (bits per element, predicted KL), the best that there is at every size, smallest first, with the
            options of the best mixture.
        sensitivities: what was measured (with the first options, where several were tried).
    """

    recipe: Recipe
    budget: Budget
    bits_per_element: float
    bytes_per_token: float
    predicted_kl: float
    measured_kl: float
    uniform: str
    uniform_bytes_per_token: float
    uniform_predicted_kl: float
    uniform_kl: float
    is_uniform: bool
    verdict: str
    held_out: Comparison | None
    opponents: Mapping[str, float]
    rejected: Recipe | None
    frontier: list[tuple[float, float]]
    sensitivities: list[Sensitivity]

    def save(self, path: str | Path) -> None:
        """Write the recipe. Raises OSError where the disk refuses."""
        self.recipe.save(path)


def verdict_of(budget: str, uniform: str, comparison: Comparison | None) -> str:
    """Return in a sentence which cache is recommended for a budget, and why."""
    if comparison is None:
        return (
            f"at {budget} the best selection is the uniform cache {uniform}, which is recommended"
        )
    if comparison.wins:
        return f"at {budget} the recipe beats {uniform} on the held-out texts: KL {comparison}"
    return (
        f"at {budget} no recipe beats {uniform} on the held-out texts, which is recommended; the best recipe's KL there "
        f"is {comparison}"
    )
