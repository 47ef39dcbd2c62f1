"""A cache's report about itself: the bytes that it holds, and the form of each layer."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..config import given_options
from ..pages.rows import Rows
from ..pages.step import block_table
from ..pages.storage import Wider
from ..spec import MemoryReport
from .identity import plain_parts
from .layer import PagedLayer


@dataclass(frozen=True)
class LayerReport:
    """The cache of one layer of the model: its formats, or the reason why transformers' own layer was kept.

    Attributes:
        layer_idx: position in the model.
        kind: "paged" or "paged latents" (then `keys` and `values` are the formats of latents and RoPE keys), each also
            with ", sliding window of N", with what lies beside the pages (", indexer keys beside them", ", linear-attention
            state beside them"), and with ", offloaded" while they are not on the device; or "indexer keys, latents of another
            layer"; or the name of transformers' layer class. Those of an encoder's keys begin with "cross ".
        keys, values: formats, None for layers of transformers.
        reason: why the layer is not paged, or why its formats are wider than those asked for; else None.
    """

    layer_idx: int
    kind: str
    keys: str | None
    values: str | None
    reason: str | None

    def __str__(self) -> str:
        formats = "" if self.keys is None else f", {self.keys} and {self.values}"
        reason = "" if self.reason is None else f": {self.reason}"
        return f"layer {self.layer_idx}: {self.kind}{formats}{reason}"


def one_line(cache: Any) -> str:
    """Return a cache as its call and its contents: PagedCache(keys='int8', .., rows=1, tokens=69, pages=4, bytes=43024)."""
    memory = cache.memory()
    held = {
        "rows": len(cache._group),
        "tokens": memory.tokens,
        "pages": memory.pages_held,
        "bytes": memory.total,
    }
    if memory.offloaded:
        held["offloaded"] = memory.offloaded
    own = {name: getattr(cache.options, name) for name in ("keys", "values", "page_size")}
    options = {**own, **given_options(cache.options), **held}
    return (
        f"{type(cache).__name__}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
    )


def report_layers(layers: Iterable[Any], reasons: Mapping[int, str]) -> list[LayerReport]:
    """Return, for each layer, how it is cached and why; `reasons` why single layers were not paged."""
    rows = []
    for index, layer in enumerate(layers):
        if isinstance(layer, PagedLayer):
            window = layer.window
            kind = layer.kind if window is None else f"{layer.kind}, sliding window of {window}"
            if layer.storage is not None and layer.storage.offloaded_bytes:
                kind += ", offloaded"
            keys, values = layer.formats.names
            wider = getattr(layer.storage, "wider", None) or Wider()
            held = {"keys": keys, "values": values, **wider.formats}
            reason = "; ".join(wider.reasons.values()) or None
            rows.append(LayerReport(index, kind, held["keys"], held["values"], reason))
        else:
            kind = type(layer).__name__
            reason = reasons.get(index) or (
                f"pages hold keys and values of attention; transformers' {kind} is kept for this layer"
            )
            rows.append(LayerReport(index, kind, None, None, reason))
    return rows


def measure_memory(layers: Sequence[Any], groups: Sequence[Rows]) -> MemoryReport:
    """Return the bytes of all tensors that the layers hold, by part."""
    payload = scales = tail = held = allocated = tables = offloaded = 0
    paged = [layer for layer in layers if isinstance(layer, PagedLayer)]
    for store in (layer.store for layer in paged if layer.store is not None):
        store.report_damage()
        for side in store.pages.sides:
            payload += side.nbytes["codes"]
            scales += sum(size for name, size in side.nbytes.items() if name != "codes")
        offloaded += store.pages.offloaded_bytes
        tail += sum(window.tokens.nbytes for window in store.residuals)
    for group in groups:
        storages = [one.storage for one in paged if one.group is group and one.storage is not None]
        held += group.pool.num_held
        allocated += max((one.capacity for one in storages), default=0)
        tables += (
            max(1, len({one.device for one in storages})) * block_table(group.batch.pages).nbytes
        )
    return MemoryReport(
        payload=payload,
        scales=scales,
        tail=tail,
        tables=tables,
        other=sum(layer.extra_bytes for layer in paged)
        + sum(tensor_bytes(vars(one)) for one in layers if not isinstance(one, PagedLayer)),
        pages_held=held,
        pages_allocated=allocated,
        tokens=max(int(group.lengths().sum()) for group in groups),
        staging=paged[0].page_memory.staging_bytes,
        offloaded=offloaded,
    )


def tensor_bytes(value: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in lists and dicts; subclasses count the tensors they are made of."""
    if isinstance(value, torch.Tensor):
        return sum(part.nbytes for part in plain_parts(value))
    if isinstance(value, Mapping):
        return sum(tensor_bytes(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(item) for item in value)
    return 0
