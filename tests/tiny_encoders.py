"""Tiny random models with an encoder, of text, sound or images, built from configs: no download, a few milliseconds each."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from tiny_models import COMMON

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
BART = {
    "vocab_size": 97,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 1024,
    "forced_eos_token_id": None,
    **SPECIAL,
}
T5 = {
    "vocab_size": 97,
    "d_model": 64,
    "d_kv": 32,  # heads do not add up to d_model
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    **SPECIAL,
}
PART = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
}

# family -> (model class, config class, options); all of them take input_ids
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "m2m_100": ("M2M100ForConditionalGeneration", "M2M100Config", BART),
    "t5gemma": ("T5GemmaForConditionalGeneration", "T5GemmaConfig", {"vocab_size": 97, **SPECIAL}),
}

# their encoders add masks to scores by themselves, which asks for the masks of eager attention
OWN_MASKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "longt5": ("LongT5ForConditionalGeneration", "LongT5Config", {**T5, "local_radius": 8}),
    "bigbird_pegasus": (
        "BigBirdPegasusForConditionalGeneration",
        "BigBirdPegasusConfig",
        {**BART, "attention_type": "original_full"},
    ),
}


def wider(model: Any) -> Any:
    """Give random weights more spread than the default, so that attention is not uniform; no early end."""
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.08)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    model.generation_config.forced_eos_token_id = None
    model.generation_config.decoder_start_token_id = 3
    return model


def make_model(family: str, **changes: Any) -> Any:
    """Return a fresh random model; the same weights for the same arguments."""
    torch.manual_seed(0)
    model, config, options = {**FAMILIES, **OWN_MASKS}[family]
    options = {**options, **changes}
    if family == "t5gemma":
        part = transformers.T5GemmaModuleConfig
        options = {**options, "encoder": part(**PART), "decoder": part(**PART)}
    return wider(getattr(transformers, model)(getattr(transformers, config)(**options)))


@cache
def shared_model(family: str) -> Any:
    """Return one model per family for tests that do not change it."""
    return make_model(family)


def sources(lengths: list[int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Return input_ids and attention_mask of an encoder's rows of these lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 97, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


@cache
def whisper() -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a tiny Whisper and its features of two rows (50 encoder positions)."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        **{**BART, "max_source_positions": 50, "max_target_positions": 256, "num_mel_bins": 16},
        begin_suppress_tokens=None,
        suppress_tokens=None,
    )
    model = wider(transformers.WhisperForConditionalGeneration(config))
    return model, {"input_features": torch.randn(2, 16, 100)}


@cache
def vision_encoder_decoder(decoder: str = "gpt2") -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a tiny ViT with a GPT-2 or MBart decoder, and two images (65 encoder positions)."""
    torch.manual_seed(0)
    vit = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=32,
        patch_size=4,
    )
    text = {
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=97, n_embd=64, n_layer=2, n_head=4, **SPECIAL
        ),
        "mbart": lambda: transformers.MBartConfig(**{**BART, "encoder_layers": 2}),
    }[decoder]()
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, text)
    config.decoder_start_token_id, config.pad_token_id = 3, 0
    model = wider(transformers.VisionEncoderDecoderModel(config=config))
    return model, {"pixel_values": torch.randn(2, 3, 32, 32)}


@cache
def bert_to_bert() -> Any:
    """Return an EncoderDecoderModel of two tiny BERTs."""
    torch.manual_seed(0)
    part = {
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
    }
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.BertConfig(**part), transformers.BertConfig(**part)
    )
    config.decoder_start_token_id, config.pad_token_id = 3, 0
    return wider(transformers.EncoderDecoderModel(config=config))


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
        text_config=transformers.LlamaConfig(**COMMON),
        image_token_id=IMAGE,
        vision_feature_select_strategy="default",
    )
    model = wider(transformers.LlavaForConditionalGeneration(config))
    return model, {**prompt(3, 4), "pixel_values": torch.randn(ROWS, 3, 32, 32)}


def qwen2_vl() -> Made:
    config = transformers.Qwen2VLConfig(
        text_config={**COMMON, "rope_parameters": MROPE},
        vision_config={**QWEN_VISION, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        image_token_id=IMAGE,
        video_token_id=95,
        vision_start_token_id=94,
        vision_end_token_id=93,
    )
    given = prompt(4, 4, begin=94, end=93)
    return wider(transformers.Qwen2VLForConditionalGeneration(config)), {
        **given,
        "mm_token_type_ids": (given["input_ids"] == IMAGE).int(),
        "pixel_values": torch.randn(ROWS * 16, 3 * 2 * 16),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
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
    text = {
        **COMMON,
        "num_hidden_layers": 3,
        "cross_attention_layers": [1],
        "rope_parameters": rope,
    }
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
    "mllama": mllama,
}


def make(name: str) -> Made:
    """Return a tiny model and the arguments of generate() for two prompts with an image each."""
    torch.manual_seed(0)
    return MODELS[name]()
