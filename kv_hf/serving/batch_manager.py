"""transformers' continuous batching on quantized pages: what its manager does where a generation config names a paged cache."""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching import continuous_api

from ..cache.model_shape import attention_config
from ..config import CacheConfig
from ..errors import CacheOptionError, UnsupportedModelError
from ..formats import ATTENTION_NAME, cache_names
from ..hf.models import takes_handles, use_paged_attention
from ..notices import warn_once
from .batch_cache import BatchCache
from .batch_making import new_cache
from .batch_offload import BatchOffload
from .batch_options import check_batching, check_model, options_of

Manager = continuous_api.ContinuousBatchingManager
Mixin = continuous_api.ContinuousMixin
_PATCHED: tuple[tuple[type, str], ...] = (
    (Manager, "__init__"),
    (Manager, "switch_to_cb_friendly_attn"),
    (Manager, "_create_batch_processor"),
    (Manager, "stop"),
    (Manager, "add_request"),
    (Mixin, "init_continuous_batching"),
    (Mixin, "generate_batch"),
)
_MODULE: Any = continuous_api
_CACHE = "PagedAttentionCache"  # the class that _create_batch_processor finds in its module
_originals: dict[tuple[Any, str], Callable[..., Any]] = {}

_managers: "weakref.WeakSet[Any]" = weakref.WeakSet()  # on quantized pages
# `make`: what this thread's manager makes its cache by, None where transformers makes it
_here = threading.local()


def install() -> None:
    """Let continuous batching take the names of paged caches; a second call changes nothing."""
    if _originals:
        return
    wraps = (
        *(_with_options, _with_pages, _processor, _handing_over),
        *(_with_salt, _checked_manager, _named_batch),
    )
    for (owner, name), wrap in zip(_PATCHED, wraps, strict=True):
        _originals[owner, name] = getattr(owner, name)
        setattr(owner, name, wrap(_originals[owner, name]))
    own = vars(continuous_api)["PagedAttentionCache"]
    _originals[_MODULE, _CACHE] = own
    setattr(continuous_api, _CACHE, functools.partial(_made, own))


def _made(own: Callable[..., Any], **kwargs: Any) -> Any:
    """Make the cache of a batch processor: that of this thread's manager, or transformers' `own`."""
    make = getattr(_here, "make", None) or own
    return make(**kwargs)


def uninstall() -> None:
    """Give continuous batching its own methods back."""
    for (owner, name), original in _originals.items():
        setattr(owner, name, original)
    _originals.clear()


def fits_transformers() -> bool:
    """Say whether transformers' continuous batching is the one of 5.18 and newer, whose cache hands work to allocators."""
    return find_spec("transformers.generation.continuous_batching.cache_allocators") is not None


def check_here() -> None:
    """Raise UnsupportedModelError where transformers' continuous batching is not the one that pages know."""
    if not fits_transformers():
        raise UnsupportedModelError(
            f"continuous batching on pages needs transformers 5.18 or newer, and this is {transformers.__version__}"
        )


# -- the methods of transformers, with what comes before or in their place --------------------------------------------


