"""Switch a model's attention to "kv_hf" where its sources allow it, and back by uninstall()."""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache.model_shape import attention_config
from ..errors import UnsupportedModelError
from ..formats import ATTENTION_NAME
from ..notices import say_once, warn_once
from .attention_source import Facts, classes_of, facts_of, is_modeling
from .foreign import why_not_as_called, why_not_foreign
from .replaced import is_native, why_not_registered

_switched: "weakref.WeakKeyDictionary[PreTrainedModel, str | None]" = weakref.WeakKeyDictionary()
# set_attn_implementation goes from config to config: another thread must not run a model that is half switched
_switching = threading.RLock()
# configs of models that know no sdpa, by id: their modules may call themselves not causal, as eager goes by the mask alone
_eager: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
# models and parts of models made since kv_hf came in: those that share a config share the name of their attention
_made: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()
# whether the model at hand was looked at as a whole, so that its classes need not be
_proved: ContextVar[bool] = ContextVar("proved", default=False)


def why_not_pages(model: PreTrainedModel, attention: str = "auto") -> str | None:
    """Return why generate() will not let `model` attend over pages, or None when it will.

    Args:
        attention: CacheConfig.attention.
    """
    if attention_config(model.config)._attn_implementation == ATTENTION_NAME:
        return None
    reason = _why_not_switched(model) or _why_not_shared(model)
    return reason or (None if attention == "auto" else "attention='keep' leaves it on another one")


def use_paged_attention(model: PreTrainedModel) -> None:
    """Let `model` attend over pages where its sources show that it then computes what it computes now; say what was done.

    Another implementation than its default (eager where sdpa exists, flex, flash) was chosen by somebody: it is kept, and
    works on dense tensors.
    """
    with _switching:
        current = attention_config(model.config)._attn_implementation
        if current == ATTENTION_NAME:
            return
        own = type(model).__name__
        reason = _why_not_switched(model) or _why_not_shared(model)
        if reason is None:
            _set_attention(model, ATTENTION_NAME)
            if attention_config(model.config)._attn_implementation != ATTENTION_NAME:
                reason = "transformers did not take the change"
        if reason is not None:
            warn_once(
                f"attention of {own}: {current}: {reason}",
                f"{own} keeps attention implementation {current!r}: {reason}. So every decode step writes out each layer's "
                "whole cache densely",
            )
            return
        _switched[model] = current
    say_once(
        f"switch {own}",
        f"kv_hf: attention of {own} switched from {current!r} to {ATTENTION_NAME!r}, which reads pages "
        "(cache_config={'attention': 'keep'} leaves it alone; set_attn_implementation('sdpa') undoes it)",
    )


def _why_not_switched(model: PreTrainedModel) -> str | None:
    """Return why the attention of `model` stays what it is, or None where it may be "kv_hf"."""
    decoder = _decoder_of(model)
    current = attention_config(model.config)._attn_implementation
    if not decoder._can_set_attn_implementation():
        return "it does not take its attention from transformers' AttentionInterface"
    default_eager = current == "eager" and not decoder._supports_sdpa
    if current not in ("sdpa", None) and not default_eager:
        return f"somebody set it to {current!r}; model.set_attn_implementation('kv_hf') reads the pages instead"
    # the whole part is switched, models inside of it too
    modules, before = list(decoder.modules()), current or "sdpa"
    kinds = frozenset(map(type, modules))
    return (
        why_not_registered(kinds, before)
        or why_not_by_source(kinds, before)
        or why_not_foreign(modules, _around(decoder, model), before)
    )


def _why_not_shared(model: PreTrainedModel) -> str | None:
    """Return why another model of the same config object must not be switched along, or None where it may be."""
    configs = (model.config, attention_config(model.config))
    own = {id(module) for module in model.modules()}
    for other in list(_made):
        if id(other) not in own and any(other.config is config for config in configs):
            reason = _why_not_switched(other)
            if reason is not None:
                return f"it shares its config with another {type(other).__name__}, and {reason}"
    return None


