"""Inputs beside the text: what an encoder reads, and images of models that take no text without one; one row of each."""

import inspect
from typing import Any

import torch

from measure.families.build import build_model
from measure.families.shrink import TEXT_IDS
from measure.families.subject import Subject, Tensors

SOURCE_TOKENS = 40
FRAMES = 80


def build_subject(family: str, role: str, seed: int = 0) -> Subject:
    """Return a tiny model of a family with the inputs that it needs."""
    model = build_model(family, role, seed)
    if model.config.is_encoder_decoder:
        return Subject(model, encoder_inputs(model, seed), decodes=True)
    return Subject(model, required_inputs(model, seed))


def required_inputs(model: Any, seed: int = 0) -> Tensors:
    """Return the inputs without which forward() cannot be called, beside the text."""
    generator = torch.Generator().manual_seed(seed)
    parameters = inspect.signature(model.forward).parameters
    needed = [
        name
        for name, one in parameters.items()
        if one.default is inspect.Parameter.empty and name in SHAPES
    ]
    return {name: torch.randn(SHAPES[name](model.config), generator=generator) for name in needed}


def encoder_inputs(model: Any, seed: int = 0) -> Tensors:
    """Return what the encoder of a model reads, for one row, by the name of its main input.

    Raises: KeyError for a main input that nothing is known of.
    """
    generator = torch.Generator().manual_seed(seed)
    name = getattr(model.get_encoder(), "main_input_name", "input_ids")
    name = model.main_input_name if name == "input_ids" else name
    if name in ("input_ids", "decoder_input_ids"):
        ids = torch.randint(*TEXT_IDS, (1, SOURCE_TOKENS), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **_boxes(model)}
    return {name: torch.randn(SHAPES[name](model.config), generator=generator)}


def _boxes(model: Any) -> Tensors:
    """Return where the words of a document lie, where the model wants to know."""
    wanted = "bbox" in inspect.signature(model.forward).parameters
    return {"bbox": torch.rand(1, SOURCE_TOKENS, 4)} if wanted else {}


def _features(config: Any) -> tuple[int, ...]:
    """Return the shape of log-mel features: [1, bins, frames] for whisper's kind, else [1, frames, bins]."""
    encoder = next(
        (vars(config)[name] for name in ("audio_config", "encoder_config") if name in vars(config)),
        config,
    )
    names = ("num_mel_bins", "input_feat_per_channel", "feature_size")
    bins = next(getattr(encoder, name) for name in names if hasattr(encoder, name))
    if config.model_type == "whisper":
        return (1, bins, 2 * config.max_source_positions)
    return (1, FRAMES, bins)


def _pixels(config: Any) -> tuple[int, ...]:
    vision = getattr(config, "vision_config", getattr(config, "encoder", config))
    size = vision.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return (1, getattr(vision, "num_channels", 3), height, width)


def _patches(config: Any) -> tuple[int, ...]:
    """Return the shape of flattened patches, each with its row and column in front."""
    return (1, 20, config.vision_config.patch_embed_hidden_size + 2)


SHAPES = {
    "input_features": _features,
    "input_values": lambda config: (1, 4000),
    "pixel_values": _pixels,
    "flattened_patches": _patches,
}
