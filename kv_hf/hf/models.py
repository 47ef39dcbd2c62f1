"""Switch a model's attention to "kv_hf", and remember it so that uninstall() can switch it back."""

import weakref

from transformers import PreTrainedModel

from ..formats import ATTENTION_NAME
from ..notices import say_once, warn_once

_switched: "weakref.WeakKeyDictionary[PreTrainedModel, str | None]" = weakref.WeakKeyDictionary()


def why_not_pages(model: PreTrainedModel, attention: str = "auto") -> str | None:
    """Return why generate() will not let `model` attend over pages, or None when it will.

    Args:
        attention: CacheConfig.attention.
    """
    current = model.config.get_text_config(decoder=True)._attn_implementation
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
    config = model.config.get_text_config(decoder=True)
    current = config._attn_implementation
    if current == ATTENTION_NAME:
        return
    own = type(model).__name__
    if not model._can_set_attn_implementation():
        warn_once(
            f"attention of {own}",
            f"{own} does not take its attention from transformers' AttentionInterface, so that it cannot read "
            "pages: every decode step writes out each layer's whole cache densely",
        )
        return
    default_eager = current == "eager" and not model._supports_sdpa
    if current not in ("sdpa", None) and not default_eager:
        warn_once(
            f"attention of {own}: {current}",
            f"{own} was set to attention implementation {current!r}, which is kept: every decode step writes out "
            "each layer's whole cache densely. model.set_attn_implementation('kv_hf') reads the pages instead",
        )
        return
    _set_attention(model, ATTENTION_NAME)
    _switched[model] = current
    say_once(
        f"switch {own}",
        f"kv_hf: attention of {own} switched from {current!r} to {ATTENTION_NAME!r}, which reads pages "
        "(cache_config={'attention': 'keep'} leaves it alone; set_attn_implementation('sdpa') undoes it)",
    )


def _set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention of the text model alone: a vision tower beside it keeps its own."""
    config = model.config
    text = config.get_text_config(decoder=True)
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    model.set_attn_implementation({names[0]: implementation} if names else implementation)


def restore_attention() -> None:
    """Set every model that was switched back to what it had."""
    for model, before in list(_switched.items()):
        if model.config.get_text_config(decoder=True)._attn_implementation == ATTENTION_NAME:
            _set_attention(model, before or "sdpa")
    _switched.clear()