def _around(part: PreTrainedModel, model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules of `model` that contain `part`."""
    name = next(name for name, module in model.named_modules() if module is part)
    return [
        module
        for around, module in model.named_modules()
        if module is not part and (not around or f"{name}.".startswith(f"{around}."))
    ]


def _decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of `model` whose attention reads the cache: it may be of another class than the whole."""
    config = attention_config(model.config)
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return next((part for part in parts if part.config is config), model)


@functools.cache
def why_not_by_source(classes: frozenset[type], current: str) -> str | None:
    """Return why the sources of a decoder's modules do not show that it computes the same under the name "kv_hf".

    Args:
        classes: of the modules.
        current: the name of the attention that the model has.
    """
    read = {cls: facts_of(cls) for cls in classes if is_modeling(cls)}
    unread = sorted(cls.__name__ for cls, facts in read.items() if facts is None)
    if unread:
        return f"the source of {unread[0]} is not there to be read"
    found = {cls.__name__: facts for cls, facts in read.items() if facts}
    reason = _objection(found, current)
    if reason is None and not any(facts.reads_interface for facts in found.values()):
        return "nothing in it reads transformers' AttentionInterface"
    return reason


@functools.cache
def why_not_class(cls: type[PreTrainedModel]) -> str | None:
    """Return why a model of this class cannot be loaded with attention "kv_hf", as far as its file shows, or None.

    Which of the file's classes a model has is not known before it is made. A model that is put together of others
    (a vision tower and a language model) may have no attention in its file: they are asked when they are made.
    """
    module = sys.modules.get(cls.__module__)
    if module is None:
        return None
    kinds: list[Any] = list(classes_of(module))
    read = {kind.__name__: facts_of(kind) for kind in kinds}
    found = {name: facts for name, facts in read.items() if facts is not None}
    caches = any(facts.updates_cache for facts in found.values())
    current = "sdpa" if cls._supports_sdpa else "eager"
    if not caches:
        return None
    return _objection(found, current) or (
        None if is_native(cls) else why_not_as_called(kinds, current)
    )


def _objection(found: Mapping[str, Facts], current: str) -> str | None:
    """Return what in the sources of these classes speaks against the name "kv_hf" in place of `current`, or None."""
    for name, facts in sorted(found.items()):
        alone = not facts.reads_interface
        if alone and current == "eager" and "Attention" in name and facts.masks_by_itself:
            return f"{name} computes attention by itself, from the masks of 'eager'"
        if alone and facts.updates_cache:
            return f"{name} computes attention without transformers' AttentionInterface"
        if current == "eager" and facts.joins_mask:
            return f"{name} adds columns to the masks of 'eager'"
        for comparison in facts.comparisons:
            if comparison.differs(current, ATTENTION_NAME):
                return (
                    f"{comparison.where} goes another way for another attention ({comparison.text})"
                )
    return None


def wants_masks(config: Any) -> bool:
    """Say whether a model of this config goes by its masks alone, whatever its modules say of causality."""
    return config is not None and _eager.get(id(config)) is config


def refuse_at_load(original: Callable[..., str]) -> Callable[..., str]:
    """Wrap PreTrainedModel.get_correct_attn_implementation: "kv_hf" is an error where nothing would read it.

    transformers asks it when a model is made, and when set_attn_implementation is called.
    """

    @functools.wraps(original)
    def checked(self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any) -> str:
        with _switching:
            _made.add(self)
        if requested == ATTENTION_NAME:
            kind: Any = type(self)
            if not _proved.get():
                _refuse(kind, why_not_class(kind))
            if not kind._supports_sdpa:
                _eager[id(self.config)] = self.config
        return original(self, requested, *args, **kwargs)

    return checked


def refuse_to_set(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap PreTrainedModel.set_attn_implementation, which leaves models without an AttentionInterface as they are."""

    @functools.wraps(original)
    def checked(self: PreTrainedModel, implementation: Any, *args: Any, **kwargs: Any) -> None:
        if implementation == ATTENTION_NAME and not self._can_set_attn_implementation():
            _refuse(
                type(self), "it does not take its attention from transformers' AttentionInterface"
            )
        return original(self, implementation, *args, **kwargs)

    return checked


def _refuse(cls: type, reason: str | None) -> None:
    if reason is not None:
        raise UnsupportedModelError(
            f"attn_implementation={ATTENTION_NAME!r}: {cls.__name__} cannot attend over pages: {reason}. Leave it out: a paged "
            "cache works on the attention that the model has"
        )


def _set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention of the text model alone: a vision tower beside it keeps its own."""
    config = model.config
    text = attention_config(
        config
    )  # a flat encoder-decoder config names one attention for both halves
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    token = _proved.set(True)
    try:
        model.set_attn_implementation({names[0]: implementation} if names else implementation)
    finally:
        _proved.reset(token)


def restore_attention() -> None:
    """Set every model that was switched back to what it had."""
    with _switching:
        for model, before in list(_switched.items()):
            if attention_config(model.config)._attn_implementation == ATTENTION_NAME:
                _set_attention(model, before or "sdpa")
        _switched.clear()
