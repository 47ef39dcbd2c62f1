"""Register kv_hf's names with transformers and take them back: the only place that patches generate().

Eight seams are patched, all idempotently: the closed list of cache implementations that
GenerationConfig.validate() reads (generation/configuration_utils.py, 5.17 to 5.24); methods of
GenerationMixin (generation/utils.py, 5.17 to 5.24): generate, whose tokens a cache notes and whose streams notices
wait for, _prepare_cache_for_generation, which makes the cache, _prefill, which runs the first forward and is where a
prefix store comes in, and _assisted_decoding, which has none; _valid_auto_compile_criteria (GenerationMixin) and
get_compiled_call (PreTrainedModel), by which generate() decides what runs a decode step, and where CUDA graphs come in; and get_interface (AttentionInterface), to which
families without sdpa hand their eager attention. dispatch.py wraps the attention and mask functions
that transformers has registered.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from transformers import AttentionInterface, PreTrainedModel
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin

from ..cache.build import check_kernel
from ..cache.encoder_decoder import PagedEncoderDecoderCache, paged_halves
from ..cache.layer_formats import warn_of_two_bits
from ..cache.layer_kinds import LatentLayer
from ..cache.model_shape import CACHE, is_encoder_decoder
from ..cache.paged_cache import PagedCache
from ..config import CacheConfig, given_options
from ..errors import CacheMismatchError, UnsupportedModelError
from ..formats import cache_names, is_cache_name, named
from ..notices import forget
from . import dispatch
from .generation import (
    WITHOUT_NAME,
    Generation,
    asked_name,
    check_length,
    decide,
    execution_devices,
    new_cache,
    not_kept_in,
    refuse_growing,
)
from .history import around_generate
from .latent import prepare_latents, restore_expansion, watch_latents
from .prefill import expect_drafts, share_prefill
from .step_graph import call_graphs, want_graphs

# options about one model's layers, latents, pages and long texts, which its assistant does not take over
OF_A_MODEL = ("layers", "prefix_store", "latent", "group_size", "read")

# owner, name, and what makes the function that takes the place of the one that stands there
Patch = tuple[Any, str, Callable[[Any], Any]]
_originals: list[tuple[Any, str, Any]] = []  # owner, name, what stood there
_added: set[str] = set()  # names that were put beside transformers' own, gone ones included


def install(more: Sequence[Patch] = ()) -> None:
    """Register the cache names, wrap the registered attention, and put patches in place, `more` besides; a second call changes nothing."""
    dispatch.register()
    watch_latents()
    _add_names()
    named.watch(_add_names)
    if not _originals:
        for owner, name, wrap in (*PATCHES, *more):
            original = getattr(owner, name)
            _originals.append((owner, name, original))
            setattr(owner, name, wrap(original))


def uninstall() -> None:
    """Take the names back, unpatch generate(), and put the registered attention back where nobody has wrapped it since."""
    restore_expansion()
    named.unwatch(_add_names)
    _set_names(())
    for owner, name, original in _originals:
        setattr(owner, name, original)
    _originals.clear()
    dispatch.unregister()
    forget()


def _add_names() -> None:
    """Put the cache names that there are now behind those of others."""
    _set_names(cache_names())
    _added.update(cache_names())


def _set_names(names: Sequence[str]) -> None:
    """Let transformers know `names` behind those that it, or others, have put there."""
    known = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    others = tuple(name for name in known if name not in _added)
    found = (*others, *(name for name in names if name not in others))
    vars(configuration_utils)["ALL_CACHE_IMPLEMENTATIONS"] = found


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def prepare(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        given = model_kwargs.get(CACHE)
        name = asked_name(generation_config, given)
        paged = any(half is not None for half in paged_halves(given))
        if paged and name is not None and getattr(generation_config, "is_assistant", False):
            return None  # called many times with the target's options and its own cache of the last call
        if paged and name is None:
            asked = Generation.of(self, generation_config, *args, **kwargs)
            _check_given(given, asked)
            _make_ready(given, asked)
        elif is_cache_name(name) and given is None and generation_config.use_cache is not False:
            asked = Generation.of(self, generation_config, *args, **kwargs)
            cache = _new_cache(asked)
            if getattr(generation_config, "is_assistant", False):
                cache.activate_past_recording()
            _make_ready(cache, asked)
            model_kwargs[CACHE] = cache
            return None
        return original(self, generation_config, model_kwargs, *args, **kwargs)

    return prepare


def _check_given(given: Any, asked: Generation) -> None:
    """Raise CacheMismatchError where the user's cache does not fit the model."""
    model = asked.model
    if isinstance(given, PagedCache) and is_encoder_decoder(model.config):
        raise CacheMismatchError(
            f"{type(model).__name__} is an encoder-decoder model and wants two caches, got a {type(given).__name__} "
            "alone: use kv_hf.PagedEncoderDecoderCache(model.config), or transformers' EncoderDecoderCache with it "
            "and a DynamicCache(config=model.config)"
        )
    own, cross = paged_halves(given)
    for half in (own, cross):
        if half is not None:
            half.origin.check_model(model.config)
            half.read_by(model.config)
            for group in half.groups:
                group.end_recording()  # assisted decoding, if it is that, turns it on again
    if cross is not None:
        _check_paged_cross(model)
    if own is given and given.options.max_length is not None:
        decide(given, asked)


def _check_paged_cross(model: Any) -> None:
    """Raise UnsupportedModelError where a model would replace a paged cross-attention cache by one of its own."""
    if (
        type(model)._prepare_cache_for_generation
        is not GenerationMixin._prepare_cache_for_generation
    ):
        raise UnsupportedModelError(
            f"cross_attention='same': {type(model).__name__} makes its cross-attention cache itself in generate(); "
            "leave cross_attention out"
        )


def _new_cache(asked: Generation) -> PagedCache | PagedEncoderDecoderCache:
    model, generation_config = asked.model, asked.config
    name = generation_config.cache_implementation or WITHOUT_NAME
    if not model._supports_default_dynamic_cache():
        raise not_kept_in(model)
    options = given_options(generation_config.cache_config)
    if getattr(generation_config, "is_assistant", False):
        # the target's options reach the assistant, whose layers are others
        options = {option: value for option, value in options.items() if option not in OF_A_MODEL}
    if not is_encoder_decoder(model.config):
        return new_cache(CacheConfig.from_options(name, options), asked)
    cache = PagedEncoderDecoderCache.from_implementation(model.config, name, options)
    if cache.options.cross_attention != "exact":
        _check_paged_cross(model)
    return cache


def _make_ready(cache: Any, asked: Generation) -> None:
    """Check the kernels, and give the model attention over pages."""
    model = asked.model
    for half in (half for half in paged_halves(cache) if half is not None):
        if half.options.max_length is None:
            refuse_growing(half.options)
        elif half is cache:
            check_length(half, asked)
        warn_of_two_bits([layer.formats for layer in half.paged_layers])
        check_kernel(half, execution_devices(model), model.dtype)
        if any(isinstance(layer, LatentLayer) for layer in half.layers):
            prepare_latents(model, half.options)
    dispatch.register()  # flash attention that came since


PATCHES: Sequence[Patch] = (
    (GenerationMixin, "generate", around_generate),
    (GenerationMixin, "_prepare_cache_for_generation", _wrap),
    (GenerationMixin, "_prefill", share_prefill),
    (GenerationMixin, "_assisted_decoding", expect_drafts),
    (GenerationMixin, "_valid_auto_compile_criteria", want_graphs),
    (PreTrainedModel, "get_compiled_call", call_graphs),
    (AttentionInterface, "get_interface", dispatch.over_eager),
)
