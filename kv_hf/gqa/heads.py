"""The number of heads in a model's config, and the check that they can be merged. Knows no tensors."""

from typing import Any

from ..errors import ConversionError

FIELD = "num_key_value_heads"
# of configs whose layers differ: other numbers of heads for some of the layers
OTHER_FIELDS = (
    "num_global_key_value_heads", "swa_num_key_value_heads", "num_key_value_heads_per_layer", "num_kv_heads_per_layer",
    "cross_num_key_value_heads", "attention_other_setting",
)  # fmt: skip
OF_HEADS = {FIELD, "num_attention_heads", "head_dim", "hidden_size"}
CAN = (
    "classes with num_key_value_heads (llama, mistral, qwen, gemma, phi, ...), falcon and gpt_bigcode to one kv head, "
    "gpt_neox (as phi) and gpt2 (as gpt_bigcode)"
)


def text_config(config: Any) -> Any:
    """Return the text model's part of a config, never a copy. Raises ConversionError where it has several."""
    try:
        return config.get_text_config(decoder=True)
    except ValueError as error:
        raise ConversionError(f"{config.model_type}: {error}") from error


def head_counts(text: Any) -> tuple[int, int, int]:
    """Return (num_heads, num_kv_heads, head_dim) of a text config.

    Raises: ConversionError where layers differ, and where there are no kv heads to merge.
    """
    kind = text.model_type
    # configs of transformers 5.17 and later with a per_layer_config raise for what differs between layers
    per_layer = (getattr(text, "per_layer_attributes", None) or set()) & OF_HEADS
    if per_layer:
        raise ConversionError(
            f"{kind} has layers with different numbers of heads: per_layer_config sets {', '.join(sorted(per_layer))}"
        )
    if getattr(text, "kv_lora_rank", None) is not None:
        raise ConversionError(
            f"{kind} caches latents (MLA), which all heads share: there are no kv heads to merge"
        )
    for name in OTHER_FIELDS:
        other = getattr(text, name, None)
        if other:
            raise ConversionError(
                f"{kind} has layers with different numbers of heads: {name}={other}"
            )
    heads, kv_heads = getattr(text, "num_attention_heads", None), getattr(text, FIELD, None)
    if isinstance(kv_heads, (list, tuple)) or isinstance(heads, (list, tuple)):
        raise ConversionError(
            f"{kind} has layers with different numbers of heads: {FIELD}={kv_heads}"
        )
    if kv_heads is None or heads is None:
        raise ConversionError(
            f"{kind} has no {FIELD}: its class knows no grouped kv heads. What can be converted: {CAN}"
        )
    if not all(isinstance(n, int) and n > 0 for n in (heads, kv_heads)) or heads % kv_heads:
        raise ConversionError(
            f"{kind}: {heads} heads and {kv_heads} kv heads, of which the first must be a multiple of the second"
        )
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return heads, kv_heads, int(head_dim)


def check_count(asked: Any) -> None:
    """Raise ConversionError unless `asked` is a positive integer."""
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise ConversionError(f"num_kv_heads must be an integer of at least 1, got {asked!r}")


def check_heads(kv_heads: int, asked: int, *, able: list[int] | None = None, why: str = "") -> None:
    """Raise ConversionError unless `kv_heads` heads can be merged into `asked`; the message lists what can be.

    Args:
        able: what can be asked for; default: all divisors of `kv_heads`.
        why: said behind the list where it is shorter.
    """
    check_count(asked)
    if able is None:
        able = [n for n in range(1, kv_heads) if kv_heads % n == 0]
    if asked in able:
        return
    if asked == kv_heads:
        raise ConversionError(
            f"num_kv_heads={asked}: the model has {kv_heads} kv heads already, there is nothing to do"
        )
    if not able:
        raise ConversionError(
            f"num_kv_heads={asked}: the model has {kv_heads} kv head{'s' * (kv_heads > 1)}, which cannot be merged "
            f"into fewer{why}"
        )
    listed = " or ".join(map(str, able))
    raise ConversionError(
        f"num_kv_heads must divide the {kv_heads} kv heads of the model, and be less: it can be {listed}{why}, got {asked}"
    )
