"""Tiny random models whose attention has as many kv heads as query heads, saved in several shards."""

import hashlib
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers
from safetensors import safe_open

COMMON = {
    **tiny_models.COMMON,
    **{"vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_key_value_heads": 4},
    "max_position_embeddings": 128,
}
WIDE = {**COMMON, "head_dim": 16}  # head_dim that is not hidden_size / heads
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
MOE = {**COMMON, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 24}
# families that need nothing beside the common options, heads of 8, or heads of 16
PLAIN = """
llama olmo olmo2 olmo3 granite smollm3 arcee bitnet nemotron cohere cohere2 qwen2 phi phi3 exaone4 apertus stablelm
"""
NARROW = "ernie4_5 helium glm glm4"
BROAD = "llama-wide gemma gemma3_text qwen3"
# model_type, or one with a word for the changes behind it -> options of its config
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(PLAIN.split(), COMMON),
    **{key: {**COMMON, "head_dim": 8} for key in NARROW.split()},
    **dict.fromkeys(BROAD.split(), WIDE),
    **{key: {**COMMON, **EXPERTS} for key in ("mixtral", "granitemoe", "phimoe")},
    "llama-bias": {**COMMON, "attention_bias": True},
    "llama-tied": {**COMMON, "tie_word_embeddings": True},
    "mistral": {**WIDE, "sliding_window": None},
    "gemma2": {**WIDE, "query_pre_attn_scalar": 16},
    "olmoe": {**COMMON, "num_experts": 2, "num_experts_per_tok": 1},
    "cohere-norm": {**COMMON, "use_qk_norm": True},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**MOE, "head_dim": 16},
    "starcoder2": {**COMMON, "sliding_window": None},
    "seed_oss": {**COMMON, "head_dim": 16, "attention_bias": True},
    "gpt_oss": {**WIDE, **EXPERTS, "num_hidden_layers": 2},
    "lfm2": {**COMMON, "layer_types": ["conv", "full_attention"]},
    # a config with an infinite value, and mamba layers
    "nemotron_h": {**COMMON, "head_dim": 8, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "num_hidden_layers": 3, "moe_intermediate_size": 8, "n_routed_experts": 2},
}  # fmt: skip
GPT_LIKE = {**tiny_models.GPT_LIKE, "vocab_size": 48, "n_embd": 32, "n_positions": 128}
FALCON = {
    **{"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "multi_query": False},
}
# classes that know all heads or one
ALL_OR_ONE: dict[str, dict[str, Any]] = {
    "falcon": FALCON,
    "falcon-bias": {**FALCON, "bias": True},
    "falcon-alibi": {**FALCON, "alibi": True, "parallel_attn": False},
    "gpt_bigcode": {**GPT_LIKE, "multi_query": False},
}  # fmt: skip
OTHERS = {"diffllama": COMMON, "gpt_neox": COMMON, "gpt2": GPT_LIKE}


def make(family: str, **changes: Any) -> Any:
    """Return a model with random weights that count: norms and biases too are not what they begin with."""
    options = {**FAMILIES, **ALL_OR_ONE, **OTHERS}[family]
    config = transformers.CONFIG_MAPPING[family.partition("-")[0]](**{**options, **changes})
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


def digest(folder: Path) -> dict[str, str]:
    """Return what is in a folder: names and hashes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def logits(model: Any) -> torch.Tensor:
    """Return the logits of a fixed prompt."""
    with torch.no_grad():
        out: torch.Tensor = model(torch.arange(3, 23)[None]).logits
    return out
