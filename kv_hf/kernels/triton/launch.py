"""Launch the kernels on tensors: sizes, strides and launch parameters; refuses to look into device tensors."""

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from ..inputs import PagedKV
from . import device
from .combine import combine_kernel
from .decode import decode_kernel
from .table import Launch, launch_parameters
from .variant import column_block, constants, power_of_two, tile_tokens

TYPES = {"fp32": tl.float32, "fp16": tl.float16, "bf16": tl.bfloat16}


def triton_constants(plain: dict[str, Any]) -> dict[str, Any]:
    """Replace dtype names by Triton's dtypes."""
    return {k: TYPES[v] if k.endswith("_DTYPE") else v for k, v in plain.items()}


def paged_attention(
    query: torch.Tensor,
    kv: PagedKV,
    *,
    softmax_scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    sliding_window: int | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Attend as `reference.paged_attention` does, on the device of `query`, without waiting for it.

    Args:
        launch: warps, stages and splits, or None for those of `table.launch_parameters`.
    """
    rows, num_heads, q_len, _ = query.shape
    spec = kv.spec
    heads = spec.keys.num_kv_heads
    group = num_heads // heads
    isa = device.target_isa(query.device)
    columns = column_block(spec, group, q_len, isa)
    blocks = -(-group * q_len // columns)
    tiles = kv.block_table.shape[1] * (kv.page_size // tile_tokens(spec))
    if launch is None:
        launch = launch_parameters(spec, columns, isa, programs=rows * heads * blocks, tiles=tiles)
    splits = launch.num_splits
    dim = spec.values.head_dim
    out = query.new_empty(rows, num_heads, q_len, dim)
    query = query if query.stride(-1) == 1 else query.contiguous()
    kind = "none"
    if mask is not None:
        kind = "bool" if mask.dtype == torch.bool else "float"
        mask = mask.view(torch.uint8) if kind == "bool" else mask
        mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    partial, lse = out, out
    if splits > 1:
        partial = torch.empty((splits, *out.shape), dtype=torch.float32, device=out.device)
        lse = torch.empty(partial.shape[:-1], dtype=torch.float32, device=out.device)
    plain = constants(
        spec,
        query_dtype=query.dtype,
        group=group,
        q_len=q_len,
        isa=isa,
        num_splits=splits,
        num_stages=launch.num_stages,
        mask=kind,
        softcap=softcap is not None,
        sliding_window=sliding_window is not None,
        sinks=sink_logits is not None,
    )
    arguments = decode_arguments(
        query, kv, mask, sink_logits, partial, lse, softmax_scale, softcap, sliding_window
    )
    grid = (rows, heads * blocks, splits)
    with device.on_device(query):
        decode_kernel[grid](
            *arguments, **triton_constants(plain), num_warps=launch.num_warps, enable_fp_fusion=True
        )
        if splits == 1:
            return out
        total = rows * num_heads * q_len
        combine_kernel[(total,)](
            partial, lse, query if sink_logits is None else sink_logits, out, total, splits,
            NUM_HEADS=num_heads, Q_LEN=q_len, V_DIM=dim, SINKS=sink_logits is not None,
            SPLITS=power_of_two(splits), DIM=power_of_two(dim), num_warps=4 if dim >= 64 else 1,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


def decode_arguments(
    query: torch.Tensor,
    kv: PagedKV,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    softcap: float | None,
    sliding_window: int | None,
) -> tuple[Any, ...]:
    """Return the run-time arguments of the decode kernel in order; `out` stands in for absent tensors."""
    keys, values = _stored(kv.key_pages, out), _stored(kv.value_pages, out)
    mask_strides = (0, 0, 0)
    if mask is not None:
        strides = zip(mask.shape[:3], mask.stride()[:3], strict=True)
        mask_strides = tuple(stride if size > 1 else 0 for size, stride in strides)  # type: ignore[assignment]
    return (
        query, *query.stride()[:3], *keys, *values,
        kv.block_table, kv.block_table.stride(0), kv.num_pages,
        kv.window_keys, *kv.window_keys.stride()[:3], kv.window_values, *kv.window_values.stride()[:3],
        kv.exact_lens, kv.padding, out if mask is None else mask, *mask_strides,
        out if sink_logits is None else sink_logits, out, lse,
        float(softmax_scale), float(softcap or 1.0), int(sliding_window or 0), int(kv.sink_tokens),
    )  # fmt: skip


def _stored(pages: Mapping[str, torch.Tensor], absent: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes (8-bit ones as uint8), scales and offsets; all contiguous."""
    codes = pages["codes"]
    if codes.dtype.itemsize == 1:
        codes = codes.view(torch.uint8)
    return codes, pages.get("scale", absent), pages.get("offset", absent)


def interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter."""
    return not isinstance(decode_kernel, triton.JITFunction)
