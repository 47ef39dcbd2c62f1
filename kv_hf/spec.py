"""Shapes, dtypes and bytes of pages, windows and tables: the one byte formula of the project.

The allocator makes the tensors that `PageSpec.fields` lists, the memory report adds them up, and
`predict_memory` adds up the same numbers without any tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .formats import Scheme

SCALE_DTYPE = torch.float16
TABLE_DTYPE = torch.int32
# float8 codes lie in uint8 tensors: torch cannot index float8 tensors on every device
CODE_DTYPES = {"unsigned": torch.uint8, "signed": torch.int8, "float8": torch.uint8}


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class SideSpec:
    """One side (keys or values) of one layer's pages.

    A page holds, for each kv head (int4 keys as the example):

        codes  [page_size, head_dim / 2]   keys:   byte = code[d] | code[d + head_dim / 2] << 4
        codes  [head_dim / 2, page_size]   values: the same bytes, tokens side by side
        scale  [page_size / group tokens, head_dim / group channels]   float16
        offset [page_size / group tokens, head_dim / group channels]   float16

    Exact storage is `codes [page_size, head_dim]` in the model's dtype for both sides, without scales.
    """

    side: str  # "keys" or "values"
    scheme: Scheme  # resolved: no "whole" groups
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # the model's

    @property
    def token_contiguous(self) -> bool:
        """True where neighbouring bytes are neighbouring tokens (encoded values)."""
        return self.side == "values" and not self.scheme.is_exact

    @property
    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape of one page, dtype) of every tensor that stores this side."""
        scheme, heads = self.scheme, self.num_kv_heads
        if scheme.is_exact:
            return {"codes": ((heads, self.page_size, self.head_dim), self.dtype)}
        packed = self.head_dim // scheme.codes_per_byte
        tokens_last = (heads, packed, self.page_size)
        shape = tokens_last if self.token_contiguous else (heads, self.page_size, packed)
        result: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "codes": (shape, CODE_DTYPES[scheme.code])
        }
        for name, group in (("scale", scheme.scale_group), ("offset", scheme.offset_group)):
            if group is not None:
                shape = (heads, self.page_size // group[0], self.head_dim // group[1])
                result[name] = (shape, SCALE_DTYPE)
        return result

    @property
    def payload_bytes(self) -> int:
        """Bytes of the codes of one page."""
        return _nbytes(*self.fields["codes"])

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales and offsets of one page."""
        return sum(_nbytes(*field) for name, field in self.fields.items() if name != "codes")

    @property
    def bits_per_element(self) -> float:
        """Stored bits per number, scales included."""
        elements = self.num_kv_heads * self.page_size * self.head_dim
        return 8 * (self.payload_bytes + self.scale_bytes) / elements


@dataclass(frozen=True)
class PageSpec:
    """A page of one layer (keys and values), and the window of exact tokens beside the pages."""

    keys: SideSpec
    values: SideSpec

    @classmethod
    def build(
        cls,
        key_scheme: Scheme,
        value_scheme: Scheme,
        *,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        page_size: int,
        dtype: torch.dtype,
        value_dtype: torch.dtype | None = None,
    ) -> "PageSpec":
        """Resolve both schemes for these sizes. Raises CacheOptionError where they do not fit.

        `value_dtype` is that of the values where it differs from the keys' (autocast makes it so).
        """
        keys = key_scheme.resolve(page_size, key_dim, "keys")
        values = value_scheme.resolve(page_size, value_dim, "values")
        return cls(
            SideSpec("keys", keys, num_kv_heads, key_dim, page_size, dtype),
            SideSpec("values", values, num_kv_heads, value_dim, page_size, value_dtype or dtype),
        )

    @property
    def sides(self) -> tuple[SideSpec, SideSpec]:
        """(keys, values)"""
        return self.keys, self.values

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of this layer, both sides, scales included."""
        return sum(side.payload_bytes + side.scale_bytes for side in self.sides)

    @property
    def bits_per_element(self) -> float:
        """Mean stored bits per number over keys and values, scales included."""
        elements = sum(s.num_kv_heads * s.page_size * s.head_dim for s in self.sides)
        return 8 * self.page_bytes / elements

    def window_bytes(self, rows: int, slots: int) -> int:
        """Bytes of the exact tokens (sinks and tail) of `rows` rows with `slots` slots each."""
        return sum(_nbytes((rows, s.num_kv_heads, slots, s.head_dim), s.dtype) for s in self.sides)


@dataclass(frozen=True)
class MemoryReport:
    """Bytes held by a cache, by part.

    Attributes:
        payload: codes of all allocated pages (for exact pages: the numbers themselves).
        scales: scales and offsets of all allocated pages.
        tail: exact tokens beside the pages (sinks and the open tail of each row).
        tables: block tables on the devices.
        other: layers that transformers' own classes hold (sliding windows, states of linear attention).
        pages_held, pages_allocated: pages in use, and pages that storage has room for.
        tokens: real tokens over all rows (padding is not counted).
    """

    payload: int
    scales: int
    tail: int
    tables: int
    other: int
    pages_held: int
    pages_allocated: int
    tokens: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.payload + self.scales + self.tail + self.tables + self.other

    @property
    def per_token(self) -> float:
        """Bytes per cached token; 0.0 for an empty cache."""
        return self.total / self.tokens if self.tokens else 0.0


def page_capacity(num_pages: int) -> int:
    """Return the pages that storage allocates to hold `num_pages`.

    Exactly that many up to 256, then in steps that keep the unused part below 1/128: memory stays close to
    what is used, and growing copies a layer's pages once per step.
    """
    if num_pages <= 256:
        return num_pages
    step = (1 << (num_pages - 1).bit_length()) // 256
    return -(-num_pages // step) * step


def sealed_pages(tokens: int, *, page_size: int, sink_tokens: int, recent_tokens: int) -> int:
    """Return how many pages of a row of `tokens` real tokens are sealed."""
    return max(0, tokens - sink_tokens - recent_tokens) // page_size


def window_slots(*, page_size: int, sink_tokens: int, recent_tokens: int) -> int:
    """Return the exact tokens that a row has room for: its sinks and its open tail."""
    return sink_tokens + page_size + recent_tokens


def predict_memory(
    specs: Sequence[PageSpec],
    row_tokens: Sequence[int],
    *,
    sink_tokens: int,
    recent_tokens: int,
) -> MemoryReport:
    """Predict the bytes of a cache whose rows hold `row_tokens` real tokens, without allocating.

    Args:
        specs: one per paged layer.
        row_tokens: real tokens of each row of the batch (left padding not counted).
        sink_tokens, recent_tokens: as in CacheConfig.
    """
    if not specs:
        return MemoryReport(0, 0, 0, 0, 0, 0, 0, sum(row_tokens))
    sizes = {
        "page_size": specs[0].keys.page_size,
        "sink_tokens": sink_tokens,
        "recent_tokens": recent_tokens,
    }
    per_row = [sealed_pages(tokens, **sizes) for tokens in row_tokens]
    held = sum(per_row)
    capacity = page_capacity(held)
    rows = len(row_tokens)
    return MemoryReport(
        payload=capacity * sum(side.payload_bytes for spec in specs for side in spec.sides),
        scales=capacity * sum(side.scale_bytes for spec in specs for side in spec.sides),
        tail=sum(spec.window_bytes(rows, window_slots(**sizes)) for spec in specs),
        tables=rows * max(per_row, default=0) * TABLE_DTYPE.itemsize,
        other=0,
        pages_held=held,
        pages_allocated=capacity,
        tokens=sum(row_tokens),
    )
