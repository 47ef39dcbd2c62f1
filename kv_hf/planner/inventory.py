"""All facts that a plan needs of a model: its cache, layer by layer, the bytes of its weights, and one device's share of them."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from ..checks import check_int
from ..errors import CacheOptionError

COUNTER = torch.int64.itemsize  # bytes of a layer's number that lives in a tensor
SLIDING = ("DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
# projections by which a tensor parallel plan shows whether it cuts keys and values by heads
_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv")


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
        return math.prod(self.shape) * _itemsize(self.dtype, dtype)


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

    @property
    def elements(self) -> int:
        """Numbers of keys and values per token."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    def index_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the indexer's keys per token, in a cache of `dtype`."""
        return self.index_dim * _itemsize(self.index_dtype, dtype)

    @property
    def position_bytes(self) -> int:
        """Bytes of the indexer's positions per token."""
        return self.index_positions * torch.int64.itemsize

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one row of what does not grow."""
        return sum(state.nbytes(dtype) for state in self.states)


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
        weight_bytes: of the checkpoint, where that is not one number of `dtype` for each of `parameters` (quantized).
        notes: what a reader of these figures has to know beside them, as sentences.
        config: transformers' config of the model, by which a real cache is made; None for an inventory made by hand.
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
    weight_bytes: int | None = None
    notes: tuple[str, ...] = ()
    config: Any = field(default=None, repr=False, compare=False)

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


def _itemsize(name: str | None, dtype: torch.dtype) -> int:
    own: torch.dtype = dtype if name is None else getattr(torch, name)
    return own.itemsize


def cut_heads(model_type: str) -> bool | None:
    """Say whether transformers' tensor parallel plan of a family cuts keys and values by heads; None: there is no plan."""
    known = model_type in CONFIG_MAPPING
    kind = CONFIG_MAPPING[model_type] if known else None  # it is lazy: get() finds nothing
    text = getattr(kind, "sub_configs", {}).get("text_config")
    plans = (getattr(one, "base_model_tp_plan", None) for one in (kind, text))
    plan = next(filter(None, plans), None)
    if plan is None:
        return None
    styles = {style for name, style in plan.items() if name.split(".")[-1] in _PROJECTIONS}
    return bool(styles & {"colwise", "packed_colwise"})


def device_share(inventory: Inventory, degree: int) -> tuple[Inventory, list[str]]:
    """Return what one of `degree` devices holds, as an inventory of its own, and notes about what was assumed.

    transformers cuts a model by the tensor parallel plan of its config class. Where the plan cuts the projections of keys
    and values by heads, a device caches its heads; otherwise every device caches all. Latents, indexer keys and states of
    linear attention are whole on every device.

    Raises: CacheOptionError where kv heads do not divide.
    """
    check_int("tensor_parallel", degree, 1)
    if degree == 1:
        return inventory, []
    layers, family, notes = inventory.layers, inventory.model_type, []
    heads = sorted({layer.kv_heads for layer in layers if layer.kv_heads and not layer.latent})
    cut = cut_heads(family)
    if heads and cut is not False:
        if any(count % degree for count in heads):
            common = math.gcd(*heads)
            fits = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
            raise CacheOptionError(
                f"tensor_parallel={degree} does not divide the {' and '.join(map(str, heads))} kv heads of "
                f"{inventory.name}; these do: {fits}"
            )
        layers = tuple(
            layer if layer.latent else replace(layer, kv_heads=layer.kv_heads // degree)
            for layer in layers
        )
        assumed = f" (an assumption: transformers has no tensor parallel plan for {family})"
        notes.append(f"a device holds 1/{degree} of the kv heads{assumed * (cut is None)}")
    elif heads:
        notes.append(
            f"every device holds all kv heads: transformers' tensor parallel plan of {family} does not cut them"
        )
    if any(layer.latent or layer.index_dim or layer.states for layer in layers):
        notes.append("latents, indexer keys and states are whole on every device")
    notes.append(
        f"weights are taken as 1/{degree}; transformers keeps embeddings and norms whole, and attention where its plan "
        "leaves it alone"
    )
    counts = {
        name: getattr(inventory, name)
        for name in ("parameters", "expert_parameters", "weight_bytes")
    }
    shares = {name: count and -(-count // degree) for name, count in counts.items()}
    return replace(inventory, layers=layers, **shares), notes
