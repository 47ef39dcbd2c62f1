"""Which attention of a model reads pages; the families that transformers runs eagerly get it by the name "kv_hf"."""

import sys
import threading
import weakref
from typing import Any

from transformers import AttentionInterface, PreTrainedModel

from ..cache.model_shape import attention_config
from ..errors import UnsupportedModelError
from ..formats import ATTENTION_NAME
from ..notices import say_once

# Families without sdpa, by package: the class that is switched from eager attention, and what else is derived from it.
# Their eager functions are softmax(scaling * query @ keys + mask) @ values with what kernels know beside it: softcap,
# sinks (s_aux), a position bias. Read in transformers 5.17 to 5.23.
EAGER = {
    "bigbird_pegasus": "BigBirdPegasusForCausalLM",  # the encoder of the whole model has an attention of its own
    "flint": "FlintPreTrainedModel",
    "gemma2": "Gemma2PreTrainedModel",
    "gpt_oss": "GptOssPreTrainedModel",
    "granite_swa": "GraniteSWAPreTrainedModel",
    "granitemoe_swa": "GraniteMoeSWAPreTrainedModel",
    "hy_v4": "HYV4PreTrainedModel",
    "mimo_v2_flash": "MiMoV2FlashPreTrainedModel",
    "nllb_moe": "NllbMoePreTrainedModel",
    "speech_to_text": "Speech2TextPreTrainedModel",
    "switch_transformers": "SwitchTransformersPreTrainedModel",
    "t5gemma": "T5GemmaPreTrainedModel",
    "vaultgemma": "VaultGemmaPreTrainedModel",
}

_switched: "weakref.WeakSet[PreTrainedModel]" = weakref.WeakSet()
# set_attn_implementation goes from config to config: another thread must not run a model that is half switched
_switching = threading.RLock()


def takes_handles(implementation: str | None) -> bool:
    """Say whether the attention function that transformers knows by this name takes handles of pages."""
    registered: Any = AttentionInterface._global_mapping
    return getattr(registered.get(implementation), "takes_handles", False)


def why_not_pages(model: PreTrainedModel) -> str | None:
    """Return why the attention of `model` does not read pages in generate(), as far as can be said before it runs, or None."""
    decoder = _decoder_of(model)
    if not decoder._can_set_attn_implementation():
        return "it does not take its attention from transformers' AttentionInterface"
    current = attention_config(model.config)._attn_implementation
    if takes_handles(current) or _is_named(decoder, current):
        return why_other_tokens(model)
    return f"its attention is {current!r}, which does not read pages"


def why_other_tokens(model: PreTrainedModel) -> str | None:
    """Return why `model` reads other tokens than those of the cache that it is given, or None."""
    if model.config.model_type != "blt":
        return None
    return "the model keeps a second cache of its own, of other tokens, beside the one that it is given"


def use_paged_attention(model: PreTrainedModel) -> None:
    """Give a model of an eager family the attention "kv_hf"; all others read pages as they are."""
    with _switching:
        if not _is_named(_decoder_of(model), attention_config(model.config)._attn_implementation):
            return
        _set_attention(model, ATTENTION_NAME)
        _switched.add(model)
    own = type(model).__name__
    say_once(
        f"switch {own}",
        f"kv_hf: attention of {own} switched from 'eager' to {ATTENTION_NAME!r}, which computes the same and reads pages",
    )


def restore_attention() -> None:
    """Give every model that was switched its eager attention back."""
    with _switching:
        for model in list(_switched):
            if attention_config(model.config)._attn_implementation == ATTENTION_NAME:
                _set_attention(model, "eager")
        _switched.clear()


def refuse_name(part: Any) -> None:
    """Raise UnsupportedModelError where a module's class, or a config's, is of no family that "kv_hf" is for."""
    if part is None or family_of(type(part)) not in EAGER:
        raise UnsupportedModelError(
            f"attn_implementation={ATTENTION_NAME!r} is set by generate() for families without sdpa ({', '.join(EAGER)}), and "
            f"{type(part).__name__} is of none of them: leave it out, 'sdpa' reads pages"
        )


def family_of(cls: type) -> str | None:
    """Return the package of transformers' models that a class is defined in, or None."""
    names = cls.__module__.split(".")
    return names[2] if names[:2] == ["transformers", "models"] and len(names) > 3 else None


def eager_attention_of(module: Any) -> Any:
    """Return the eager attention function of a module's family."""
    return vars(sys.modules[type(module).__module__])["eager_attention_forward"]


def _is_named(decoder: PreTrainedModel, current: str | None) -> bool:
    """Say whether a decoder with the attention `current` is one that "kv_hf" is for."""
    kind = type(decoder)
    named = EAGER.get(family_of(kind) or "")
    return current == "eager" and any(base.__name__ == named for base in kind.__mro__)


def _decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of `model` whose attention reads the cache: it may be of another class than the whole."""
    config = attention_config(model.config)
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return next((part for part in parts if part.config is config), model)


def _set_attention(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention of the text model alone: a vision tower beside it keeps its own."""
    # a flat encoder-decoder config names one attention for both halves
    config, text = model.config, attention_config(model.config)
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    model.set_attn_implementation({names[0]: implementation} if names else implementation)
