"""Whether generate() runs its decode steps as a CUDA graph, and why not. Decides; captures nothing."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..cache.identity import virtual_owner
from ..cache.layer import HandleLayer, PagedLayer
from ..cache.layer_kinds import LatentLayer
from ..cache.model_shape import is_dummy, is_encoder_decoder
from ..cache.paged_cache import PagedCache
from ..config import DEFAULTS, CacheConfig, names_of
from ..errors import CacheOptionError, UnsupportedModelError
from .devices import execution_devices
from .models import why_not_pages

PAYS_FROM = 32  # new tokens: beginning takes about as long as three steps of Python
MOST_OF_FREE_MEMORY = 0.5  # that room for the whole text may take before it is used
MODES = ("greedy_search", "sample")


@dataclass(frozen=True)
class Generation:
    """What generate() is about to do, as it tells `_prepare_cache_for_generation` (5.17 to 5.23).

    Attributes:
        rows: of the cache.
        length: columns of prompt and new tokens.
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
        return cls(model, config, generation_mode, batch_size * copies, max_cache_length + 1)


def with_room(options: CacheConfig, asked: Generation) -> PagedCache | None:
    """Return a preallocated cache whose steps can be captured, in place of one that would grow; None where one cannot.

    Raises: CacheOptionError where cuda_graph="always" asks for what cannot be.
    """
    reason = _why_not(options, asked) or _why_not_allocated(options, asked)
    made = None
    if reason is None:
        made, reason = _allocated(replace(options, max_length=asked.length), asked)
    if made is not None:
        made.captured = True
        return made
    _refuse(options, reason)
    return None


def decide(cache: PagedCache, asked: Generation) -> None:
    """Note whether the steps of a preallocated cache are captured in this generation.

    Raises: CacheOptionError where cuda_graph="always" asks for what cannot be.
    """
    reason = _why_not(cache.options, asked) or _keeps_states(cache)
    cache.captured = reason is None
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
        for device in execution_devices(asked.model):
            cache.check_kernel(device, asked.model.dtype)
    except (CacheOptionError, UnsupportedModelError) as error:
        return None, str(error)
    if (reason := _keeps_states(cache)) is not None:
        return None, reason
    needed = cache.bytes_of(asked.rows, asked.model.dtype)
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
