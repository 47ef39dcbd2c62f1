"""What the rules of shrink.py cannot know: options by model_type, on top of a family's shrunk defaults.

Where the defaults of a family leave out kinds of layers that its published models have (sliding windows, block
selection, layers that share keys), the options here bring them in.
"""

from typing import Any

DERIVED = object()  # leave the option out, so that the config derives it from the others

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_MIXED = {"num_hidden_layers": 3, "layer_types": [_FULL, _SLIDING, _FULL], "sliding_window": 24}
_MIXED_QWEN = {**_MIXED, "use_sliding_window": True}
_LINEAR_AND_FULL = {"num_hidden_layers": 3, "layer_types": [_LINEAR, _FULL, _LINEAR]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MROPE = {**_ROPE, "mrope_section": [2, 3, 3]}
_GROUPS = {"n_group": 2, "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
_SHARED_KEYS = {
    "num_hidden_layers": 6,
    "layer_types": [_SLIDING, _FULL] * 3,
    "num_kv_shared_layers": 2,
    "sliding_window": 24,
    "vocab_size_per_layer_input": 200,
}
_GEMMA4 = {
    **_SHARED_KEYS,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# all of its layers take the keys of another model; given as a whole, so that no rule shrinks it
_DRAFT_OF_GEMMA4 = {
    **_GEMMA4,
    "num_kv_shared_layers": 6,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 200,
}
_DRAFT = {"gemma4_assistant": {"text_config": {"model_type": "gemma4_text", **_DRAFT_OF_GEMMA4}}}
_QWEN4 = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 8,
}
_DOTS3 = {
    "num_hidden_layers": 3,
    "layer_types": ["indexed_attention", _SLIDING, "indexed_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "head_dim": 32,
    "sliding_window": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 32,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
    "per_layer_config": DERIVED,
}

_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_CROSS = {"is_decoder": True, "add_cross_attention": True}
_TEXTS_WITH_SECTIONS = (
    *(
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen2_5_omni_text",
        "glm4v_text",
        "glm_ocr_text",
        "glmga_text",
    ),
    *("paddleocr_vl_text", "glm46v_text"),
)

CHANGES: dict[str, dict[str, Any]] = {
    **{name: {"rope_parameters": _MROPE, "head_dim": 16} for name in _TEXTS_WITH_SECTIONS},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}},
    "glm4v_moe_text": {
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    },
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_d_head": "auto"},
    "blt": {"encoder_hash_byte_group_vocab": 500, "encoder_hash_byte_group_size": [3, 4]},
    "chameleon": {"vocabulary_map": {"<image>": 199}},
    "cohere_compass_text": {**_MIXED, "rope_parameters": {_FULL: _MROPE, _SLIDING: _MROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {
        "num_hidden_layers": 2,
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3},
    "deepseek_v3": {"first_k_dense_replace": 1, "num_hidden_layers": 3},
    "deepseek_v4": {
        "num_hidden_layers": 4,
        "layer_types": [
            _SLIDING,
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "compressed_sparse_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "head_dim": 32,
        "o_groups": 2,
        "hc_mult": 2,
    },
    "diffusion_gemma_text": {
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "global_head_dim": 32,
        "head_dim": 16,
    },
    "dots1": {**_MIXED, **_GROUPS, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "dots3_note_text": _DOTS3,
    "emu3": {"vocabulary_map": {"<image>": 199, "<|extra_200|>": 198}},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma3n_text": {
        **_SHARED_KEYS,
        "activation_sparsity_pattern": [0.0] * 6,
        "intermediate_size": [96] * 6,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": {**_GEMMA4, "vocab_size_per_layer_input": DERIVED},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 24},
    "granite4_vision": {
        "deepstack_layer_map": [],
        "spatial_target_layers": [],
        "downsample_rate": "4/8",
    },
    "granitemoehybrid": {
        **_LINEAR_AND_FULL,
        "mamba_d_head": "auto",
        "shared_intermediate_size": 32,
    },
    "hunyuan_vl_text": {
        "head_dim": 16,
        "rope_parameters": {**_ROPE, "mrope_section": [2, 2, 2, 2]},
    },
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "inkling_vision": {"patch_size": 4, "num_hidden_layers": 24},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {
        **_MIXED,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_attention_heads_per_layer": [4, 4, 4],
    },
    "lfm2": {"num_hidden_layers": 3, "layer_types": ["conv", _FULL, "conv"]},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", _FULL, "conv"],
        "num_dense_layers": 1,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "mimi": {"upsample_groups": 8},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "perception_lm": {"vision_config": {**_SIGLIP, "model_args": {"embed_dim": 64}}},
    **{
        f"vibevoice_acoustic_tokenizer_{half}": {"num_filters": 2, "depths": [1] * 7}
        for half in ("encoder", "decoder")
    },
    "mellum": {**_MIXED, "mlp_layer_types": ["sparse"] * 3},
    **_DRAFT,
    "minimax_m3_vl_text": {
        "num_hidden_layers": 3,
        "layer_types": [_FULL, "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "ministral": {**_MIXED, "head_dim": 16},
    "mixtral": {"sliding_window": 24},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "phi3": {"sliding_window": 24},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 198, "vision_end_token_id": 197},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 198, "vision_end_token_id": 197},
    "qwen2": _MIXED_QWEN,
    "qwen2_moe": _MIXED_QWEN,
    "qwen3": _MIXED_QWEN,
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "axial_pos_embds_dim": [32, 32],
        "axial_pos_shape": [32, 32],
        "attn_layers": ["local", "lsh"],
        "num_hidden_layers": 2,
        "feed_forward_size": 96,
        "num_buckets": 4,
        "local_attn_chunk_length": 16,
        "lsh_attn_chunk_length": 16,
    },
    "smollm3": {**_MIXED_QWEN, "no_rope_layers": [1, 0, 1]},
    "step3p5": {"sliding_window": 24},
    "starcoder2": {"sliding_window": 24},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "xlstm": {"hidden_size": 128, "num_hidden_layers": 2, "num_blocks": 2, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 5,
        "layers_block_type": [_LINEAR, _LINEAR, "hybrid", _LINEAR, "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {"attention_head_dim": DERIVED, "attention_hidden_size": DERIVED},
    "zaya": {
        "num_hidden_layers": 3,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "sliding_window": 24,
        "num_experts_per_tok": 1,
    },
}
# families whose whole default config is invalid: options that the defaults need, in place of them
FIRST: dict[str, dict[str, Any]] = {
    # their vision towers come from a package that is not needed for text
    "gemma3n": {"vision_config": {**_SIGLIP, "vocab_offset": 180, "vocab_size": 8}},
    "fast_vlm": {"vision_config": _SIGLIP},
    # composed of two models, which transformers 5.17 wants to be named
    "encoder-decoder": {
        "encoder": {"model_type": "bert"},
        "decoder": {"model_type": "bert", **_CROSS},
    },
    "speech-encoder-decoder": {
        "encoder": {"model_type": "wav2vec2"},
        "decoder": {"model_type": "bert", **_CROSS},
    },
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit"},
        "decoder": {"model_type": "gpt2", **_CROSS},
    },
    "perception_lm": {"vision_config": {**_SIGLIP, "model_args": {"embed_dim": 64}}},
    **_DRAFT,
    # transformers 5.17 wants their parts to be named, or has defaults that do not fit
    **{
        name: {
            "text_encoder": {"model_type": "t5"},
            "audio_encoder": {"model_type": "encodec"},
            "decoder": {"model_type": f"{name}_decoder"},
        }
        for name in ("musicgen", "musicgen_melody")
    },
    "granite4_vision": {"text_config": {"model_type": "granite4_vision_text"}},
    "diffusion_gemma": {"vision_config": {"model_type": "gemma4_vision"}},
}
