"""Names of caches, as commands and tables write them: a kind, and options behind a colon."""

from pathlib import Path
from typing import Any

from .checks import check_choice
from .formats import IMPLEMENTATIONS

# name -> arguments of transformers' QuantizedCache; the axes are those that its documentation recommends for a backend
QUANTIZED: dict[str, dict[str, Any]] = {
    "quanto_int4": {"backend": "quanto", "nbits": 4},
    "quanto_int2": {"backend": "quanto", "nbits": 2},
    "hqq_int8": {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1},
    "hqq_int4": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    "hqq_int2": {"backend": "hqq", "nbits": 2, "axis_key": 1, "axis_value": 1},
    "quantized_fp8": {"backend": "fp8"},
}
STOCK = ("dynamic", "static", "offloaded", *QUANTIZED)
CACHE_NAMES = (*STOCK, *IMPLEMENTATIONS)


def parse_cache_name(name: str) -> tuple[str, dict[str, Any]]:
    """Split "paged_int4:recent_tokens=32,keys=int8" into the cache and its options; numbers become integers.

    "recipe:PATH" is a cache with the formats of that recipe.
    """
    base, _, tail = name.partition(":")
    if base == "recipe":
        if not tail:
            raise ValueError(
                f"cache must name the recipe's file, as in recipe:my.json, got {name!r}"
            )
        return "paged_exact", {"recipe": tail}
    check_choice("cache", base, CACHE_NAMES)
    options: dict[str, Any] = {}
    for item in tail.split(",") if tail else []:
        option, equals, value = item.partition("=")
        if not (option and equals and value):
            raise ValueError(f"options of a cache must be NAME=VALUE, got {item!r} in {name!r}")
        options[option] = int(value) if value.lstrip("-").isdigit() else value
    return base, options


def cache_label(name: str) -> str:
    """Return the name of a cache in rows and tables: that of a recipe is its file's, without folder and ending."""
    options = parse_cache_name(name)[1]
    if "recipe" not in options:
        return name
    others = [f"{option}={value}" for option, value in options.items() if option != "recipe"]
    return ",".join([f"recipe:{Path(options['recipe']).stem}", *others])
