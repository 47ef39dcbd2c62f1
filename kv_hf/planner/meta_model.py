"""The layers of a model's cache and its weights, read off one forward of the model on torch's meta device.

Decides what a layer holds and who reads it. Knows no cache but the DynamicCache that the model fills, and no bytes.
"""

import copy
import inspect
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import DynamicCache

from ..cache.model_shape import CACHE, decoder_config, is_dummy, kept_layers, latent_ranks
from ..errors import UnsupportedModelError, first_line
from ..model_fields import EXPERTS, EXPERTS_PER_TOKEN, first, read
from .inventory import CachedLayer, State

ROWS, TOKENS = 2, 3
# a model is run with this dtype, so that states that are float32 whatever the model's dtype show
DTYPE = torch.bfloat16
# in this order: what people load to generate text with
_KINDS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
# one vector per token beside keys and values: transformers' DynamicIndexedLayer, and MiniMax-M3's own
_INDEX_KEYS = ("indexer_keys", "idx_keys")
_INDEX_POSITIONS = "indexer_position_ids"
_STATES = ("conv_states", "recurrent_states")
# what else layers hold: numbers of transformers' own, the same for every model and row
_COUNTERS = ("_sliding_window_tensor", "cumulative_length")
_KNOWN = {"keys", "values", *_STATES, *_INDEX_KEYS, _INDEX_POSITIONS, *_COUNTERS}
# one model at a time: Python's warning filters, and torch's default dtype while a model is built, are the process's
_lock = threading.RLock()


@contextmanager
def quiet() -> Iterator[None]:
    """Run alone, and keep what transformers says about slow paths from the user: nothing is computed here."""
    with _lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        try:
            yield
        finally:
            transformers.logging.set_verbosity(before)


def look(config: Any, name: str) -> dict[str, Any]:
    """Return `layers`, `parameters`, `expert_parameters`, `experts`, `experts_per_token` and `notes` of an Inventory.

    The model is built without weights and run for three tokens with a DynamicCache; `config` is not changed.

    Raises: UnsupportedModelError for models without a cache of transformers, and caches that an Inventory cannot
        describe; whatever the model's code raises where it cannot run without weights.
    """
    own = copy.deepcopy(config)
    # says how weights are stored, and wants its library
    own.__dict__.pop("quantization_config", None)
    notes: list[str] = []
    if model_kind(own) is None:
        own, notes = _text_part(own, name, "no class of transformers generates text from all of it")
    with quiet():
        try:
            model, cache = _run(own, name)
        except ImportError as error:  # of a vision tower
            own, notes = _text_part(own, name, first_line(error))
            model, cache = _run(own, name)
    layers, more = _layers(cache, decoder_config(model.config))
    if not any(layer.elements or layer.states for layer in layers):
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) keeps nothing in a cache of transformers"
        )
    return {**_weights(model), "layers": layers, "notes": [*notes, *more]}


# -- the model ------------------------------------------------------------------------------------------------


def model_kind(config: Any) -> Any:
    """Return the auto class that builds a model which generates text from `config`, None where none does."""
    kinds = (getattr(transformers, name, None) for name in _KINDS)
    return next((k for k in kinds if k is not None and type(config) in k._model_mapping), None)


def _text_part(config: Any, name: str, reason: str) -> tuple[Any, list[str]]:
    text = decoder_config(config)
    if text is config or model_kind(text) is None:
        raise UnsupportedModelError(
            f"{name} ({config.model_type}): transformers has no class that generates text from this config ({reason})"
        )
    return text, [f"weights are those of the language model alone: {reason}"]


def _run(config: Any, name: str) -> tuple[Any, Any]:
    """Return the model of a copy of `config`, built without numbers, and its cache after a forward of 2 rows of 3 tokens.

    The cache is a DynamicCache, or one of the model's own class where it takes no other.
    """
    own = copy.deepcopy(config)
    with torch.device("meta"):
        # attention in plain torch: a kernel's own code may ask for a device
        options = {"attn_implementation": "eager", "dtype": DTYPE}
        model = model_kind(own).from_config(own, **options).eval()
    takes = inspect.signature(model.forward).parameters
    argument = CACHE if CACHE in takes else "cache_params"
    if argument not in takes:
        raise UnsupportedModelError(f"{type(model).__name__} takes no cache of transformers")
    cache: Any = DynamicCache(config=model.config)
    try:
        with torch.device("meta"), torch.no_grad(), _NoNumbers():
            ids = torch.zeros(ROWS, TOKENS, dtype=torch.long, device="meta")
            try:
                model(input_ids=ids, use_cache=True, **{argument: cache})
            except ValueError as error:
                if "cache of its own" not in str(error):  # MiniMax
                    raise
                cache = getattr(model(input_ids=ids, use_cache=True), argument)
        return model, cache
    except Exception as error:
        if any("attention" in type(module).__name__.lower() for module in model.modules()):
            raise
        raise UnsupportedModelError(
            f"{name} ({model.config.model_type}) has no attention, and keeps its state in no cache of "
            f"transformers ({type(error).__name__}: {first_line(error)})"
        ) from error


# -- numbers that tensors of the meta device do not have ------------------------------------------------------------


