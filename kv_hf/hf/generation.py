"""What a call of generate() asks of its cache: a name or options, steps that become a CUDA graph, room for the text. Captures nothing."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.generation import configuration_utils

from ..cache.build import check_kernel, most_bytes
from ..cache.identity import virtual_owner
from ..cache.layer import HandleLayer, PagedLayer
from ..cache.layer_kinds import LatentLayer
from ..cache.model_shape import CACHE, is_dummy, is_encoder_decoder, modules_of
from ..cache.paged_cache import PagedCache
from ..checks import check_choice
from ..config import DEFAULTS, OPTIONS, OTHER_CACHE_WORDS, CacheConfig, names_of
from ..errors import CacheOptionError, UnsupportedModelError
from ..formats import cache_names, is_cache_name
from ..notices import warn_once
from ..printable import short
from .models import why_not_pages, why_not_preallocated, why_other_tokens

PAYS_FROM = 32  # new tokens: beginning takes about as long as three steps of Python
MOST_OF_FREE_MEMORY = 0.5  # that room for the whole text may take before it is used
MODES = ("greedy_search", "sample")
WITHOUT_NAME = "paged_exact"  # brings no option of its own: a CacheConfig says the rest
# how GenerationConfig.validate() begins where it does not know a name (generation/configuration_utils.py, 5.17 to 5.24)
_REFUSED = re.compile(r"Invalid `cache_implementation` \((.*?)\)\.")


# -- the cache that is asked for ----------------------------------------------------------------------------------------


def asked_name(generation_config: Any, given: Any) -> str | None:
    """Return the name of the cache that is asked for, or None; options that transformers passes over are said once.

    A kv_hf.CacheConfig without a name asks for a paged cache of its formats.

    Args:
        generation_config: of this call.
        given: the cache that the user passes (`past_key_values`, from 5.24 on `cache`), or None.
    Raises: CacheOptionError for a CacheConfig beside the name of a cache that is not paged, and a name, options or a class in place of a cache.
    """
    if isinstance(given, str | CacheConfig | type):
        raise CacheOptionError(
            f"{CACHE} must be a cache, as kv_hf.PagedCache(model.config, ..) makes one, got {short(given)}: a name goes into "
            "cache_implementation, and options into cache_config"
        )
    name: str | None = generation_config.cache_implementation
    options = generation_config.cache_config
    if options is None or is_cache_name(name) or getattr(generation_config, "is_assistant", False):
        return name
    if isinstance(options, CacheConfig):
        if name is not None:
            raise CacheOptionError(
                f"cache_config=kv_hf.CacheConfig(..) is for paged caches, got cache_implementation={name!r}; name one of "
                f"{', '.join(cache_names())}, or leave cache_implementation out"
            )
        if given is None:
            return WITHOUT_NAME
    elif name is not None or not (
        isinstance(options, Mapping) and options.keys() <= OPTIONS.keys()
    ):
        return name
    if options:
        warn_once(
            "cache_config unread",
            f"cache_config={short(options)} is not read: transformers reads it with a cache_implementation. Pass one of "
            f"{', '.join(cache_names())}, or cache_config=kv_hf.CacheConfig(..), which needs no name; a cache that was passed "
            "has options of its own, which are given where it is made",
        )
    return name


def check_made(model: Any, generation_config: Any, cache: Any) -> None:
    """Raise UnsupportedModelError where a model's own generate() (MusicGen) reaches its prefill without the cache that was named."""
    name = generation_config.cache_implementation
    if cache is None and generation_config.use_cache is not False and is_cache_name(name):
        raise UnsupportedModelError(
            f"cache_implementation={name!r}: generate() of {type(model).__name__} makes no cache by its name; leave "
            f"cache_implementation out, and pass {CACHE}=kv_hf.PagedEncoderDecoderCache(model.config, ..)"
        )


def not_kept_in(model: Any) -> UnsupportedModelError:
    """Return the error for a model that keeps nothing in generate()'s cache."""
    return UnsupportedModelError(
        f"{type(model).__name__} does not keep its keys and values in a transformers Cache that generate() passes as {CACHE}, so "
        "that pages cannot hold them: take no paged cache"
    )


