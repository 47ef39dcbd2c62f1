"""Launch the kernel that chooses the pages of a step; refuses to look into device tensors."""

import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from ...notices import warn_once
from ...spec import PageSpec
from ..base import AttentionCall
from ..reference import selection
from . import direct, support
from .direct import ALIGNED, Compiled, address, as_bytes
from .launch import refuse_cpu, workspace
from .launch_plan import LayerPlan, keep, triton_constants
from .meta_params import column_block, power_of_two
from .selection import choose_kernel
from .selection_meta_params import NUM_WARPS, selection_constants, splits

INTERPRETED = direct.interpreted(choose_kernel)
NO_LIMIT = 2**31 - 1  # pages
LEAST_ROOM = 64  # pages
QUAD = 4  # numbers: parts of the scratch begin at multiples of 16 bytes
Choice = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class ChoicePlan(LayerPlan):
    """How to launch one kind of choice.

    Attributes:
        spec: of the pages; keeps what the plan's key names by id.
        constants: of the kernel, by name.
        rows, blocks: the grid without its splits.
        columns: query heads times queries of a row; block: columns of a program.
        stretch: tokens of a split at least; max_splits: splits at most.
        room: pages that there is scratch for.
        refused: whether the device has too little for the kernel.
    """

    spec: PageSpec
    constants: dict[str, Any]
    rows: int
    blocks: int
    columns: int
    block: int
    stretch: int
    max_splits: int
    room: int = LEAST_ROOM
    refused: bool = False

    @property
    def groups(self) -> int:
        """Counters: one for each row."""
        return self.rows

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """float32 numbers of scores of pages, sums of splits, sums of columns and masses of pages."""
        sums = self.rows * self.blocks * (self.max_splits + 1) * 2 * self.block
        numbers = self.rows * self.columns * self.room, sums, self.rows * (self.columns + 1)
        a, b, c = (-(-number // QUAD) * QUAD for number in numbers)
        return a, b, c, self.rows * self.room

    @property
    def starts(self) -> tuple[int, int, int, int]:
        """Where the parts begin."""
        a, b, c, _ = self.parts
        return 0, a, a + b, a + b + c

    @property
    def partial_results(self) -> int:
        """float32 numbers in front of the sums of splits."""
        return self.parts[0]

    @property
    def numbers(self) -> int:
        """float32 numbers of all scratch."""
        return sum(self.parts)

    def splits(self, width: int) -> int:
        """Return the programs that share a row's pages, of which there are at most `width`."""
        return max(1, min(self.max_splits, width * self.spec.keys.page_size // self.stretch))

    def make_room(self, width: int) -> None:
        """Have room for `width` pages of each row."""
        if width > self.room:
            self.room = power_of_two(width)
            self.workspaces.clear()


def choose_pages(call: AttentionCall) -> Choice:
    """Choose as `reference.selection.choose_pages` does, in one launch on the device of the query, without waiting for it.

    Args:
        call: over keys and values, with a budget; its keys may be an index (PagedKV.words). `call.kv.launches` keeps
            the plan.
    Returns: a block table [rows, kv.budget.width(..)] and the pages of each row [rows], both int32.
    """
    if call.kv.hold is nullcontext:
        return _choose(call)
    with call.kv.hold():
        return _choose(call)


def _choose(call: AttentionCall) -> Choice:
    query, kv = call.query, call.kv
    index = query.get_device()
    if not INTERPRETED and not direct.is_current(index):
        with torch.cuda.device(index):
            return _choose(call)
    if query.stride(3) != 1:
        query = query.contiguous()
    budget, sinks = kv.budget, call.sink_logits
    assert budget is not None
    key = (
        "choose", id(kv.spec), query.shape, query.stride(), query.dtype, kv.residual_keys.stride(), call.softcap is None,
        None if sinks is None else sinks.dtype, budget.top_p is None, kv.words is None, index,
    )  # fmt: skip
    plan = kv.launches.get(key)
    if plan is None:
        plan = _prepare(call)
        keep(kv.launches, key, plan)
    columns = kv.block_table.shape[1]
    if plan.refused:
        return _by_reference(call)
    plan.make_room(columns)
    width = budget.width(columns, kv.page_size)
    chosen = kv.block_table.new_empty((plan.rows, width))
    pages = kv.block_table.new_empty(plan.rows)
    if INTERPRETED:
        _interpret(plan, call, query, chosen, pages)
        return chosen, pages
    stream = direct.current_stream(index)
    held = None if direct.is_capturing(index) else plan.workspaces.get(stream)
    held = held or workspace(plan, index, stream, query.device)  # alive until the launch
    scores, _, counters = held[:3]
    room = (*(scores + 4 * start for start in plan.starts), counters)
    given = arguments(address, call, query, chosen, pages, room, plan.room)
    odd = tuple(given[i] % ALIGNED == 0 for i in POINTERS)
    compiled = plan.compiled.get(odd)
    if compiled is None:
        some = torch.empty(ALIGNED, dtype=torch.float32, device=query.device)
        shown = (*(some,) * 4, some.view(torch.int32))
        call = replace(call, softmax_scale=float(call.softmax_scale))
        tensors = arguments(as_bytes, call, query, chosen, pages, shown, plan.room)
        try:
            compiled = Compiled(choose_kernel, tensors, plan.constants, **OPTIONS)
        except OutOfResources as error:
            plan.refused = True
            return _by_reference(call, str(error))
        plan.compiled[odd] = compiled
    compiled(plan.rows, plan.blocks, plan.splits(columns), stream, *given)
    return chosen, pages


def _by_reference(call: AttentionCall, reason: str = "") -> Choice:
    """Choose in plain torch, which waits for the device; say so once, with the reason."""
    if reason:
        warn_once(
            f"read_tokens: triton: {reason}",
            "The pages that a step reads are chosen by 'reference', slower than by 'triton', and not in CUDA graphs: the GPU "
            f"refuses the kernel ({reason})",
        )
    return selection.choose_pages(call)


OPTIONS: dict[str, Any] = {"num_warps": NUM_WARPS, "enable_fp_fusion": True}
POINTERS = (
    0,
    4,
    5,
    6,
    12,
)  # query, codes, scales, offsets, window: what kernels are compiled for the alignment of


def arguments(
    at: Callable[[torch.Tensor], Any],
    call: AttentionCall,
    query: torch.Tensor,
    chosen: torch.Tensor,
    pages: torch.Tensor,
    room: tuple[Any, ...],
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
        absent if sinks is None else at(sinks), at(chosen), at(pages), *room, room_pages, chosen.shape[1],
        NO_LIMIT if budget.pages is None else budget.pages, _bits_of(1.0 if budget.share is None else budget.share),
        min(budget.from_tokens, NO_LIMIT), query.shape[2], call.softmax_scale, call.softcap or 1.0,
        1.0 if budget.top_p is None else budget.top_p,
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
    block = column_block(kv.spec, group, q_len, isa)
    blocks = heads * -(-group * q_len // block)
    assert kv.budget is not None
    constants = selection_constants(
        kv.spec, query_dtype=query.dtype, group=group, q_len=q_len, isa=isa, softcap=call.softcap is not None,
        sinks=call.sink_logits is not None, top_p=kv.budget.top_p is not None, indexed=kv.words is not None,
    )  # fmt: skip
    stretch, most = splits(kv.spec, rows * blocks, kv.words is not None)
    plan = ChoicePlan(
        kv.spec, triton_constants(constants), rows, blocks, num_heads * q_len, block, stretch, most
    )
    # as for attention: a graph that captures this plan later need not set its counters
    if not direct.is_capturing(query.get_device()):
        plan.counters = torch.zeros(plan.groups, dtype=torch.int32, device=where)
    return plan


def _interpret(
    plan: ChoicePlan,
    call: AttentionCall,
    query: torch.Tensor,
    chosen: torch.Tensor,
    pages: torch.Tensor,
) -> torch.Tensor:
    """Run the kernel in Triton's interpreter and return its scratch, which begins as nan; the counters must end as zeros."""
    numbers = torch.full((plan.numbers,), float("nan"))
    chosen.fill_(-1)
    pages.fill_(-1)
    counters = torch.zeros(plan.groups, dtype=torch.int32)
    parts = tuple(numbers[start:] for start in plan.starts)
    given = arguments(as_bytes, call, query, chosen, pages, (*parts, counters), plan.room)
    grid = plan.rows, plan.blocks, plan.splits(call.kv.block_table.shape[1])
    choose_kernel[grid](*given, **plan.constants, **OPTIONS)
    assert not counters.any()
    return numbers
