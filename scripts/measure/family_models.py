"""Build a tiny random model of every family of transformers, from the defaults of its config shrunk by the names of fields.

A family is a config class of one of the mappings of transformers' auto classes; its name is its model_type. The rules,
and what they cannot know of a family, are in family_overrides.toml.
"""

import copy
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

# role -> mappings; a family that several name is walked in the first role that names its class
ROLES: dict[str, tuple[str, ...]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING",),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"),
    "conditional": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING"),
}
WEIGHT_STD = 0.12  # wider than the default, so that attention is not uniform
ONE_DIMENSION_STD = 0.05  # biases, norms and gates, many of which begin at zero
VOCABULARY, HEADS = 200, 4
TEXT_IDS = (3, 150)  # ids of prompts; special ids of a config move to those above
DERIVED = "(derived)"
# options of generate() in place of a family's own
GREEDY = {
    "eos_token_id": None,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "do_sample": False,
    "num_beams": 1,
    "max_length": None,
    "cache_implementation": None,
    "use_cache": True,
}
Options = dict[str, Any]
QUERY_HEADS, KV_HEADS = "query heads", "kv heads"
SPECIAL_ID = re.compile(r"\w*token_(id|index|ids)|\w+_token")
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")


@cache
def overrides() -> Options:
    """Return "rules" and the tables "changes" and "first" of family_overrides.toml, shared options put in."""
    text = Path(__file__).with_name("family_overrides.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)

    def whole(options: Any) -> Any:
        if not isinstance(options, dict):
            return options
        names = options.get("like", [])
        for name in [names] if isinstance(names, str) else names:
            options = {**whole(tables["shared"][name]), **options}
        return {name: whole(value) for name, value in options.items() if name != "like"}

    return {name: whole(tables[name]) for name in ("rules", "changes", "first")}


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


def build_config(family: str, role: str = "causal") -> Any:
    """Return a tiny config of a family: its defaults, shrunk, with the changes of the table of overrides.

    Raises: KeyError where the role has no such family.
    """
    config_class = CONFIG_MAPPING[family]
    changes = dict(overrides()["changes"])
    if role == "causal" and "is_decoder" in config_class.__dataclass_fields__:
        # an encoder's defaults have no cache; the mapping's class is its decoder
        changes[family] = {"is_decoder": True, **changes.get(family, {})}
    return shrink(config_class(**overrides()["first"].get(family, {})), changes)


def build_model(family: str, role: str = "causal", seed: int = 0) -> Any:
    """Return a tiny random model of a family in fp32, in evaluation mode; equal arguments give equal weights.

    Args:
        family: model_type of a config class of the role's mappings.
        role: causal, seq2seq or conditional.
    Raises: TypeError for a model that does not generate, and whatever a config or a model raises.
    """
    config = build_config(family, role)
    found = getattr(modeling_auto, families(role)[family])[CONFIG_MAPPING[family]]
    model_class = found[0] if isinstance(found, (tuple, list)) else found
    torch.manual_seed(seed)
    wanted = model_class.config_class
    if wanted is not None and not isinstance(config, wanted):
        text = config.get_text_config(decoder=True)
        config = text if isinstance(text, wanted) else config
    model = model_class._from_config(config, dtype=torch.float32).eval()
    if getattr(model, "generation_config", None) is None:
        raise TypeError(f"{type(model).__name__} does not generate")
    for parameter, noise in _noise(model, seed):
        if parameter.ndim > 1:
            parameter.copy_(WEIGHT_STD * noise)
        else:
            parameter.add_(ONE_DIMENSION_STD * noise)
    fix_generation(model)
    return model


def twin(model: Any) -> Any:
    """Return a copy of a model whose weights are a little off: a draft model that is right often, not always."""
    other = copy.deepcopy(model)
    for parameter, noise in _noise(other, seed=1):
        parameter.add_(0.02 * noise)
    other.generation_config.num_assistant_tokens = 4
    return other


def _noise(model: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        yield parameter.data, torch.randn(parameter.shape, generator=generator)


def fix_generation(model: Any) -> None:
    """Let generate() be greedy, never end early and use a cache, whatever the family's defaults are."""
    for part in (model.config, model.config.get_text_config(decoder=True)):
        if hasattr(part, "use_cache"):
            part.use_cache = True
    config = model.generation_config
    vars(config).update(GREEDY)
    if config.pad_token_id is None or config.pad_token_id < 0:
        config.pad_token_id = 0
    if model.config.is_encoder_decoder and config.decoder_start_token_id is None:
        # not the padding where there is another: without a cache T5Gemma hides every padding token that it is given
        start = config.bos_token_id
        config.decoder_start_token_id = config.pad_token_id if start is None else start


def shrink(config: Any, changes: Options) -> Any:
    """Return a tiny config of the class of `config`, a config of its defaults, sub-configs included.

    Args:
        changes: options by model_type (or the name of a config class) that take precedence; DERIVED leaves an option to the config.
    """
    options = shrunk_options(config, changes)
    for name in (config.model_type, type(config).__name__):  # some parts of a model have no type
        options |= changes.get(name, {})
    # by type first: configs of models whose layers differ do not compare themselves with a string
    for name, value in list(options.items()):
        if isinstance(value, str) and value == DERIVED:
            del options[name]
    return type(config)(**options)


def shrunk_options(config: Any, changes: Options) -> Options:
    """Return the options of the class of `config` with which it is tiny."""
    options: Options = {}
    # whose fields differ from the defaults of its class: those that the config it is a part of has given
    own = vars(type(config)()) if config.model_type not in overrides()["first"] else {}
    count, kept = kept_layers(config)
    special = iter(range(VOCABULARY - 1, TEXT_IDS[1], -1))
    fields = {field.name: field for field in dataclasses.fields(config)}
    # not by getattr(): some configs refuse to tell what differs between layers
    for name, value in vars(config).items():
        field = fields.get(name)
        if field is None:
            if is_config(value):  # a part that is no field (transformers 5.17)
                options[name] = shrink(value, changes).to_dict()
            continue
        if name.startswith("_") or not field.init:
            continue
        if is_config(value):  # which does not compare itself where its layers differ
            options[name] = shrink(value, changes)
            continue
        given = bool(own) and own.get(name) != value
        if isinstance(value, (list, tuple)) and kept and len(value) == vars(config)[count]:
            options[name] = [value[index] for index in kept]
        elif isinstance(value, int) and not isinstance(value, bool):
            small = _small(name, value, config, special)
            declared = field.default is not None  # None: derived from the others
            if given or (small != value and (declared or SPECIAL_ID.fullmatch(name))):
                options[name] = small
        elif isinstance(value, (str, bool, float)) and given:
            options[name] = value
    if kept:
        options[count] = len(kept)
    return options


def is_config(value: Any) -> bool:
    """Say whether a value is the config of a model or of a part."""
    return hasattr(value, "model_type") and dataclasses.is_dataclass(value)


def kept_layers(config: Any) -> tuple[str, list[int]]:
    """Return the field with the number of layers, and the layers that hold every kind there is; none without lists of kinds.

    Layers are of one kind when all lists of a layer's properties agree in them; one of the most frequent kind is
    kept twice, so that layers of a kind follow each other's lead.
    """
    own = {field.name: vars(config).get(field.name) for field in dataclasses.fields(config)}
    count = next((name for name in LAYER_COUNTS if isinstance(own.get(name), int)), "")
    lists = [value for value in vars(config).values() if _tells_kinds(value, own.get(count, 0))]
    if not lists:
        return count, []
    kinds = list(zip(*lists, strict=True))
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)][:6]
    most = max(dict.fromkeys(kinds), key=kinds.count)
    twice = [index for index, kind in enumerate(kinds) if kind == most and index not in kept]
    return count, sorted(kept + twice[:1])


def _tells_kinds(value: Any, layers: int) -> bool:
    if not isinstance(value, (list, tuple)) or len(value) != layers or layers <= 2:
        return False
    return all(isinstance(one, (str, bool, int)) for one in value) and len(set(value)) <= 4


def _small(name: str, value: int, config: Any, special: Iterator[int]) -> int:
    if SPECIAL_ID.fullmatch(name):
        common = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        return common.get(name, value if value < VOCABULARY else next(special))
    rules = overrides()["rules"]
    small = next((small for small, fields in rules if re.fullmatch(fields, name)), value)
    if small == QUERY_HEADS:
        return min(value, HEADS)
    if small == KV_HEADS:  # as many as queries have, or two: as the family's own proportion is
        queries = name.replace("_key_value", "_attention").replace("_kv_heads", "_heads")
        own = vars(config)
        full = own.get(queries.replace("num_global_", "num_")) or own.get("num_attention_heads")
        return min(value, 2 if isinstance(full, int) and value < full else HEADS)
    # positions and, where the defaults have fewer, the vocabulary of TEXT_IDS
    return small if name == "vocab_size" or small == 1024 else min(value, small)
