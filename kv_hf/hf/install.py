"""Register kv_hf's names with transformers and take them back: the only place that patches anything.

Two seams are patched, both idempotently: the closed list of cache implementations that
GenerationConfig.validate() reads (generation/configuration_utils.py, 5.17 to 5.23), and
GenerationMixin._prepare_cache_for_generation, which makes the cache (generation/utils.py, 5.17 to 5.23).
The attention and mask functions are registered through transformers' public interfaces.
"""

import functools
from collections.abc import Callable
from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin

from ..cache.paged_cache import PagedCache
from ..cache.static_cache import StaticPagedCache
from ..errors import CacheOptionError, UnsupportedModelError
from ..formats import ATTENTION_NAME, IMPLEMENTATIONS
from ..notices import forget
from .attention import kv_hf_attention, kv_hf_mask
from .models import restore_attention, use_paged_attention
from .static_generation import check_static_generation

_original_prepare: Callable[..., Any] | None = None


def install() -> None:
    """Register the cache names and the attention; a second call changes nothing."""
    global _original_prepare
    AttentionInterface.register(ATTENTION_NAME, kv_hf_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, kv_hf_mask)
    known = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    missing = tuple(name for name in IMPLEMENTATIONS if name not in known)
    _set_names(tuple(known) + missing)
    if _original_prepare is None:
        _original_prepare = GenerationMixin._prepare_cache_for_generation
        _patch_generation(_wrap(_original_prepare))


def uninstall() -> None:
    """Take the names back, unpatch generate() and give switched models their attention back."""
    global _original_prepare
    restore_attention()
    known = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    _set_names(tuple(name for name in known if name not in IMPLEMENTATIONS))
    if _original_prepare is not None:
        _patch_generation(_original_prepare)
        _original_prepare = None
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(ATTENTION_NAME, None)
    forget()


def _set_names(names: tuple[str, ...]) -> None:
    vars(configuration_utils)["ALL_CACHE_IMPLEMENTATIONS"] = names


def _patch_generation(function: Callable[..., Any]) -> None:
    setattr(GenerationMixin, "_prepare_cache_for_generation", function)  # noqa: B010


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        name = generation_config.cache_implementation
        given = model_kwargs.get("past_key_values")
        if isinstance(given, PagedCache) and name is None:
            given.check_model(self.config)
            if isinstance(given, StaticPagedCache):
                check_static_generation(
                    self, given, generation_config, model_kwargs, *args, **kwargs
                )
            else:
                given.group.end_recording()  # assisted decoding, if it is that, turns it on again
            _make_ready(self, given, model_kwargs)
        elif isinstance(given, PagedCache) and getattr(generation_config, "is_assistant", False):
            # an assistant is called many times with the target's options and its own cache of the last call
            generation_config.cache_implementation = None
            try:
                return original(self, generation_config, model_kwargs, *args, **kwargs)
            finally:
                generation_config.cache_implementation = name
        elif name in IMPLEMENTATIONS and given is None and generation_config.use_cache is not False:
            cache = _new_cache(self, generation_config)
            if isinstance(cache, StaticPagedCache):
                check_static_generation(
                    self, cache, generation_config, model_kwargs, *args, **kwargs
                )
            elif getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()
            _make_ready(self, cache, model_kwargs)
            model_kwargs["past_key_values"] = cache
            return None
        return original(self, generation_config, model_kwargs, *args, **kwargs)

    return prepare


def _new_cache(model: Any, generation_config: Any) -> PagedCache:
    name = generation_config.cache_implementation
    if not model._supports_default_dynamic_cache() or "mamba" in type(model).__name__.lower():
        raise UnsupportedModelError(
            f"cache_implementation={name!r}: {type(model).__name__} does not keep its keys and values in a "
            "transformers Cache, so that pages cannot hold them; leave cache_implementation out"
        )
    options = generation_config.cache_config
    if options is not None and not isinstance(options, dict):
        raise CacheOptionError(
            f"cache_config must be a dict of options such as {{'page_size': 32}}, got {type(options).__name__}"
        )
    if options and getattr(generation_config, "is_assistant", False):
        # the target's options reach the assistant, whose layers are others
        options = {option: value for option, value in options.items() if option != "layers"}
    return PagedCache.from_implementation(model.config, name, options)


def _make_ready(model: Any, cache: PagedCache, model_kwargs: dict[str, Any]) -> None:
    cache.check_kernel(model.device, model.dtype)
    if cache.options.attention == "auto":
        use_paged_attention(model)
    cache.observe_padding(model_kwargs.get("attention_mask"))
