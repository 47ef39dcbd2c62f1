"""Tiny models and configs of families whose caches are not plain: sliding windows, states, shared keys, towers."""

from typing import Any

import torch
import transformers
from tiny_models import COMMON

FOUR = {**COMMON, "num_hidden_layers": 4}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 16},
}
MAMBA2 = {**MAMBA, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}

# name -> (config class, options)
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("BambaConfig", {**COMMON, **MAMBA2, "attn_layer_indices": [1]}),
    "falcon_h1": (
        "FalconH1Config",
        {**COMMON, **MAMBA2, "mamba_n_heads": 4, "mamba_d_ssm": 64, "mamba_chunk_size": 16},
    ),
    "falcon_mamba": (
        "FalconMambaConfig",
        {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **{**COMMON, **MAMBA2, "layer_types": ["mamba", "attention"]},
            **{"num_local_experts": 4, "num_experts_per_tok": 2},
            "shared_intermediate_size": 32,
        },
    ),
    "inkling_text": (
        "InklingTextConfig",
        {**COMMON, **EXPERTS, "head_dim": 16, "swa_head_dim": 16, "n_routed_experts": 4},
    ),
    "jamba": (
        "JambaConfig",
        {
            **{**FOUR, **MAMBA, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
            **{"num_experts": 4, "num_experts_per_tok": 2},
        },
    ),
    "lfm2": ("Lfm2Config", {**COMMON, "layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**COMMON, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    ),
    "mamba": (
        "MambaConfig",
        {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    ),
    "mamba2": (
        "Mamba2Config",
        {
            **{"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
            **{"num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 16},
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{**COMMON, "head_dim": 16, "layers_block_type": ["mamba", "moe", "attention", "mlp"]},
            **{"num_hidden_layers": 4, "ssm_state_size": 8, "mamba_num_heads": 8},
            **{"mamba_head_dim": 16, "n_groups": 1, "chunk_size": 16, "n_routed_experts": 4},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 32},
            **{"moe_shared_expert_intermediate_size": 32, "moe_latent_size": 32},
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        {
            **{**COMMON, **LINEAR, "linear_num_value_heads": 2},
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **{**COMMON, **EXPERTS, **LINEAR, "head_dim": 16},
            **{"shared_expert_intermediate_size": 32},
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        {**COMMON, "num_hidden_layers": 3, "attention_window_size": 20, "lru_width": 64},
    ),
    "zamba": (
        "ZambaConfig",
        {
            **{**COMMON, "mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2},
            **{"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
        },
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **{**FOUR, "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8},
            **{"mamba_headdim": 16, "chunk_size": 16, "num_mem_blocks": 1, "adapter_rank": 8},
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        },
    ),
}
WINDOWS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {**FOUR, "sliding_window": 20}),
    "qwen2": (
        "Qwen2Config",
        {**FOUR, "sliding_window": 20, "use_sliding_window": True, "max_window_layers": 2},
    ),
    "gemma2": ("Gemma2Config", {**FOUR, "head_dim": 16, "sliding_window": 20}),
    "gemma3": (
        "Gemma3TextConfig",
        {**FOUR, "head_dim": 16, "sliding_window": 20, "layer_types": ALTERNATING},
    ),
    "cohere2": ("Cohere2Config", {**FOUR, "sliding_window": 20}),
    "starcoder2": ("Starcoder2Config", {**FOUR, "sliding_window": 20}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **{**FOUR, "head_dim": 16, "sliding_window": 20},
            **{"num_local_experts": 4, "num_experts_per_tok": 2},
        },
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {
            **{**FOUR, "head_dim": 16, "attention_chunk_size": 20, "intermediate_size_mlp": 48},
            **{"num_local_experts": 4, "num_experts_per_tok": 1},
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            **{**FOUR, "head_dim": 24, "v_head_dim": 16, "sliding_window": 20},
            **{"layer_types": ALTERNATING, "n_routed_experts": 4, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 32, "swa_num_key_value_heads": 4},
        },
    ),
    "minimax": (
        "MiniMaxConfig",
        {
            **{**COMMON, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 16},
        },
    ),
    "minimax_m3": (
        "MiniMaxM3VLTextConfig",
        {
            **{**COMMON, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
            **{"index_head_dim": 16, "index_n_heads": 2, "index_topk_blocks": 4},
            "layer_types": ["full_attention", "minimax_m3_sparse"],
        },
    ),
}
GEMMA3N = {
    **{**FOUR, "head_dim": 16, "sliding_window": 20, "hidden_size_per_layer_input": 8},
    **{"vocab_size_per_layer_input": 97, "laurel_rank": 8},
    "activation_sparsity_pattern": None,
}
# the last two of six layers read the keys of layers 2 (sliding) and 3 (full)
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n_text": (
        "Gemma3nTextConfig",
        {
            **GEMMA3N,
            **{"num_hidden_layers": 6, "num_kv_shared_layers": 2},
            "layer_types": [*ALTERNATING, *ALTERNATING[:2]],
        },
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            **{**GEMMA3N, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "global_head_dim": 32},
            "layer_types": [*ALTERNATING, *ALTERNATING[:2]],
        },
    ),
}
ALL = {**HYBRIDS, **WINDOWS, **SHARED}
MODELS = (
    "mistral",
    "qwen2",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "cohere2",
    "starcoder2",
)  # make_sliding


def make_config(name: str, **changes: Any) -> Any:
    kind, options = ALL[name]
    return getattr(transformers, kind)(**{**options, **changes})


def is_there(name: str) -> bool:
    """Say whether the installed transformers knows a family at all."""
    return hasattr(transformers, ALL[name][0])


def make_sliding(name: str, window: int) -> Any:
    """Return a fresh model of four layers, some or all of them with this window."""
    torch.manual_seed(0)
    config = make_config(name, sliding_window=window)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model
