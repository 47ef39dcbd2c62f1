"""kv_hf: paged, quantized key/value caches for Hugging Face transformers.

    import kv_hf
    model.generate(**inputs, cache_implementation="paged_int4")

Importing registers the names paged_exact, paged_fp8, paged_int8, paged_int4, paged_int2 and paged_k8v4 with
transformers, and an attention implementation "kv_hf"; `uninstall()` removes them. `cache_names()` lists the names;
`register_format` and `register_cache` add others.
"""

from typing import TYPE_CHECKING, Any

from .backends.plugins import load_plugins as _load_backends
from .cache import compat as _compat  # noqa: F401  (an old transformers is named first)
from .cache.cross import CrossCache
from .cache.encoder_decoder import PagedEncoderDecoderCache
from .cache.paged_cache import PagedCache
from .cache.prefix_store import PrefixStats, PrefixStore
from .cache_names import register_cache, unregister_cache
from .config import CacheConfig
from .errors import (
    CacheFileError,
    CacheMismatchError,
    CacheOptionError,
    ConversionError,
    DeviceBudgetError,
    InterruptedForwardError,
    KVCacheError,
    KVCacheWarning,
    OffloadError,
    PagePoolExhaustedError,
    StaleHandleError,
    UnsupportedModelError,
)
from .formats import (
    IMPLEMENTATIONS,
    Format,
    Scheme,
    cache_names,
    register_format,
    unregister_format,
)
from .formats.plugins import load_plugins as _load_formats
from .hf.install import install, uninstall
from .spec import MemoryReport, PageSpec, predict_memory
from .version import __version__

__all__ = [
    "IMPLEMENTATIONS",
    "CacheConfig",
    "CacheFileError",
    "CacheMismatchError",
    "CacheOptionError",
    "CachePlan",
    "ConversionError",
    "CrossCache",
    "DeviceBudgetError",
    "Format",
    "InterruptedForwardError",
    "KVCacheError",
    "KVCacheWarning",
    "MemoryReport",
    "OffloadError",
    "PagePoolExhaustedError",
    "PageSpec",
    "PagedCache",
    "PagedEncoderDecoderCache",
    "Plan",
    "PrefixStats",
    "PrefixStore",
    "Scheme",
    "StaleHandleError",
    "UnsupportedModelError",
    "__version__",
    "cache_names",
    "convert_to_gqa",
    "install",
    "plan",
    "predict_memory",
    "recommend",
    "register_cache",
    "register_format",
    "uninstall",
    "unregister_cache",
    "unregister_format",
]

if TYPE_CHECKING:
    from .evaluation.recommend import recommend
    from .gqa.convert import convert_to_gqa
    from .planner.memory_plan import CachePlan, Plan, plan


def __getattr__(name: str) -> Any:
    """Import what plans, measures or converts when it is asked for: a program that only generates does without."""
    if name == "convert_to_gqa":
        from .gqa.convert import convert_to_gqa

        return convert_to_gqa
    if name == "recommend":
        from .evaluation.recommend import recommend

        return recommend
    if name in ("CachePlan", "Plan", "plan"):
        from .planner import memory_plan as planning

        return getattr(planning, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_load_formats()
_load_backends()
install()