class _NoNumbers(TorchFunctionMode):
    """Has a model run on the meta device: what asks for numbers (which tokens chose an expert?) is computed of zeros instead.

    The shapes of a cache do not depend on them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch._is_all_true:  # torch.distributions checks its arguments
            return True
        try:
            return func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # torch says either
            args, kwargs = tree_map_only(torch.Tensor, _zeros, (args, kwargs))
        found = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), found)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")


def _tensors(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)]


# -- the layers of its cache ----------------------------------------------------------------------------------------


def _layers(cache: Any, config: Any) -> tuple[tuple[CachedLayer, ...], list[str]]:
    """Return the layers of a cache, and notes about them."""
    count = len(cache.layers)
    ranks, readers = latent_ranks(config, count), _readers(config, count)
    linear = getattr(cache, "linear_cache", [])  # MiniMaxCache
    layers = tuple(
        _layer(layer, index, linear[index : index + 1], ranks[index], readers[index])
        for index, layer in enumerate(cache.layers)
    )
    notes = []
    uncached = layers.count(CachedLayer(cache_class="LinearAttentionLayer"))
    if uncached:
        notes.append(
            f"{uncached} layers keep their states in the model, not in its cache: not counted"
        )
    kept = kept_layers(config)
    notes += [f"{len(kept)} layers are not counted: {reason}" for reason in set(kept.values())]
    return layers, notes


def _readers(config: Any, count: int) -> list[int]:
    """Return how many layers of the model read each layer of its cache; those that store nothing read one of their kind."""
    sources = read(config, "kv_source_layers")  # Mistral Large 4 says which
    if sources is None:
        types = read(config, "layer_types") or [None] * count
        last: dict[Any, int] = {}  # kind of a layer -> the one that others of its kind read
        sources = []
        for index, mode in enumerate(read(config, "kv_sharing_modes") or ()):
            sources.append(last.get(types[index], index) if mode == "reuse" else index)
            if mode == "store":
                last[types[index]] = index
    return [max(1, sources.count(index)) for index in range(count)]


def _layer(layer: Any, index: int, linear: Any, rank: int | None, readers: int) -> CachedLayer:
    """Return what a layer holds. Raises UnsupportedModelError where a CachedLayer cannot say it."""
    at = f"layer {index} of its cache ({type(layer).__name__})"
    if is_dummy(layer):
        return CachedLayer(cache_class=type(layer).__name__)
    held = {name: _tensors(value) for name, value in vars(layer).items()}
    strange = [name for name, tensors in held.items() if tensors and name not in _KNOWN]
    if strange:
        raise UnsupportedModelError(f"{at} holds {strange[0]}, whose size a plan does not know")
    states = [tensor for name in _STATES for tensor in held.get(name, ())]
    if any(tensor.shape[0] != ROWS for tensor in states):
        raise UnsupportedModelError(f"{at} holds states that do not begin with the {ROWS} rows")
    given: dict[str, Any] = {
        "cache_class": type(layer).__name__,
        "states": tuple(
            State(tuple(t.shape[1:]), _dtype(t)) for t in (*states, *_tensors(list(linear)))
        ),
    }
    for key in (tensor for name in _INDEX_KEYS for tensor in held.get(name, ())):
        positions = held.get(_INDEX_POSITIONS)
        given["index_dim"] = key.numel() // (ROWS * TOKENS)
        given["index_dtype"] = _dtype(key)
        given["index_positions"] = positions[0].shape[0] if positions else 0
    found = [held[name][0] for name in ("keys", "values") if held.get(name)]
    if not found or not found[0].numel():
        return CachedLayer(**given)
    for tensor in found:
        wrong = tensor.dim() != 4 or (tensor.shape[0], tensor.shape[2]) != (ROWS, TOKENS)
        if tensor.numel() and (wrong or tensor.dtype != DTYPE):
            raise UnsupportedModelError(
                f"{at} holds keys or values of shape {list(tensor.shape)} and {tensor.dtype} for {ROWS} rows of {TOKENS} "
                f"tokens; expected [{ROWS}, heads, {TOKENS}, head_dim] in the model's dtype"
            )
    keys, values = found
    return CachedLayer(
        **given,
        kv_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        latent=rank is not None and keys.shape[1] == 1 and keys.shape[3] == rank,
        window=getattr(layer, "sliding_window", None),
        readers=readers,
    )


def _dtype(tensor: torch.Tensor) -> str | None:
    return None if tensor.dtype == DTYPE else str(tensor.dtype).removeprefix("torch.")


# -- its weights ------------------------------------------------------------------------------------------------------


def _weights(model: Any) -> dict[str, Any]:
    """Count the parameters of a model, tied ones once, and those of routed experts."""
    config = decoder_config(model.config)
    named = dict(model.named_parameters())
    stated = first(config, EXPERTS) or 0
    experts = [
        p
        for name, p in named.items()
        if re.search(r"(^|\.)experts\.", name) or (p.ndim == 3 and p.shape[0] == stated > 1)
    ]
    lists = (
        len(module)
        for name, module in model.named_modules()
        if name.endswith(".experts") and isinstance(module, (nn.ModuleList, nn.ModuleDict))
    )
    count = max(lists, default=0)
    count = count or max((p.shape[0] for p in experts if p.ndim == 3), default=stated)
    return {
        "parameters": sum(p.numel() for p in named.values()),
        "expert_parameters": sum(p.numel() for p in experts),
        "experts": count if experts else 0,
        "experts_per_token": (first(config, EXPERTS_PER_TOKEN) or 0) if experts else 0,
    }
