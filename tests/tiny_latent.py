"""Tiny random models with multi-head latent attention (MLA), one of each kind of family, built from configs."""

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import tiny_models
import torch
import transformers

RANK, ROPE = 32, 8
COMMON = {
    **tiny_models.COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": RANK,
    "q_lora_rank": 24,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": 12,
    "v_head_dim": 12,
}
MOE = {
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse"]}
# an index that chooses everything: choices of fewer tokens tie at 0 behind the ReLU, and then differ from run to run
DSA = {"index_topk": 512, "index_head_dim": 16, "index_n_heads": 4}
THREE_OF = {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "dense"]}

# family -> (config class, options); `text_config` inside where only a model with images can generate
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": (
        "DeepseekV2Config",
        {**COMMON, **MOE, "mlp_layer_types": ["dense", "sparse"], "topk_method": "greedy"},
    ),
    "deepseek_v3": ("DeepseekV3Config", {**COMMON, **MOE, "first_k_dense_replace": 1}),
    "deepseek_v32": ("DeepseekV32Config", {**COMMON, **MOE, **DSA, **DENSE_FIRST}),
    "dots3_note": (
        "Dots3NoteTextConfig",
        {
            **COMMON,
            **MOE,
            **DSA,
            **THREE_OF,
            "head_dim": 20,
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            "sliding_window": 20,
            "shared_experts_intermediate_size": 32,
            "use_dsa": True,
            **{"swa_num_attention_heads": 2, "swa_num_key_value_heads": 2},
            **{"swa_q_lora_rank": 24, "swa_kv_lora_rank": 48, "swa_head_dim": 24},
            **{"swa_qk_nope_head_dim": 16, "swa_v_head_dim": 12},
        },
    ),
    "glm5_next": (
        "Glm5NextConfig",
        {
            "text_config": {
                **COMMON,
                **MOE,
                **DSA,
                **THREE_OF,
                "qk_rope_head_dim": 0,
                "layer_types": ["linear_attention", "full_attention", "full_attention"],
                "indexer_types": ["full", "full", "shared"],
                "index_kpool": 4,
                **{"linear_head_dim": 16, "linear_num_heads": 2, "hc_mult": 2},
            },
            "vision_config": {
                **{"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64},
                **{"intermediate_size": 48, "image_size": 28, "patch_size": 14},
            },
        },
    ),
    "hy_v4": (
        "HYV4Config",
        {**COMMON, **MOE, **DSA, **THREE_OF, "indexer_types": ["full", "shared", "full"]}
        | {"hc_mult": 2, "learnable_sink_init": 0.7},
    ),
    "minicpm3": ("MiniCPM3Config", COMMON),
    "mistral_large4": (
        "MistralLarge4Config",
        {
            "text_config": {
                **{name: value for name, value in COMMON.items() if name != "q_lora_rank"},
                **MOE,
                **DSA,
                "num_hidden_layers": 5,
                "mlp_layer_types": ["dense", "sparse", "dense", "dense", "dense"],
                "no_rope_layers": [1, 0, 1, 0, 1],
                # 2 reads what 0 stored, and has indexer keys of its own; 3 reads what 1 stored, and has nothing
                "kv_source_layers": [0, 1, 0, 1, 4],
                "indexer_types": ["full", "shared", "full", "shared", "full"],
            },
            "vision_config": {
                **{"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48},
                **{"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32},
                "patch_size": 16,
            },
        },
    ),
    "youtu": ("YoutuConfig", COMMON),
}
SPARSE = tuple(
    name
    for name, (_, options) in FAMILIES.items()
    if "index_topk" in options.get("text_config", options)
)


def families_of_transformers(cached: str = r"") -> set[str]:
    """Return the folders of all models of the installed transformers that expand latents, and cache what is called so."""
    models = Path(transformers.__file__).parent / "models"
    texts = {path: path.read_text(encoding="utf-8") for path in models.glob("*/modeling_*.py")}
    return {
        path.parent.name
        for path, text in texts.items()
        if re.search(r"^    def expand_kv\(", text, re.MULTILINE)
        and re.search(rf"past_key_values\.update\(\s*{cached}", text)
    }


def is_there(family: str) -> bool:
    """Say whether the installed transformers knows a family at all."""
    return hasattr(transformers, FAMILIES[family][0])


def make_config(family: str, **changes: Any) -> Any:
    name, options = FAMILIES[family]
    if "text_config" in options:
        options = {**options, "text_config": {**options["text_config"], **changes}}
    else:
        options = {**options, **changes}
    return getattr(transformers, name)(**options)


def make_model(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a fresh random model; the same weights for the same arguments."""
    torch.manual_seed(0)
    config = make_config(family, **changes)
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    ends = ("ForCausalLM", "ForConditionalGeneration")
    kinds = [getattr(module, name) for name in module.__all__ if name.endswith(ends)]
    model = kinds[0]._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # wider than the default, so that attention is not uniform, and sinks that differ
            if parameter.ndim > 1 or name.endswith("sinks"):
                parameter.copy_(torch.randn(parameter.shape) * 0.08)
    generation = model.generation_config
    generation.pad_token_id, generation.eos_token_id = 0, None
    return model


@cache
def shared_model(family: str) -> Any:
    """Return one model per family for tests that do not change it."""
    return make_model(family)


def text_config(model: Any) -> Any:
    return model.config.get_text_config(decoder=True)


def latent_modules(model: Any) -> list[Any]:
    """Return all attention modules that expand latents, in the order of their layers."""
    return [module for module in model.modules() if hasattr(type(module), "expand_kv")]
