"""Shrink a config of transformers by the names of its fields: which sizes, which layers stay.

Knows no family: what these rules cannot shrink is in overrides.py.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from measure.families.overrides import DERIVED, FIRST

VOCABULARY = 200
HIDDEN = 64
HEAD = 16
HEADS = 4
POSITIONS = 1024
TEXT_IDS = (3, 150)  # ids of prompts; special ids of a config move to those above

_HIDDEN = (
    "hidden_size|d_model|n_embd|emb_dim|embed_dim|dim_model|embedding_size|hidden_dim|dim|out_hidden_size|"
    "word_embed_proj_dim|text_hidden_size|encoder_hidden_size|audio_dim|output_proj_dims|fc_latent_dim|"
    "cross_attention_hidden_size|projector_hidden_size|projection_dim|llm_hidden_size|width|vision_output_dim|"
    "projector_output_dim|projector_input_dim|attention_hidden_size|hidden_size_global|adapter_out_dim|output_dim|"
    "encoder_dim|image_text_hidden_size|decoder_hidden_size|audio_hidden_size|adapter_in_dim|adapter_input_size|adapter_output_size"
)
_FFN = (
    r"\w*intermediate_size\w*|\w*ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|dim_ff|d_inner|feed_forward_size|"
    r"expert_ffn_hidden_size|mlp_hidden_size"
)
_LAYERS = (
    r"num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_encoder_layers|num_decoder_layers|depth|"
    r"num_blocks|num_local_layers|num_global_layers|n_blocks"
)
# field's name -> its small value; first match counts. A number is a ceiling, so that what is small already stays
RULES: tuple[tuple[str, int], ...] = (
    (r"(\w+_)?vocab_size(_\w+)?", VOCABULARY),
    (_HIDDEN, HIDDEN),
    (r"moe_\w*intermediate_size|\w*expert\w*intermediate_size|expert_ffn\w*", 32),
    (_FFN, 96),
    (_LAYERS, 2),
    (r"qk_nope_head_dim|v_head_dim|qk_rope_head_dim|rotary_dim|index_head_dim|d_kv|(\w+_)?head_dim|kv_channels|dim_head", HEAD),
    (r"\w*lora_rank", 32),
    (r"index_topk|index_budget", 32),
    (r"index_topk_blocks", 2),
    (r"index_block_size", 16),
    (r"index_n_heads|\w*index\w*heads", 4),
    (r"num_experts|n_routed_experts|num_local_experts|moe_num_experts|ffn_num_experts|\w*num_experts", 4),
    (r"num_experts_per_tok\w*|moe_k|moe_topk|moe_top_k|top_k_experts|num_selected_experts", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"attention_chunk_size|\w*local_attention_window\w*|attention_window_size", 32),
    (r"\w*sliding_window(_size)?|local_attention|window_size", 24),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", 8),
    (r"mamba_d_head|mamba_head_dim", 16),
    (r"mamba_d_ssm", 2 * HIDDEN),
    (r"mamba_d_state|ssm_state_size|state_size", 16),
    (r"mamba_chunk_size|chunk_size", 32),
    (r"time_step_rank|mamba_dt_rank", 8),
    (r"linear_num_key_heads", 2),
    (r"linear_num_value_heads|linear_num_heads", 4),
    (r"linear_key_head_dim|linear_value_head_dim|linear_head_dim", HEAD),
    (r"hidden_size_per_layer_input|laurel_rank|ple_embed_dim", 32),
    (r"image_size", 32),
)  # fmt: skip
_POSITIONS = r"(\w+_)?max_\w*positions?(_embeddings)?|n_positions|n_ctx|max_seq_len|max_sequence_length|model_max_length"
_QUERY_HEADS = (
    r"num_attention_heads|n_heads?|num_heads|encoder_attention_heads|decoder_attention_heads|attention_heads|"
    r"\w+_num_attention_heads"
)
_KV_HEADS = (
    r"(\w+_)?num_(global_)?key_value_heads|num_kv_heads|n_kv_heads|\w*key_value_attention_heads"
)
_SPECIAL_ID = re.compile(r"\w*token_(id|index|ids)|\w+_token")


def shrink(config: Any, changes: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return a tiny config of the class of `config`, a config of its defaults, sub-configs included.

    Args:
        changes: options by model_type (or the name of a config class) that take precedence; DERIVED leaves an option to the config.
    """
    options = shrunk_options(config, changes)
    for name in (config.model_type, type(config).__name__):  # some parts of a model have no type
        options.update(changes.get(name, {}))
    return type(config)(**{name: value for name, value in options.items() if value is not DERIVED})


