"""Attend to pages: one call finds its plan, hands over addresses and launches; refuses to look into device tensors."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...errors import CacheOptionError
from ..base import AttentionCall, PagedKV
from . import decode_launch, direct, latent_launch, support
from .decode import decode_kernel
from .direct import ALIGNED, Compiled, Workspace, address, as_bytes
from .launch_arguments import arguments
from .launch_plan import LayerPlan, Plan, Shapes, keep
from .meta_params import Launch

INTERPRETED = direct.interpreted(decode_kernel)
Tensors = Callable[[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], tuple[Any, ...]]
MASKS = {torch.bool: "bool"}
NO_MASK: tuple[int, ...] = (0, 0, 0)  # its strides


def paged_attention(call: AttentionCall, launch: Launch | None = None) -> torch.Tensor:
    """Attend as `reference.paged_attention` does, on the device of `query`, without waiting for it.

    Args:
        call: over keys and values, or over latents. `call.kv.launches` keeps the plan.
        launch: warps, stages and splits, or None for those of tuning.py and latent_meta_params.py.
    Returns: [rows, heads, q_len, value dim], a view of a contiguous [rows, q_len, heads, value dim].
    Raises: CacheOptionError for a softcap over latents.
    """
    query, kv, mask, sink_logits = call.query, call.kv, call.mask, call.sink_logits
    softcap, sliding_window = call.softcap, call.sliding_window
    index = query.get_device()
    if not INTERPRETED and not direct.is_current(index):
        with torch.cuda.device(index):
            return paged_attention(call, launch)
    strides = query.stride()
    if strides[3] != 1:
        query = query.contiguous()
        strides = query.stride()
    mask_kind: Any = None
    mask_strides = NO_MASK
    if mask is not None:
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        mask_strides = _mask_strides(mask)
        mask_kind = mask.dtype, mask_strides[0] >> 31
    shape = query.shape
    key = (
        id(kv.spec), shape, strides, query.dtype, kv.residual_keys.stride(), kv.residual_values.stride(), mask_kind,
        softcap is None, sliding_window is None, None if sink_logits is None else sink_logits.dtype, launch, index,
    )  # fmt: skip
    plan = kv.launches.get(key)
    if plan is None:
        if softcap is not None and kv.spec.is_latent:
            raise CacheOptionError(f"softcap: pages of latents are read without one, got {softcap}")
        shapes = Shapes(
            rows=shape[0],
            heads=shape[1],
            q_len=shape[2],
            query_dtype=query.dtype,
            mask="none" if mask is None else MASKS.get(mask.dtype, "float"),
            softcap=softcap is not None,
            sliding_window=sliding_window is not None,
            sinks=sink_logits is not None,
        )
        plan = _prepare(query, kv, shapes, launch)
        keep(kv.launches, key, plan)
    out = query.new_empty_strided(plan.shape, plan.strides)
    if INTERPRETED:
        _interpret(plan, _tensors(call, query, mask, mask_strides, out), call, out)
        return out
    stream = direct.current_stream(index)
    splits = plan.splits(kv.block_table.shape[1])
    there = address(out)
    room: tuple[Any, Any, Any] = (there, there, there)
    if splits > 1:
        held = None if direct.is_capturing(index) else plan.workspaces.get(stream)
        held = held or workspace(plan, index, stream, query.device)  # alive until the launch
        room = held[:3]
    sinks = there if sink_logits is None else address(sink_logits)
    shown = there if mask is None else address(mask)
    given = arguments(address, call, query, shown, mask_strides, sinks, there, room)
    pointers = plan.pointers(given)
    a, b, c, d, e, f, g, h, i = pointers
    odd: Any = (a | b | c | d | e | f | g | h | i) % ALIGNED
    if odd:
        odd = tuple(pointer % ALIGNED == 0 for pointer in pointers)
    compiled = plan.compiled.get(odd)
    if compiled is None:
        compiled = _compile(plan, _tensors(call, query, mask, mask_strides, out), out.device)
        plan.compiled[odd] = compiled
    compiled(plan.rows, plan.blocks, splits, stream, *given)
    if splits > 1 and plan.combine is not None:
        if plan.combined is None:
            plan.combined = _compile_combine(plan, sink_logits, out)
        _, _, programs, parts = plan.combine
        plan.combined(programs, parts, 1, stream, *room[:2], sinks, there, shape[2], splits)
    return out


def refuse_cpu() -> None:
    """Raise CacheOptionError where tensors on the CPU can be no kernel's."""
    if not INTERPRETED:
        raise CacheOptionError(
            "kernel 'triton' needs a GPU, and its tensors are on the CPU; use another backend, or set "
            "TRITON_INTERPRET=1 before Python starts to run it in Triton's interpreter"
        )