def _with_options(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap ContinuousBatchingManager.__init__: options are checked before the model is touched."""

    @functools.wraps(original)
    def init(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(original).bind(self, model, *args, **kwargs).arguments
        options = options_of(bound["generation_config"])
        self.kv_hf_options, self.kv_hf_salts = options, {}
        if options is not None:
            check_here()
            check_batching(bound["continuous_batching_config"])
            check_model(model)
        original(self, model, *args, **kwargs)
        if options is not None:
            _managers.add(self)

    return init


def _with_pages(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap switch_to_cb_friendly_attn, which knows a closed list of attentions."""

    @functools.wraps(original)
    def switch(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        before = model.config._attn_implementation
        if self.kv_hf_options is None:
            if before == ATTENTION_NAME:
                # a call of generate() has switched it; 16-bit pages are not read by it
                if _running_beside(self, model):
                    raise UnsupportedModelError(
                        f"another manager runs on quantized pages of this {type(model).__name__}, whose attention 16-bit pages are "
                        "not read by; stop it first"
                    )
                model.set_attn_implementation("eager")
            original(self, model, *args, **kwargs)
            if before == ATTENTION_NAME:
                self._original_attn_impl = before
        else:
            use_paged_attention(model)
            if model.config._attn_implementation != before:
                self._original_attn_impl = before

    return switch


def _running_beside(manager: Any, model: Any) -> Any:
    """Return another manager that runs on quantized pages of `model`, or None."""
    others = (one for one in list(_managers) if one is not manager and one.model is model)
    return next((one for one in others if one.is_running()), None)


def _handing_over(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap stop, which gives a model its attention back: the last manager of several shall."""

    @functools.wraps(original)
    def stop(self: Any, *args: Any, **kwargs: Any) -> None:
        other = _running_beside(self, self.model)
        if self.kv_hf_options is not None and other is not None:
            if other._original_attn_impl is None:
                other._original_attn_impl = self._original_attn_impl
            self._original_attn_impl = None
        original(self, *args, **kwargs)

    return stop


def _processor(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap _create_batch_processor, which makes the cache."""

    @functools.wraps(original)
    def create(self: Any) -> Any:
        if self.kv_hf_options is None:
            return original(self)
        self.switch_to_cb_friendly_attn(self.model)  # stop() has switched it back
        if self.batch_processor is not None:
            self.batch_processor.cache.look_again()
            return original(self)
        made: list[BatchCache] = []

        def make(**kwargs: Any) -> BatchCache:
            made.append(new_cache(self.model, self.kv_hf_options, self.continuous_batching_config))
            return made[0]

        batching = self.continuous_batching_config
        space = batching.cpu_offload_space
        batching.cpu_offload_space = 0.0  # no buffer of 16-bit pages
        _here.make = make
        try:
            processor = original(self)
        except BaseException:
            if self._original_attn_impl is not None:
                self.model.set_attn_implementation(self._original_attn_impl)
                self._original_attn_impl = None
            raise
        finally:
            _here.make = None
            batching.cpu_offload_space = space
        # the bytes that transformers would take: its sectors are bytes here
        most = batching.cpu_offload_space_safety_threshold
        host_bytes = processor.offloading_manager._compute_num_cpu_sectors(space, most)
        _join(processor, made[0], host_bytes, self.kv_hf_salts)
        return processor

    return create


def _join(processor: Any, cache: BatchCache, host_bytes: int, salts: dict[str, str]) -> None:
    """Let a batch processor run its forwards on `cache`.

    Args:
        salts: of requests that were added and have not come here yet.
    """
    cache.requests.stream = processor.inputs_and_outputs.compute_stream
    processor.offloading_manager = BatchOffload(cache, processor.scheduler, host_bytes)
    scheduler, compute = processor.scheduler, processor.model_runner.compute_batch
    enqueue, clear = scheduler.add_waiting_request, scheduler.clear_cancelled_requests

    def run(model: Any, batch: dict[str, Any]) -> None:
        """Plan the forward; a mask of four dimensions is handed on as it is, so that none is made, and nobody reads it."""
        _check_attention(model)
        count = batch["input_ids"].shape[1]
        with cache.requests.in_order():
            cache.begin(count)
        if not count:  # a request that was found as a whole, and waits to be forked
            return
        batch["attention_mask"] = batch["input_ids"].new_zeros((1, 1, count, 0), dtype=torch.bool)
        try:
            compute(model, batch)
        except Exception:
            _check_attention(model)  # in the middle of a forward
            raise

    def add(state: Any) -> None:
        """Refuse a request that can never have room, so that it does not keep others waiting, and one of an id that is in use."""
        salt = salts.pop(state.request_id, None)
        if state.request_id in scheduler.active_requests | scheduler.waiting_requests:
            raise CacheOptionError(
                f"request_id={state.request_id!r} is that of a request that has not finished; give each its own, or none"
            )
        _check_length(cache, state)
        if salt is not None:
            cache.salt(state.request_id, salt)
        enqueue(state)

    def clear_cancelled() -> Any:
        """Let waiting requests in where all others were cancelled: transformers does so where one finishes."""
        gone = clear()
        if not scheduler.active_requests:
            scheduler.block_new_requests = False
        return gone

    status = processor.background_thread_status
    wait = getattr(type(status), "pause_and_wait", None)  # not of a processor before this one

    alive = weakref.ref(cache)  # the status outlives a manager's stop, which frees the cache

    def paused() -> None:
        """Look at the model again afterwards: it may have been changed in place."""
        assert wait is not None
        wait(status)
        held = alive()
        if held is not None:
            held.look_again()

    if wait is not None:
        status.pause_and_wait = paused
    processor.model_runner.compute_batch = run
    scheduler.add_waiting_request, scheduler.clear_cancelled_requests = add, clear_cancelled


def _check_attention(model: Any) -> None:
    """Raise UnsupportedModelError where the attention of `model` is no longer one that reads pages."""
    now = attention_config(model.config)._attn_implementation
    if not takes_handles(now):
        raise UnsupportedModelError(
            f"the attention of {type(model).__name__} was set to {now!r}, which does not read pages, while continuous batching "
            "runs on them; stop the manager first"
        )


def _check_length(cache: BatchCache, state: Any) -> None:
    """Raise CacheOptionError for a prompt that has no room; shorten an answer that would not."""
    prompt, most = len(state.initial_tokens), cache.most_tokens
    if prompt + 1 > most:
        raise CacheOptionError(
            f"the prompt has {prompt} tokens, and the cache has room for {most} tokens of one request, its answer included: "
            "shorten it, or give the cache more memory (cache_config={'max_bytes': ..})"
        )
    if state._new_tokens_limit > most - prompt:
        if state.max_new_tokens is not None:
            warn_once(
                "shortened answers",
                f"A request asks for {state.max_new_tokens} new tokens behind {prompt}, and the cache has room for {most} tokens of "
                "one request: its answer ends there",
            )
        state._new_tokens_limit = most - prompt


def _with_salt(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap add_request: `cache_salt`, a string, keeps a request's prefixes apart from those of other salts."""

    @functools.wraps(original)
    def add(self: Any, *args: Any, cache_salt: str | None = None, **kwargs: Any) -> Any:
        if cache_salt is None:
            return original(self, *args, **kwargs)
        if self.kv_hf_options is None or not isinstance(cache_salt, str):
            raise CacheOptionError(
                f"cache_salt={cache_salt!r} must be a string, and is read by continuous batching on a paged cache alone"
            )
        bound = inspect.signature(original).bind_partial(self, *args, **kwargs).arguments
        given = {
            name: one
            for name, one in bound.items()
            if name not in ("self", "logit_processor_kwargs")
        }
        if given.get("request_id") is None:
            with self._request_lock:
                given["request_id"] = f"req_{self._request_counter}"
                self._request_counter += 1
        self.kv_hf_salts[given["request_id"]] = cache_salt
        taken = original(self, **given, **bound.get("logit_processor_kwargs", {}))
        if taken is None:  # the manager is stopping
            self.kv_hf_salts.pop(given["request_id"], None)
        return taken

    return add


def _checked_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap init_continuous_batching, which gives a manager back that was kept, whatever its cache is."""

    @functools.wraps(original)
    def init(self: Any, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        kept = getattr(self, "_cached_continuous_batching_manager", None)
        if kept is not None:
            chosen = self.generation_config if generation_config is None else generation_config
            asked, held = options_of(chosen), getattr(kept, "kv_hf_options", None)
            if asked != held:
                raise CacheOptionError(
                    f"a manager with {_words(held)} was kept for this model, and this call asks for {_words(asked)}; call "
                    "model.destroy_cached_continuous_batching_manager() first"
                )
        return original(self, generation_config, *args, **kwargs)

    return init


def _words(options: CacheConfig | None) -> str:
    return "transformers' own 16-bit pages" if options is None else str(options)


def _named_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap generate_batch, which drops keyword arguments that it does not know: the name of a cache among them."""

    @functools.wraps(original)
    def generate_batch(
        self: Any,
        inputs: Any,
        generation_config: Any = None,
        *args: Any,
        cache_implementation: str | None = None,
        cache_config: Any = None,
        **kwargs: Any,
    ) -> Any:
        if cache_implementation is None and cache_config is not None:
            raise CacheOptionError(
                f"cache_config={cache_config!r} was given without cache_implementation; name one of {', '.join(cache_names())}"
            )
        if cache_implementation is not None:
            chosen = self.generation_config if generation_config is None else generation_config
            generation_config = type(chosen).from_dict(
                {**chosen.to_dict(), "cache_implementation": cache_implementation}
            )
            generation_config.cache_config = cache_config
        return original(self, inputs, generation_config, *args, **kwargs)

    return generate_batch
