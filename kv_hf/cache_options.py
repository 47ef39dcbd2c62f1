"""The options of paged caches as keyword arguments: their names and types for editors, and signatures that show them.

`CacheConfig` decides what the options are; a test compares the two lists.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypedDict, TypeVar

from .config import CacheConfig

Call = TypeVar("Call", bound=Callable[..., Any])


class CacheOptions(TypedDict, total=False):
    """The fields of `kv_hf.CacheConfig` beside `keys` and `values`, which constructors take by name.

    `kv_hf.CacheConfig` says what each of them does, and which values it takes.
    """

    page_size: int
    key_group_size: int | None
    value_group_size: int | None
    sink_tokens: int
    recent_tokens: int
    max_pages: int | None
    max_bytes: int | str | None
    reserve_tokens: int | str
    max_length: int | str | None
    cuda_graph: Literal["auto", "always", "never"]
    layers: Mapping[str, Any] | None
    kernel: str
    prefix_store: Any
    cross_attention: Literal["exact", "same"]
    offload: Literal["cpu", "disk"] | None
    device_bytes: int | str | None
    device_pages: int | None
    offload_dir: str | None
    latent: str | None
    latent_group_size: int | None
    k_rope: str | None
    mla: Literal["auto", "absorb", "expand"]
    widen: Literal["auto", "never"]
    read_tokens: int | str | None
    read_share: float | None
    read_top_p: float | None
    read_from: int | str


def option_parameters() -> list[inspect.Parameter]:
    """Return the options as parameters that are given by name, with types and defaults."""
    defaults = {field.name: field.default for field in fields(CacheConfig)}
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if defaults[name] is MISSING else defaults[name],
            annotation=kind,
        )
        for name, kind in CacheOptions.__annotations__.items()
    ]


def shows_options(function: Call) -> Call:
    """Have `inspect.signature`, `help` and notebooks show each option where a function has `**options`."""
    shown = inspect.signature(function)
    named = [
        parameter
        for parameter in shown.parameters.values()
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    replaced: Any = function
    replaced.__signature__ = shown.replace(parameters=[*named, *option_parameters()])
    return function


# the types that a caller may give, in place of those of the fields
CacheConfig.__init__.__annotations__.update(CacheOptions.__annotations__)