def with_hint(error: BaseException) -> BaseException:
    """Return the error to raise: with the nearest name where transformers refused an unknown one, else `error` itself."""
    found = _REFUSED.match(str(error))
    if found is None:
        return error
    try:
        known = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
        check_choice("cache_implementation", found[1], known, OTHER_CACHE_WORDS)
    except CacheOptionError as ours:
        return ours
    return error


@dataclass(frozen=True)
class Generation:
    """What generate() is about to do, as it tells `_prepare_cache_for_generation` (5.17 to 5.24).

    Attributes:
        rows: of the cache.
        length: columns that the cache takes in at most: prompt and new tokens but the last, and drafts that go beyond them.
    """

    model: Any
    config: Any
    mode: Any
    rows: int
    length: int

    @classmethod
    def of(
        cls,
        model: Any,
        config: Any,
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> "Generation":
        """Take over arguments of `_prepare_cache_for_generation`, which some models (MusicGen, RAG) give by name."""
        copies = max(config.num_beams or 1, config.num_return_sequences or 1)
        length = max_cache_length
        if getattr(generation_mode, "value", None) == "assisted_generation":
            # prompt lookup drafts beyond the end, and an assistant with another tokenizer up to it (candidate_generator.py, 5.24)
            length += max(1, (config.prompt_lookup_num_tokens or 0) - 1)
        return cls(model, config, generation_mode, batch_size * copies, length)


# -- graphs ----------------------------------------------------------------------------------------------------------


def new_cache(options: CacheConfig, asked: Generation) -> PagedCache:
    """Return the cache of a decoder: a preallocated one whose steps can be captured in place of one that would grow.

    Raises: CacheOptionError where cuda_graph="always" asks for what cannot be.
    """
    if options.max_length is None:
        reason = _why_not(options, asked) or _why_not_allocated(options, asked)
        made = None
        if reason is None:
            made, reason = _allocated(replace(options, max_length=asked.length), asked)
        if made is not None:
            made._compiled.captured = True
            return made
        _refuse(options, reason)
    cache = PagedCache.from_options(asked.model.config, options)
    if options.max_length is not None:
        decide(cache, asked)
    return cache


def decide(cache: PagedCache, asked: Generation) -> None:
    """Note whether the steps of a preallocated cache are captured in this generation.

    Raises: CacheOptionError where cuda_graph="always" asks for what cannot be.
    """
    reason = _why_not(cache.options, asked) or _keeps_states(cache)
    cache._compiled.captured = reason is None
    _refuse(cache.options, reason)


def refuse_growing(options: CacheConfig) -> None:
    """Raise CacheOptionError where cuda_graph="always" is an option of a cache that stays one that grows."""
    _refuse(
        options, "the cache grows; make it with max_length, or let generate() make it for a decoder"
    )


def _refuse(options: CacheConfig, reason: str | None) -> None:
    """Raise CacheOptionError where a graph is insisted on and there is a reason against it."""
    if reason is not None and options.cuda_graph == "always":
        raise CacheOptionError(
            f"cuda_graph='always': decode steps cannot be a CUDA graph here: {reason}. Leave cuda_graph out"
        )


def _why_not(options: CacheConfig, asked: Generation) -> str | None:
    """Return why the steps of such a generation are not captured."""
    config = asked.config
    if options.cuda_graph == "never":
        return "cuda_graph='never'"
    if config.disable_compile:
        return "disable_compile=True"
    if config.compile_config is not None:
        return "compile_config asks for torch.compile"
    if is_encoder_decoder(asked.model.config):
        return "the model is an encoder-decoder"
    if getattr(config, "is_assistant", False) or str(getattr(asked.mode, "value", "")) not in MODES:
        return f"the generation mode is {getattr(asked.mode, 'value', asked.mode)}, not greedy search or sampling"
    if config.output_attentions or config.output_hidden_states:
        return "attentions or hidden states of every step are asked for"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "several processes generate together"
    return why_not_captured(asked.model) or why_not_pages(asked.model)


def _keeps_states(cache: PagedCache) -> str | None:
    """Return why the steps of a cache cannot be replayed: recording one runs it twice."""
    kinds = {type(layer) for layer in cache.layers if not is_dummy(layer)}
    others = sorted(kind.__name__ for kind in kinds - {PagedLayer, HandleLayer, LatentLayer})
    return f"layers ({', '.join(others)}) hold states that a step moves on" if others else None


def why_not_captured(model: Any) -> str | None:
    """Return why no GPU could capture a step of `model`, by where it lies."""
    devices = execution_devices(model)
    if len(devices) > 1:
        return f"the model computes on several devices ({', '.join(map(str, devices))})"
    return None if devices[0].type == "cuda" else f"the model is on {devices[0]}"


def _why_not_allocated(options: CacheConfig, asked: Generation) -> str | None:
    """Return why a cache that would grow cannot have room for the whole text at once."""
    for name in names_of("grows"):
        if getattr(options, name) != DEFAULTS[name]:
            return f"{name} belongs to a cache that grows"
    config = asked.config
    if virtual_owner(asked.model) is not None:
        return "virtual tokens stand in front of the prompt"
    prepare = vars(asked.model).get("prepare_inputs_for_generation")
    if prepare is not None and not hasattr(getattr(prepare, "__self__", None), "peft_config"):
        return "prepare_inputs_for_generation was replaced, and may make the text longer"
    if not type(asked.model).__module__.startswith("transformers."):
        return f"{type(asked.model).__name__}, whose code is not transformers' own, may make the text longer"
    # such a model may take no mask of four dimensions either (Kosmos-2)
    if not asked.model._can_compile_fullgraph:
        return "transformers compiles no steps of this model"
    if config.return_dict_in_generate:
        return "the cache is returned, and another generation may make it grow"
    if config.prefill_chunk_size is not None:
        return "the prompt comes in chunks"
    if config.max_new_tokens is not None and config.max_new_tokens < PAYS_FROM:
        return f"fewer than {PAYS_FROM} new tokens"
    return None


def _allocated(options: CacheConfig, asked: Generation) -> tuple[PagedCache | None, str | None]:
    """Return the preallocated cache, or why there is none."""
    try:
        cache = PagedCache.from_options(asked.model.config, options)
        check_kernel(cache, execution_devices(asked.model), asked.model.dtype)
    except (CacheOptionError, UnsupportedModelError) as error:
        return None, str(error)
    if (reason := _keeps_states(cache)) is not None:
        return None, reason
    needed = most_bytes(cache, asked.rows, asked.model.dtype)
    free = free_memory(execution_devices(asked.model)[0])
    if needed is None:
        return None, "the model's config does not say how much memory the whole text takes"
    if needed > MOST_OF_FREE_MEMORY * free:
        return None, f"room for {asked.length} tokens takes {needed} bytes, and {free} are free"
    return cache, None


def free_memory(device: torch.device) -> int:
    """Return the bytes that torch can still get on a GPU, those that it keeps for itself included."""
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + kept)


