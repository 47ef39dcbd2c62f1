"""The fields of a model's config.json: the names under which configs keep the same thing, and the bounds of their numbers.

A config comes from anywhere. Numbers below zero would be planned as if they were real, and a thousand million layers
would be built one by one, so that they are checked by name before anything is built of them. The limits lie far above every known
model.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import KVCacheError, PlanError
from .printable import short

# names of kv_hf's own fields, which say what it has done to a checkpoint
CONVERSION = "kv_hf_conversion"
UPTRAINING = "kv_hf_uptraining"

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
KV_HEADS = (
    "num_key_value_heads",
    "n_head_kv",
    "num_kv_heads",
    "n_kv_heads",
    "kv_n_heads",
    "multi_query_group_num",
)
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim", "d_kv", "d_head")
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
EXPERTS = (
    "num_local_experts",
    "n_routed_experts",
    "num_experts",
    "moe_num_experts",
    "num_routed_experts",
)
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "top_k",
)

MOST_LAYERS = 1024
MOST_HEADS = 1 << 16
MOST_CHANNELS = 1 << 20
MOST_TOKENS = 1 << 30  # positions, words of a vocabulary
MOST_WINDOW = 1 << 24  # its pages are followed one by one
MOST_NUMBER = (1 << 63) - 1  # of all numbers: what torch can count


def first(given: Any, names: tuple[str, ...]) -> int | None:
    """Return the first of these names that is a whole number above 0 in a config or its dict."""
    for name in names:
        value = read(given, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def read(given: Any, name: str) -> Any:
    """Return a value of a config or its dict, None where it has none or says it per layer only."""
    if isinstance(given, Mapping):
        return given.get(name)
    try:
        return getattr(given, name, None)
    except Exception:  # heterogeneous configs raise where layers differ
        return None


# -- bounds ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """A whole number from `least` to `most`, or a list with one per layer."""

    least: int
    most: int
    floats: bool = False  # whether 1200.0 is one: a config of transformers says so

    def allows(self, value: Any) -> bool:
        if isinstance(value, list):
            return all(one is None or self._allows_one(one) for one in value)
        return self._allows_one(value)

    def _allows_one(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if isinstance(value, float) and not (self.floats and value.is_integer()):
            return False
        return self.least <= value <= self.most


_RULES = {
    **dict.fromkeys(LAYERS, _Rule(1, MOST_LAYERS)),
    **dict.fromkeys(("num_kv_shared_layers", "max_window_layers"), _Rule(0, MOST_LAYERS)),
    **dict.fromkeys((*HEADS, *KV_HEADS), _Rule(1, MOST_HEADS)),
    **dict.fromkeys(HIDDEN, _Rule(1, MOST_CHANNELS)),
    **dict.fromkeys(HEAD_DIM, _Rule(0, MOST_CHANNELS)),
    **dict.fromkeys(
        ("v_head_dim", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "index_head_dim"),
        _Rule(0, MOST_CHANNELS),
    ),
    **dict.fromkeys(POSITIONS, _Rule(0, MOST_TOKENS, floats=True)),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), _Rule(0, MOST_WINDOW)),
    **dict.fromkeys((*EXPERTS, *EXPERTS_PER_TOKEN), _Rule(0, MOST_HEADS)),
    "vocab_size": _Rule(1, MOST_TOKENS),
    "num_labels": _Rule(0, MOST_CHANNELS),  # transformers makes a name for each
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner"), _Rule(0, 1 << 24)),
}  # fmt: skip
# other names of what is built one by one
_MANY = re.compile(r"(layers?|depths?|blocks?|stages?|codebooks?)$")
_MORE = re.compile(r"(heads?|experts?)$")


def check_numbers(
    config: Mapping[str, Any], name: str, error: type[KVCacheError] = PlanError
) -> None:
    """Raise `error`, naming the field, its value and the rule, for a number that no model has.

    Args:
        config: a config.json; its parts (a vision tower, for one) are looked at as well.
        name: of the model or file, for the message.
    """
    for path, field, value in _fields(config):
        rule = _RULES.get(field)
        if rule is not None and value is not None and not rule.allows(value):
            raise error(
                f"{name}: {path} must be a whole number from {rule.least:,} to {rule.most:,}, got {short(value)}"
            )
        most = _most(field)
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, int) and not -most <= one <= most:
                raise error(f"{name}: {path} must be at most {most:,}, got {short(one)}")
        if field == "layer_types" and not _are_names(value):
            raise error(f"{name}: {path} must be a list of names, got {short(value)}")


def _most(field: str) -> int:
    if _MANY.search(field):
        return MOST_LAYERS
    return MOST_HEADS if _MORE.search(field) else MOST_NUMBER


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _fields(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (path, name, value) of every field that is no part with fields of its own."""
    for key, value in config.items():
        own = f"{path}{key}"
        if isinstance(value, Mapping):
            yield from _fields(value, f"{own}.")
        else:
            yield own, str(key), value
