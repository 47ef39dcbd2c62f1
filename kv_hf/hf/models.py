"""Which attention of a model reads pages."""

from typing import Any

from transformers import AttentionInterface, PreTrainedModel, masking_utils

from ..bridge.handles import reads_eagerly
from ..cache.model_shape import attention_config


def takes_handles(implementation: str | None, part: type) -> bool:
    """Say whether the attention that transformers knows by this name, in code of the family of `part`, takes handles of pages."""
    if implementation == "eager":
        return reads_eagerly(part)
    registered: Any = AttentionInterface._global_mapping
    return getattr(registered.get(implementation), "takes_handles", False)


def why_not_pages(model: PreTrainedModel) -> str | None:
    """Return why the attention of `model` does not read pages in generate(), as far as can be said before it runs, or None."""
    decoder = _decoder_of(model)
    if not decoder._can_set_attn_implementation():
        return "it does not take its attention from transformers' AttentionInterface"
    current = attention_config(model.config)._attn_implementation
    if takes_handles(current, type(decoder)):
        return why_other_tokens(model)
    return f"its attention is {current!r}, which does not read pages"


OTHER_TOKENS = {
    "blt": "the model keeps a second cache of its own, of other tokens, beside the one that it is given",
    "cpmant": "the model puts columns of its own in front of the tokens of each forward",
    "prophetnet": "the model takes one token at a time after a cache",
    "xlm": "the model puts a mask token behind the tokens of each forward",
}


def why_other_tokens(model: PreTrainedModel) -> str | None:
    """Return why `model` reads other tokens than those of the cache that it is given, or None."""
    return OTHER_TOKENS.get(model.config.model_type)


def why_not_preallocated(model: PreTrainedModel) -> str | None:
    """Return why generate() of `model` would be wrong on a cache with room for more columns than it has seen, or None."""
    if not _decoder_of(model)._can_set_attn_implementation():
        return "its attention, which is not transformers' AttentionInterface, may take the columns of the keys for those of the text"
    if any(hasattr(part, "_prepare_decoder_attention_mask") for part in model.modules()):
        return "it makes its masks itself, from those of two dimensions"  # Kosmos-2
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    made: Any = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING.get("hybrid_sliding", {})
    own = made.get("sliding_attention")  # 5.23: the masks of full attention
    if "hybrid_sliding" in types and own is masking_utils.create_causal_mask:
        return "this transformers gives its sliding layers masks without their window there"
    return None


def _decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of `model` whose attention reads the cache: it may be of another class than the whole."""
    config = attention_config(model.config)
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    return next((part for part in parts if part.config is config), model)
