"""What is measured on: attention shapes of known models, random models of known sizes, and models by name.

Knows no cache. Everything but packaged models needs torch and transformers alone.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    PreTrainedConfig,
)

from measure.runner import Call, Contender, Device, in_turns

SIZES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
LATENT_SIZES = "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # far beyond any processor's cache


@dataclass(frozen=True)
class AttentionShape:
    """Heads of an attention layer, and the layers of its model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: int = 32

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.num_heads // self.num_kv_heads

    def elements(self, tokens: int) -> int:
        """Numbers that one row of `tokens` keys and values holds in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * tokens

    def config(self, layers: int) -> PreTrainedConfig:
        """Return a config of attention layers of this shape; no model is ever built from it."""
        hidden = self.num_heads * self.head_dim
        return _config(LlamaConfig, (8, hidden, 8, layers, self.num_heads, self.num_kv_heads))


def _config(
    kind: Callable[..., PreTrainedConfig],
    sizes: tuple[int, ...],
    latent: tuple[int, ...] = (),
    queries: int | None = None,
) -> PreTrainedConfig:
    """Return a config of SIZES; with `latent`, LATENT_SIZES, of latent attention without experts."""
    fields: dict[str, Any] = dict(zip(SIZES.split(), sizes, strict=True))
    if latent:
        fields |= zip(LATENT_SIZES.split(), latent, strict=True)
        fields |= {"q_lora_rank": queries, "first_k_dense_replace": fields["num_hidden_layers"]}
    fields |= {"max_position_embeddings": 1 << 20, "tie_word_embeddings": False}
    return kind(**fields)


SHAPES = {
    "llama-8b": AttentionShape(32, 8, 128),
    "smollm2": AttentionShape(9, 3, 64, 30),
    "qwen2.5-7b": AttentionShape(28, 4, 128, 28),
    "llama-70b-layer": AttentionShape(64, 8, 128, 1),
    "heads-96": AttentionShape(8, 2, 96, 1),
    "heads-80": AttentionShape(8, 2, 80, 1),
    "heads-256": AttentionShape(8, 2, 256, 1),
    "tiny": AttentionShape(4, 2, 16, 2),
}
V2, V3 = DeepseekV2Config, DeepseekV3Config
# sizes as published but for DeepSeek's vocabulary, whose logits would outweigh few layers; the weights are random
RANDOM_MODELS = {
    "llama-3.1-8b": _config(LlamaConfig, (128256, 4096, 14336, 32, 32, 8)),
    "deepseek-v2-lite-layer": _config(V2, (1024, 2048, 64, 1, 16, 16), (512, 128, 64, 128)),
    "deepseek-v3-2-layers": _config(
        V3, (1024, 7168, 18432, 2, 128, 128), (512, 128, 64, 128), queries=1536
    ),
    # cheap in float32, with heads as real models have them
    "small": _config(LlamaConfig, (512, 512, 512, 2, 8, 2)),
    "small-latent": _config(V3, (512, 512, 512, 2, 8, 8), (512, 64, 64, 64)),
    "tiny": _config(LlamaConfig, (128, 64, 96, 2, 4, 2)),
    "tiny-latent": _config(V3, (128, 64, 96, 2, 4, 4), (32, 16, 8, 16)),
}


def random_model(name: str, device: Device, dtype: torch.dtype, **changes: Any) -> Any:
    """Build a model of random weights right on `device`, in eval mode; the same weights for the same arguments.

    Args:
        changes: of the config's fields.
    """
    config = type(RANDOM_MODELS[name]).from_dict({**RANDOM_MODELS[name].to_dict(), **changes})
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device).eval()


@functools.lru_cache(maxsize=1)
def load(name: str, device: Device, dtype: str) -> Any:
    """Return a model, kept until another one is asked for: of RANDOM_MODELS, packaged, a hub id or a folder."""
    if name in RANDOM_MODELS:
        return random_model(name, device, getattr(torch, dtype))
    model: Any = AutoModelForCausalLM.from_pretrained(folder_of(name), dtype=getattr(torch, dtype))
    return model.to(device).eval()


def folder_of(name: str) -> str:
    """Return the folder of a packaged model, and any other name as it is."""
    from measure.models.packaged import resolve_model  # asks for the packages that read model files

    return str(resolve_model(name))


def captured(run: Call) -> Call:
    """Return a replay of `run` as a CUDA graph: the time of the kernels without that of launching them.

    Raises: RuntimeError when the call cannot be captured (it reads from the device, say).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels that are compiled or tuned at their first calls
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


@functools.lru_cache(maxsize=1)
def copy_bandwidth(device: Device) -> float:
    """Return the GB/s (read plus written) of torch copying a large buffer: what memory gives to a plain program."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    row = in_turns([Contender("copy", lambda: target.copy_(source))], 7, device)[0]
    return float(2 * source.nbytes / (1e6 * row["ms_p50"]))
