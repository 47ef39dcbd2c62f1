"""Shapes, dtypes and bytes of pages, windows and tables: the one byte formula of the project.

The allocator makes the tensors that `PageSpec.fields` lists, the memory report adds them up, and
`predict_memory` adds up the same numbers without any tensor.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from .formats import Scheme
from .formats.base import planes
from .row_pages import RowPages, page_use
from .units import format_bytes

TABLE_DTYPE = torch.int32


def order_dtype(head_dim: int) -> torch.dtype:
    """Return the dtype of a channel's number in the order of a page."""
    return torch.uint8 if head_dim <= 256 else torch.int16


# How codes are arranged in a page. A format fixes the codes and scales; the layout is a matter of the kernel
# that reads them, and layouts convert exactly (quant/codec.py).
KV_SIDES, LATENT_SIDES = ("keys", "values"), ("latent", "k_rope")  # of a page

ROWS = "rows"  # Triton: tokens of keys and channels of values are rows of bytes
LANES = (
    "lanes"  # C: words of four bytes, neighbouring words belong to neighbouring tokens or channels
)


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class SideSpec:
    """One side (keys or values, or latents or their RoPE keys) of one layer's pages.

    A page holds, for each kv head (int4 keys as the example):

        codes  [page_size, head_dim / 2]   keys:   byte = code[d] | code[d + head_dim / 2] << 4
        codes  [head_dim / 2, page_size]   values: the same bytes, tokens side by side
        scale  [page_size / group tokens, head_dim / group channels]   float16
        offset [page_size / group tokens, head_dim / group channels]   float16

    Exact storage is `codes [page_size, head_dim]` in the model's dtype for both sides, without scales.
    Where a scheme has wide channels, keys lie in the order of their page: the bytes of the widest channels' codes, those of the
    next, and for all of them, scales and offsets at the channel's place in

        order  [head_dim]   uint8 (int16 where head_dim is above 256): place -> channel of the model

    Codes of 3 and 6 bits are two planes, one behind the other: the bytes of their low 2 or 4 bits, those of the others.
    That is layout "rows". In layout "lanes" the same codes are int32 words, so that a vector of words holds
    neighbouring tokens of keys and neighbouring channels of values:

        codes  [head_dim * bits / 32, page_size]   keys:   word w of token t = bytes 4w .. 4w + 3 of its row above
        codes  [page_size * bits / 32, head_dim]   values: the same with tokens packed in place of channels

    Latents are read as keys and as values at once. In layout "rows" a 16-bit word holds codes of one channel and of
    tokens that lie page_size * bits / 16 apart, from its lowest bits up:

        codes  [page_size * bits / 16, head_dim]   int16

    RoPE keys beside latents lie as keys do. In layout "lanes" both lie as values do.
    """

    side: str  # "keys", "values", "latent" or "k_rope"
    scheme: Scheme  # resolved: no "whole" groups
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # the model's
    layout: str = ROWS

    @property
    def token_contiguous(self) -> bool:
        """True where neighbouring bytes are neighbouring tokens (encoded values in layout "rows")."""
        return self.side == "values" and not self.scheme.is_exact

    @property
    def token_words(self) -> bool:
        """True where 16-bit words hold codes of several tokens (encoded latents in layout "rows")."""
        return self.side == "latent" and not self.scheme.is_exact

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of scales and offsets."""
        return self.scheme.scale_dtype

    @property
    def code_dtype(self) -> torch.dtype:
        """Dtype of a code, or of packed codes; for exact storage the numbers' own."""
        return self.dtype if self.scheme.is_exact else self.scheme.code_dtype

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(bits of a code, channels) of the runs of channels whose codes lie together, the widest first."""
        wide = self.scheme.wide
        rest = self.head_dim - sum(channels for _, channels in wide)
        return *wide, (self.scheme.bits or 8 * self.dtype.itemsize, rest)

    @property
    def token_bits(self) -> int:
        """Bits of the codes of one token and head, or of its numbers where storage is exact."""
        return sum(bits * channels for bits, channels in self.runs)

    @property
    def fills_words(self) -> bool:
        """True where layout LANES is not asked for, or the codes that it packs fill whole words of 32 bits."""
        return self.layout != LANES or self.could_fill_words

    @property
    def could_fill_words(self) -> bool:
        """True where the codes of every run and plane that layout LANES would pack fill whole words of 32 bits."""
        return all(
            (channels if self.side == "keys" else self.page_size) * plane % 32 == 0
            for bits, channels in self.runs
            for plane in planes(bits)
        )

    @property
    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape of one page, dtype) of every tensor that stores this side."""
        scheme, heads = self.scheme, self.num_kv_heads
        result = {"codes": self._codes_field()}
        for name, group in (("scale", scheme.scale_group), ("offset", scheme.offset_group)):
            if group is not None:
                shape = (heads, self.page_size // group[0], self.head_dim // group[1])
                result[name] = (shape, self.scale_dtype)
        if scheme.wide:
            result["order"] = ((heads, self.head_dim), order_dtype(self.head_dim))
        return result

    def _codes_field(self) -> tuple[tuple[int, ...], torch.dtype]:
        heads, page, dim = self.num_kv_heads, self.page_size, self.head_dim
        bits = self.runs[-1][0]
        if self.layout == LANES:
            if self.side == "keys":
                return (heads, self.token_bits // 32, page), torch.int32
            return (heads, page * bits // 32, dim), torch.int32
        if self.token_words:
            return (heads, page * bits // 16, dim), torch.int16
        packed = dim if self.scheme.is_exact else self.token_bits // 8
        shape = (packed, page) if self.token_contiguous else (page, packed)
        return (heads, *shape), self.code_dtype

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


class PageFields(dict[str, torch.Tensor]):
    """The tensors of `SideSpec.fields` by name, each with a leading [pages].

    Attributes:
        room: pages that there is room for in every one of them.
        mark: an object that stands for these very tensors: another one as soon as a field is replaced.
    """

    room = 0
    mark: object = None

    def __init__(self, fields: Mapping[str, torch.Tensor]) -> None:
        super().__init__(fields)
        self._measure()

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        super().__setitem__(name, tensor)
        self._measure()

    def _measure(self) -> None:
        self.room = min(tensor.shape[0] for tensor in self.values())
        self.mark = object()


@dataclass(frozen=True)
class PageSpec:
    """A page of one layer (keys and values), and the window of exact tokens beside the pages.

    Attributes:
        is_latent: whether pages hold latents and RoPE keys in place of keys and values.
        query_dim: channels of a query: those of a key, or of a latent and a RoPE key.
        out_dim: channels that attention gives back: those of a value, or of a latent.
    """

    keys: SideSpec
    values: SideSpec
    is_latent: bool = field(init=False, repr=False, compare=False)
    query_dim: int = field(init=False, repr=False, compare=False)
    out_dim: int = field(init=False, repr=False, compare=False)

    @classmethod
    @lru_cache(maxsize=256)  # the layers of a model share one
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
        layout: str = ROWS,
        sides: tuple[str, str] = KV_SIDES,
    ) -> "PageSpec":
        """Resolve both schemes for these sizes. Raises CacheOptionError where they do not fit.

        With the `sides` LATENT_SIDES the latents take the place of the keys, the RoPE keys that of the values, as in transformers'
        caches: of one head each, and there may be no channels of RoPE keys.

        `value_dtype` is that of the values where it differs from the keys' (autocast makes it so).
        `layout` LANES is replaced by ROWS where the bytes of a key, or of a channel of the values, do not fill whole words.
        """
        schemes, dims = (key_scheme, value_scheme), (key_dim, value_dim)
        return cls(
            *(
                SideSpec(
                    side,
                    scheme.resolve(page_size, dim, side),
                    num_kv_heads,
                    dim,
                    page_size,
                    own,
                    layout,
                )
                for side, scheme, dim, own in zip(
                    sides, schemes, dims, (dtype, value_dtype or dtype), strict=True
                )
            )
        )._in_whole_words()

    def __post_init__(self) -> None:
        keys, values = self.keys, self.values
        latent = keys.side == "latent"
        # not cached properties, which torch.compile cannot trace under Python 3.11: they take a lock
        object.__setattr__(self, "is_latent", latent)
        object.__setattr__(self, "query_dim", keys.head_dim + (values.head_dim if latent else 0))
        object.__setattr__(self, "out_dim", keys.head_dim if latent else values.head_dim)

    def _in_whole_words(self) -> "PageSpec":
        """Return this spec, in layout ROWS where words of four bytes would not hold a side."""
        if all(side.fills_words for side in self.sides):
            return self
        return PageSpec(*(replace(side, layout=ROWS) for side in self.sides))

    @property
    def sides(self) -> tuple[SideSpec, SideSpec]:
        """(keys, values), or (latents, RoPE keys)."""
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


# not frozen, which would make it slower to make: there is one per layer and step
@dataclass(slots=True, eq=False)
class PageWrite:
    """What a step writes of one layer: new tokens into its exact windows, and then pages, sealed from there; nobody changes one.

        windows[side][b, :, starts[b] + i] = new[side][b, :, skips[b] + i]

    Attributes:
        windows: keys and values (or latents and RoPE keys), [rows, heads, slots, head_dim], written in place.
        fields: the storage of both sides, in place: contiguous tensors of SideSpec.fields with a leading [pages].
        spec: sizes and formats of both sides.
        damaged: [], uint8, set to 1 where a number had to be made finite, else left as it is.
        launches: what a backend keeps between calls for this layer, as PagedKV.launches.
        jobs: [n, 4], int32: (row, first of page_size slots, page id, whose order), each page id at most once; a job with a
            negative page id is skipped. Keys of several widths get the order of channels of a page that is there, or of the
            tokens from a slot on: -1 - slot. None: nothing is sealed.
        new: [rows, heads, q_len, head_dim] each, in the windows' dtypes, with padding in front. None: nothing is appended, and
            the windows are read alone.
        starts, skips: [rows], int32: first free slots, and columns of padding that are not stored.
    """

    windows: tuple[torch.Tensor, torch.Tensor]
    fields: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]
    spec: PageSpec
    damaged: torch.Tensor
    launches: dict[Any, Any]
    jobs: torch.Tensor | None = None
    new: tuple[torch.Tensor, torch.Tensor] | None = None
    starts: torch.Tensor | None = None
    skips: torch.Tensor | None = None


@dataclass(frozen=True)
class MemoryReport:
    """Bytes held by a cache, by part.

    Attributes:
        payload: codes of all allocated pages on the device (for exact pages: the numbers themselves).
        scales: scales and offsets of all allocated pages on the device.
        tail: exact tokens beside the pages (sinks and the open tail of each row).
        tables: block tables on the devices.
        other: transformers' own layers, keys of indexers, and states of linear attention.
        pages_held, pages_allocated: pages in use, and pages that storage has room for.
        tokens: real tokens over all rows (padding is not counted).
        staging: buffers on the device through which offloaded pages are read, and indexes by which some are chosen.
        offloaded: pages that live outside of the device; not a part of `total`.
    """

    payload: int
    scales: int
    tail: int
    tables: int
    other: int
    pages_held: int
    pages_allocated: int
    tokens: int
    staging: int = 0
    offloaded: int = 0

    @property
    def total(self) -> int:
        """All bytes on the model's devices."""
        return self.payload + self.scales + self.tail + self.tables + self.other + self.staging

    @property
    def per_token(self) -> float:
        """Bytes on the device per cached token; 0.0 for an empty cache."""
        return self.total / self.tokens if self.tokens else 0.0

    def __str__(self) -> str:
        parts = {
            "codes": self.payload,
            "scales": self.scales,
            "exact tokens": self.tail,
            "tables": self.tables,
            "other layers": self.other,
            "staging": self.staging,
        }
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
        outside = (
            f"; {format_bytes(self.offloaded)} outside of the device" if self.offloaded else ""
        )
        return (
            f"{format_bytes(self.total)}{f' ({listed})' if listed else ''}{outside}; {self.tokens:,} tokens, "
            f"pages {self.pages_held:,} of {self.pages_allocated:,}"
        )


def predict_memory(
    specs: Sequence[PageSpec],
    row_tokens: Sequence[int],
    *,
    sink_tokens: int,
    recent_tokens: int,
    max_length: int | None = None,
    window: int | None = None,
    prompt: int | None = None,
) -> MemoryReport:
    """Predict the bytes of paged layers whose rows hold `row_tokens` real tokens, without allocating.

    Args:
        specs: one per paged layer, all of one window.
        row_tokens: real tokens of each row of the batch (left padding not counted).
        sink_tokens, recent_tokens, max_length: as in CacheConfig.
        window: sliding window of these layers, None for full attention.
        prompt: tokens of the longest row that came in one first forward, the others one by one; with a sliding
            window the bytes depend on it. None: the most that any prompt leads to.
    """
    if not specs:
        return MemoryReport(0, 0, 0, 0, 0, 0, 0, sum(row_tokens))
    sizes = RowPages(specs[0].keys.page_size, sink_tokens, recent_tokens, window)
    use = page_use(sizes, row_tokens, prompt)
    capacity = use.capacity(len(row_tokens) * sizes.reserved(max_length))
    return pages_report(specs, sizes, row_tokens, use.held, capacity)


def counted(specs: Sequence[PageSpec]) -> list[tuple[PageSpec, int]]:
    """Return (spec, how many there are of it): layers that are alike share one object, and are worked out once."""
    kinds = {id(spec): spec for spec in specs}
    return [(kinds[key], count) for key, count in Counter(map(id, specs)).items()]


def pages_report(
    specs: Sequence[PageSpec],
    sizes: RowPages,
    row_tokens: Sequence[int],
    held: Sequence[int],
    capacity: int,
) -> MemoryReport:
    """Return the bytes of layers with storage for `capacity` pages, of which each row holds `held`."""
    rows = len(row_tokens)
    kinds = counted(specs)
    return MemoryReport(
        payload=capacity * sum(n * side.payload_bytes for spec, n in kinds for side in spec.sides),
        scales=capacity * sum(n * side.scale_bytes for spec, n in kinds for side in spec.sides),
        tail=sum(n * spec.window_bytes(rows, sizes.slots) for spec, n in kinds),
        tables=rows * max(held, default=0) * TABLE_DTYPE.itemsize,
        other=0,
        pages_held=sum(held),
        pages_allocated=capacity,
        tokens=sum(row_tokens),
    )
