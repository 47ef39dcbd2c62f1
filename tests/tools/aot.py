"""Compile the kernels for GPUs that are not here: what the tests count instructions of.

Knows which arguments a kernel takes and how Triton compiles for a target; knows nothing of what the code should be.
"""

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_source

from kv_hf.backends.triton.decode import decode_kernel
from kv_hf.backends.triton.dense import dense_constants, dense_kernel
from kv_hf.backends.triton.direct import STEPWISE, TABLES
from kv_hf.backends.triton.meta_params import (
    FLOATS,
    HIP,
    Step,
    constants,
    launch_parameters,
)
from kv_hf.backends.triton.seal import (
    append_pair_kernel,
    pair_constants,
    seal_pair_kernel,
)
from kv_hf.backends.triton.selection import NUM_WARPS, choose_kernel, selection_constants
from kv_hf.backends.triton.selection import STEPWISE as SELECTION_STEPWISE
from kv_hf.backends.triton.selection import UNALIGNED as SELECTION_UNALIGNED
from kv_hf.backends.triton.softmax import combine_constants, combine_kernel
from kv_hf.spec import PageSpec, SideSpec

STRIDES = (
    "query_row",
    "query_head",
    "query_token",
    "wk_row",
    "wk_head",
    "wk_slot",
    "wv_row",
    "wv_head",
    "wv_slot",
)


def target(arch: str) -> GPUTarget:
    """Return the target of "sm_90" or "gfx942"."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64)


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
    """Compile one variant of the decode kernel for `arch` ("sm_90", "gfx942"), as a launch would ask for it.

    group: query heads of a kv head; over latents, of all.

    Returns: Triton's compiled kernel: `.asm["cubin"]` or `.asm["amdgcn"]`, `.metadata.shared`.
    """
    isa = int(arch[3:]) if arch.startswith("sm_") else HIP
    mask = "none" if mask_dtype is None else "bool" if mask_dtype == torch.bool else "float"
    step = Step(
        query_dtype,
        group * spec.keys.num_kv_heads,
        q_len,
        isa,
        mask,
        softcap,
        sliding_window,
        sinks,
    )
    plain = constants(spec, step)
    keys, values = spec.sides
    pointers = {
        "query": query_dtype, "key_codes": keys.fields["codes"][1], "value_codes": values.fields["codes"][1],
        "window_keys": keys.dtype, "window_values": values.dtype, "mask": mask_dtype or query_dtype,
        "sink_logits": query_dtype, "out": query_dtype, "partial": torch.float32, "bests": torch.float32,
        "key_scale": keys.scale_dtype, "key_offset": keys.scale_dtype, "value_scale": values.scale_dtype,
        "value_offset": values.scale_dtype,
    }  # fmt: skip
    types = {name: "*" + _pointee(dtype) for name, dtype in pointers.items()}
    types |= dict.fromkeys((*TABLES, "counters"), "*i32") | {"key_order": "*u8"}
    types |= dict.fromkeys((*STRIDES, *STEPWISE), "i32")
    types |= {"softmax_scale": "fp32", "softcap": "fp32"}
    # strides of whole heads and tokens are multiples of 16; a table's or a mask's need not be
    aligned = [name for name in pointers if name not in ("mask", "sink_logits")] + list(STRIDES)
    return compile_kernel(
        decode_kernel, types, plain, arch, aligned, launch_parameters(spec, step).num_warps
    )


def compile_selection(
    spec: PageSpec,
    arch: str,
    *,
    query_dtype: torch.dtype = torch.bfloat16,
    group: int = 4,
    q_len: int = 1,
    softcap: bool = False,
    sinks: bool = False,
    top_p: bool = False,
    indexed: bool = False,
) -> Any:
    """Compile one variant of the kernel that chooses pages for `arch`, as a launch would ask for it."""
    isa = int(arch[3:]) if arch.startswith("sm_") else HIP
    step = Step(
        query_dtype, group * spec.keys.num_kv_heads, q_len, isa, softcap=softcap, sinks=sinks
    )
    plain = selection_constants(spec, step, top_p=top_p, indexed=indexed)
    keys = spec.keys
    pointers = {
        "query": query_dtype,
        "key_codes": keys.code_dtype,
        "window_keys": keys.dtype,
        "sink_logits": query_dtype,
    }
    types = {name: "*" + _pointee(dtype) for name, dtype in pointers.items()}
    types |= dict.fromkeys(("key_scale", "key_offset"), "*fp16") | {"key_order": "*u8"}
    if keys.scheme.is_exact:  # scales are its codes, and offsets those or an index's middles
        types |= dict.fromkeys(("key_scale", "key_offset"), types["key_codes"])
    types |= dict.fromkeys(("scores", "sums", "masses"), "*fp32")
    tables = (
        "held_words",
        "block_table",
        "num_pages",
        "exact_lens",
        "chosen",
        "chosen_pages",
        "counters",
    )
    types |= dict.fromkeys(tables, "*i32")
    strides = [name for name in STRIDES if not name.startswith("wv")]
    types |= dict.fromkeys((*strides, "room", *SELECTION_STEPWISE), "i32") | {"share": "i64"}
    types |= dict.fromkeys(("softmax_scale", "softcap", "top_p"), "fp32")
    unaligned = (
        *tables,
        *SELECTION_UNALIGNED,
        *SELECTION_STEPWISE,
        "softmax_scale",
        "softcap",
        "top_p",
    )
    aligned = [name for name in types if name not in unaligned]
    return compile_kernel(choose_kernel, types, plain, arch, aligned, NUM_WARPS)


def compile_seal_pair(spec: PageSpec, arch: str) -> Any:
    """Compile the kernel that seals both sides for `arch`, as a launch would ask for it."""
    types = {"jobs": "*i32", "damaged": "*u8", "order": "*u8"}
    aligned = []
    for side, prefix in zip(spec.sides, ("", "value_"), strict=True):
        pointers = {"tokens": side.dtype, "codes": side.fields["codes"][1]}
        pointers |= {"scale": side.scale_dtype, "offset": side.scale_dtype}
        types |= {prefix + name: "*" + _pointee(dtype) for name, dtype in pointers.items()}
        strides = [f"{prefix}{name}" for name in ("row", "head", "slot")]
        strides = strides if prefix else [f"{name}_stride" for name in strides]
        types |= dict.fromkeys(strides, "i32")
        aligned += [*(prefix + name for name in pointers), *strides]
    kernel, plain = seal_pair_kernel, pair_constants(spec)
    return compile_kernel(kernel, types, plain, arch, aligned, 4, enable_fp_fusion=False)


def compile_dense(side: SideSpec, arch: str) -> Any:
    """Compile the kernel that writes one side out densely for `arch`, as a launch would ask for it."""
    types = dict.fromkeys(("out", "window"), "*" + FLOATS[side.dtype])
    types |= {"codes": "*" + _pointee(side.fields["codes"][1])}
    types |= dict.fromkeys(("scale", "offset"), "*" + FLOATS[side.scale_dtype])
    strides = ("window_row", "window_head", "window_slot")
    aligned = [*types, *strides]
    types |= dict.fromkeys(TABLES, "*i32") | {"order": "*u8"}
    types |= dict.fromkeys((*strides, "seen", "table_row", "sink_tokens"), "i32")
    plain = dense_constants(side)
    return compile_kernel(dense_kernel, types, plain, arch, aligned, 4, enable_fp_fusion=False)


def compile_combine(
    arch: str, *, value_dim: int, heads: int = 16, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Compile the kernel that merges splits over latents for `arch`."""
    types = dict.fromkeys(("partial", "bests"), "*fp32") | {"q_len": "i32", "num_splits": "i32"}
    types |= dict.fromkeys(("sink_logits", "out"), "*" + FLOATS[dtype])
    plain = combine_constants(heads, 16, value_dim, True)
    return compile_kernel(combine_kernel, types, plain, arch, ["partial", "bests", "out"], 4)


