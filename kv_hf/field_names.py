"""The names under which configs keep the same thing."""

from collections.abc import Mapping
from typing import Any

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
