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
from .cache.paged_cache import PagedCache
from .cache.prefix_store import PrefixStore
from .cache_names import register_cache, unregister_cache
from .config import CacheConfig
from .errors import (
    CacheFileError,
    CacheMismatchError,
    CacheOptionError,
    ConversionError,
    InterruptedForwardError,
    KVCacheError,
    KVCacheWarning,
    UnsupportedModelError,
)
from .formats import Format, cache_names, register_format, unregister_format
from .serving import install, uninstall
from .serving.batch_cache import BatchCounts
from .spec import predict_memory
from .version import __version__

# where names are that are imported when they are asked for: what a program that only generates does without, and below
# the types of results and errors that few name, which `dir` does not show
_LATER = {
    "Chat": "chat",
    "convert_to_gqa": "gqa.convert",
    "evaluate": "evaluation.recommend",
    "plan": "planner.memory_plan",
    "recommend": "evaluation.recommend",
    "CachePlan": "planner.plan_table",
    "ConversionReport": "gqa.convert",
    "CrossCache": "cache.paged_cache",
    "DeviceBudgetError": "errors",
    "MemoryReport": "spec",
    "OffloadError": "errors",
    "PagePoolExhaustedError": "errors",
    "PageSpec": "spec",
    "Plan": "planner.plan_table",
    "PrefixStats": "cache.prefix_store",
    "Recommendation": "evaluation.recommend",
    "Scheme": "formats",
    "StaleHandleError": "errors",
    "measure_accuracy": "evaluation.accuracy",
    "measure_footprint": "evaluation.memory",
    "needle_grid": "evaluation.needles",
}
_PARTS = ("doctor", "evaluation", "gqa", "planner", "texts")
__all__ = [
    "BatchCounts",
    "CacheConfig",
    "CacheFileError",
    "CacheMismatchError",
    "CacheOptionError",
    "Chat",
    "ConversionError",
    "Format",
    "InterruptedForwardError",
    "KVCacheError",
    "KVCacheWarning",
    "PagedCache",
    "PagedEncoderDecoderCache",
    "PrefixStore",
    "UnsupportedModelError",
    "__version__",
    "cache_names",
    "convert_to_gqa",
    "evaluate",
    "install",
    "plan",
    "predict_memory",
    "recommend",
    "register_cache",
    "register_format",
    "texts",
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
    from .cache.paged_cache import CrossCache as CrossCache
    from .cache.prefix_store import PrefixStats as PrefixStats
    from .chat import Chat
    from .errors import DeviceBudgetError as DeviceBudgetError
    from .errors import OffloadError as OffloadError
    from .errors import PagePoolExhaustedError as PagePoolExhaustedError
    from .errors import StaleHandleError as StaleHandleError
    from .evaluation.accuracy import measure_accuracy as measure_accuracy
    from .evaluation.memory import measure_footprint as measure_footprint
    from .evaluation.needles import needle_grid as needle_grid
    from .evaluation.recommend import Recommendation as Recommendation
    from .evaluation.recommend import evaluate, recommend
    from .formats import Scheme as Scheme
    from .gqa.convert import ConversionReport as ConversionReport
    from .gqa.convert import convert_to_gqa
    from .planner.memory_plan import plan
    from .planner.plan_table import CachePlan as CachePlan
    from .planner.plan_table import Plan as Plan
    from .spec import MemoryReport as MemoryReport
    from .spec import PageSpec as PageSpec


def __getattr__(name: str) -> Any:
    """Import a name of `_LATER`, or a part of the package, when it is asked for."""
    if name in _LATER:
        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    if name in _PARTS:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names that users need."""
    return sorted(__all__)


install()
