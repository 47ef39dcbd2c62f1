"""Tiny random models with an encoder, of text, sound or images, and what they read: no download, a few milliseconds each."""

from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from measure.family_models import build_model, overrides
from measure.family_operations import other_inputs

FAMILIES = ("t5", "umt5", "bart", "m2m_100", "t5gemma")
# their encoders add masks to scores by themselves, which asks for the masks of eager attention
OWN_MASKS = ("longt5", "bigbird_pegasus")
# what decoders attend to beside a text: sound, an image, and the states of another kind of model
OTHERS = {
    "whisper": "seq2seq",
    "encoder-decoder": "seq2seq",
    "vision-encoder-decoder": "conditional",
}
ROWS, LENGTH, IMAGE = 2, 60, 199
# family -> changes of its configs, by model_type
CHANGES: dict[str, dict[str, Any]] = {
    "t5": {"t5": {"d_kv": 32}},  # heads do not add up to d_model
    "bart": {"bart": {"encoder_attention_heads": 2}},
    "whisper": {"whisper": {"max_source_positions": 50, "num_mel_bins": 16}},
    "vision-encoder-decoder": {"vit": {"patch_size": 4}},
    "llava": {"llama": {"num_key_value_heads": 2}},
    "mllama": {
        "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        "mllama_vision_model": {"patch_size": 16, "intermediate_layers_indices": [0]}
        | {"max_num_tiles": 2, "supported_aspect_ratios": [[1, 1], [1, 2]]}
        | {"vision_output_dim": 128},
    },
}


def make_model(family: str, role: str = "seq2seq") -> Any:
    """Return a fresh random model; the same weights for the same family."""
    with patch.dict(overrides()["changes"], CHANGES.get(family, {})):
        return build_model(family, role)


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


def make_other(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model of OTHERS, and what its encoder reads: two rows."""
    model, generator = make_model(name, OTHERS[name]), torch.Generator().manual_seed(0)
    rows = [other_inputs(model, generator) for _ in range(2)]
    return model, {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


# -- images in the prompt of a decoder-only model ------------------------------------------------------------


def prompt(first: int, count: int) -> dict[str, torch.Tensor]:
    """Return ids [2, 60] with `count` image tokens from column `first` on, the second row padded on the left."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, :2], mask[1, :2] = 0, 0
    ids[:, first : first + count] = IMAGE
    return {"input_ids": ids, "attention_mask": mask}


def llava(model: Any) -> dict[str, torch.Tensor]:
    return {**prompt(3, 4), "pixel_values": torch.randn(ROWS, 3, 32, 32)}


def qwen2_vl(model: Any) -> dict[str, torch.Tensor]:
    given = prompt(4, 4)
    given["input_ids"][:, 3] = model.config.vision_start_token_id
    given["input_ids"][:, 8] = model.config.vision_end_token_id
    return {
        **given,
        "mm_token_type_ids": (given["input_ids"] == IMAGE).int(),
        "pixel_values": torch.randn(ROWS * 16, 3 * 2 * 14**2),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * ROWS),
    }


def mllama(model: Any) -> dict[str, torch.Tensor]:
    for name, parameter in model.named_parameters():
        if "gate" in name and parameter.numel() == 1:
            parameter.data.fill_(0.7)  # nearly closed at first, so that images would not count
    seen = torch.ones(ROWS, LENGTH, 1, 2, dtype=torch.long)
    seen[:, :3] = 0
    return {
        **prompt(3, 1),
        "pixel_values": torch.randn(ROWS, 1, 2, 3, 32, 32),
        "aspect_ratio_ids": torch.ones(ROWS, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.tensor([[[1, 0]]] * ROWS),
        "cross_attention_mask": seen,
    }


MODELS = {"llava": llava, "qwen2_vl": qwen2_vl, "mllama": mllama}


def make(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a tiny model and the arguments of generate() for two prompts with an image each."""
    model = make_model(name, "conditional")
    torch.manual_seed(0)
    return model, MODELS[name](model)
