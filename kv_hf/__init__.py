"""kv_hf: paged, quantized key/value caches for Hugging Face transformers.

    import kv_hf
    model.generate(**inputs, cache_implementation="paged_int4")

Importing registers the names paged_exact, paged_fp8, paged_int8, paged_int4 and paged_int2 with
transformers, and an attention implementation "kv_hf"; `uninstall()` takes them back.
"""

from .cache import compat as _compat  # noqa: F401  (an old transformers is named first)
from .cache.paged_cache import PagedCache
from .config import CacheConfig
from .errors import (
    CacheMismatchError,
    CacheOptionError,
    DeviceBudgetError,
    InterruptedForwardError,
    KVCacheError,
    KVCacheWarning,
    OffloadError,
    PagePoolExhaustedError,
    StaleHandleError,
    UnsupportedModelError,
)
from .formats import IMPLEMENTATIONS
from .hf.install import install, uninstall
from .spec import MemoryReport, PageSpec, predict_memory

__version__ = "0.1.0"

__all__ = [
    "IMPLEMENTATIONS",
    "CacheConfig",
    "CacheMismatchError",
    "CacheOptionError",
    "DeviceBudgetError",
    "InterruptedForwardError",
    "KVCacheError",
    "KVCacheWarning",
    "MemoryReport",
    "OffloadError",
    "PagePoolExhaustedError",
    "PageSpec",
    "PagedCache",
    "StaleHandleError",
    "UnsupportedModelError",
    "install",
    "predict_memory",
    "uninstall",
]

install()
