"""Launch the kernels for latents on tensors: sizes, strides and launch parameters; refuses to look into device tensors."""

from typing import Any

import torch

from ..inputs import PagedKV
from . import device
from .combine import combine_kernel
from .latent import latent_kernel
from .latent_variant import COLUMNS, COMBINED, latent_constants, launch_parameters, tile_tokens
from .launch import triton_constants
from .table import Launch
from .variant import power_of_two


def latent_attention(
    query: torch.Tensor,
    kv: PagedKV,
    *,
    softmax_scale: float,
    mask: torch.Tensor | None = None,
    sink_logits: torch.Tensor | None = None,
    sliding_window: int | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Attend to latents as `reference.paged_attention` does, on the device of `query`, without waiting for it.

    Args:
        query: [rows, heads, q_len, rank + rope_dim]; kv: of a spec of latents.
        launch: warps, stages and splits, or None for those of `latent_variant.launch_parameters`.
    Returns: [rows, heads, q_len, rank].
    """
    rows, heads, q_len, _ = query.shape
    spec = kv.spec
    isa = device.target_isa(query.device)
    blocks = -(-heads * q_len // COLUMNS)
    if launch is None:
        tiles = kv.block_table.shape[1] * (kv.page_size // tile_tokens(spec))
        launch = launch_parameters(spec, isa, programs=rows * blocks, tiles=tiles)
    splits = launch.num_splits
    rank = spec.out_dim
    out = query.new_empty(rows, heads, q_len, rank)
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
    plain = latent_constants(
        spec,
        query_dtype=query.dtype,
        heads=heads,
        q_len=q_len,
        isa=isa,
        num_splits=splits,
        num_stages=launch.num_stages,
        mask=kind,
        sliding_window=sliding_window is not None,
        sinks=sink_logits is not None,
    )
    arguments = latent_arguments(
        query, kv, mask, sink_logits, partial, lse, softmax_scale, sliding_window
    )
    with device.on_device(query):
        latent_kernel[(rows, blocks, splits)](
            *arguments, **triton_constants(plain), num_warps=launch.num_warps, enable_fp_fusion=True
        )
        if splits == 1:
            return out
        total = rows * heads * q_len
        combine_kernel[(total, -(-rank // COMBINED))](
            partial, lse, query if sink_logits is None else sink_logits, out, total, splits,
            NUM_HEADS=heads, Q_LEN=q_len, V_DIM=rank, SINKS=sink_logits is not None,
            SPLITS=power_of_two(splits), DIM=COMBINED, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def latent_arguments(
    query: torch.Tensor,
    kv: PagedKV,
    mask: torch.Tensor | None,
    sink_logits: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float,
    sliding_window: int | None,
) -> tuple[Any, ...]:
    """Return the run-time arguments of the latent kernel in order; `out` stands in for absent tensors."""
    latents, ropes = kv.key_pages, kv.value_pages
    rope_codes = ropes["codes"]
    if rope_codes.dtype.itemsize == 1:
        rope_codes = rope_codes.view(torch.uint8)
    mask_strides = (0, 0, 0)
    if mask is not None:
        strides = zip(mask.shape[:3], mask.stride()[:3], strict=True)
        mask_strides = tuple(stride if size > 1 else 0 for size, stride in strides)  # type: ignore[assignment]
    windows = kv.window_keys, kv.window_values
    return (
        query, *query.stride()[:3],
        latents["codes"], latents.get("scale", out), latents.get("offset", out),
        rope_codes, ropes.get("scale", out), ropes.get("offset", out),
        kv.block_table, kv.block_table.stride(0), kv.num_pages,
        *(part for w in windows for part in (w, w.stride(0), w.stride(2))),
        kv.exact_lens, kv.padding, out if mask is None else mask, *mask_strides,
        out if sink_logits is None else sink_logits, out, lse,
        float(softmax_scale), int(sliding_window or 0), int(kv.sink_tokens),
    )  # fmt: skip