def shrunk_options(config: Any, changes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options of the class of `config` with which it is tiny."""
    options: dict[str, Any] = {}
    own = vars(type(config)()) if config.model_type not in FIRST else {}
    kept = kept_layers(config)
    special = iter(range(VOCABULARY - 1, TEXT_IDS[1], -1))
    for field in dataclasses.fields(config):
        # not by getattr(): some configs refuse to tell what differs between layers
        name, value = field.name, vars(config).get(field.name)
        if name.startswith("_") or not field.init:
            continue
        if hasattr(value, "model_type") and dataclasses.is_dataclass(value):
            options[name] = shrink(value, changes)
        elif isinstance(value, (list, tuple)) and kept and len(value) == kept[0]:
            options[name] = [value[index] for index in kept[1]]
        elif isinstance(value, dict) and "mrope_section" in value:
            options[name] = {**value, "mrope_section": _sections(value, config)}
        elif isinstance(value, int) and not isinstance(value, bool):
            small = _small(name, value, config, special)
            declared = field.default is not None  # None: derived from the others
            given = own and own.get(name) != value  # by the config that this one is a part of
            if small != value and (declared or given or _SPECIAL_ID.fullmatch(name)):
                options[name] = small
            elif given:
                options[name] = value
        elif own and isinstance(value, (str, bool, float)) and own.get(name) != value:
            options[name] = value
    named = {field.name for field in dataclasses.fields(config)}
    for name, value in vars(config).items():
        if name not in named and hasattr(value, "model_type") and dataclasses.is_dataclass(value):
            options[name] = shrink(
                value, changes
            ).to_dict()  # a part that is no field (transformers 5.17)
    count = _count_field(config)
    if kept and count:
        options[count] = len(kept[1])
    return options


def kept_layers(config: Any) -> tuple[int, list[int]] | None:
    """Return the number of layers, and those that hold every kind there is; None without lists of kinds.

    Layers are of one kind when all lists of a layer's properties agree in them; one of the most frequent kind is
    kept twice, so that layers of a kind follow each other's lead.
    """
    count = _count_field(config)
    total = vars(config)[count] if count else 0
    lists = [
        list(value)
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == total and total > 2
        and all(isinstance(one, (str, bool, int)) for one in value) and len(set(value)) <= 4
    ]  # fmt: skip
    if not lists:
        return None
    kinds = list(zip(*lists, strict=True))
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:6]
    most = max(set(kinds), key=kinds.count)
    twice = [index for index, kind in enumerate(kinds) if kind == most and index not in kept][:1]
    return total, sorted(kept + twice)


def _count_field(config: Any) -> str | None:
    names = {field.name for field in dataclasses.fields(config)}
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers"):
        if name in names and isinstance(vars(config).get(name), int):
            return name
    return None


def _small(name: str, value: int, config: Any, special: Any) -> int:
    if _SPECIAL_ID.fullmatch(name):
        common = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return common.get(name, value if value < VOCABULARY else next(special))
    if re.fullmatch(_QUERY_HEADS, name):
        return min(value, HEADS)
    if re.fullmatch(_KV_HEADS, name):
        return _kv_heads(name, value, config)
    if name == "vocab_size":  # also where the defaults have less: prompts are of TEXT_IDS
        return VOCABULARY
    if re.fullmatch(_POSITIONS, name):
        return POSITIONS
    for pattern, small in RULES:
        if re.fullmatch(pattern, name):
            return min(value, small)
    return value


def _sections(rope: Mapping[str, Any], config: Any) -> list[int]:
    """Return three sections of half the rotated channels of a small head."""
    half = int(HEAD * rope.get("partial_rotary_factor", 1)) // 2
    return [half - 2 * (half // 3), half // 3, half // 3]


def _kv_heads(name: str, value: int, config: Any) -> int:
    """Return kv heads beside four query heads: as many, two or one, as the family's own proportion is."""
    queries = name.replace("_key_value", "_attention").replace("_kv_heads", "_heads")
    queries = queries.replace("num_global_", "num_")
    own = vars(config)
    full = own.get(queries) or own.get("num_attention_heads") or value
    if not isinstance(full, int) or value >= full:
        return min(value, HEADS)
    return min(value, 2)
