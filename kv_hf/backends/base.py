"""What a backend is: the functions that it offers, the one argument of its attention, and what that reads. Computes nothing.

Compiled kernels read formats with a number in the header that C and Python share, in the groups listed here. That is a list of what
is allowed: the kernels check nothing, so that another grouping would be read wrongly, or written past its end.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ..checks import listed
from ..formats import Scheme
from ..formats.base import planes
from ..read_budget import ReadBudget
from ..spec import PageSpec, PageWrite, SideSpec

Pair = tuple[torch.Tensor, torch.Tensor]
MAX_ORDERED = 256  # channels of a head whose order compiled kernels read


class OffloadedPages(Protocol):
    """Offloaded pages of one layer, of which some can be chosen and read."""

    def index(self) -> tuple[Mapping[str, torch.Tensor], torch.Tensor, torch.Tensor | None]:
        """Return what a choice reads.

        Returns: fields of all keys (page_summary.part_fields), block table [rows, width], and `PagedKV.words`.
        """
        ...

    def read(
        self, block_table: torch.Tensor, num_pages: torch.Tensor
    ) -> tuple[
        Mapping[str, torch.Tensor],
        Mapping[str, torch.Tensor],
        torch.Tensor,
        Callable[[], AbstractContextManager[Any]],
    ]:
        """Return keys, values, block table and `PagedKV.hold` of these pages [rows, width] of the index's table alone."""
        ...


