"""Launch the kernel that chooses the pages of a step; refuses to look into device tensors.

What of a page is read says page_summary.py; how the kernel reads it is said here.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from ...notices import warn_once
from ...page_summary import (
    MIDDLE_TOKENS,
    Summary,
    middle_code,
    summary_of,
    summary_words,
    turned_by,
    word_channels,
)
from ...spec import PageSpec, SideSpec
from ..base import AttentionCall
from ..reference import selection
from . import support
from .direct import Kernel, Plan, Scratch, kept
from .launch import refuse_cpu
from .meta_params import (
    HIP,
    Cut,
    column_block,
    compute_types,
    hiding,
    power_of_two,
    side_layout,
    whole,
)
from .selection import choose_kernel

NUM_WARPS = 4
TILE_TOKENS = 256  # of the pages that a program scores at once
RANGED_NUMBERS = 512  # of a piece of a page whose ranges are taken
MIN_DEPTH = 16  # numbers that a product sums over, at least
MIN_STRETCH = 512  # tokens of a program, at least
# the same where ranges come from codes, of which every program reads RANGED_PAGES pages
CODES_STRETCH = 2048
MAX_SPLITS = 64
STAGED_BYTES = 48 * 1024  # of the tiles that are on their way
PROGRAMS = 132 * 4  # that fill a large GPU
NO_LIMIT = 2**31 - 1  # pages
LEAST_ROOM = 64  # pages
Choice = tuple[torch.Tensor, torch.Tensor]


class KeyWords(NamedTuple):
    """What of a page's keys is read, and where it lies.

    Attributes:
        kind: "scales", "codes" (ranges from codes, an offset is the middle), "tokens" (exact numbers) or "order" (of
            two widths); code, bits: as in formats.Scheme, bits of what is read token by token.
        page, dim, group: tokens of a page, channels, tokens that share a scale.
        indexed: whether the pages are an index, which holds the words that are read one after the other.
        row: bytes or numbers of a token, as far as they are there; width: those of a run that is read; runs: codes of a byte.
        part: bytes or numbers of a word; words: words of a run; padded: their next power of two.
        turn: words from one to the one that RoPE turns with it (page_summary.turned_by), or 0.
        read: words that are read; slots: places for them, a power of two.
        ranged: tokens of a page whose ranges are taken at once.
        pages: pages of a tile.
        wide: places in front that are read, where pages have an order.
        middle: the code in the middle; middles: tokens, evenly spread, whose mean is the middle of exact numbers.
        all: whether all channels are read token by token.
        window, window_tile: how the exact window is cut, and its tokens that are read at once.
        dtype, window_dtype: of the products with pages and with the window, by name; isa: as in meta_params.Operand.
    """

    kind: str
    code: str
    bits: int
    page: int
    dim: int
    group: int
    indexed: bool
    row: int
    width: int
    runs: int
    part: int
    words: int
    padded: int
    turn: int
    read: int
    slots: int
    ranged: int
    pages: int
    wide: int
    middle: float
    middles: int
    all: bool
    window: Cut
    window_tile: int
    dtype: str
    window_dtype: str
    isa: int


def key_words(spec: PageSpec, query_dtype: torch.dtype, isa: int, indexed: bool) -> KeyWords:
    """Return what is read of the keys of pages (layout "rows"), or of an index of them (page_summary.part_fields)."""
    keys, page = spec.keys, spec.keys.page_size
    scheme, side = keys.scheme, side_layout(keys)
    words = [
        word for word in word_channels(keys) if not side.ordered or word[0] < scheme.wide_channels
    ]
    bits, width, runs, _, _ = side.sections[0]
    part = len(words[0]) // runs
    if scheme.is_exact:
        kind = "tokens"
    elif scheme.code == "unsigned":
        kind = "order" if side.ordered else "scales"
    else:
        kind = "codes"
    group = scheme.scale_group[0] if scheme.scale_group and scheme.code == "unsigned" else page
    read, padded = min(summary_words(keys), len(words)), power_of_two(len(words))
    dtype, _, window_dtype, _ = compute_types(spec, query_dtype)
    return KeyWords(
        kind=kind, code=scheme.code, bits=bits, page=page, dim=keys.head_dim, group=group, indexed=indexed,
        row=read * part if indexed else side.size, width=width, runs=runs, part=part, words=len(words), padded=padded,
        turn=turned_by(keys), read=read, slots=max(power_of_two(read), MIN_DEPTH // part),
        ranged=max(1, min(page, RANGED_NUMBERS // (padded * part))), pages=max(NUM_WARPS, TILE_TOKENS // page),
        wide=scheme.wide_channels, middle=0.0 if scheme.is_exact else middle_code(scheme),
        middles=min(MIDDLE_TOKENS, page), all=summary_of(keys) == Summary.ALL_CHANNELS, window=whole(keys),
        window_tile=32 if keys.head_dim <= 128 else 16, dtype=dtype, window_dtype=window_dtype,
        isa=0 if dtype == "fp32" else isa,
    )  # fmt: skip


def splits(words: KeyWords, programs: int) -> tuple[int, int]:
    """Return (tokens of a split at least, splits at most) where one split takes `programs` programs."""
    by_codes = words.kind in ("codes", "tokens") and not words.all and not words.indexed
    most = max(1, min(MAX_SPLITS, PROGRAMS // programs))
    return (CODES_STRETCH if by_codes else MIN_STRETCH), most


def _stages(words: KeyWords, keys: SideSpec) -> int:
    """Return the tiles that are on their way: fewer where one takes much shared memory."""
    size = 4 if words.dtype == "fp32" else max(1, words.bits // 8, keys.code_dtype.itemsize)
    most = 2 if words.isa == HIP else 3
    numbers = words.pages * words.page * words.slots * words.part
    return max(1, min(most, STAGED_BYTES // (numbers * size)))


def selection_constants(
    spec: PageSpec,
    *,
    query_dtype: torch.dtype,
    group: int,
    q_len: int,
    isa: int,
    softcap: bool = False,
    sinks: bool = False,
    top_p: bool = False,
    indexed: bool = False,
) -> dict[str, Any]:
    """Return the compile-time arguments of the kernel that chooses pages.

    Args:
        group: query heads of a kv head; q_len: chunks of all lengths above 1 share a variant.
        isa: compute capability * 10 on NVIDIA, HIP on AMD, 0 in the interpreter.
        top_p: whether the budget has a part of the mass.
        indexed: whether the pages are an index (PagedKV.words).
    """
    words = key_words(spec, query_dtype, isa, indexed)
    return {
        "HEADS": spec.keys.num_kv_heads, "GROUP": group, "CHUNK": q_len > 1,
        "COLUMNS": column_block(spec, group, q_len, isa), "KEYS": words, "HIDING": hiding(q_len, "none", softcap, False),
        "SINKS": sinks, "TOP": top_p, "M_THREADS": 64 * NUM_WARPS if isa == HIP else 0, "STAGES": _stages(words, spec.keys),
    }  # fmt: skip


@dataclass(slots=True, kw_only=True)
class ChoicePlan(Plan):
    """How to launch one kind of choice.

    Attributes:
        columns: query heads times queries of a row; sums: float32 numbers of the sums of splits.
        room: pages that there is scratch for.
        refused: whether the device has too little for the kernel.
    """

    columns: int
    sums: int
    room: int
    refused: bool = False

    def make_room(self, width: int, where: torch.device) -> None:
        """Have room for `width` pages of each row: scores of pages, sums of splits, sums of columns, masses of pages."""
        if width > self.room:
            self.room = max(LEAST_ROOM, power_of_two(width))
            rows, columns = self.rows, self.columns
            sizes = rows * columns * self.room, self.sums, rows * (columns + 1), rows * self.room
            self.scratch = Scratch(sizes, rows, where)


def choose_pages(call: AttentionCall) -> Choice:
    """Choose as `reference.selection.choose_pages` does, in one launch on the device of the query, without waiting for it.

    Args:
        call: over keys and values, with a budget; its keys may be an index (PagedKV.words). `call.kv.launches` keeps
            the plan.
    Returns: a block table [rows, kv.budget.width(..)] and the pages of each row [rows], both int32.
    """
    with call.kv.hold():
        return _choose(call)


def _choose(call: AttentionCall) -> Choice:
    query, kv = call.query, call.kv
    index = query.get_device()
    if query.stride(3) != 1:
        query = query.contiguous()
    budget, sinks = kv.budget, call.sink_logits
    assert budget is not None
    key = (
        "choose", id(kv.spec), query.shape, query.stride(), query.dtype, kv.residual_keys.stride(), call.softcap is None,
        None if sinks is None else sinks.dtype, budget.top_p is None, kv.words is None, index,
    )  # fmt: skip
    plan = kept(kv.launches, key, lambda: _prepare(call))
    if plan.refused:
        return selection.choose_pages(call)
    width = kv.block_table.shape[1]
    plan.make_room(width, query.device)
    chosen = kv.block_table.new_empty((plan.rows, budget.width(width, kv.page_size)))
    pages = kv.block_table.new_empty(plan.rows)
    room = plan.scratch.parts()  # alive until the launch
    try:
        plan.kernel.launch(
            plan.rows, plan.blocks, plan.splits(width), index,
            lambda at: arguments(at, call, query, chosen, pages, room, plan.room),
        )  # fmt: skip
    except OutOfResources as error:
        plan.refused = True
        warn_once(
            f"read_tokens: triton: {error}",
            "The pages that a step reads are chosen by 'reference', slower than by 'triton', and not in CUDA graphs: the GPU "
            f"refuses the kernel ({error})",
        )
        return selection.choose_pages(call)
    return chosen, pages


def arguments(
    at: Callable[[torch.Tensor], Any],
    call: AttentionCall,
    query: torch.Tensor,
    chosen: torch.Tensor,
    pages: torch.Tensor,
    room: tuple[torch.Tensor, ...],
    room_pages: int,
) -> tuple[Any, ...]:
    """Return the run-time arguments of the kernel that chooses pages.

    Args:
        at: what to hand over for a tensor, its address or itself.
        query: [rows, num_heads, q_len, dim], of the call, with contiguous channels.
        chosen, pages: [rows, width] and [rows], int32, which are written.
        room: scores, sums of splits, sums of columns, masses, counters; of `room_pages` pages.
    """
    kv, budget, sinks = call.kv, call.kv.budget, call.sink_logits
    assert budget is not None
    keys, window, absent = kv.key_pages, kv.residual_keys, at(kv.num_pages)
    # an index holds bytes, which are read as what they are of
    codes = at(keys["codes"] if kv.words is None else keys["codes"].view(kv.spec.keys.code_dtype))
    scale, offset, order = (keys.get(name) for name in ("scale", "offset", "order"))
    if "middle" in keys:
        offset = keys["middle"]
    return (
        at(query), *query.stride()[:3], codes,
        codes if scale is None else at(scale), codes if offset is None else at(offset),
        absent if order is None else at(order), absent if kv.words is None else at(kv.words),
        at(kv.block_table), kv.block_table.stride(0), absent, at(window), *window.stride()[:3], at(kv.exact_lens),
        absent if sinks is None else at(sinks), at(chosen), at(pages), *map(at, room), room_pages, chosen.shape[1],
        NO_LIMIT if budget.pages is None else budget.pages, _bits_of(1.0 if budget.share is None else budget.share),
        min(budget.from_tokens, NO_LIMIT), query.shape[2], float(call.softmax_scale),
        float(call.softcap or 1.0), 1.0 if budget.top_p is None else budget.top_p,
    )  # fmt: skip


def _bits_of(share: float) -> int:
    """Return the bits of a float64, which no launch takes, as an integer."""
    bits: int = struct.unpack("<q", struct.pack("<d", share))[0]
    return bits


def _prepare(call: AttentionCall) -> ChoicePlan:
    query, kv = call.query, call.kv
    where = query.device
    if where.type == "cpu":
        refuse_cpu()
    rows, num_heads, q_len, _ = query.shape
    heads = kv.spec.keys.num_kv_heads
    group, isa = num_heads // heads, support.target_isa(where)
    assert kv.budget is not None
    constants = selection_constants(
        kv.spec, query_dtype=query.dtype, group=group, q_len=q_len, isa=isa, softcap=call.softcap is not None,
        sinks=call.sink_logits is not None, top_p=kv.budget.top_p is not None, indexed=kv.words is not None,
    )  # fmt: skip
    block = constants["COLUMNS"]
    blocks = heads * -(-group * q_len // block)
    stretch, most = splits(constants["KEYS"], rows * blocks)
    return ChoicePlan(
        kernel=Kernel(
            kv.spec, choose_kernel, constants, num_warps=NUM_WARPS, enable_fp_fusion=True
        ),
        rows=rows, blocks=blocks, stretch=stretch, most=most, columns=num_heads * q_len,
        sums=rows * blocks * (most + 1) * 2 * block, room=0, scratch=Scratch((), rows, where),
    )  # fmt: skip
