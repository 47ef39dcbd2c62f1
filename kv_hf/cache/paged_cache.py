"""The public name of paged caches: which of the siblings keeps a text is decided here, and nowhere else."""

import inspect
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any

from .base import CacheBase
from .cross import CrossCache
from .growing import GrowingCache
from .static_cache import StaticPagedCache


class _Choosing(ABCMeta):
    """Has the class that is called make a cache of the kind that fits its options."""

    def __call__(cls, config: Any, *args: Any, **options: Any) -> Any:
        given = args[0] if args else options.get("cache_config")
        held = given.get("max_length") if isinstance(given, Mapping) else None
        length = options.get("max_length", getattr(given, "max_length", held))
        kind: Any = cls.kind_for(length)  # type: ignore[attr-defined]
        return type.__call__(kind, config, *args, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """The parameters of the class that is called: without this they would be those of `__call__` above."""
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:])


class PagedCache(GrowingCache, metaclass=_Choosing):
    """Keys and values in fixed-size pages, stored exactly or quantized.

        cache = kv_hf.PagedCache(model.config, keys="int8", values="int4", page_size=64)
        model.generate(**inputs, past_key_values=cache)

    Without formats nothing is quantized: `from_implementation(model.config, "paged_int8")` takes those of a name.

    With `max_length` the cache is of the preallocated kind, its sibling StaticPagedCache. That one and CrossCache count as
    PagedCaches too (`isinstance`); a subclass of this class grows.

    Args:
        config: the model's config (`model.config`).
        cache_config: a kv_hf.CacheConfig, or a dict of options; options by name win over it.
        keys, values: exact (the default), fp8, int8, int4, int2 or another format; `values` defaults to the format of
            `keys`.
        **options: the other fields of `kv_hf.CacheConfig`.
    Raises: CacheOptionError for a bad option, UnsupportedModelError for a model without attention layers.
    """

    @classmethod
    def kind_for(cls, max_length: int | None) -> type[CacheBase]:
        """Return the class that keeps a cache with this option."""
        return StaticPagedCache if cls is PagedCache and max_length is not None else cls


for _sibling in (StaticPagedCache, CrossCache):
    PagedCache.register(_sibling)
