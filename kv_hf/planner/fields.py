"""Facts about a cache from the names in a config alone: for models whose code cannot be run here."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import UnsupportedModelError
from ..field_names import (
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    POSITIONS,
    first,
)
from .inventory import CachedLayer, Inventory

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
# names under which configs keep parts of attention
_NESTED = ("attn_config",)
_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_KINDS = (_FULL, _SLIDING, _CHUNKED, "indexed_attention")
# starts of names of configs whose layers are not all plain attention
_OTHER_LAYERS = (
    "mamba",
    "ssm_",
    "linear_",
    "conv_",
    "rwkv",
    "wkv",
    "lru_",
    "state_size",
    "block_configs",
    "layers_block_type",
    "block_types",
    "hybrid_",
    "attn_layer_",
    "full_attn_idxs",
    "cross_attention_layers",
    "compress_r",
)


def inventory_of_fields(
    config: Mapping[str, Any],
    *,
    name: str,
    model_type: str,
    dtype: str,
    source: str,
    max_positions: int | None = None,
) -> Inventory:
    """Return an Inventory from the names of a config.json: plain attention, MLA, sliding windows.

    Parameters are not known from names (None).

    Raises: UnsupportedModelError for a name that is missing, with those that are there, and for configs that speak of
    other layers than attention.
    """
    own = language_part(config)
    if config.get("is_encoder_decoder") or own.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; plans are for decoders")
    _refuse_other_layers(own, name)
    count = _need(own, LAYERS, name, "the number of layers")
    layers = [_layer(own, name, index, count) for index in range(count)]
    notes = []
    if layers[0].latent:
        notes.append(
            "latents are taken to be cached, as transformers does; other code may expand them"
        )
    experts = first(own, EXPERTS) or 0
    per_token = min(first(own, EXPERTS_PER_TOKEN) or 0, experts)
    if experts > 1:
        notes.append("the weights of experts are not told apart from the others")
    return Inventory(
        name=name,
        model_type=model_type,
        dtype=dtype,
        layers=tuple(_shared(own, layers, [_kind(own, i, count, name) for i in range(count)])),
        experts=experts if experts > 1 else 0,
        experts_per_token=per_token if experts > 1 else 0,
        max_positions=max_positions or first(own, POSITIONS),
        source=source,
        how="fields",
        notes=tuple(notes),
    )


def language_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the names of a config's language model, those of its attention among them."""
    part = next((config[key] for key in TEXT_PARTS if isinstance(config.get(key), dict)), config)
    own = dict(part)
    for key in _NESTED:
        if isinstance(own.get(key), dict):
            own = {**own[key], **own}
    return own


def _refuse_other_layers(own: Mapping[str, Any], name: str) -> None:
    kinds = set(own.get("layer_types") or ()) - set(_KINDS)
    names = sorted(key for key in own if key.startswith(_OTHER_LAYERS) and own[key])
    if kinds or names:
        raise UnsupportedModelError(
            f"{name}: not all layers of its config are plain attention ({', '.join([*sorted(kinds), *names])}), and "
            "the names of its fields do not say what these layers cache"
        )


def _need(own: Mapping[str, Any], names: tuple[str, ...], name: str, what: str) -> int:
    value = first(own, names)
    if value is None:
        raise UnsupportedModelError(
            f"{name}: its config does not say {what}: none of {', '.join(names)} is a number above 0 there; it has "
            f"{', '.join(sorted(own)) or 'no names at all'}"
        )
    return value