def compile_append_pair(
    arch: str, dim: int, value_dim: int, dtype: torch.dtype = torch.bfloat16
) -> Any:
    """Compile the kernel that appends tokens of both sides to their windows for `arch`."""
    pointers = ("window", "new", "value_window", "new_value")
    types = dict.fromkeys(pointers, "*" + FLOATS[dtype]) | dict.fromkeys(
        ("starts", "skips"), "*i32"
    )
    strides = [
        f"{of}_{name}"
        for of, names in (
            ("window", "row head slot"), ("new", "row head token"), ("value", "row head slot"),
            ("new_value", "row head token"),
        )
        for name in names.split()
    ]  # fmt: skip
    types |= dict.fromkeys((*strides, "slots", "value_slots", "q_len"), "i32")
    plain = {"DIM": dim, "VALUE_DIM": value_dim, "TOKENS": 1}
    return compile_kernel(append_pair_kernel, types, plain, arch, [*pointers, *strides], 4)


def compile_kernel(
    kernel: Any,
    types: dict[str, str],
    constexprs: dict[str, Any],
    arch: str,
    aligned: list[str],
    num_warps: int,
    **options: Any,
) -> Any:
    """Compile `kernel` for `arch`; `aligned` names the arguments that are multiples of 16."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constexprs.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options.setdefault("enable_fp_fusion", True)
    options |= {"num_warps": num_warps, "num_stages": constexprs.get("STAGES", 3)}
    return compile_source(source, target=target(arch), options=options)


def _pointee(dtype: torch.dtype) -> str:
    return FLOATS.get(dtype) or f"i{8 * dtype.itemsize}".replace("i8", "u8")
