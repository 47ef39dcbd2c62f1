"""A recipe that is there already, against caches of one's choice, on text that it was not made on."""

from collections.abc import Sequence
from typing import Any

from ...cache.paged_cache import PagedCache
from ...cache_names import parse_cache_name
from ...formats import is_cache_name
from ...texts import HELD_OUT
from .attention import paged_attention
from .calibration import check_prompt
from .held_out import Comparison, Contestant, compare, measure
from .windows import Source, cut_windows


def check_recipe(
    model: Any,
    recipe: Any,
    against: Sequence[str],
    *,
    tokenizer: Any = None,
    held_out: Source = HELD_OUT,
    windows: int = 2,
    window: int = 1024,
    prompt: int = 896,
) -> dict[str, Comparison]:
    """Compare a recipe with other paged caches, token by token of the same windows.

    Args:
        model: a causal language model in eval mode.
        recipe: as `cache_config` takes it: a path, a dict or a kv_hf.recipe.Recipe.
        against: paged caches as commands write them: "paged_int4:keys=int8".
        tokenizer, held_out, windows, window, prompt: as in `recommend`.
    Returns: the comparison with each of `against`.
    Raises: CacheOptionError for a recipe of another model, ValueError naming the argument for the rest, before anything
        is measured.
    """
    if not against:
        raise ValueError("against must name at least one cache, got none")
    contestants: list[Contestant] = [("paged_exact", {"recipe": recipe})]
    for cache in against:
        name, options = parse_cache_name(cache)
        if not is_cache_name(name):
            raise ValueError(f"against must be paged caches, got {cache!r}")
        contestants.append((name, options))
    for base, given in contestants:
        PagedCache.from_implementation(model.config, base, dict(given))
    cut = cut_windows(model, tokenizer, "held_out", held_out, window, windows)
    check_prompt("held_out", prompt, cut.ids)
    with paged_attention(model):
        mine, *theirs = measure(model, cut, prompt, contestants)
    return {
        cache: compare(mine, one, cut.texts) for cache, one in zip(against, theirs, strict=True)
    }
