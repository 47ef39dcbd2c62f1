"""Switch a model's attention to "kv_hf", and remember it so that uninstall() can switch it back."""

import inspect
import threading
import weakref

from transformers import PreTrainedModel

from ..cache.model_shape import attention_config, is_encoder_decoder
from ..formats import ATTENTION_NAME
from ..notices import say_once, warn_once

_switched: "weakref.WeakKeyDictionary[PreTrainedModel, str | None]" = weakref.WeakKeyDictionary()
# set_attn_implementation goes from config to config: another thread must not run a model that is half switched
_switching = threading.RLock()


def why_not_pages(model: PreTrainedModel, attention: str = "auto") -> str | None:
    """Return why generate() will not let `model` attend over pages, or None when it will.

    Args:
        attention: CacheConfig.attention.
    """
    current = attention_config(model.config)._attn_implementation
    if not model._can_set_attn_implementation():
        return "it does not take its attention from transformers' AttentionInterface"
    if current == ATTENTION_NAME:
        return None
    if current not in ("sdpa", None) and not (current == "eager" and not model._supports_sdpa):
        return f"it was set to attention implementation {current!r}"
    return None if attention == "auto" else "attention='keep' leaves it on another one"


def use_paged_attention(model: PreTrainedModel) -> None:
    """Let `model` attend over pages, where its attention is sdpa or has no sdpa form; say what was done.

    Another implementation (eager where sdpa exists, flex, flash) was chosen by somebody: it is kept, and
    works on dense tensors.
    """
    with _switching:
        _use_paged_attention(model)


def _use_paged_attention(model: PreTrainedModel) -> None:
    decoder = _decoder_of(model)
    current = attention_config(model.config)._attn_implementation
    if current == ATTENTION_NAME:
        return
    own = type(model).__name__
    if not decoder._can_set_attn_implementation():
        warn_once(
            f"attention of {own}",
            f"{own} does not take its attention from transformers' AttentionInterface, so that it cannot read "
            "pages: every decode step writes out each layer's whole cache densely",
        )
        return
    default_eager = current == "eager" and not decoder._supports_sdpa
    if current not in ("sdpa", None) and not default_eager:
        warn_once(
            f"attention of {own}: {current}",
            f"{own} was set to attention implementation {current!r}, which is kept: every decode step writes out "
            "each layer's whole cache densely. model.set_attn_implementation('kv_hf') reads the pages instead",
        )
        return
    if (
        default_eager
        and decoder is model
        and is_encoder_decoder(model.config)
        and not _reads_interface(model)
    ):
        warn_once(
            f"attention of {own}: parts",
            f"{own} computes attention in places without transformers' AttentionInterface, from the masks of 'eager', "
            "which is therefore kept: every decode step writes out each layer's whole cache densely",
        )
        return
    _set_attention(model, ATTENTION_NAME)
    _switched[model] = current
    say_once(
        f"switch {own}",
        f"kv_hf: attention of {own} switched from {current!r} to {ATTENTION_NAME!r}, which reads pages "
        "(cache_config={'attention': 'keep'} leaves it alone; set_attn_implementation('sdpa') undoes it)",
    )


def _decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of `model` whose attention reads the cache: it may be of another class than the whole."""
    config = attention_config(model.config)
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return next((part for part in parts if part.config is config), model)


def _reads_interface(model: PreTrainedModel) -> bool:
    """Say whether no part of `model` computes attention by itself: such a part wants masks of its own kind.

    BigBird-Pegasus, for one: its encoder adds the mask to the scores, and shares its config with the decoder.
    """
    for part in model.modules():
        inner = any("Attention" in type(child).__name__ for child in part.children())
        if "Attention" in type(part).__name__ and not inner:
            try:
                source = inspect.getsource(type(part))
            except (OSError, TypeError):
                return False
            if "get_interface(" not in source:
                return False
    return True


def _set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention of the text model alone: a vision tower beside it keeps its own."""
    config = model.config
    text = attention_config(
        config
    )  # a flat encoder-decoder config names one attention for both halves
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    model.set_attn_implementation({names[0]: implementation} if names else implementation)


def restore_attention() -> None:
    """Set every model that was switched back to what it had."""
    with _switching:
        for model, before in list(_switched.items()):
            if attention_config(model.config)._attn_implementation == ATTENTION_NAME:
                _set_attention(model, before or "sdpa")
        _switched.clear()
