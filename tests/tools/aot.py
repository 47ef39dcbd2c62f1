"""Compile the kernels for GPUs that are not here: what the tests count instructions of.

Launches are the package's own, of tensors on the CPU: they are not carried out, and their kernels are compiled for a target.
Knows nothing of what the code should be.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kv_hf.backends.base import AttentionCall, PagedKV
from kv_hf.backends.triton import decode, direct, meta_params, pages, selection
from kv_hf.read_budget import ReadBudget
from kv_hf.spec import PageSpec, PageWrite, SideSpec

PAGES = 64  # of the only row: enough for more than one split


def compile_decode(
    spec: PageSpec,
    arch: str,
    *,
    query_dtype: torch.dtype = torch.bfloat16,
    group: int = 4,
    q_len: int = 1,
    mask_dtype: torch.dtype | None = None,
    softcap: bool = False,
    sliding_window: bool = False,
    sinks: bool = False,
) -> Any:
    """Compile one variant of the decode kernel for `arch` ("sm_90", "gfx942"), as a launch asks for it, and what merges splits.

    group: query heads of a kv head; over latents, of all.

    Returns: Triton's compiled kernel: `.asm["cubin"]` or `.asm["amdgcn"]`, `.metadata.shared`.
    """
    call = call_of(spec, query_dtype, group, q_len, softcap=softcap, sinks=sinks)
    if mask_dtype is not None:
        call = replace(call, mask=torch.zeros(1, 1, q_len, call.kv.seen, dtype=mask_dtype))
    if sliding_window:
        call = replace(call, sliding_window=16)
    return compiled(decode.decode_kernel, lambda: decode.paged_attention(call), arch)


def compile_selection(
    spec: PageSpec,
    arch: str,
    *,
    query_dtype: torch.dtype = torch.bfloat16,
    q_len: int = 1,
    softcap: bool = False,
    sinks: bool = False,
    indexed: bool = False,
) -> Any:
    """Compile one variant of the kernel that chooses pages for `arch`, as a launch asks for it."""
    call = call_of(spec, query_dtype, 4, q_len, softcap=softcap, sinks=sinks)
    words = torch.zeros(spec.keys.num_kv_heads, 1, dtype=torch.int32) if indexed else None
    call = replace(call, kv=replace(call.kv, budget=ReadBudget(pages=8), words=words))
    return compiled(selection.score_kernel, lambda: selection.choose_pages(call), arch)


def compile_seal_pair(spec: PageSpec, arch: str) -> Any:
    """Compile the kernels that append to and seal both sides for `arch`, as a launch asks for them; return the second."""
    kv = kv_of(spec)
    jobs, number = torch.zeros(1, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    damaged = torch.zeros((), dtype=torch.uint8)
    windows, fields = (kv.residual_keys, kv.residual_values), (kv.key_pages, kv.value_pages)
    new = tuple(window[:, :, :1].contiguous() for window in windows)
    asked = PageWrite(windows, fields, spec, damaged, {}, jobs, new, number, number)
    return compiled(pages.seal_pair_kernel, lambda: pages.write(asked), arch)


def compile_dense(side: SideSpec, arch: str) -> Any:
    """Compile the kernel that writes one side out densely for `arch`, as a launch asks for it."""
    kv = kv_of(PageSpec(side, side))
    return compiled(pages.dense_kernel, lambda: pages.dense_side(kv, "keys"), arch)


# -- launches ----------------------------------------------------------------------------------------------------------


def kv_of(spec: PageSpec) -> PagedKV:
    """Return a row of a table that names one page, which holds nothing."""
    keys, values = (
        {name: torch.zeros(1, *shape, dtype=dtype) for name, (shape, dtype) in side.fields.items()}
        for side in spec.sides
    )
    windows = [
        torch.zeros(1, side.num_kv_heads, 80, side.head_dim, dtype=side.dtype)
        for side in spec.sides
    ]
    table, number = torch.zeros(1, PAGES, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    seen = PAGES * spec.keys.page_size
    return PagedKV(keys, values, spec, table, number, *windows, number, number, seen, 0)


def call_of(
    spec: PageSpec, dtype: torch.dtype, group: int, q_len: int, *, softcap: bool, sinks: bool
) -> AttentionCall:
    """Return a call over what `kv_of` returns."""
    heads = group * spec.keys.num_kv_heads
    query = torch.zeros(1, heads, q_len, spec.query_dim, dtype=dtype)
    sink_logits = torch.zeros(heads, dtype=dtype) if sinks else None
    return AttentionCall(query, kv_of(spec), 0.1, None, 5.0 if softcap else None, sink_logits)


def compiled(jit: Any, launch: Callable[[], Any], arch: str) -> Any:
    """Compile all kernels that `launch` launches for `arch`; return `jit`."""
    isa = int(arch[3:]) if arch.startswith("sm_") else meta_params.HIP
    target = GPUTarget("hip", arch, 64) if isa == meta_params.HIP else GPUTarget("cuda", isa, 32)
    found = []

    def compile_only(kernel: direct.Kernel, x: int, y: int, z: int, index: int, arguments: Any) -> None:  # fmt: skip
        given = {**kernel.constants, **kernel.options, "grid": (1, 1, 1), "warmup": True}
        made = kernel.jit.run(*arguments(direct.as_bytes), **given)
        if kernel.jit is jit:
            found.append(made)

    active = SimpleNamespace(
        get_current_device=lambda: arch,  # Triton keeps what it compiled by device
        get_current_stream=lambda index: 0,
        get_current_target=lambda: target,
        get_device_capability=lambda index=0: divmod(isa, 10),
    )
    with ExitStack() as stack:
        for owner, name, value in (
            (driver, "_active", active),
            (meta_params, "target_isa", lambda where: isa),
            (direct, "refuse_cpu", lambda: None),
            (direct.Kernel, "launch", compile_only),
        ):
            stack.enter_context(patch.object(owner, name, value))
        launch()
    return found[0]
