"""Tiny random vision-language models with prompts that hold images."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from tiny_encoder_decoders import wider

TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN_VISION = {
    "depth": 1,
    "num_heads": 4,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
ROWS, LENGTH, IMAGE = 2, 60, 96
Made = tuple[Any, dict[str, torch.Tensor]]


def prompt(first: int, count: int, **around: int) -> dict[str, torch.Tensor]:
    """Return ids [2, 60] with `count` image tokens from column `first` on, the second row padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, :2], mask[1, :2] = 0, 0
    ids[:, first : first + count] = IMAGE
    if around:
        ids[:, first - 1], ids[:, first + count] = around["begin"], around["end"]
    return {"input_ids": ids, "attention_mask": mask}


def llava() -> Made:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=16,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_id=IMAGE,
        vision_feature_select_strategy="default",
    )
    model = wider(transformers.LlavaForConditionalGeneration(config))
    return model, {**prompt(3, 4), "pixel_values": torch.randn(ROWS, 3, 32, 32)}


def _qwen(config: Any, model: Any, vision: dict[str, Any]) -> Made:
    made = config(
        text_config={**TEXT, "rope_parameters": MROPE},
        vision_config={**QWEN_VISION, **vision},
        image_token_id=IMAGE,
        video_token_id=95,
        vision_start_token_id=94,
        vision_end_token_id=93,
    )
    given = prompt(4, 4, begin=94, end=93)
    return wider(model(made)), {
        **given,
        "mm_token_type_ids": (given["input_ids"] == IMAGE).int(),
        "pixel_values": torch.randn(ROWS * 16, 3 * 2 * 16),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
    }


def qwen2_vl() -> Made:
    vision = {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    return _qwen(transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration, vision)


def qwen2_5_vl() -> Made:
    vision = {
        "hidden_size": 32,
        "out_hidden_size": 64,
        "intermediate_size": 48,
        "window_size": 16,
        "fullatt_block_indexes": [0],
    }
    kinds = transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration
    return _qwen(*kinds, vision)


def gemma3() -> Made:
    layers = ["sliding_attention", "full_attention"]
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    config = transformers.Gemma3Config(
        text_config={**TEXT, "head_dim": 16, "sliding_window": 16, "layer_types": layers},
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=94,
        eoi_token_index=95,
    )
    given = prompt(4, 4, begin=94, end=95)
    model = wider(transformers.Gemma3ForConditionalGeneration(config))
    return model, {
        **given,
        "token_type_ids": (given["input_ids"] == IMAGE).long(),
        "pixel_values": torch.randn(ROWS, 3, 32, 32),
    }


def mllama() -> Made:
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 4,
        "image_size": 32,
        "patch_size": 16,
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2]],
        "intermediate_layers_indices": [0],
        "vision_output_dim": 64,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    text = {**TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1], "rope_parameters": rope}
    config = transformers.MllamaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE
    )
    model = wider(transformers.MllamaForConditionalGeneration(config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name and parameter.numel() == 1:
                parameter.fill_(0.7)  # closed at first, so that images would not count
    seen = torch.ones(ROWS, LENGTH, 1, 2, dtype=torch.long)
    seen[:, :3] = 0
    return model, {
        **prompt(3, 1),
        "pixel_values": torch.randn(ROWS, 1, 2, 3, 32, 32),
        "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1, 0]]] * ROWS),
        "cross_attention_mask": seen,
    }


MODELS: dict[str, Callable[[], Made]] = {
    "llava": llava,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "gemma3": gemma3,
    "mllama": mllama,
}


def make(name: str) -> Made:
    """Return a tiny model and the arguments of generate() for two prompts with an image each."""
    torch.manual_seed(0)
    return MODELS[name]()
