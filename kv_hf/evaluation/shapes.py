"""Sizes to measure on: attention shapes of well-known models, and random models of those sizes without a network."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2Config,
)

from ..formats import key_scheme, value_scheme
from ..spec import ROWS, PageSpec


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    def elements(self, tokens: int) -> int:
        """Numbers that one row of `tokens` keys and values holds in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * tokens

    def dense_bytes(self, tokens: int, dtype: torch.dtype) -> int:
        """Bytes of one row's keys and values of one layer as plain tensors."""
        return self.elements(tokens) * dtype.itemsize

    def page_spec(
        self, name: str, dtype: torch.dtype, page_size: int = 64, layout: str = ROWS
    ) -> PageSpec:
        """Return the page of one layer in format `name`."""
        return PageSpec.build(
            key_scheme(name),
            value_scheme(name),
            num_kv_heads=self.num_kv_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            page_size=page_size,
            dtype=dtype,
            layout=layout,
        )

    def config(self, layers: int) -> LlamaConfig:
        """Return a config of attention layers of this shape; no model is ever built from it."""
        return LlamaConfig(
            vocab_size=8,
            hidden_size=self.num_heads * self.head_dim,
            intermediate_size=8,
            num_hidden_layers=layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


SHAPES = {
    "llama-8b": AttentionShape(32, 8, 128),
    "smollm2": AttentionShape(9, 3, 64),
    "qwen2.5-7b": AttentionShape(28, 4, 128),
    "llama-70b-layer": AttentionShape(64, 8, 128),
    "tiny": AttentionShape(4, 2, 16),  # for tests and for trying the scripts out
}

_LONG = {"max_position_embeddings": 1 << 20, "tie_word_embeddings": False}
# name -> (config class, sizes as published; the weights are random)
_RANDOM: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama-3.1-8b": (
        LlamaConfig,
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "qwen2.5-7b": (
        Qwen2Config,
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    # one layer of the 70B sizes; a small vocabulary, or the logits would outweigh the layer
    "llama-70b-layer": (
        LlamaConfig,
        {
            "vocab_size": 1024,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 1,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
    ),
    # latent attention of DeepSeek-V2-Lite's sizes alone: one layer, its experts and vocabulary left out
    "deepseek-v2-lite-layer": (
        DeepseekV2Config,
        {
            "vocab_size": 1024,
            "hidden_size": 2048,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 8,  # no layer has experts
        },
    ),
    # the first two layers of DeepSeek-V3, which have no experts; a small vocabulary
    "deepseek-v3-2-layers": (
        DeepseekV3Config,
        {
            "vocab_size": 1024,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "num_hidden_layers": 2,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 8,  # no layer has experts
        },
    ),
    # for tests and for trying the scripts out
    "tiny-latent": (
        DeepseekV3Config,
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "first_k_dense_replace": 8,  # no layer has experts
        },
    ),
    # cheap in float32, with heads as real models have them
    "small": (
        LlamaConfig,
        {
            "vocab_size": 512,
            "hidden_size": 512,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
        },
    ),
    "tiny": (
        LlamaConfig,
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
}
RANDOM_MODELS = tuple(_RANDOM)


def random_config(name: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of a random model: `RANDOM_MODELS`, with `changes`."""
    kind, sizes = _RANDOM[name]
    return kind(**{**_LONG, **sizes, **changes})


def random_model(name: str, device: torch.device, dtype: torch.dtype, **changes: Any) -> Any:
    """Build a model of random weights right on `device`, in eval mode; the same weights for the same arguments."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(random_config(name, **changes), dtype=dtype)
    return model.to(device).eval()
