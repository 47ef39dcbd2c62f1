"""Append and seal both sides of a layer at once: one launch each, directly; refuses to look into device tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from ...spec import PageSpec
from . import direct
from .append import append_pair_kernel
from .direct import ALIGNED, Compiled, address, as_bytes
from .meta_params import power_of_two
from .seal import pair_constants, seal_pair_kernel

Pair = tuple[torch.Tensor, torch.Tensor]
Fields = dict[str, torch.Tensor]

APPENDED = 16  # new tokens of one program, of a chunk
INTERPRETED = direct.interpreted(append_pair_kernel)
APPEND_TENSORS = (
    0,
    4,
    8,
    12,
    16,
    17,
)  # places among the arguments; alignment does not count for the last two
NOTHING = (0, 0, 0, 0)  # strides of a side without numbers
SEAL_TENSORS = (0, 4, 5, 6, 7, 11, 12, 13, 14, 15, 16)  # nor for the last three


@dataclass(slots=True)
class WritePlan:
    """How to launch one kind of write.

    Attributes:
        spec: keeps what the plan's key names by id.
        kernel: to be compiled with `constants`, by name, and `options`.
        places: of tensors among the arguments; pointers: picks those whose alignment the kernel is compiled for.
        heads, sides: of the grid; sides: 2, or 1 where the other one holds no numbers.
        tokens: new tokens of one program.
        compiled: by which pointers are no multiples of 16 (0: none).
    """

    spec: PageSpec
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    places: tuple[int, ...]
    pointers: Callable[[tuple[Any, ...]], tuple[int, ...]]
    heads: int
    sides: int
    tokens: int = 1
    compiled: dict[Any, Compiled] = field(default_factory=dict)


def write_pair(
    windows: Pair,
    new: Pair,
    starts: torch.Tensor,
    skips: torch.Tensor,
    jobs: torch.Tensor | None,
    fields: tuple[Fields, Fields],
    spec: PageSpec,
    damaged: torch.Tensor,
    launches: dict[Any, Any],
) -> None:
    """Append new keys and values to their windows, then seal full pages from there, in place and without waiting.

    Args:
        windows: keys and values (or latents and RoPE keys), [rows, heads, slots, dim]; slots from starts[b] on are
            written with new[b, :, skips[b] :].
        new: [rows, heads, q_len, dim] each, in the windows' dtypes.
        starts, skips: [rows], int32: first free slots, and leading tokens of `new` that are padding.
        jobs, fields, damaged: as `seal_pair` takes them; jobs None: nothing to seal.
        launches: keeps compiled launches for the layer.
    """
    window, value_window = windows
    token, value_token = new
    index = window.get_device()
    if not INTERPRETED and not direct.is_current(index):
        with torch.cuda.device(index):
            return write_pair(windows, new, starts, skips, jobs, fields, spec, damaged, launches)
    shape, strides, value_strides = token.shape, token.stride(), value_token.stride()
    if strides[3] != 1 or value_strides[3] != 1:
        token, value_token, strides, value_strides = _contiguous(token, value_token)
    q_len = shape[2]
    to, value_to = window.stride(), value_window.stride()
    key = "append", id(spec), q_len > 1, strides, value_strides, to, value_to, index
    plan = launches.get(key)
    if plan is None:
        plan = launches[key] = _append_plan(spec, q_len)
    if plan.sides == 1:
        value_strides = value_to = NOTHING
    arguments = (
        address(window), to[0], to[1], to[2], address(token), strides[0], strides[1], strides[2],
        address(value_window), value_to[0], value_to[1], value_to[2],
        address(value_token), value_strides[0], value_strides[1], value_strides[2],
        address(starts), address(skips), window.shape[2], value_window.shape[2], q_len,
    )  # fmt: skip
    tensors = window, token, value_window, value_token, starts, skips
    _launch(plan, shape[0], -(-q_len // plan.tokens) * plan.sides, index, arguments, tensors)
    if jobs is not None:
        seal_pair(windows, jobs, fields, spec, damaged, launches)


def seal_pair(
    tokens: Pair,
    jobs: torch.Tensor,
    fields: tuple[Fields, Fields],
    spec: PageSpec,
    damaged: torch.Tensor,
    launches: dict[Any, Any],
) -> None:
    """Encode full pages of both sides in place as `reference.seal_pages` does, with equal bytes and without waiting.

    Args:
        tokens: keys and values (or latents and RoPE keys), [rows, heads, slots, dim].
        jobs: [n, 3], int32: row, first slot and page of each job; a negative page: nothing to do.
        fields: tensors of SideSpec.fields of each side with a leading [pages], contiguous.
        damaged: [], uint8, set to 1 where numbers had to be made finite, else left as it is.
        launches: keeps compiled launches for the layer.
    """
    if not jobs.shape[0]:
        return
    window, value_window = tokens
    index = window.get_device()
    if not INTERPRETED and not direct.is_current(index):
        with torch.cuda.device(index):
            return seal_pair(tokens, jobs, fields, spec, damaged, launches)
    strides, value_strides = window.stride(), value_window.stride()
    if strides[3] != 1 or value_strides[3] != 1:
        window, value_window, strides, value_strides = _contiguous(window, value_window)
    key = "seal", id(spec), strides, value_strides, index
    plan = launches.get(key)
    if plan is None:
        plan = launches[key] = _seal_plan(spec)
    if plan.sides == 1:
        value_strides = NOTHING
    keys, values = fields
    codes, value_codes = keys["codes"], values["codes"]
    stored = (
        codes, keys.get("scale", codes), keys.get("offset", codes), value_codes, values.get("scale", value_codes),
        values.get("offset", value_codes),
    )  # fmt: skip
    order = keys.get("order", codes)
    a, b, c, d, e, f = map(address, stored)
    arguments = (
        address(window), strides[0], strides[1], strides[2], a, b, c,
        address(value_window), value_strides[0], value_strides[1], value_strides[2], d, e, f,
        address(jobs), address(damaged), address(order),
    )  # fmt: skip
    tensors = window, *stored[:3], value_window, *stored[3:], jobs, damaged, order
    _launch(plan, jobs.shape[0], plan.sides, index, arguments, tensors)


def _contiguous(
    keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """Return both with contiguous channels, and their strides."""
    keys, values = keys.contiguous(), values.contiguous()
    return keys, values, keys.stride(), values.stride()


def _launch(
    plan: WritePlan,
    x: int,
    z: int,
    index: int,
    arguments: tuple[Any, ...],
    tensors: tuple[torch.Tensor, ...],
) -> None:
    """Launch x * heads * z programs; `arguments` hold the addresses of `tensors` at plan.places."""
    odd: Any = 0
    if not INTERPRETED:
        pointers = plan.pointers(arguments)
        for pointer in pointers:
            odd |= pointer
        odd %= ALIGNED
        if odd:
            odd = tuple(pointer % ALIGNED == 0 for pointer in pointers)
        compiled = plan.compiled.get(odd)
        if compiled is not None:
            compiled(x, plan.heads, z, direct.current_stream(index), *arguments)
            return
    given = list(arguments)
    for place, tensor in zip(plan.places, tensors, strict=True):
        given[place] = as_bytes(tensor)
    if INTERPRETED:
        plan.kernel[x, plan.heads, z](*given, **plan.constants, **plan.options)
        return
    compiled = plan.compiled[odd] = Compiled(
        plan.kernel, tuple(given), plan.constants, **plan.options
    )
    compiled(x, plan.heads, z, direct.current_stream(index), *arguments)


def _append_plan(spec: PageSpec, q_len: int) -> WritePlan:
    dim, value_dim = (side.head_dim for side in spec.sides)
    tokens = 1 if q_len == 1 else APPENDED
    return WritePlan(
        spec=spec,
        kernel=append_pair_kernel,
        constants=append_constants(dim, value_dim, tokens),
        options={"num_warps": 4, "enable_fp_fusion": False},
        places=APPEND_TENSORS,
        pointers=itemgetter(*APPEND_TENSORS[:4]),
        heads=spec.keys.num_kv_heads,
        sides=2 if value_dim else 1,
        tokens=tokens,
    )  # fmt: skip


def append_constants(dim: int, value_dim: int, tokens: int) -> dict[str, int]:
    """Return the compile-time arguments of the kernel that appends; tokens: new ones of one program."""
    return {
        "DIM": dim, "WIDE": power_of_two(dim), "VALUE_DIM": value_dim, "VALUE_WIDE": power_of_two(value_dim),
        "TOKENS": tokens,
    }  # fmt: skip


def _seal_plan(spec: PageSpec) -> WritePlan:
    keys, values = spec.sides
    return WritePlan(
        spec=spec,
        kernel=seal_pair_kernel,
        constants=pair_constants(spec),
        options={"num_warps": 4, "enable_fp_fusion": False},
        places=SEAL_TENSORS,
        pointers=itemgetter(*SEAL_TENSORS[:-3]),
        heads=keys.num_kv_heads,
        sides=2 if values.head_dim else 1,
    )  # fmt: skip
