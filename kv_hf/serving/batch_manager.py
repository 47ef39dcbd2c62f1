"""transformers' continuous batching on quantized pages: what its manager does where a generation config names a paged cache."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from transformers.generation.continuous_batching import continuous_api, initialization

from ..backends.cpu.library import end_idle_threads
from ..cache.model_shape import decoder_config, is_chunked, is_encoder_decoder
from ..config import CacheConfig
from ..errors import CacheOptionError, UnsupportedModelError
from ..formats import cache_names, is_cache_name
from ..hf.generation import not_kept_in
from ..hf.install import Patch
from ..hf.latent import foreign_expansion, passing_new_latents
from ..hf.models import why_not_pages
from ..notices import warn_once
from .batch_cache import BatchCache, Salted
from .batch_making import new_cache, template_of, why_not_shared
from .batch_store import called

Manager = continuous_api.ContinuousBatchingManager
Mixin = continuous_api.ContinuousMixin
_numbers = itertools.count()  # of requests with a salt and without an id
# whether the manager that this thread makes is one of pages
_on_pages: ContextVar[bool] = ContextVar("kv_hf_batches_on_pages", default=False)


def _made(own: Callable[..., Any], **kwargs: Any) -> Any:
    """Make the cache of a batch processor: as its manager has noted, or transformers' `own`."""
    make = getattr(kwargs["continuous_batching_config"], "kv_hf_make", None)
    return own(**kwargs) if make is None else make()