def _layer(own: Mapping[str, Any], name: str, index: int, count: int) -> CachedLayer:
    heads = _heads(_at(own, index, count), name)
    kind = _kind(own, index, count, name)
    window = None
    if kind == _SLIDING:
        window = _need(own, ("sliding_window", "window_size"), name, "its sliding window")
    elif kind == _CHUNKED:
        window = _need(own, ("attention_chunk_size",), name, "the size of its chunks")
    cache_class = "DynamicLayer" if window is None else "DynamicSlidingWindowLayer"
    given: dict[str, Any] = {"window": window, "query_heads": heads, "cache_class": cache_class}
    rank = own.get("kv_lora_rank")
    if rank:
        rope = own.get("qk_rope_head_dim")
        if not isinstance(rope, int) or isinstance(rope, bool):
            raise UnsupportedModelError(
                f"{name}: its config has kv_lora_rank, but no qk_rope_head_dim"
            )
        sizes = {"kv_heads": 1, "key_dim": rank, "value_dim": rope, "latent": True}
        return CachedLayer(**{**given, **_index(own, index, given), **sizes})
    at = _at(own, index, count)
    dim = first(at, HEAD_DIM)
    if dim is None:
        hidden = _need(at, HIDDEN, name, "the width of a head (head_dim), or of a token")
        if hidden % heads:
            raise UnsupportedModelError(
                f"{name}: its config has no head_dim, and {hidden} channels do not divide into {heads} heads"
            )
        dim = hidden // heads
    return CachedLayer(
        **given,
        kv_heads=_kv_heads(at, heads),
        key_dim=dim,
        value_dim=first(at, ("v_head_dim",)) or dim,
    )


def _at(own: Mapping[str, Any], index: int, count: int) -> Mapping[str, Any]:
    """Return the names as one layer has them: a list with an entry per layer gives its own."""
    names = (*HEADS, *KV_HEADS, *HEAD_DIM, "v_head_dim")
    lists = {
        key: own[key][index]
        for key in names
        if isinstance(own.get(key), list) and len(own[key]) == count
    }
    return {**own, **lists}


def _heads(own: Mapping[str, Any], name: str) -> int:
    return _need(own, HEADS, name, "the number of query heads")


def _kv_heads(own: Mapping[str, Any], heads: int) -> int:
    if own.get("multi_query_attention") is False:  # ChatGLM keeps the number of groups beside it
        return heads
    if own.get("multi_query") and not own.get("new_decoder_architecture"):  # Falcon, StarCoder
        return 1
    return first(own, KV_HEADS) or heads


def _index(own: Mapping[str, Any], index: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the indexer of sparse attention (DSA) adds to a layer with latents."""
    dim, kinds = own.get("index_head_dim"), own.get("indexer_types")
    if not isinstance(dim, int) or given["window"] is not None:
        return {}
    has_own = not (isinstance(kinds, list) and index < len(kinds) and kinds[index] == "shared")
    return {"cache_class": "DynamicIndexedLayer", "index_dim": dim if has_own else 0}


def _kind(own: Mapping[str, Any], index: int, count: int, name: str) -> str:
    kinds = own.get("layer_types")
    if isinstance(kinds, list):
        if len(kinds) != count:
            raise UnsupportedModelError(
                f"{name}: layer_types has {len(kinds)} entries for {count} layers"
            )
        return str(kinds[index])
    window = own.get("sliding_window")
    if not window or own.get("use_sliding_window") is False:
        return _CHUNKED if own.get("attention_chunk_size") else _FULL
    pattern = own.get("sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 0:  # each last one of so many is full
        return _SLIDING if (index + 1) % pattern else _FULL
    if isinstance(own.get("max_window_layers"), int):
        return _SLIDING if index >= own["max_window_layers"] else _FULL
    return _SLIDING


def _shared(
    own: Mapping[str, Any], layers: list[CachedLayer], kinds: list[str]
) -> list[CachedLayer]:
    """Let the last num_kv_shared_layers read the last layer of their kind before them."""
    shared = min(own.get("num_kv_shared_layers") or 0, len(layers))
    first_shared = len(layers) - shared
    for index in range(first_shared, len(layers)):
        owner = max((i for i in range(first_shared) if kinds[i] == kinds[index]), default=None)
        if owner is not None:
            layers[owner] = replace(layers[owner], readers=layers[owner].readers + 1)
            layers[index] = CachedLayer(cache_class="DummyLayer")
    return layers
