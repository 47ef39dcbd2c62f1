"""generate()'s first forward, and what happens around it: prompts that share a prefix skip it, and virtual tokens go into pages."""

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import Cache

from ..cache.encoder_decoder import paged_halves
from ..cache.identity import ModelId, adapters_of, drops_numbers, virtual_owner
from ..cache.model_shape import CACHE, CHUNKS_BEHIND_A_CACHE, rotates_by_length
from ..cache.paged_cache import PagedCache
from ..cache.prefix_store import PrefixStore, common_tokens
from ..cache.states import check_states, states_of
from ..errors import CacheMismatchError, UnsupportedModelError
from ..notices import logger, warn_once
from .generation import check_made, not_kept_in
from .history import Text, note_at_end
from .models import why_other_tokens

# tensors among the inputs of generate() that keys and values do not depend on beyond the tokens
_KNOWN_INPUTS = {"attention_mask", "position_ids", "cache_position"}
_TRIAL = (8, 4)  # tokens in front of a forward that is tried, and of that forward
_tried: WeakKeyDictionary[Any, str | None] = WeakKeyDictionary()


@dataclass(frozen=True)
class Prompt:
    """The rows of a batch of prompts, without their padding.

    Attributes:
        rows: token ids of each row.
        padding: columns of left padding of each row.
    """

    rows: list[list[int]]
    padding: list[int]


def read_prompt(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None, inputs: dict[str, Any]
) -> Prompt | str:
    """Return the prompt, or why its keys and values do not follow from its tokens alone.

    Args:
        input_ids: [batch, columns].
        attention_mask: [batch, columns], 0 or False = padding; None: no padding.
        inputs: the other inputs of the model.
    """
    if input_ids.ndim != 2 or not input_ids.numel():
        return f"input_ids have shape {tuple(input_ids.shape)}"
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor | list | tuple | dict) and name not in _KNOWN_INPUTS:
            return f"the prompt holds {name} beside its tokens"
    columns = input_ids.shape[1]
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        return f"the attention_mask has shape {tuple(attention_mask.shape)}, the tokens {tuple(input_ids.shape)}"
    real = attention_mask.to("cpu", torch.bool)
    padding = columns - real.sum(-1)
    if not torch.equal(real, torch.arange(columns, device="cpu") >= padding[:, None]):
        return "the attention_mask hides more than left padding"
    positions = inputs.get("position_ids")
    if positions is not None:
        counted = (real.long().cumsum(-1) - 1).clamp(min=0)
        given = positions.cpu()
        if given.shape[-1] != columns or not bool(((given == counted) | ~real).all()):
            return "the position_ids do not count the tokens"
    ids, starts = input_ids.tolist(), padding.tolist()
    return Prompt([row[start:] for row, start in zip(ids, starts, strict=True)], starts)


