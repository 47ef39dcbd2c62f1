"""Attend to pages: one call finds its plan, hands over addresses and launches; refuses to look into device tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CacheOptionError
from ..base import AttentionCall
from . import support
from .decode import decode_kernel
from .direct import INTERPRETED, Kernel, Plan, Scratch, kept
from .meta_params import (
    MIN_TILES,
    Step,
    constants,
    launch_parameters,
    most_splits,
    query_blocks,
)
from .softmax import COMBINED, combine_constants, combine_kernel

NO_MASK: tuple[int, ...] = (0, 0, 0)  # its strides


@dataclass(slots=True, kw_only=True)
class AttentionPlan(Plan):
    """How to launch one kind of attention.

    Attributes:
        shape, strides: of the result, [rows, heads, q_len, dim] over a contiguous [rows, q_len, heads, dim].
        combine: merges the splits, in `merged` programs times blocks of channels; None where the last program does.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    combine: Kernel | None
    merged: tuple[int, int]


def paged_attention(call: AttentionCall) -> torch.Tensor:
    """Attend as `reference.paged_attention` does, on the device of `query`, without waiting for it.

    Args:
        call: over keys and values, or over latents. `call.kv.launches` keeps the plan.
    Returns: [rows, heads, q_len, value dim], a view of a contiguous [rows, q_len, heads, value dim].
    """
    query, kv, mask, sink_logits = call.query, call.kv, call.mask, call.sink_logits
    index = query.get_device()
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
    key = (
        id(kv.spec), query.shape, strides, query.dtype, kv.residual_keys.stride(), kv.residual_values.stride(), mask_kind,
        call.softcap is None, call.sliding_window is None, None if sink_logits is None else sink_logits.dtype, index,
    )  # fmt: skip
    plan = kept(kv.launches, key, lambda: _prepare(call))
    out = query.new_empty_strided(plan.shape, plan.strides)
    splits = plan.splits(kv.block_table.shape[1])
    room = plan.scratch.parts() if splits > 1 else plan.scratch.nothing  # alive until the launch
    sinks = out if sink_logits is None else sink_logits
    shown = out if mask is None else mask
    keys, values = kv.key_pages, kv.value_pages
    window_keys, window_values = kv.residual_keys, kv.residual_values

    def arguments(at: Callable[[torch.Tensor], Any]) -> tuple[Any, ...]:
        # `out` stands for what there is not
        return (
            at(query), *strides[:3], at(keys["codes"]), at(keys.get("scale", out)), at(keys.get("offset", out)),
            at(values["codes"]), at(values.get("scale", out)), at(values.get("offset", out)),
            at(kv.block_table), kv.block_table.stride(0), at(kv.num_pages), at(window_keys), *window_keys.stride()[:3],
            at(window_values), *window_values.stride()[:3], at(kv.exact_lens), at(kv.padding), at(shown), *mask_strides,
            at(sinks), at(out), *map(at, room), at(keys.get("order", out)), float(call.softmax_scale),
            float(call.softcap or 1.0), call.sliding_window or 0, kv.sink_tokens, query.shape[2],
        )  # fmt: skip

    plan.kernel.launch(plan.rows, plan.blocks, splits, index, arguments)
    if splits > 1 and plan.combine is not None:
        partial, bests, _ = room
        programs, parts = plan.merged
        plan.combine.launch(
            programs, parts, 1, index,
            lambda at: (at(partial), at(bests), at(sinks), at(out), plan.shape[2], splits),
        )  # fmt: skip
    return out


def _mask_strides(mask: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of rows, heads and queries, 0 where all share one."""
    sizes = zip(mask.shape[:3], mask.stride()[:3], strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in sizes)


def refuse_cpu() -> None:
    """Raise CacheOptionError where tensors on the CPU can be no kernel's."""
    if not INTERPRETED:
        raise CacheOptionError(
            "kernel 'triton' needs a GPU, and its tensors are on the CPU; use another backend, or set "
            "TRITON_INTERPRET=1 before Python starts to run it in Triton's interpreter"
        )


def _prepare(call: AttentionCall) -> AttentionPlan:
    query, spec = call.query, call.kv.spec
    where = query.device
    if where.type == "cpu":
        refuse_cpu()
    step = Step.of(call, support.target_isa(where))
    rows, heads, q_len, _ = query.shape
    dim, blocks, plain = spec.out_dim, query_blocks(spec, step), constants(spec, step)
    most = most_splits(spec, rows * blocks)
    parts = rows * blocks * plain["M_COLUMNS"] * most  # of all splits
    combine = None
    if spec.is_latent:
        merging = combine_constants(heads, plain["M_COLUMNS"], dim, step.sinks)
        combine = Kernel(spec, combine_kernel, merging, num_warps=4, enable_fp_fusion=True)
    return AttentionPlan(
        kernel=Kernel(
            spec,
            decode_kernel,
            plain,
            num_warps=launch_parameters(spec, step).num_warps,
            enable_fp_fusion=True,
        ),
        rows=rows,
        blocks=blocks,
        stretch=plain["KEYS"].tile * MIN_TILES,
        most=most,
        scratch=Scratch((parts * dim, 2 * parts), rows * blocks, where),
        shape=(rows, heads, q_len, dim),
        strides=(q_len * heads * dim, dim, heads * dim, 1),
        combine=combine,
        merged=(rows * heads * q_len, -(-dim // COMBINED)),
    )