# -- room for the text -----------------------------------------------------------------------------------------------


def check_length(cache: PagedCache, asked: Generation) -> None:
    """Raise CacheOptionError where this generation does not fit a cache with max_length; change nothing."""
    model, length, most = asked.model, asked.length, cache.options.max_length or 0
    reason = why_other_tokens(model) or why_not_preallocated(model)
    if reason is not None:
        raise CacheOptionError(
            f"max_length={most}: {type(model).__name__} cannot use it: {reason}. Leave max_length out"
        )
    if length > most:
        raise CacheOptionError(
            f"prompt, new tokens and drafts take up to {length} columns, and cache_config max_length is {most}: raise "
            "max_length or generate fewer tokens (max_new_tokens)"
        )


# -- devices ---------------------------------------------------------------------------------------------------------


def execution_devices(model: torch.nn.Module) -> list[torch.device]:
    """Return the devices that `model` computes on, without repetitions.

    accelerate leaves a hook on each part of a model that it splits or offloads, which names the part's device.
    `model.device` is not it: weights that are offloaded lie on "meta" between two forwards.
    """
    found = {
        torch.device(hook.execution_device): None
        for module in modules_of(model)
        for hook in _hooks(module)
        if getattr(hook, "execution_device", None) is not None
    }
    return list(found) or [next(parameter.device for parameter in model.parameters())]


def _hooks(module: torch.nn.Module) -> Iterator[Any]:
    """Yield accelerate's hooks of one module; a SequentialHook holds several."""
    hook = vars(module).get("_hf_hook")
    if hook is not None:
        yield hook
        yield from getattr(hook, "hooks", ())