def share_prefill(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap GenerationMixin._prefill: texts are compared and noted, known prefixes attached before it, new pages kept after it."""

    def prefill(
        self: Any,
        input_ids: torch.Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def run(ids: torch.Tensor) -> Any:
            return original(self, ids, generation_config, model_kwargs, *args, **kwargs)

        cache: Any = model_kwargs.get(CACHE)
        halves = [half for half in paged_halves(cache) if half is not None]
        own = halves[0] if halves else None
        if own is None:
            check_made(self, generation_config, cache)
            return run(input_ids)
        text = Text(self, cache, own, input_ids, generation_config, model_kwargs)
        text.check()
        note_origin(self, own)
        with own.reading_everything():
            prompt = None
            if own.options.prefix_store is not None and not text.seen:
                prompt = _prompt_to_share(self, own, input_ids, generation_config, model_kwargs)
            if prompt is None:
                with virtual_tokens_in_pages(self, cache):
                    outputs = run(input_ids)
            else:
                outputs = _share(self, own, prompt, generation_config, input_ids, run)
        # the first GPT and Flaubert take no cache from generate()
        if not own.get_seq_length():
            raise not_kept_in(self)
        for half in halves:
            half.end_prefill()
        front = text.note()  # a cache that is stopped from here on knows its text
        if prompt is not None:
            own.options.prefix_store.add(own, prompt.rows)
        if front is not None:
            note_at_end(own, front, prompt is not None and own.options.prefix_store.keep_answers)
        return outputs

    return prefill


def _share(
    model: Any,
    cache: PagedCache,
    prompt: Prompt,
    generation_config: Any,
    input_ids: torch.Tensor,
    run: Callable[..., Any],
) -> Any:
    """Run the prefill after what the store of an empty cache knows of `prompt`."""
    store: Any = cache.options.prefix_store
    space = _space_of(model, cache, store)
    cache.origin.note_space(space)
    chunk = getattr(generation_config, "prefill_chunk_size", None)
    try:
        skipped = attach_prefix(model, cache, prompt, space, chunk)
        logger.info("kv_hf: %d of %d columns were in the prefix store", skipped, input_ids.shape[1])
        return run(input_ids[:, skipped:])
    except BaseException:
        # where no layer has run, what is known of this prompt must not stay
        if not cache.forward.joined:
            cache.reset()
        raise


def _prompt_to_share(
    model: Any,
    cache: PagedCache,
    input_ids: torch.Tensor,
    generation_config: Any,
    inputs: dict[str, Any],
) -> Prompt | None:
    """Return the prompt of an empty cache with a store; None where prefixes cannot be shared, which is said once."""
    prompt: Prompt | str = "this transformers splits prompts into chunks only without a past"
    if getattr(generation_config, "prefill_chunk_size", None) is None or CHUNKS_BEHIND_A_CACHE:
        prompt = read_prompt(input_ids, inputs.get("attention_mask"), inputs)
    prompt = more_than_tokens(model) or prompt
    if isinstance(prompt, Prompt) and cache.options.prefix_store.has_states:
        if len(set(prompt.padding)) > 1:
            prompt = "rows of several lengths have no column that all of them have states of"
        else:
            prompt = why_not_from_states(model, cache) or prompt
    if isinstance(prompt, Prompt):
        return prompt
    warn_once(f"prefix_store {prompt}", f"prefix_store is not used: {prompt}")
    cache.origin.note_space(None)
    return None


def attach_prefix(
    model: Any, cache: PagedCache, prompt: Prompt, space: Hashable, chunk: int | None = None
) -> int:
    """Let an empty cache begin with what the store knows of `prompt`; return the columns that may be skipped.

    What all rows have in common goes through the model once, as a row of its own, and into the store; where layers hold states, so
    does the beginning of a single row, in parts.
    """
    store = cache.options.prefix_store
    assert store is not None
    rows, computed = prompt.rows, 0
    if store.has_states and (exact := cache.options.recent_tokens) > 1:
        rows = [row[: 1 - exact] for row in rows]  # states must not be behind what stays exact
    common = common_tokens(rows, cache.options.page_size, cache.options.sink_tokens)
    alone = prompt.rows[0][: len(common) + 1]
    shared = len(rows) > 1 or store.has_states
    if shared and len(common) > store.find(space, alone).tokens:
        lead = cache.fresh(recent_tokens=0)  # all that is common goes into pages
        # a folder, or another thread, may have brought all of it
        begin = store.attach(lead, space, [alone], [0], computed=None)
        for start, end in pairwise([begin, *store.ends(begin, len(common))]):
            ids = torch.tensor([common[start:end]], device=model.device)
            with lead.reading_everything():
                for part in ids.split(chunk or end - start, dim=1):
                    model(input_ids=part, **{CACHE: lead}, use_cache=True, **last_logit(model))
            store.add(lead, [common[:end]], space)
        lead.end_prefill()
        computed = len(common) - begin
    return store.attach(cache, space, prompt.rows, prompt.padding, chunk, computed)


def why_not_from_states(model: Any, cache: PagedCache) -> str | None:
    """Return why a forward of several tokens does not go on from states as steps of one token do, None where it does; tried once.

    In transformers 5.23 those of Bamba, Jamba and Zamba begin anew, and RecurrentGemma's states lie in its modules.
    """
    if model not in _tried:
        before, after = _TRIAL
        ids = torch.arange(1, 1 + before + after, device=model.device)[None]
        found = []
        try:
            for sizes in ([before, after], [before, *[1] * after]):
                one = cache.fresh(prefix_store=None)
                for part in ids.split(sizes, dim=1):
                    out = model(input_ids=part, **{CACHE: one}, use_cache=True)
                states = [states_of(layer) for layer in one.layers]
                for index, held in enumerate(states):
                    check_states(one, index, held)
                found.append(
                    [out.logits[:, -1], *(one for held in states for one in held.values())]
                )
            # a forward that begins anew was off by 0.1 and more, rounding in another order by 0.004, and 0.02 in half precision
            most = 0.02 if model.dtype.itemsize > 2 else 0.06
            alike = all((a - b).norm() <= most * b.norm() for a, b in zip(*found, strict=True))
            reason = None if alike else "its forwards of several tokens do not go on from states"
        except CacheMismatchError as error:
            reason = str(error)
        _tried[model] = reason and f"{type(model).__name__}: {reason}"
    return _tried[model]


def note_origin(model: Any, cache: Any) -> None:
    """Note in `cache` by which model its next tokens are computed, and in which space of its store.

    Raises: CacheMismatchError where another model has filled it.
    """
    started = cache.get_seq_length() > 0
    if not started:
        cache.origin.forget()
    cache.origin.note_model(ModelId.of(model))
    store = cache.options.prefix_store
    if started and store is not None:
        tokens_alone = more_than_tokens(model) is None
        cache.origin.note_space(_space_of(model, cache, store) if tokens_alone else None)


def expect_drafts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap GenerationMixin._assisted_decoding, which has no prefill of its own: texts are compared before it, and noted behind it.

    A prefix store does nothing there, which is said once, and the first forward is the prompt's.
    """

    @functools.wraps(original)
    def assisted(
        self: Any, input_ids: torch.Tensor, *args: Any, generation_config: Any, **inputs: Any
    ) -> Any:
        cache: Any = inputs.get(CACHE)
        own = next((half for half in paged_halves(cache) if half is not None), None)
        if own is None:
            return original(self, input_ids, *args, generation_config=generation_config, **inputs)
        text = Text(self, cache, own, input_ids, generation_config, inputs)
        text.check()
        started = text.seen > 0
        if started and text.is_whole:  # transformers computes all of it, behind what is there
            if own.options.on_edit != "crop":
                raise CacheMismatchError(
                    f"assisted decoding goes on behind the {text.seen} tokens that this cache holds with new tokens alone, without "
                    "left padding, and an attention_mask of the whole text: call cache.reset() to pass the whole text"
                )
            own.reset()
            started = False
        if own.options.prefix_store is not None:
            warn_once(
                "prefix_store assisted",
                "prefix_store is not used: assisted decoding has no prefill of its own that could be skipped",
            )
        for group in own.groups:
            group.reading.next_of_everything()
        note_origin(self, own)
        known = text.is_comparable and not started
        if known:
            note_at_end(own, 0)
        try:
            return original(self, input_ids, *args, generation_config=generation_config, **inputs)
        except BaseException:
            if known and own.get_seq_length() >= input_ids.shape[1]:
                own.origin.note_text(input_ids, 0, input_ids.shape[1])
            raise

    return assisted


def more_than_tokens(model: Any) -> str | None:
    """Return why keys and values of `model` do not follow from the tokens in and before them, or None."""
    if rotates_by_length(model.config):
        return "the model's rotary embedding depends on the length of the whole text"
    adapters = adapters_of(model)
    if adapters.by_call:
        return "adapter_names, task_ids or activated LoRA give rows adapters of their own"
    if adapters.virtual:
        return f"virtual tokens stand in front of the prompt ({adapters.virtual})"
    if drops_numbers(model):
        return "the model is in training mode and drops numbers at random"
    return why_other_tokens(model)


def _space_of(model: Any, cache: PagedCache, store: PrefixStore) -> str:
    """Return the space of prefixes of `model` now; answers of steps that read a part are kept apart from all others."""
    return store.bind_model(model, cache.options if store.keep_answers else None)


def last_logit(model: Any) -> dict[str, int]:
    """Return the argument that keeps a forward from computing logits of all tokens, where the model has it."""
    return {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}


# -- virtual tokens of prefix tuning: peft brings their keys and values as a cache of its own --------------------------------------


@contextmanager
def virtual_tokens_in_pages(model: Any, cache: Any) -> Iterator[None]:
    """Within this block, let `cache` take the virtual tokens that peft would put in its place.

    peft prepares the inputs of generate() in place of the model, and hands on a cache of virtual tokens where it finds
    an empty one.

    Args:
        cache: a PagedCache, or an EncoderDecoderCache with one.
    Raises: UnsupportedModelError for a preallocated cache, whose masks peft cannot lengthen.
    """
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is None or virtual_owner(model) is None:
        yield
        return
    if isinstance(cache, PagedCache) and cache.options.max_length is not None:
        raise UnsupportedModelError(
            "peft puts no virtual tokens in front of prompts of a preallocated cache (it fails on the mask, with transformers' "
            "own preallocated caches too); leave max_length out of cache_config"
        )

    def with_pages(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(*args, **kwargs)
        brought = inputs.get(CACHE)
        if isinstance(brought, Cache) and brought is not cache:
            _move(getattr(brought, "self_attention_cache", brought), cache)
            inputs[CACHE] = cache
        return inputs

    model.prepare_inputs_for_generation = with_pages
    try:
        yield
    finally:
        model.prepare_inputs_for_generation = prepare


def _move(brought: Any, cache: Any) -> None:
    """Append the keys and values of `brought` to `cache` if it is empty. All are real: padding comes after them."""
    own, _ = paged_halves(cache)
    assert own is not None
    if own.get_seq_length():
        return
    for group in own.groups:
        group.forget_padding()
    for index, layer in enumerate(brought.layers):
        if layer.is_initialized:
            own.update(layer.keys, layer.values, index)
