"""Tiny random models of many families, built from configs (no download, a few milliseconds each), and hard versions of them.

A stressed model has the outputs of another one and keys or values that are hard to store: scaled in one projection, undone in the next.
"""

import copy
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import transformers

from kv_hf.cache.model_shape import CACHE

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT_LIKE = {
    "vocab_size": 97,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MHA = {**COMMON, "num_key_value_heads": 4}
MOE = {**COMMON, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# what needs nothing beside the common options
PLAIN = "llama qwen2 phi phi3 olmo2 stablelm granite cohere nemotron smollm3 falcon"
# model_type -> options of its config; every layer of these attends to everything
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(PLAIN.split(), COMMON),
    **dict.fromkeys(("gpt_neox", "persimmon", "biogpt"), MHA),
    **{key: {**COMMON, "sliding_window": None} for key in ("mistral", "starcoder2")},
    **{key: {**COMMON, "head_dim": 16} for key in ("qwen3", "glm")},
    **dict.fromkeys(("gpt2", "gpt_bigcode"), GPT_LIKE),
    **{key: {**GPT_LIKE, "rotary_dim": 8} for key in ("gptj", "codegen")},
    "gemma": {**COMMON, "head_dim": 32},
    "opt": {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen3_moe": {**MOE, "head_dim": 16},
    "mixtral": {**COMMON, "num_local_experts": 4, "sliding_window": None},
    "gpt_neo": {**COMMON, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "bloom": {**GPT_LIKE, "hidden_size": 64},
    "mpt": {"vocab_size": 97, "d_model": 64, "n_heads": 4, "n_layers": 2, "use_cache": True},
}
# which do not use transformers' attention interface: dense, but right
NO_INTERFACE = (
    "gpt_neo",
    "bloom",
    "falcon",
    "mpt",
    *(("gptj", "codegen") if CACHE != "cache" else ()),
)
FOUR = {**COMMON, "num_hidden_layers": 4, "sliding_window": 20}
ALTERNATING = ["sliding_attention", "full_attention"]

# the same of families whose layers, or some of them, have a sliding window
WINDOWS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("mistral", "cohere2", "starcoder2"), FOUR),
    "qwen2": {**FOUR, "use_sliding_window": True, "max_window_layers": 2},
    "gemma2": {**FOUR, "head_dim": 16},
    "gemma3_text": {**FOUR, "head_dim": 16, "layer_types": 2 * ALTERNATING},
    "gpt_oss": {**FOUR, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
}
GEMMA3N = {
    **{**FOUR, "num_hidden_layers": 6, "layer_types": 3 * ALTERNATING, "head_dim": 16},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "laurel_rank": 8},
    **{"activation_sparsity_pattern": None, "num_kv_shared_layers": 2},
}
# the last two of six layers read the keys of layers 2 (sliding) and 3 (full)
SHARED: dict[str, dict[str, Any]] = {
    "gemma3n_text": GEMMA3N,
    "gemma4_text": {**GEMMA3N, "global_head_dim": 32},
}
# the caches whose keys and values have one format, by name
ONE_FORMAT = {
    "paged_exact": "exact",
    "paged_fp8": "fp8",
    "paged_int8": "int8",
    "paged_int4": "int4",
}


def make_config(family: str, **changes: Any) -> Any:
    return transformers.CONFIG_MAPPING[family](**{**FAMILIES[family], **changes})


def is_there(name: str) -> bool:
    """Say whether the installed transformers knows a family with windows or shared keys at all."""
    return name in transformers.CONFIG_MAPPING


def make_layers(name: str, **changes: Any) -> Any:
    """Return the config of a family with windows or shared keys."""
    return transformers.CONFIG_MAPPING[name](**{**{**WINDOWS, **SHARED}[name], **changes})


def make_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a fresh random model; the same weights for the same arguments."""
    torch.manual_seed(0)
    config = make_config(family, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # wider than the default, so that attention is not uniform
                parameter.normal_(std=0.08)
    generation = model.generation_config
    generation.pad_token_id, generation.eos_token_id = 0, None
    return model


@cache
def shared_model(family: str) -> Any:
    """Return one model per family for tests that do not change it."""
    return make_model(family)


def make_sliding(name: str, window: int | None) -> Any:
    """Return a fresh model of four layers, some or all of them with this window."""
    torch.manual_seed(0)
    config = make_layers(name, sliding_window=window)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    """Return random token ids [rows, length] without special ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (rows, length), generator=generator)


def left_padded(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return input_ids and attention_mask of rows of these lengths, padded on the left."""
    width = max(lengths)
    ids = tokens(len(lengths), width, seed)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : width - length] = 0
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


Change = Callable[[Any], None]


def stressed(model: Any, *changes: Change) -> Any:
    """Return a copy of a Llama-like model, changed."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for change in changes:
            change(copied)
    return copied


def value_channel(factor: float, channel: int = 3, layers: Iterable[int] | None = None) -> Change:
    """Multiply one value channel of the first kv head, and divide it out again behind attention."""

    def change(model: Any) -> None:
        dim, group = _sizes(model)
        for attention in _attentions(model, layers):
            _scale_rows(attention.v_proj, [channel], factor)
            columns = [head * dim + channel for head in range(group)]
            attention.o_proj.weight[:, columns] /= factor

    return change


def key_pairs(
    factor: float, pairs: Iterable[int] = (1, 5), layers: Iterable[int] | None = None
) -> Change:
    """Multiply RoPE pairs of the first kv head's keys, and divide them out of its queries."""

    def change(model: Any) -> None:
        dim, group = _sizes(model)
        channels = [place for pair in pairs for place in (pair, pair + dim // 2)]
        for attention in _attentions(model, layers):
            _scale_rows(attention.k_proj, channels, factor)
            rows = [head * dim + channel for head in range(group) for channel in channels]
            _scale_rows(attention.q_proj, rows, 1 / factor)

    return change


def all_values(factor: float, layers: Iterable[int] | None = None) -> Change:
    """Multiply all values, and divide them out again behind attention."""

    def change(model: Any) -> None:
        for attention in _attentions(model, layers):
            _scale_rows(attention.v_proj, slice(None), factor)
            attention.o_proj.weight /= factor

    return change


def key_bias(size: float, channels: Iterable[int]) -> Change:
    """Add a constant to key channels of every head; the outputs are not those of the given model."""

    def change(model: Any) -> None:
        dim, _ = _sizes(model)
        for attention in _attentions(model, None):
            width = attention.k_proj.weight.shape[0]
            bias = torch.zeros(width)
            bias[[first + channel for first in range(0, width, dim) for channel in channels]] = size
            attention.k_proj.bias = torch.nn.Parameter(bias)

    return change


def _scale_rows(projection: Any, rows: Any, factor: float) -> None:
    projection.weight[rows] *= factor
    if projection.bias is not None:
        projection.bias[rows] *= factor


def _sizes(model: Any) -> tuple[int, int]:
    """Return (channels of a head, query heads of a kv head)."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return dim, config.num_attention_heads // config.num_key_value_heads


def _attentions(model: Any, layers: Iterable[int] | None) -> list[Any]:
    blocks = model.model.layers
    chosen = range(len(blocks)) if layers is None else layers
    return [blocks[index].self_attn for index in chosen]
