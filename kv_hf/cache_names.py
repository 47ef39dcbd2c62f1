"""Names of caches, as commands and tables write them: a kind, and options behind a colon; and names that users add."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .checks import check_choice
from .config import OTHER_CACHE_WORDS, CacheConfig, shows_options
from .formats import cache_names, named

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
# name -> what makes a cache of another package; evaluation.register_peer writes to it
PEERS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {}


def __getattr__(name: str) -> Any:
    """Return all names as CACHE_NAMES, read anew at every access: `all_cache_names` is the one that stays true."""
    if name == "CACHE_NAMES":
        return all_cache_names()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def all_cache_names() -> tuple[str, ...]:
    """Return the names of transformers' caches, of registered peers and of the paged caches."""
    return (*STOCK, *PEERS, *cache_names())


@shows_options
def register_cache(
    name: str,
    *,
    keys: str | None = None,
    values: str | None = None,
    **options: Any,
) -> None:
    """Add a name for options of a paged cache, which `cache_implementation`, evaluation, plans and the doctor then know.

        kv_hf.register_cache("paged_k8v4_short", keys="int8", values="int4", page_size=32)
        model.generate(**inputs, cache_implementation="paged_k8v4_short")

    Options given beside the name (`cache_config`) win over those that it stands for. The same call again changes nothing.

    Args:
        name: "paged_" and lower-case letters, digits or underscores.
        keys, values: formats; `values` defaults to the format of `keys`, and `keys` to exact.
        **options: the other fields of `kv_hf.CacheConfig`.
    Raises: CacheOptionError for a bad name, one that stands for other options, and options that CacheConfig refuses.
    """
    checked = CacheConfig.from_arguments(keys, values, options)
    named.add(name, {"keys": checked.keys, "values": checked.values, **options})


def unregister_cache(name: str) -> None:
    """Take a name back that `register_cache` added. Raises CacheOptionError for any other name."""
    named.drop(name)


def parse_cache_name(name: str) -> tuple[str, dict[str, Any]]:
    """Split "paged_int4:recent_tokens=32,keys=int8" into the cache and its options; numbers become int or float.

    An option that is a mapping is given part by part: "paged_int4:read.tokens=2048,read.from=8k".

    Raises: CacheOptionError for an unknown cache, ValueError for what is not NAME=VALUE or gives a value beside parts.
    """
    base, _, tail = name.partition(":")
    check_choice("cache", base, all_cache_names(), OTHER_CACHE_WORDS)
    options: dict[str, Any] = {}
    for item in tail.split(",") if tail else []:
        option, equals, value = item.partition("=")
        if not (option and equals and value):
            raise ValueError(f"options of a cache must be NAME=VALUE, got {item!r} in {name!r}")
        option, dot, part = option.partition(".")
        held = options.get(option)
        if held is not None and isinstance(held, dict) != bool(dot):
            raise ValueError(f"{option} of a cache must be a value or parts, got both in {name!r}")
        options[option] = {**(held or {}), part: _number(value)} if dot else _number(value)
    return base, options


def write_cache_name(base: str, options: Mapping[str, Any]) -> str:
    """Return the name that `parse_cache_name` splits into a cache and these options."""
    words = []
    for option, value in options.items():
        named = {option: value}
        if isinstance(value, Mapping):
            named = {f"{option}.{part}": one for part, one in value.items()}
        for name, one in named.items():
            words.append(f"{name}={one if isinstance(one, str) else json.dumps(one, default=str)}")
    return f"{base}:{','.join(words)}" if words else base


def _number(text: str) -> int | float | str:
    """Return the number that a text is, "32" or "0.25", or the text."""
    if re.fullmatch(r"-?[0-9]+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?[0-9]*\.[0-9]+(e-?[0-9]+)?", text) else text
