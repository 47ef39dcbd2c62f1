"""A recipe against uniform caches on text that none of them was chosen on: the comparison that decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...cache.paged_cache import PagedCache
from ..distances import block_interval
from ..reference import ExactReference
from ..teacher_forcing import forced_logits
from .divergence import divergence
from .windows import Windows

# A cache to measure, as kv_hf.cache_names.parse_cache_name gives it: the cache and its options.
Contestant = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """A recipe and a uniform cache on the same tokens; KL to the exact cache in nats per token.

    Attributes:
        recipe_kl, uniform_kl: means over all tokens.
        gain: how much less the recipe loses; negative where it loses more.
        low, high: 95 % interval of the gain, from its differences token by token in each window.
        tokens: scored ones.
        texts: (KL of the recipe, KL of the uniform cache) on each text.
    """

    recipe_kl: float
    uniform_kl: float
    gain: float
    low: float
    high: float
    tokens: int
    texts: Mapping[str, tuple[float, float]]

    @property
    def wins(self) -> bool:
        """Whether the recipe loses less, with all of the interval above zero."""
        return self.low > 0

    def __str__(self) -> str:
        less = "less" if self.gain >= 0 else "more"
        bounds = sorted((abs(self.low), abs(self.high)))
        span = f"{bounds[0]:.2g} to {bounds[1]:.2g}"
        if self.low <= 0 <= self.high:
            span = f"from {-self.low:.2g} more to {self.high:.2g} less"
        return f"{self.recipe_kl:.3g} against {self.uniform_kl:.3g}: {abs(self.gain):.2g} {less} ({span}, {self.tokens} tokens)"

    def to_json(self) -> dict[str, Any]:
        """Return what a recipe's file says about it."""
        return {
            "recipe_kl": self.recipe_kl,
            "uniform_kl": self.uniform_kl,
            "gain": self.gain,
            "gain_low": self.low,
            "gain_high": self.high,
            "recipe_wins": self.wins,
            "tokens": self.tokens,
            "texts": {
                name: {"recipe_kl": recipe, "uniform_kl": uniform}
                for name, (recipe, uniform) in self.texts.items()
            },
        }


def measure(
    model: Any, windows: Windows, prompt_tokens: int, contestants: Sequence[Contestant]
) -> list[list[torch.Tensor]]:
    """Return the KL of each token of each window, [scored] fp64, for each contestant.

    Each window's exact run and prefill are computed once.

    Args:
        model: a causal language model in eval mode.
        prompt_tokens: tokens of each window that are not scored.
    Raises: ValueError where logits are not finite, CacheOptionError for a cache that the model cannot have.
    """
    found: list[list[torch.Tensor]] = [[] for _ in contestants]
    for ids in windows.ids:
        reference = ExactReference(model, [ids], prompt_tokens)
        exact, prefill = reference.log_probs(0), reference.prefill(0)
        for (name, options), kl in zip(contestants, found, strict=True):
            cache = PagedCache.from_implementation(model.config, name, dict(options))
            parts = []
            for position, logits in forced_logits(model, ids, cache, prompt_tokens, prefill=prefill):  # fmt: skip
                if not torch.isfinite(logits).all():
                    raise ValueError(
                        f"{name} with {dict(options)} gives logits that are not finite at token {position}"
                    )
                first = position - prompt_tokens
                parts.append(divergence(exact[first : first + len(logits)], logits).cpu())
            kl.append(torch.cat(parts))
    return found


def compare(
    recipe: Sequence[torch.Tensor], uniform: Sequence[torch.Tensor], names: Sequence[str]
) -> Comparison:
    """Compare two contestants of `measure`, whose KL of each window is [scored tokens]; `names` are the windows' texts."""
    low, high = block_interval([b - a for a, b in zip(recipe, uniform, strict=True)])
    mine, theirs = torch.cat(list(recipe)), torch.cat(list(uniform))
    texts = {}
    for name in dict.fromkeys(names):
        both = (
            torch.cat([kl for kl, text in zip(side, names, strict=True) if text == name])
            for side in (recipe, uniform)
        )
        ours, plain = (one.mean().item() for one in both)
        texts[name] = (ours, plain)
    return Comparison(
        recipe_kl=mine.mean().item(),
        uniform_kl=theirs.mean().item(),
        gain=(theirs - mine).mean().item(),
        low=low,
        high=high,
        tokens=len(mine),
        texts=texts,
    )
