"""The cache that transformers sees: a DynamicCache whose full-attention layers live in pages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..config import CacheConfig, check_option_names
from ..errors import CacheMismatchError, CacheOptionError, UnsupportedModelError
from ..formats import ATTENTION_NAME
from ..kernels.choice import choose, layout_for
from ..pages.group import PageGroup
from ..spec import TABLE_DTYPE, MemoryReport
from .handle import view_behind, warn_dense
from .layer import PagedLayer, chosen_rows
from .model_shape import decoder_config, planned_specs, signature


class MaskLength(int):
    """A kv_length that knows its group, so that a mask function can tell the group of left padding."""

    group: PageGroup

    def __new__(cls, length: int, group: PageGroup) -> "MaskLength":
        """Make the length `length` that belongs to `group`."""
        self = super().__new__(cls, length)
        self.group = group
        return self


@dataclass(frozen=True)
class LayerReport:
    """How one layer of the model is cached: its formats, or why transformers' own layer was kept."""

    layer_idx: int
    kind: str
    keys: str | None
    values: str | None
    reason: str | None


class PagedCache(DynamicCache):
    """Keys and values in fixed-size pages, stored exactly or quantized.

        cache = kv_hf.PagedCache(model.config, keys="int8", values="int4", page_size=64)
        model.generate(**inputs, past_key_values=cache)

    Args:
        config: the model's config (`model.config`).
        keys, values: exact, fp8, int8, int4 or int2; `values` defaults to the format of `keys`.
        **options: the other fields of `kv_hf.CacheConfig`.
    Raises: CacheOptionError for a bad option, UnsupportedModelError for a model without full-attention layers.
    """

    def __new__(
        cls, config: Any = None, *, max_length: int | None = None, **options: Any
    ) -> "PagedCache":
        """Make the preallocated form where `max_length` asks for it."""
        if cls is PagedCache and max_length is not None:
            from .static_cache import StaticPagedCache

            cls = StaticPagedCache
        return super().__new__(cls)

    def __init__(
        self, config: Any, *, keys: str = "exact", values: str | None = None, **options: Any
    ) -> None:
        check_option_names(options)
        chosen = CacheConfig(keys=keys, values=keys if values is None else values, **options)
        self._build(config, chosen)

    @classmethod
    def from_implementation(
        cls, config: Any, implementation: str, options: Mapping[str, Any] | None = None
    ) -> "PagedCache":
        """Build the cache of `cache_implementation=implementation, cache_config=options`."""
        self = cls.__new__(cls, max_length=(options or {}).get("max_length"))
        self._build(config, CacheConfig.from_options(implementation, options))
        return self

    def _build(self, config: Any, options: CacheConfig) -> None:
        if options.max_length is not None:
            raise CacheOptionError(
                f"max_length={options.max_length}: {type(self).__name__} grows; use kv_hf.PagedCache itself"
            )
        decoder = decoder_config(config)
        super().__init__(config=decoder)
        self.options = options
        self._config = decoder
        self.model_signature = signature(decoder)
        self.group = PageGroup(
            options.page_size,
            options.sink_tokens,
            options.recent_tokens,
            options.max_pages,
            options.reserve_tokens,
        )
        schemes = [options.schemes(i, len(self.layers)) for i in range(len(self.layers))]
        planned_specs(decoder, schemes, options.page_size)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[index] = PagedLayer(index, self.group, *schemes[index], options.kernel)
        self._check_overrides()
        self._first_paged = min((layer.layer_idx for layer in self.paged_layers), default=0)
        if not self.paged_layers:
            kinds = sorted({type(layer).__name__ for layer in self.layers})
            raise UnsupportedModelError(
                f"{getattr(config, 'model_type', config)!r} has no full-attention layer that pages could hold "
                f"(its layers: {', '.join(kinds)}); use cache_implementation='dynamic'"
            )

    def _check_overrides(self) -> None:
        """Raise CacheOptionError where `layers` names only layers that transformers keeps."""
        paged = {layer.layer_idx for layer in self.paged_layers}
        for low, high, _ in self.options.layer_overrides() if paged else []:
            if not paged & set(range(low, high + 1)):
                kind = type(self.layers[low]).__name__
                raise CacheOptionError(
                    f"layers: {low}-{high} holds no paged layer; transformers' {kind} is kept there, which has no "
                    "formats"
                )

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values of one layer; see `PagedLayer.update` for what comes back.

        flex_attention is traced by torch.compile, which cannot look into handles: it gets dense tensors.
        """
        if layer_idx < self._first_paged:
            # a layer of another kind comes first: find out now whether the paged ones will refuse
            self.group.check_append(key_states.shape[0], key_states.shape[2])
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if self._config._attn_implementation == "flex_attention":
            view = view_behind(keys, values)
            if view is not None:
                warn_dense("flex_attention")
                return view.dense("keys"), view.dense("values")
        return keys, values

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) for the mask of the next `query_length` columns of a layer.

        For the "kv_hf" attention the length also says where its mask function reports left padding.
        """
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        if self._config._attn_implementation == ATTENTION_NAME:
            return MaskLength(length, self.group), offset
        return length, offset

    @property
    def paged_layers(self) -> list[PagedLayer]:
        """The layers that live in pages."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def reset(self) -> None:
        """Forget all tokens and give the memory back; afterwards any batch size fits."""
        for layer in self.layers:
            layer.reset()
            if isinstance(layer, DynamicLayer) and not isinstance(layer, PagedLayer):
                # 5.17 zeroes these instead of dropping them, so that the next update would append to zeros
                layer.keys = layer.values = None
                layer.is_initialized = False

    # -- rows: one list of row numbers for all layers, read from the device once ---------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue the former row beam_idx[i]; sealed pages are shared, not copied."""
        sources = beam_idx.tolist()
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.select_rows(sources)
            else:
                layer.reorder_cache(beam_idx)  # type: ignore[arg-type]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (numbers or a bool mask)."""
        if not self.group.rows:
            return
        sources = chosen_rows(indices, len(self.group.rows))
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.select_rows(sources)
            else:
                layer.batch_select_indices(indices)  # type: ignore[union-attr]

    # -- what transformers does not ask for ----------------------------------------------------------------

    def check_model(self, config: Any) -> None:
        """Raise CacheMismatchError when this cache was built for a model of other sizes."""
        theirs = signature(decoder_config(config))
        differing = [name for name, value in self.model_signature.items() if value != theirs[name]]
        if differing:
            name = differing[0]
            raise CacheMismatchError(
                f"this cache was built for a model with {name}={self.model_signature[name]!r}, got a model with "
                f"{name}={theirs[name]!r}; use one cache per model"
            )

    def check_kernel(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise CacheOptionError when the kernel that was asked for by name cannot run for such a model.

        generate() asks before its first forward; the first update() asks again, about the tensors it gets.
        """
        if self.options.kernel != "auto":
            schemes = [layer.schemes for layer in self.paged_layers]
            layout = layout_for(device)
            for spec in planned_specs(self._config, schemes, self.options.page_size, dtype, layout):
                choose(self.options.kernel, device, spec)

    def observe_padding(self, attention_mask: torch.Tensor | None) -> None:
        """Learn the left padding of rows that hold no token yet, so that padding is never stored.

        generate() and the "kv_hf" attention do this by themselves; code that calls a model of another
        attention implementation directly may do it before the first forward.

        Args:
            attention_mask: [batch, columns], 0 or False = padding; None changes nothing.
        """
        if attention_mask is not None:
            self.group.observe_padding(attention_mask)

    @property
    def bits_per_element(self) -> float:
        """Mean stored bits per number of a sealed page over all paged layers, scales included."""
        specs = [layer.spec for layer in self.paged_layers if layer.spec is not None]
        return sum(spec.bits_per_element for spec in specs) / len(specs) if specs else 0.0

    def memory(self) -> MemoryReport:
        """Return the bytes of all tensors that this cache holds, by part."""
        payload = scales = tail = 0
        for layer in self.paged_layers:
            store = layer.store
            if store is None:
                continue
            store.report_damage()
            for side in store.pages.sides:
                payload += side.nbytes["codes"]
                scales += sum(size for name, size in side.nbytes.items() if name != "codes")
            tail += sum(window.tokens.nbytes for window in store.windows)
        rows = self.group.rows
        width = max((len(row.pages) for row in rows), default=0)
        allocated = max(
            (layer.storage.keys.capacity for layer in self.paged_layers if layer.storage), default=0
        )
        return MemoryReport(
            payload=payload,
            scales=scales,
            tail=tail,
            tables=len(rows) * width * TABLE_DTYPE.itemsize,
            other=sum(
                tensor_bytes(vars(layer))
                for layer in self.layers
                if not isinstance(layer, PagedLayer)
            ),
            pages_held=self.group.pool.num_held,
            pages_allocated=allocated,
            tokens=sum(self.group.tokens(row) for row in rows),
        )

    def report(self) -> list[LayerReport]:
        """Return, for each layer, how it is cached and why."""
        rows = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, PagedLayer):
                keys, values = (scheme.name for scheme in layer.schemes)
                rows.append(LayerReport(index, "paged", keys, values, None))
            else:
                kind = type(layer).__name__
                reason = (
                    f"pages hold full attention only; transformers' {kind} is kept for this layer"
                )
                rows.append(LayerReport(index, kind, None, None, reason))
        return rows

    def check_integrity(self) -> None:
        """Raise ValueError unless counts, lengths, storage and layers agree."""
        self.group.check_integrity()
        for layer in self.paged_layers:
            if layer.storage is not None and layer.storage.keys.capacity < max(
                (page + 1 for row in self.group.rows for page in row.pages), default=0
            ):
                raise ValueError(
                    f"layer {layer.layer_idx} has no room for a page of the block table"
                )

    def __repr__(self) -> str:
        memory = self.memory()
        return (
            f"PagedCache(keys={self.options.keys!r}, values={self.options.values!r}, "
            f"page_size={self.options.page_size}, rows={len(self.group.rows)}, tokens={memory.tokens}, "
            f"pages={memory.pages_held}, bytes={memory.total})"
        )


def tensor_bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in lists and dicts; subclasses count the tensors they are made of."""
    if isinstance(value, torch.Tensor):
        parts = getattr(value, "__tensor_flatten__", None)
        if parts is None:
            return value.nbytes
        return sum(tensor_bytes(getattr(value, name)) for name in parts()[0])
    if isinstance(value, Mapping):
        return sum(tensor_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(item) for item in value)
    return 0
