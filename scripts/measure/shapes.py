"""What is measured on: attention shapes of known models, random models of known sizes (shapes.toml), and models by name.

Knows no cache. Everything but packaged models needs torch and transformers alone.
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from measure.runner import Call, Contender, Device, in_turns

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # far beyond any processor's cache
POSITIONS = 1 << 20
LISTED = tomllib.loads(Path(__file__).with_name("shapes.toml").read_text("utf-8"))


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
        return LlamaConfig(
            hidden_size=self.num_heads * self.head_dim,
            num_hidden_layers=layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=POSITIONS,
        )


def random_config(**sizes: Any) -> PreTrainedConfig:
    """Return the config of a row of shapes.toml."""
    how: Any = {"max_position_embeddings": POSITIONS, "tie_word_embeddings": False}
    if "kv_lora_rank" in sizes:
        how["q_lora_rank"] = None  # the default is that of DeepSeek's largest
    return AutoConfig.for_model(**how | sizes)


SHAPES = {name: AttentionShape(**sizes) for name, sizes in LISTED["attention"].items()}
RANDOM_MODELS = {name: random_config(**sizes) for name, sizes in LISTED["models"].items()}


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
