"""Tiny random models whose attention has as many kv heads as query heads, saved in several shards."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

COMMON = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE = {**COMMON, "head_dim": 16}  # head_dim that is not hidden_size / heads
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MOE = {**COMMON, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
# family -> (config class, options)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", COMMON),
    "llama-bias": ("LlamaConfig", {**COMMON, "attention_bias": True}),
    "llama-wide": ("LlamaConfig", WIDE),
    "llama-tied": ("LlamaConfig", {**COMMON, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {**WIDE, "sliding_window": None}),
    "mixtral": ("MixtralConfig", {**COMMON, **EXPERTS}),
    "gemma": ("GemmaConfig", WIDE),
    "gemma2": ("Gemma2Config", {**WIDE, "query_pre_attn_scalar": 16}),
    "gemma3_text": ("Gemma3TextConfig", WIDE),
    "olmo": ("OlmoConfig", COMMON),
    "olmo2": ("Olmo2Config", COMMON),
    "olmo3": ("Olmo3Config", COMMON),
    "olmoe": ("OlmoeConfig", {**COMMON, "num_experts": 2, "num_experts_per_tok": 1}),
    "granite": ("GraniteConfig", COMMON),
    "granitemoe": ("GraniteMoeConfig", {**COMMON, **EXPERTS}),
    "smollm3": ("SmolLM3Config", COMMON),
    "ernie4_5": ("Ernie4_5Config", {**COMMON, "head_dim": 8}),
    "arcee": ("ArceeConfig", COMMON),
    "helium": ("HeliumConfig", {**COMMON, "head_dim": 8}),
    "bitnet": ("BitNetConfig", COMMON),
    "nemotron": ("NemotronConfig", COMMON),
    "cohere": ("CohereConfig", COMMON),
    "cohere-norm": ("CohereConfig", {**COMMON, "use_qk_norm": True}),
    "cohere2": ("Cohere2Config", COMMON),
    "phimoe": ("PhimoeConfig", {**COMMON, **EXPERTS}),
    "qwen2": ("Qwen2Config", COMMON),
    "qwen2_moe": ("Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 24}),
    "qwen3": ("Qwen3Config", WIDE),
    "qwen3_moe": ("Qwen3MoeConfig", {**MOE, "head_dim": 16}),
    "glm": ("GlmConfig", {**COMMON, "head_dim": 8}),
    "glm4": ("Glm4Config", {**COMMON, "head_dim": 8}),
    "starcoder2": ("Starcoder2Config", {**COMMON, "sliding_window": None}),
    "seed_oss": ("SeedOssConfig", {**COMMON, "head_dim": 16, "attention_bias": True}),
    "gpt_oss": ("GptOssConfig", {**WIDE, **EXPERTS, "num_hidden_layers": 2}),
    "phi": ("PhiConfig", COMMON),
    "phi3": ("Phi3Config", COMMON),
    "exaone4": ("Exaone4Config", COMMON),
    "apertus": ("ApertusConfig", COMMON),
    "stablelm": ("StableLmConfig", COMMON),
    "lfm2": ("Lfm2Config", {**COMMON, "layer_types": ["conv", "full_attention"]}),
    # a config with an infinite value, and mamba layers
    "nemotron_h": ("NemotronHConfig", {**COMMON, "head_dim": 8, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "num_hidden_layers": 3, "moe_intermediate_size": 8, "n_routed_experts": 2}),
}  # fmt: skip
GPT_LIKE = {"vocab_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
FALCON = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# classes that know all heads or one
ALL_OR_ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon": ("FalconConfig", {**FALCON, **SPECIAL, "multi_query": False}),
    "falcon-bias": ("FalconConfig", {**FALCON, **SPECIAL, "multi_query": False, "bias": True}),
    "falcon-alibi": ("FalconConfig", {**FALCON, **SPECIAL, "multi_query": False, "alibi": True, "parallel_attn": False}),
    "gpt_bigcode": ("GPTBigCodeConfig", {**GPT_LIKE, **SPECIAL, "multi_query": False}),
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "diffllama": ("DiffLlamaConfig", COMMON),
    "gpt_neox": ("GPTNeoXConfig", COMMON),
    "gpt2": ("GPT2Config", {**GPT_LIKE, **SPECIAL}),
}


def make(family: str, **changes: Any) -> Any:
    """Return a model with random weights that count: norms and biases too are not what they begin with."""
    name, options = {**FAMILIES, **ALL_OR_ONE, **OTHERS}[family]
    config = getattr(transformers, name)(**{**options, **changes})
    return randomize(transformers.AutoModelForCausalLM.from_config(config))


def randomize(model: Any, seed: int = 0) -> Any:
    """Give every parameter random values; return the model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name or ".ln_" in name else 0.2 * noise)
    return model.eval()


def save(model: Any, folder: Path, size: str = "20KB") -> Path:
    """Save a model in shards of at most `size`; return the folder."""
    model.save_pretrained(folder, max_shard_size=size)
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as opened:
            found.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
    return found


def load(folder: Path) -> Any:
    """Return the model of a checkpoint; nothing may be missing, left over or of another shape."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), {name: found for name, found in info.items() if found}
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    """Return the logits of a fixed prompt."""
    with torch.no_grad():
        out: torch.Tensor = model(torch.arange(3, 23)[None]).logits
    return out
