"""Inputs beside the text: what an encoder-decoder model's encoder reads, one row of it."""

from typing import Any

import torch

from .shrink import TEXT_IDS
from .subject import Subject
from .build import build_model

SOURCE_TOKENS = 40


def build_subject(family: str, role: str, seed: int = 0) -> Subject:
    """Return a tiny model of a family with the inputs that it needs."""
    model = build_model(family, role, seed)
    if not model.config.is_encoder_decoder:
        return Subject(model)
    return Subject(model, encoder_inputs(model, seed), decodes=True)


def encoder_inputs(model: Any, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return what the encoder of a model reads, for one row, by the name of its main input.

    Raises: KeyError for a main input that nothing is known of.
    """
    generator = torch.Generator().manual_seed(seed)
    name = model.get_encoder().main_input_name if hasattr(model, "get_encoder") else model.main_input_name
    name = model.main_input_name if name == "input_ids" else name
    if name in ("input_ids", "decoder_input_ids"):
        ids = torch.randint(*TEXT_IDS, (1, SOURCE_TOKENS), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {name: torch.randn(SHAPES[name](model.config), generator=generator)}


def _features(config: Any) -> tuple[int, ...]:
    bins = config.num_mel_bins
    if getattr(config, "max_source_positions", None) and config.model_type == "whisper":
        return (1, bins, 2 * config.max_source_positions)
    return (1, 80, bins)


def _pixels(config: Any) -> tuple[int, ...]:
    vision = getattr(config, "vision_config", getattr(config, "encoder", config))
    size = vision.image_size
    return (1, getattr(vision, "num_channels", 3), *(size if isinstance(size, (tuple, list)) else (size, size)))


SHAPES = {
    "input_features": _features,
    "input_values": lambda config: (1, 4000),
    "pixel_values": _pixels,
}
