"""Read what a model caches off the model's own code, run without weights on torch's meta device."""

import copy
from collections.abc import Mapping
from typing import Any

import torch

from ..cache.model_shape import decoder_config, is_encoder_decoder
from ..errors import UnsupportedModelError
from ..field_names import POSITIONS, first, read
from ..notices import say_once
from ..printable import short
from . import meta_model, tracing
from .cached_layers import read_cache
from .fields import inventory_of_fields
from .inventory import CachedLayer, Inventory
from .weights import Weights, count_weights

# a model is run with this dtype, so that states that are float32 whatever the model's dtype show
_RUN_DTYPE = torch.bfloat16
DEFAULT_DTYPE = "bfloat16"
# families whose configs say is_decoder=False unless they were made to generate text
ENCODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie"),
    *("megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)


def probe(
    config: Any, *, name: str, source: str, dtype: torch.dtype | str | None = None
) -> Inventory:
    """Return what a model of this config keeps in its cache, and what its weights take.

    The model is built without weights and run for three tokens with a DynamicCache; `config` is not changed. Where
    its code cannot run that way, the names of its config are read instead (`Inventory.how` is "fields", a note has
    the reason, and it is said once).

    Args:
        config: a transformers model config.
        name: of the model, for people.
        source: where the config comes from.
        dtype: of weights and cache; None: the config's, or bfloat16 (with a note) where it has none.

    Raises:
        UnsupportedModelError: encoder-decoder models, models without a cache of transformers, and caches that an
            Inventory cannot describe.
    """
    text = decoder_config(config)
    if is_encoder_decoder(config) or is_encoder_decoder(text):
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) is an encoder-decoder model, with a second cache for its encoder's "
            "output; plans are for decoders"
        )
    if config.model_type in ENCODERS and not config.is_decoder:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) is an encoder (its config has no is_decoder=true): it generates no text, and "
            "keeps no cache"
        )
    own, assumed = resolve_dtype(config, dtype)
    given = {
        "name": name,
        "model_type": config.model_type,
        "dtype": own,
        "max_positions": first(text, POSITIONS),
        "source": source,
    }
    try:
        with meta_model.quiet(), tracing.registered():
            layers, weights, notes = _look(config, name)
    except UnsupportedModelError:
        raise
    except Exception as error:
        # whatever a model's code raises: it was not written to run without weights
        reason = f"{type(error).__name__}: {_first_line(error)}"
        return _by_names(config, given, reason).with_note(*assumed)
    return Inventory(
        **given,
        layers=layers,
        parameters=weights.parameters,
        expert_parameters=weights.expert_parameters,
        experts=weights.experts,
        experts_per_token=weights.experts_per_token,
        notes=(*assumed, *notes, *weights.notes),
    )


def resolve_dtype(config: Any, dtype: torch.dtype | str | None) -> tuple[str, tuple[str, ...]]:
    """Return the dtype of weights and cache as "bfloat16", and a note where nobody names one: then it is bfloat16."""
    found = named_dtype(config, dtype)
    if found is not None:
        return found, ()
    return DEFAULT_DTYPE, (
        f"its config names no dtype: weights and cache are taken to be {DEFAULT_DTYPE}",
    )


def named_dtype(config: Any, dtype: torch.dtype | str | None) -> str | None:
    """Return `dtype`, else the one in a config or its dict, as "bfloat16"; None where neither names one.

    Raises: UnsupportedModelError for names of no floating-point dtype.
    """
    values = [dtype]
    for part in (config, read(config, "text_config")):
        # transformers' configs answer the old name with a warning, and have the new one
        names = ("dtype", "torch_dtype") if isinstance(part, Mapping) else ("dtype",)
        values += [read(part, name) for name in names]
    found = next((value for value in values if value not in (None, "auto")), None)
    if found is None:
        return None
    own = getattr(torch, found.removeprefix("torch."), None) if isinstance(found, str) else found
    if not isinstance(own, torch.dtype) or not own.is_floating_point:
        raise UnsupportedModelError(
            f"dtype must be a floating-point dtype of torch, as 'bfloat16', got {short(found)}"
        )
    return str(own).removeprefix("torch.")


def _look(config: Any, name: str) -> tuple[tuple[CachedLayer, ...], Weights, list[str]]:
    """Build and run the model; attention without a mask, with one, and the model's own: the first that works."""
    own = copy.deepcopy(config)
    own.__dict__.pop(
        "quantization_config", None
    )  # says how weights are stored, and wants its library
    notes: list[str] = []
    if meta_model.model_kind(own) is None:
        own, notes = _text_part(own, name, "no class of transformers generates text from all of it")
    failed: Exception | None = None
    for attention in (tracing.ATTENTION, tracing.MASKED_ATTENTION, "eager"):
        try:
            try:
                model = meta_model.build(own, _RUN_DTYPE, attention)
            except ImportError as error:  # of a vision tower
                own, notes = _text_part(own, name, _first_line(error))
                model = meta_model.build(own, _RUN_DTYPE, attention)
            cache, reads = _run(model, name)
        except UnsupportedModelError:
            raise
        except Exception as error:
            failed = error
            continue
        layers, more = read_cache(cache, reads, model.config, dtype=_RUN_DTYPE)
        if not any(layer.elements or layer.states for layer in layers):
            raise UnsupportedModelError(
                f"{name} ({config.model_type}) keeps nothing in a cache of transformers"
            )
        return layers, count_weights(model), notes + more
    assert failed is not None
    raise failed


def _run(model: Any, name: str) -> tuple[Any, tracing.Reads]:
    try:
        return meta_model.run(model)
    except UnsupportedModelError:
        raise
    except Exception as error:
        # names are read next, which would take it for attention
        if not any("attention" in type(module).__name__.lower() for module in model.modules()):
            raise UnsupportedModelError(
                f"{name} ({model.config.model_type}) has no attention, and keeps its state in no cache of "
                f"transformers ({type(error).__name__}: {_first_line(error)})"
            ) from error
        raise


def _text_part(config: Any, name: str, reason: str) -> tuple[Any, list[str]]:
    text = decoder_config(config)
    if text is config or meta_model.model_kind(text) is None:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}): transformers has no class that generates text from this config ({reason})"
        )
    return text, [f"weights are those of the language model alone: {reason}"]


def _by_names(config: Any, given: dict[str, Any], reason: str) -> Inventory:
    name = given["name"]
    try:
        found = inventory_of_fields(config.to_dict(), **given)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) cannot be run without weights ({reason}), and the names of its config do "
            f"not say enough: {error}"
        ) from error
    note = (
        f"its code cannot be run without weights ({reason}); names of its config were read instead"
    )
    say_once(f"planner fields {name} {reason}", f"kv_hf: {name}: {note}")
    return found.with_note(note)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")[:200].strip()
