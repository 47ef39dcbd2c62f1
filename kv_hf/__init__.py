"""kv_hf: paged, quantized key/value caches for Hugging Face transformers.

    import kv_hf
    model.generate(**inputs, cache_implementation="paged_int4")

Importing registers the names of paged caches with transformers, and wraps its registered attention so that it reads
pages; `uninstall()` takes both back. `cache_names()` lists the names; `register_format` and `register_cache` add others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cache import model_shape as _first  # noqa: F401  (an old transformers is named first)
from .cache.encoder_decoder import PagedEncoderDecoderCache
from .cache.paged_cache import CrossCache, PagedCache
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
    Format,
    Scheme,
    cache_names,
    register_format,
    unregister_format,
)
from .serving import install, uninstall
from .serving.batch_cache import BatchCounts
from .spec import MemoryReport, PageSpec, predict_memory
from .version import __version__

# what plans, measures or converts: imported when it is asked for, since a program that only generates does without.
# Names that need an extra are not in __all__: `from kv_hf import *` works without it.
_LATER = {
    "Chat": "chat",
    "CachePlan": "planner.plan_table",
    "ConversionReport": "gqa.convert",
    "Plan": "planner.plan_table",
    "Recommendation": "evaluation.recommend",
    "convert_to_gqa": "gqa.convert",
    "measure_accuracy": "evaluation.accuracy",
    "measure_footprint": "evaluation.memory",
    "needle_grid": "evaluation.needles",
    "plan": "planner.memory_plan",
    "recommend": "evaluation.recommend",
}
_PARTS = ("doctor", "evaluation", "gqa", "planner", "texts")
__all__ = [
    "BatchCounts",
    "CacheConfig",
    "CacheFileError",
    "CacheMismatchError",
    "CacheOptionError",
    "CachePlan",
    "Chat",
    "ConversionError",
    "ConversionReport",
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
    "Recommendation",
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
    from . import doctor as doctor
    from . import evaluation as evaluation
    from . import gqa as gqa
    from . import planner as planner
    from . import texts as texts
    from .chat import Chat
    from .evaluation.accuracy import measure_accuracy as measure_accuracy
    from .evaluation.memory import measure_footprint as measure_footprint
    from .evaluation.needles import needle_grid as needle_grid
    from .evaluation.recommend import Recommendation, recommend
    from .gqa.convert import ConversionReport, convert_to_gqa
    from .planner.memory_plan import plan
    from .planner.plan_table import CachePlan, Plan


def __getattr__(name: str) -> Any:
    """Import a name of `_LATER`, or a part of the package, when it is asked for."""
    if name in _LATER:
        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    if name in _PARTS:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, those that are imported later among them, and no modules that lie beside them."""
    return sorted({*__all__, *_LATER, *_PARTS})


install()
