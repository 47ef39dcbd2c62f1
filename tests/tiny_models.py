"""Tiny random models of many families, built from configs: no download, a few milliseconds each."""

from functools import cache
from typing import Any

import torch
import transformers

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

# family -> (config class, options); every layer of these attends to everything
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON),
    "mistral": ("MistralConfig", {**COMMON, "sliding_window": None}),
    "qwen2": ("Qwen2Config", COMMON),
    "qwen3": ("Qwen3Config", {**COMMON, "head_dim": 16}),
    "gemma": ("GemmaConfig", {**COMMON, "head_dim": 32}),
    "phi": ("PhiConfig", COMMON),
    "phi3": ("Phi3Config", COMMON),
    "gpt_neox": ("GPTNeoXConfig", MHA),
    "gpt2": ("GPT2Config", GPT_LIKE),
    "opt": ("OPTConfig", {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "olmo2": ("Olmo2Config", COMMON),
    "starcoder2": ("Starcoder2Config", {**COMMON, "sliding_window": None}),
    "stablelm": ("StableLmConfig", COMMON),
    "granite": ("GraniteConfig", COMMON),
    "cohere": ("CohereConfig", COMMON),
    "glm": ("GlmConfig", {**COMMON, "head_dim": 16}),
    "nemotron": ("NemotronConfig", COMMON),
    "persimmon": ("PersimmonConfig", MHA),
    "smollm3": ("SmolLM3Config", COMMON),
    "biogpt": ("BioGptConfig", MHA),
    "gpt_bigcode": ("GPTBigCodeConfig", GPT_LIKE),
    "qwen3_moe": ("Qwen3MoeConfig", {**MOE, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**COMMON, "num_local_experts": 4, "sliding_window": None}),
    # the next ones do not use transformers' attention interface: dense, but right
    "gptj": ("GPTJConfig", {**GPT_LIKE, "rotary_dim": 8}),
    "gpt_neo": (
        "GPTNeoConfig",
        {**COMMON, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    ),
    "bloom": ("BloomConfig", {**GPT_LIKE, "hidden_size": 64}),
    "falcon": ("FalconConfig", COMMON),
    "codegen": ("CodeGenConfig", {**GPT_LIKE, "rotary_dim": 8}),
    "mpt": (
        "MptConfig",
        {"vocab_size": 97, "d_model": 64, "n_heads": 4, "n_layers": 2, "use_cache": True},
    ),
}
# the caches whose keys and values have one format, by name
ONE_FORMAT = {
    "paged_exact": "exact",
    "paged_fp8": "fp8",
    "paged_int8": "int8",
    "paged_int4": "int4",
    "paged_int2_v1": "int2",
}
NO_INTERFACE = ("gptj", "gpt_neo", "bloom", "falcon", "codegen", "mpt")


def make_config(family: str, **changes: Any) -> Any:
    name, options = FAMILIES[family]
    return getattr(transformers, name)(**{**options, **changes})


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
