"""All facts that a plan needs of a model: its cache, layer by layer, and the bytes of its weights."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch


@dataclass(frozen=True)
class State:
    """A tensor of a layer that does not grow: the state of linear attention, or the last inputs of a convolution.

    Attributes:
        shape: of one row of the batch.
        dtype: as "float32"; None is the dtype of the cache.
    """

    shape: tuple[int, ...]
    dtype: str | None = None

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row."""
        own = dtype if self.dtype is None else getattr(torch, self.dtype)
        return math.prod(self.shape) * int(own.itemsize)


@dataclass(frozen=True)
class CachedLayer:
    """One layer of a cache.

    Attributes:
        cache_class: transformers' class of the layer in a DynamicCache; DummyLayer holds nothing (the model's layer
            reads the keys and values of another one, or has no attention).
        kv_heads, key_dim, value_dim: of the keys and values that it holds per token; with latent attention one head,
            kv_lora_rank and qk_rope_head_dim. All 0 where it holds none.
        latent: whether keys and values are latents and RoPE keys (MLA).
        window: the sliding window or chunk of its config: a DynamicCache holds one token less at most, as the newest is
            a query; None: it holds all.
        index_dim: width of the keys of a sparse-attention indexer (DSA) beside them, one per token; else 0.
        index_dtype: of these keys, as "float32"; None is the dtype of the cache.
        index_positions: int64 numbers per token that an indexer keeps beside its keys (positions of images); else 0.
        states: tensors that do not grow.
        readers: layers of the model that attend to it in a step: more than 1 where others share its keys and values.
        query_heads: query heads of a reader.
    """

    cache_class: str = "DynamicLayer"
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    latent: bool = False
    window: int | None = None
    index_dim: int = 0
    index_dtype: str | None = None
    index_positions: int = 0
    states: tuple[State, ...] = ()
    readers: int = 1
    query_heads: int = 0

    @property
    def elements(self) -> int:
        """Numbers of keys and values per token."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    def index_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the indexer's keys per token, in a cache of `dtype`."""
        own = dtype if self.index_dtype is None else getattr(torch, self.index_dtype)
        return self.index_dim * int(own.itemsize)


@dataclass(frozen=True)
class Inventory:
    """The facts about memory in a model's config.

    Attributes:
        name: of the model, for people.
        model_type: transformers' name of the family.
        dtype: of weights and cache, as "bfloat16".
        layers: of the cache, in order.
        parameters: numbers of the model's weights, None where they are not known.
        expert_parameters: those of them that belong to routed experts, of which a token reads some.
        experts, experts_per_token: routed experts of a layer and how many a token takes; 0 without experts.
        max_positions: the context that the model was made for, None where its config does not say.
        source: where these figures come from: a folder, a hub id, a preset's source.
        how: "meta" when the model's own code was run without weights, "fields" when only names of a config were read.
        weight_bytes: of the checkpoint, where that is not one number of `dtype` for each of `parameters` (quantized).
        notes: what a reader of these figures has to know beside them, as sentences.
    """

    name: str
    model_type: str
    dtype: str
    layers: tuple[CachedLayer, ...]
    parameters: int | None = None
    expert_parameters: int = 0
    experts: int = 0
    experts_per_token: int = 0
    max_positions: int | None = None
    source: str = ""
    how: str = "meta"
    weight_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of weights and cache."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def stored_bytes(self) -> int | None:
        """Bytes of the weights, None where they are not known."""
        if self.weight_bytes is not None or self.parameters is None:
            return self.weight_bytes
        return self.parameters * self.torch_dtype.itemsize

    def with_note(self, *notes: str) -> "Inventory":
        """Return a copy with more notes."""
        return replace(self, notes=(*self.notes, *notes))

    def as_dict(self) -> dict[str, Any]:
        """Return what `from_dict` takes: JSON types; equal layers that follow each other are one entry with "count"."""
        runs = []
        for layer, group in itertools.groupby(self.layers):
            given = _without_defaults(layer)
            if layer.states:
                given["states"] = [
                    {**_without_defaults(state), "shape": list(state.shape)}
                    for state in layer.states
                ]
            runs.append({"count": len(list(group)), **given})
        found = {**asdict(replace(self, layers=())), "layers": runs, "notes": list(self.notes)}
        if self.weight_bytes is None:
            del found["weight_bytes"]
        return found

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Inventory":
        """Build it from what `as_dict` returned."""
        layers: list[CachedLayer] = []
        for run in given["layers"]:
            own = {name: value for name, value in run.items() if name != "count"}
            own["states"] = tuple(
                State(tuple(state["shape"]), state.get("dtype")) for state in run.get("states", ())
            )
            layers += [CachedLayer(**own)] * run["count"]
        notes = tuple(given.get("notes", ()))
        return cls(**{**given, "layers": tuple(layers), "notes": notes})


def _without_defaults(given: Any) -> dict[str, Any]:
    return {
        field.name: getattr(given, field.name)
        for field in fields(given)
        if getattr(given, field.name) != field.default
    }
