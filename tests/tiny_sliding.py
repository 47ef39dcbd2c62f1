"""Tiny random models with sliding windows, built from configs."""

import torch
import transformers
from tiny_models import COMMON

ALTERNATING = ["sliding_attention", "full_attention"] * 2
MODELS = {
    "mistral": ("MistralConfig", {}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": True, "max_window_layers": 2}),
    "gemma2": ("Gemma2Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16, "layer_types": ALTERNATING}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "cohere2": ("Cohere2Config", {}),
    "starcoder2": ("Starcoder2Config", {}),
}


def make_sliding(name, window):
    kind, options = MODELS[name]
    torch.manual_seed(0)
    options = {**COMMON, "num_hidden_layers": 4, "sliding_window": window, **options}
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**options)
    ).eval()
    model.generation_config.eos_token_id = None
    return model
