"""Build a tiny random model of a family, from the config's own defaults shrunk, or from its override.

A family is a config class of one of the mappings of transformers' auto classes; its name is its model_type.
"""

import copy
from functools import cache
from typing import Any

import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from measure.families.overrides import CHANGES, FIRST
from measure.families.shrink import shrink

# role -> mappings; a family that several name is walked in the first role that names its class
ROLES: dict[str, tuple[str, ...]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING",),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    "conditional": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING"),
}
WEIGHT_STD = 0.12  # wider than the default, so that attention is not uniform
ONE_DIMENSION_STD = 0.05  # biases, norms and gates, many of which begin at zero


@cache
def families(role: str) -> dict[str, str]:
    """Return the families of a role: model_type, and the name of the mapping that has its class.

    No module of a model is imported. Where several model types share a config class, the first stands for it.
    """
    found: dict[str, str] = {}
    seen: set[str] = set()
    for mapping in ROLES[role]:
        for model_type in getattr(modeling_auto, f"{mapping}_NAMES", {}):
            config_class = CONFIG_MAPPING_NAMES.get(model_type)
            if config_class is not None and config_class not in seen:
                seen.add(config_class)
                found[model_type] = mapping
    return found


def classes(family: str, role: str) -> tuple[Any, Any]:
    """Return the config class and the model class of a family. Raises KeyError where the role has no such family."""
    mapping = getattr(modeling_auto, families(role)[family])
    config_class = CONFIG_MAPPING[family]
    found = mapping[config_class]
    return config_class, found[0] if isinstance(found, (tuple, list)) else found


def build_config(family: str, role: str = "causal") -> Any:
    """Return a tiny config of a family: its defaults, shrunk, with the changes of the table of overrides."""
    config_class, _ = classes(family, role)
    changes = dict(CHANGES)
    if role == "causal" and "is_decoder" in config_class.__dataclass_fields__:
        # an encoder's defaults have no cache; the mapping's class is its decoder
        changes[family] = {"is_decoder": True, **changes.get(family, {})}
    return shrink(config_class(**FIRST.get(family, {})), changes)


def build_model(family: str, role: str = "causal", seed: int = 0, **options: Any) -> Any:
    """Return a tiny random model of a family in fp32, in evaluation mode; equal arguments give equal weights.

    Args:
        family: model_type of a config class of the role's mappings.
        role: causal, seq2seq or conditional.
        seed: of the weights.
        options: for the model's `_from_config`, such as attn_implementation.
    Raises: TypeError for a model that does not generate, and whatever a config or a model raises.
    """
    config = build_config(family, role)
    _, model_class = classes(family, role)
    torch.manual_seed(seed)
    wanted = model_class.config_class
    if wanted is not None and not isinstance(config, wanted):
        text = config.get_text_config(decoder=True)
        config = text if isinstance(text, wanted) else config
    model = model_class._from_config(config, dtype=torch.float32, **options).eval()
    if getattr(model, "generation_config", None) is None:
        raise TypeError(f"{type(model).__name__} does not generate")
    randomize(model, seed)
    settle_generation(model)
    return model


def randomize(model: Any, seed: int) -> None:
    """Give the weights a spread with which attention and gates do something."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(WEIGHT_STD * noise)
            else:
                parameter.add_(ONE_DIMENSION_STD * noise)


def settle_generation(model: Any) -> None:
    """Let generate() be greedy, never end early and use a cache, whatever the family's defaults are."""
    for part in {
        id(one): one for one in (model.config, model.config.get_text_config(decoder=True))
    }.values():
        if hasattr(part, "use_cache"):
            part.use_cache = True
    config = model.generation_config
    config.eos_token_id = config.forced_eos_token_id = config.forced_bos_token_id = None
    config.suppress_tokens = config.begin_suppress_tokens = None
    config.do_sample, config.num_beams, config.max_length = False, 1, None
    config.cache_implementation, config.use_cache = None, True
    if config.pad_token_id is None or config.pad_token_id < 0:
        config.pad_token_id = 0
    if model.config.is_encoder_decoder and config.decoder_start_token_id is None:
        # not the padding where there is another: without a cache T5Gemma hides every padding token that it is given
        start = config.bos_token_id
        config.decoder_start_token_id = config.pad_token_id if start is None else start


def twin(model: Any, seed: int = 1, noise: float = 0.02) -> Any:
    """Return a copy of a model whose weights are a little off: a draft model that is right often, not always."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return other