def _mask_strides(mask: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of rows, heads and queries, 0 where all share one."""
    sizes = zip(mask.shape[:3], mask.stride()[:3], strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in sizes)


def _prepare(query: torch.Tensor, kv: PagedKV, shapes: Shapes, launch: Launch | None) -> Plan:
    where = query.device
    if where.type == "cpu":
        refuse_cpu()
    module = latent_launch if kv.spec.is_latent else decode_launch
    plan = module.prepare(
        kv, shapes, support.target_isa(where), support.shared_memory(where), launch
    )
    # zeros made outside of any graph: a graph that captures this plan later need not set its counters
    if not direct.is_capturing(query.get_device()):
        plan.counters = torch.zeros(plan.groups, dtype=torch.int32, device=where)
    return plan


def workspace(
    plan: LayerPlan, index: int, stream: int, where: torch.device
) -> tuple[int, int, int, Any]:
    """Return addresses of partial results, of their maxima and sums, and of counters that are zero; and the memory.

    Kernels of one stream share all. What a CUDA graph captures is replayed on any stream: its partial results lie in
    the graph's own memory, and its counters are the plan's.
    """
    shared = None
    if direct.is_capturing(index):
        numbers = torch.empty(plan.numbers, dtype=torch.float32, device=where)
        counters = plan.counters
        if counters is None:
            counters = torch.zeros(plan.groups, dtype=torch.int32, device=where)
    else:
        shared = Workspace.of(index, stream, where)
        numbers, counters = shared.reserve(plan.numbers, plan.groups)
    start = address(numbers)
    kept = numbers, counters, shared
    found = start, start + 4 * plan.partial_results, address(counters), kept
    if shared is not None:
        plan.workspaces[stream] = found
    return found


def _tensors(
    call: AttentionCall,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    mask_strides: tuple[int, ...],
    out: torch.Tensor,
) -> Tensors:
    """Return a function that gives the run-time arguments, with tensors in place of addresses, for partial results."""
    sinks = out if call.sink_logits is None else call.sink_logits
    shown = out if mask is None else as_bytes(mask)
    call = replace(call, softmax_scale=float(call.softmax_scale))
    return partial(arguments, as_bytes, call, query, shown, mask_strides, sinks, out)


def _compile(plan: Plan, tensors: Tensors, where: torch.device) -> Compiled:
    some = torch.empty(ALIGNED, dtype=torch.float32, device=where)
    given = tensors((some, some, some.view(torch.int32)))
    return Compiled(plan.kernel, given, plan.constants, **plan.options)


def _compile_combine(plan: Plan, sink_logits: torch.Tensor | None, out: torch.Tensor) -> Compiled:
    assert plan.combine is not None
    some = torch.empty(ALIGNED, dtype=torch.float32, device=out.device)
    kernel, constants, *_ = plan.combine
    arguments = some, some, out if sink_logits is None else sink_logits, out, 1, 1
    return Compiled(kernel, arguments, constants, num_warps=4, enable_fp_fusion=True)


def _interpret(plan: Plan, tensors: Tensors, call: AttentionCall, out: torch.Tensor) -> None:
    """Run the kernels in Triton's interpreter: partial results begin as nan, and the counters must end as zeros."""
    splits = plan.splits(call.kv.block_table.shape[1])
    numbers = torch.full((plan.numbers,), float("nan"))
    bests = numbers[plan.partial_results :]
    counters = torch.zeros(plan.groups, dtype=torch.int32)
    given = tensors((numbers, bests, counters))
    plan.kernel[plan.rows, plan.blocks, splits](*given, **plan.constants, **plan.options)
    assert not counters.any()
    if splits > 1 and plan.combine is not None:
        kernel, constants, programs, parts = plan.combine
        sinks = out if call.sink_logits is None else call.sink_logits
        kernel[programs, parts](
            numbers, bests, sinks, out, call.query.shape[2], splits, **constants
        )
