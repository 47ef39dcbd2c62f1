"""Options about how much of a long text a decode step reads: their checks, and the budget that they make."""

from dataclasses import replace
from typing import Any

from .checks import check_int
from .errors import CacheOptionError
from .read_budget import READ_FROM, ReadBudget, pages_for

LIMITS = ("read_tokens", "read_share", "read_top_p")


def is_reading_part(config: Any) -> bool:
    """Say whether the options let steps read less than everything."""
    return any(getattr(config, name) is not None for name in LIMITS)


def reading_everything(config: Any) -> Any:
    """Return the options without what they say of a part to read."""
    return replace(config, **dict.fromkeys(LIMITS), read_from=READ_FROM)


def check_reading(config: Any) -> None:
    """Raise CacheOptionError for bad options about what a step reads."""
    check_int("read_from", config.read_from, 1)
    for name in ("read_share", "read_top_p"):
        value = getattr(config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
            raise CacheOptionError(
                f"{name} must be a number between 0 and 1, both left out, got {value!r}; leave it out to read everything"
            )
    if not is_reading_part(config):
        default = type(config).read_from
        if config.read_from != default:
            raise CacheOptionError(
                f"read_from={config.read_from} has nothing to do: it says from how many tokens on a step reads a part; give "
                "read_tokens, read_share or read_top_p as well"
            )
        return
    if config.read_tokens is None:
        return
    if config.read_share is not None:
        raise CacheOptionError(
            f"read_tokens={config.read_tokens!r} and read_share={config.read_share!r} are two ways to bound what a step "
            "reads; give one of them"
        )
    kept = config.sink_tokens + config.recent_tokens
    least = kept + 2 * config.page_size
    check_int("read_tokens", config.read_tokens, 1)
    if config.read_tokens < least:
        raise CacheOptionError(
            f"read_tokens must be at least {least}: {config.sink_tokens} sink_tokens, {config.recent_tokens} recent_tokens, an "
            f"open page and one more page of {config.page_size} tokens, got {config.read_tokens}"
        )


def read_budget(config: Any) -> ReadBudget | None:
    """Return what the options allow a step to read; None: everything."""
    if not is_reading_part(config):
        return None
    pages = None
    if config.read_tokens is not None:
        kept = config.sink_tokens + config.recent_tokens
        pages = pages_for(config.read_tokens, kept, config.page_size)
    return ReadBudget(pages, config.read_share, config.read_top_p, config.read_from)


def check_readable(
    config: Any, model_type: Any, windows: list[int | None], latent: bool
) -> ReadBudget | None:
    """Return the budget of a model's layers with full attention; None: everything is read.

    Args:
        windows: sliding window of each layer that lives in pages, None of those that see everything.
        latent: whether any of them holds latents.
    Raises: CacheOptionError where the options ask for a part, and no layer can be read in part.
    """
    budget = read_budget(config)
    if budget is None:
        return None
    given = ", ".join(
        f"{name}={value!r}" for name in LIMITS if (value := getattr(config, name)) is not None
    )
    if latent:
        raise CacheOptionError(
            f"{given}: {model_type!r} caches latents (MLA), of which a step reads all; leave it out"
        )
    if all(window is not None for window in windows):
        widest = max(window or 0 for window in windows)
        raise CacheOptionError(
            f"{given}: no layer of {model_type!r} attends to the whole text (its sliding windows are {widest} tokens at most), "
            "so that there is nothing to choose from; leave it out"
        )
    return budget