def _kinds_of_layers(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap what says which allocators of transformers a model's layers need, and refuses all it has none for: pages need none."""
    return lambda config: {} if _on_pages.get() else own(config)


# -- what is asked, and refused before anything is changed ---------------------------------------------------------------


def fits_transformers() -> bool:
    """Say whether transformers' continuous batching is the one of 5.18 and newer, whose cache hands work to allocators."""
    return find_spec("transformers.generation.continuous_batching.cache_allocators") is not None


def options_of(generation_config: Any) -> CacheConfig | None:
    """Return the options of the paged cache that `generation_config` names, or None where it names none."""
    name = getattr(generation_config, "cache_implementation", None)
    if name is None or not is_cache_name(name):
        return None
    return CacheConfig.from_options(name, generation_config.cache_config)


def _check_options(options: CacheConfig) -> None:
    """Raise CacheOptionError for options that continuous batching cannot follow."""
    options.refuse(
        "call",
        "is for one call of generate(); continuous batching allocates all pages when it starts (cache_config={'max_bytes': ..})",
    )
    if options.cuda_graph == "always":
        raise CacheOptionError(
            "cuda_graph='always': continuous batching on pages makes no CUDA graphs; leave it out"
        )


def _check_batching(config: Any) -> None:
    """Raise CacheOptionError for what a ContinuousBatchingConfig asks and pages cannot do."""
    for name in (
        *("use_cuda_graph", "use_async_batching", "varlen_compile_config", "decode_compile_config"),
        *("default_compile_level", "q_padding_interval_size", "kv_padding_interval_size"),
    ):
        value = getattr(config, name)
        if any(value) if isinstance(value, tuple | list) else value:
            raise CacheOptionError(
                f"{name}={value!r} of the ContinuousBatchingConfig: forwards over pages are neither compiled nor captured in "
                "graphs, and run one after the other; leave it out"
            )


def check_batches(model: Any, options: CacheConfig) -> None:
    """Raise UnsupportedModelError or CacheOptionError where this transformers, a model or options know no batches on pages."""
    if not fits_transformers():
        raise UnsupportedModelError(
            f"continuous batching on pages needs transformers 5.18 or newer, and this is {transformers.__version__}"
        )
    _check_options(options)
    _check_model(model)
    layers = why_not_shared(template_of(model, options))
    if options.prefix_store is not None and layers is not None:
        raise CacheOptionError(
            "prefix_store (--prefix-folder of the server) shares pages between requests, and in batches layers with "
            f"{layers}, as this model has, share none; leave it out"
        )


def _check_model(model: Any) -> None:
    """Raise UnsupportedModelError where a model cannot attend over pages, or runs on several devices or processes."""
    name = type(model).__name__
    if not model._supports_default_dynamic_cache():
        raise not_kept_in(model)
    reason = why_not_pages(model)
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if is_encoder_decoder(model.config):
        why = f"is for decoders, and {name} has an encoder"
    elif reason is not None:
        why = f"on pages needs attention that reads them, which {name} has not: {reason}"
    elif getattr(model, "_device_mesh", None) is not None:
        why = "on pages runs in one process; this model is spread by tensor parallelism"
    elif is_chunked(decoder_config(model.config)):
        why = f"knows no layers that attend within chunks of a text, as those of {name} do"
    elif (foreign := foreign_expansion(model)) is not None:
        why = f"on pages stores latents as they are, and {name} expands them before: {foreign}"
    elif len(devices) > 1:
        why = f"runs on one device, and the weights of {name} lie on {', '.join(devices)}"
    else:
        return
    raise UnsupportedModelError(f"continuous batching {why}")


# -- transformers' manager -------------------------------------------------------------------------------------------------


class BatchManager(Manager):
    """transformers' manager, in its place: on pages where its generation config names a paged cache, else as it is.

    Attributes:
        kv_hf_options: of the paged cache, None without one.
    """

    def __init__(
        self, model: Any, generation_config: Any, continuous_batching_config: Any, **kwargs: Any
    ) -> None:
        options = self.kv_hf_options = options_of(generation_config)
        if options is not None:  # checked before the model is touched
            check_batches(model, options)
            _check_batching(continuous_batching_config)
        before = _on_pages.set(options is not None)
        try:
            super().__init__(model, generation_config, continuous_batching_config, **kwargs)
        finally:
            _on_pages.reset(before)
        if options is not None:
            batching = self.continuous_batching_config = copy.copy(self.continuous_batching_config)
            vars(batching)["kv_hf_make"] = functools.partial(new_cache, model, options, batching)

    def switch_to_cb_friendly_attn(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Leave a model its attention, which reads these pages; transformers' own method knows a closed list of them."""
        if self.kv_hf_options is None:
            super().switch_to_cb_friendly_attn(model, *args, **kwargs)

    def start(self) -> None:
        """Start the thread that runs the forwards, and end the idle OpenMP threads of the thread that calls this."""
        if self.kv_hf_options is not None:
            end_idle_threads()
        super().start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause the forwards; the model is looked at again afterwards, as it may have been changed in place."""
        with super().pause():
            try:
                yield
            finally:
                if self.kv_hf_options is not None:
                    processor: Any = self.batch_processor
                    processor.cache.look_again()

    def _create_batch_processor(self) -> Any:
        """Make the batch processor with its cache, or empty the one that is there."""
        known: Any = self.batch_processor
        processor = super()._create_batch_processor()
        if self.kv_hf_options is not None and processor is not known:
            _join(processor)
        # one that was kept from another session, since which the model may have changed
        elif self.kv_hf_options is not None:
            known.cache.look_again()
        return processor

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        *args: Any,
        cache_salt: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Add a request; `cache_salt`, a string, keeps its prefixes apart from those of other salts."""
        if cache_salt is not None:
            if self.kv_hf_options is None or not isinstance(cache_salt, str):
                raise CacheOptionError(
                    f"cache_salt={cache_salt!r} must be a string, and is read by continuous batching on a paged cache alone"
                )
            request_id = Salted(request_id or f"salted_{next(_numbers)}", cache_salt)
        return super().add_request(input_ids, request_id, *args, **kwargs)


def _checked_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap init_continuous_batching, which gives a manager back that was kept, whatever its cache is."""

    @functools.wraps(original)
    def init(self: Any, generation_config: Any = None, *args: Any, **kwargs: Any) -> Any:
        kept = getattr(self, "_cached_continuous_batching_manager", None)
        held, own = getattr(kept, "kv_hf_options", None), "transformers' own 16-bit pages"
        asked = options_of(generation_config or self.generation_config)
        if kept is not None and asked != held:
            raise CacheOptionError(
                f"a manager with {held or own} was kept for this model, and this call asks for {asked or own}; call "
                "model.destroy_cached_continuous_batching_manager() first"
            )
        return original(self, generation_config, *args, **kwargs)

    return init


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
        if cache_implementation is not None:
            chosen = generation_config or self.generation_config
            named = {**chosen.to_dict(), "cache_implementation": cache_implementation}
            generation_config = type(chosen).from_dict(named)
            generation_config.cache_config = cache_config
        elif cache_config is not None:
            raise CacheOptionError(
                f"cache_config={cache_config!r} was given without cache_implementation; name one of {', '.join(cache_names())}"
            )
        return original(self, inputs, generation_config, *args, **kwargs)

    return generate_batch


# -- its batch processor ---------------------------------------------------------------------------------------------------


def _join(processor: Any) -> None:
    """Let a batch processor run its forwards on the BatchCache that it was made with."""
    cache: BatchCache = processor.cache
    scheduler, compute = processor.scheduler, processor.model_runner.compute_batch
    cache.stream, cache.scheduler = processor.inputs_and_outputs.compute_stream, scheduler
    enqueue = scheduler.add_waiting_request

    def run(model: Any, batch: dict[str, Any]) -> None:
        """Plan and run a forward. A mask of four dimensions is handed on as it is, so that none is made, and nobody reads it."""
        with cache.in_order():
            cache.begin()
        count = batch["input_ids"].shape[1]
        if not count:  # a request that was found as a whole, and waits to be forked
            return
        batch["attention_mask"] = batch["input_ids"].new_zeros((1, 1, count, 0), dtype=torch.bool)
        batch["paged_batch"] = cache
        # transformers leaves the indices of a longer forward where a request waits to be forked
        batch["logits_indices"].clamp_(max=count - 1)
        if cache.states:  # the parts give logits of these alone
            batch["logits_to_keep"] = batch["logits_indices"]
        # nobody reads it here, and the model would write it into its config, where forwards of other threads read it
        batch.pop("is_causal", None)
        try:
            with passing_new_latents():
                compute(called(model, cache), batch)
        finally:
            cache.finish()
            # another thread may have changed it, before this forward or in the middle
            if (reason := why_not_pages(model)) is not None:
                raise UnsupportedModelError(
                    f"the attention of {type(model).__name__} was changed, while continuous batching runs on its pages: "
                    f"{reason}; stop the manager first"
                )

    def add(state: Any) -> None:
        """Refuse a request that can never have room, so that it does not keep others waiting, and one of an id that is in use."""
        try:
            if state.request_id in scheduler.active_requests | scheduler.waiting_requests:
                raise CacheOptionError(
                    f"request_id={state.request_id!r} is that of a request that has not finished; give each its own, or none"
                )
            _check_length(cache, state)
        except CacheOptionError as error:
            # transformers answers this one; generate_batch waits for its children, too
            for number in range(state.num_children):
                child = state.fork(f"{state.request_id}__child#{number}")
                processor._handle_request_error(error, child)
            raise
        enqueue(state)

    processor.model_runner.compute_batch, scheduler.add_waiting_request = run, add


def _check_length(cache: BatchCache, state: Any) -> None:
    """Raise CacheOptionError for a prompt that is empty or has no room; shorten an answer that would not."""
    prompt, most = len(state.initial_tokens), cache.most_tokens
    if not prompt:  # its first token would be one that another request was given
        raise CacheOptionError("the prompt of a request must have a token at least, and is empty")
    if prompt + 1 > most:
        raise CacheOptionError(
            f"the prompt has {prompt} tokens, and the cache has room for {most} tokens of one request, its answer included: "
            "shorten it, or give the cache more memory (cache_config={'max_bytes': ..})"
        )
    if state._new_tokens_limit > most - prompt:
        if state.max_new_tokens is not None:
            warn_once(
                "shortened answers",
                f"A request asks for {state.max_new_tokens} new tokens after {prompt}, and the cache has room for {most} tokens of "
                "one request: its answer ends there",
            )
        state._new_tokens_limit = most - prompt


PATCHES: Sequence[Patch] = (
    (continuous_api, "ContinuousBatchingManager", lambda _: BatchManager),
    (continuous_api, "PagedAttentionCache", lambda own: functools.partial(_made, own)),
    (Mixin, "init_continuous_batching", _checked_manager),
    (Mixin, "generate_batch", _named_batch),
)
if fits_transformers():  # 5.17 allocates in another way, and check_batches refuses it
    PATCHES = (*PATCHES, (initialization, "group_layers_by_attn_type", _kinds_of_layers))