# not frozen, which would make it slower to make: there is one per layer and step
@dataclass(slots=True, eq=False)
class PagedKV:
    """The keys and values of one layer as one forward sees them; nobody changes one.

    geometry.place_of says where token t of row b lies: in slot t of the exact window for t < sink_tokens, in its sealed
    pages for the next num_pages[b] * page_size tokens, and from slot sink_tokens of the exact window on for the rest. Where pages
    have an order of channels, all pages of a row have the same one.

    Attributes:
        key_pages, value_pages: tensors of SideSpec.fields with a leading [num_pages].
        spec: sizes and formats of both sides.
        block_table: [rows, width], int32; entries past a row's last page hold any allocated id.
        num_pages: [rows], int32, sealed pages of each row.
        residual_keys, residual_values: [rows, num_kv_heads, slots, head_dim], model dtype: the exact window, which
            holds a row's sinks and its residual; slots at and past exact_lens may hold anything.
        exact_lens: [rows], int32, tokens in the exact window; num_pages * page_size + exact_lens = tokens.
        padding: [rows], int32, columns in front of the row's first token.
        seen: columns (padding + tokens), the same for all rows; of a preallocated cache the columns that there is
            room for.
        sink_tokens: slots of the exact window that hold the first tokens of the row.
        hold: keeps the pages where they are while kernels that read them are launched (offloaded pages share
            room on the device).
        launches: what a backend keeps between calls for this layer (compiled launches, packed arguments), under keys
            that name all it depends on.
        budget: how much of a row a step of few queries reads; None: everything.
        offloaded: the offloaded pages, of which a part can be read; None: all are to be read, or lie here.
        words: [num_kv_heads, words], int32: the words of a token's codes that `key_pages` hold, which are then those of
            page_summary.part_fields and good for a choice alone; None: all words.

    In a sliding layer that has given pages back, columns begin with the first that a query may see, the pages
    given back are left out, and the sinks are stale: a kernel hides them, as they lie before the sliding window.
    """

    key_pages: Mapping[str, torch.Tensor]
    value_pages: Mapping[str, torch.Tensor]
    spec: PageSpec
    block_table: torch.Tensor
    num_pages: torch.Tensor
    residual_keys: torch.Tensor
    residual_values: torch.Tensor
    exact_lens: torch.Tensor
    padding: torch.Tensor
    seen: int
    sink_tokens: int
    hold: Callable[[], AbstractContextManager[Any]] = nullcontext
    launches: dict[Any, Any] = field(default_factory=dict, compare=False)
    budget: ReadBudget | None = None
    offloaded: OffloadedPages | None = None
    words: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where kernels read it."""
        return self.residual_keys.device

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.spec.keys.page_size

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.residual_keys.shape[0]

    def with_pages(self, block_table: torch.Tensor, num_pages: torch.Tensor) -> "PagedKV":
        """Return what a kernel reads of some pages of each row, for queries behind all of them and without a mask.

        Of offloaded pages these alone are fetched, when they are read.

        `padding` stays as it is: columns have no meaning without a mask.

        Args:
            block_table: [rows, width], int32, the pages in their order.
            num_pages: [rows], int32.
        """
        keys, values, hold = self.key_pages, self.value_pages, self.hold
        if self.offloaded is not None:
            keys, values, block_table, hold = self.offloaded.read(block_table, num_pages)
        return PagedKV(
            keys,
            values,
            self.spec,
            block_table,
            num_pages,
            self.residual_keys,
            self.residual_values,
            self.exact_lens,
            self.padding,
            self.seen,
            self.sink_tokens,
            hold,
            self.launches,
        )

    def to_choose_from(self) -> "PagedKV":
        """Return what a choice of pages reads: this, or the index of pages that are offloaded; its `value_pages` are empty."""
        if self.offloaded is None:
            return self
        keys, table, words = self.offloaded.index()
        nothing = {
            name: keys["codes"].new_empty((0, *shape), dtype=dtype)
            for name, (shape, dtype) in self.spec.values.fields.items()
        }
        return replace(
            self,
            key_pages=keys,
            value_pages=nothing,
            block_table=table,
            hold=nullcontext,
            offloaded=None,
            words=words,
        )


# not frozen, which would make it slower to make: there is one per layer and step
@dataclass(slots=True, eq=False)
class AttentionCall:
    """One call of paged attention: the newest tokens of each row attend to all of the row's tokens; nobody changes one.

        out[b, h, i] = softmax(cap(softmax_scale * q[b, h, i] @ K[b, h // group].T) + mask) @ V[b, h // group]
        cap(s) = softcap * tanh(s / softcap), or s

    Attributes:
        query: [rows, num_heads, q_len, query_dim], fp64, fp32, fp16 or bf16; the last q_len tokens.
        kv: keys and values, the q_len tokens included.
        softmax_scale: factor of the scores.
        mask: [rows or 1, num_heads or 1, q_len, seen] over columns (padding included): bool (True = attend)
            or additive float. None: causal inside the q_len tokens, everything before them visible.
        softcap: bound of the scores, or None.
        sink_logits: [num_heads], a learnt extra logit in the softmax's denominator, or None.
        sliding_window: tokens that a query sees, itself included, or None for all; on top of the mask.
    """

    query: torch.Tensor
    kv: PagedKV
    softmax_scale: float
    mask: torch.Tensor | None = None
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None
    sliding_window: int | None = None


def empty_output(query: torch.Tensor, kv: PagedKV) -> torch.Tensor:
    """Return room for the result: a [rows, num_heads, q_len, out_dim] view of memory in which q_len comes before num_heads."""
    rows, num_heads, q_len, query_dim = query.shape
    dim = kv.spec.out_dim
    if q_len == 1 and dim == query_dim and query.is_contiguous():
        return torch.empty_like(query)
    strides = (q_len * num_heads * dim, dim, num_heads * dim, 1)
    return query.new_empty_strided((rows, num_heads, q_len, dim), strides)


def contiguous_pair(pair: Pair) -> Pair:
    """Return keys and values [rows, heads, tokens, channels] with contiguous channels."""
    keys, values = pair
    if keys.stride(3) == 1 == values.stride(3):
        return pair
    return keys.contiguous(), values.contiguous()


def mask_strides(mask: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of a mask's rows, heads and queries, [rows or 1, heads or 1, q_len, columns]; 0 where all share one."""
    row, head, query = (
        stride if size > 1 else 0
        for size, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True)
    )
    return row, head, query


@dataclass(frozen=True)
class Backend:
    """One implementation of attention over pages: its functions do what those of the same names in `reference` do.

    Attributes:
        name: one of config.KERNELS.
        attend: takes an AttentionCall, returns [rows, num_heads, q_len, out_dim] in the query's dtype.
        write: appends and seals what a PageWrite says, as reference.pages.write does.
        dense: writes one side of a layer out, as reference.pages.dense_side does.
        choose_pages: takes an AttentionCall whose kv has a budget, and returns the block table [rows, width] and the
            pages of each row [rows] that the step reads, as reference.selection.choose_pages does.
        max_queries: queries up to which reading the pages is better than writing one layer out for SDPA.
    """

    name: str
    attend: Callable[[AttentionCall], torch.Tensor]
    write: Callable[[PageWrite], None]
    dense: Callable[[PagedKV, str], torch.Tensor]
    choose_pages: Callable[[AttentionCall], tuple[torch.Tensor, torch.Tensor]]
    max_queries: int = 16


# -- what compiled kernels read ----------------------------------------------------------------------------------------


def unread_formats(spec: PageSpec) -> str | None:
    """Return which formats of the pages no compiled kernel reads, as a sentence, or None."""
    unread = [side for side in spec.sides if side.scheme.native_number is None]
    if not unread:
        return None
    formats = dict.fromkeys(side.scheme.name for side in unread)
    return (
        f"no compiled kernel reads the format {listed(repr(one) for one in formats)} of "
        f"{listed(side.side for side in unread)}"
    )


def unread_groups(spec: PageSpec, reads: Callable[[SideSpec], bool], kernel: str) -> str | None:
    """Return which side of the pages has groups that a kernel does not read, as a sentence, or None.

    Args:
        reads: says whether the kernel reads the groups of an encoded side: `in_known_groups`, and what else it knows.
        kernel: how the sentence begins: "the C kernel does".
    """
    for side in spec.sides:
        if not side.scheme.is_exact and not reads(side):
            return f"{kernel} not read {side.side} in format {side.scheme.name!r}: {_words(side.scheme)}"
    return None


def in_known_groups(side: SideSpec) -> bool:
    """Say whether an encoded side has groups that all compiled kernels read.

    | side | codes | (tokens, channels) of a scale | of an offset | bits of both |
    |---|---|---|---|---|
    | keys, latents | unsigned | (any, 1) | the same | 16 |
    | values | unsigned | (1, any) | the same, or none | 16 |
    | keys; RoPE keys of signed codes | 8 bits | (page, head) | (page, 1) | 16 |
    | values | 8 bits | (1, any) | none | 16 |
    | latents | 8 bits | (1, at least 2) | none | 16 or 32 |

    Besides, unsigned values may be rotated, keys of up to MAX_ORDERED channels have several widths, and codes of both lie in planes.
    """
    scheme, kind = side.scheme, side.side
    scale, offset, bits = scheme.scale_group, scheme.offset_group, scheme.scale_bits
    if scale is None or (scheme.rotated and (kind, scheme.code) != ("values", "unsigned")):
        return False
    if scheme.wide and (side.head_dim > MAX_ORDERED or None in dict(scheme.native_wide)):
        return False
    if scheme.code == "unsigned":
        over = {"keys": scale[1], "latent": scale[1], "values": scale[0]}.get(kind)
        own = offset == scale or (kind == "values" and offset is None)
        whole_bytes = kind != "latent" or len(planes(scheme.bits)) == 1
        return over == 1 and own and bits == 16 and whole_bytes
    if kind in ("keys", "k_rope"):
        whole = (side.page_size, side.head_dim)
        known = kind == "keys" or scheme.code == "signed"
        return known and scale == whole and offset == (side.page_size, 1) and bits == 16
    if scale[0] != 1 or offset is not None:
        return False
    return bits == 16 if kind == "values" else scale[1] > 1


def _words(scheme: Scheme) -> str:
    offset = "no offset" if scheme.offset_group is None else f"an offset {scheme.offset_group}"
    scale = "no scale" if scheme.scale_group is None else f"a scale {scheme.scale_group}"
    kind = f"{'rotated ' if scheme.rotated else ''}{scheme.code}"
    wide = "".join(f"{bits} bits in {channels} channels, " for bits, channels in scheme.wide)
    return (
        f"{kind} codes of {wide}{scheme.bits} bits with {scale} and {offset} for groups of (tokens, channels), in "
        f"{scheme.scale_bits} bits"
    )
