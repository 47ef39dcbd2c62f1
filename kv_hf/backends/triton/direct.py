"""Launch compiled kernels without Triton's front end, which takes a hundred microseconds for as many arguments.

A kernel is compiled once for arguments of one kind and then launched with addresses in place of tensors: Triton's
launchers take integers for pointers as they are (backends/*/driver.py of 3.6 and 3.9). Whoever launches sees to it
that dtypes, strides (1, multiples of 16) and alignment are those that the kernel was compiled for. Knows nothing of
what kernels compute.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from triton import knobs
from triton.runtime import driver

from ...errors import CacheOptionError
from ...spec import PageSpec
from ..base import AttentionCall, PagedKV
from . import meta_params

ALIGNED = 16  # bytes: Triton compiles anew for pointers that are no multiples of it
INTERPRETED: bool = knobs.runtime.interpret  # kernels run in Triton's interpreter, on the CPU

address = torch.Tensor.data_ptr


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` [any shape] as kernels are compiled for it: numbers of 8 bits as uint8."""
    return tensor if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8)


At = Callable[[torch.Tensor], Any]  # what to hand over for a tensor


class Strided(NamedTuple):
    """A tensor [rows, heads, tokens, channels] of contiguous channels as kernels take it: its pointer, and its strides."""

    pointer: Any
    row: Any
    head: Any
    token: Any

    @classmethod
    def of(cls, at: At, tensor: torch.Tensor) -> "Strided":
        """Return that of a tensor [rows, heads, tokens, channels]."""
        row, head, token, _ = tensor.stride()
        return tuple.__new__(cls, (at(tensor), row, head, token))  # quicker than its constructor


class Fields(NamedTuple):
    """Pointers to the tensors of one side of the pages (SideSpec.fields); codes stand for what there is not."""

    codes: Any
    scale: Any
    offset: Any
    order: Any

    @classmethod
    def of(cls, at: At, fields: Mapping[str, torch.Tensor]) -> "Fields":
        """Return those of a side; fields: tensors with a leading [pages]."""
        codes = fields["codes"]
        scale, offset = fields.get("scale", codes), fields.get("offset", codes)
        order = fields.get("order", codes)
        return tuple.__new__(cls, (at(codes), at(scale), at(offset), at(order)))


# for triton.jit: numbers that change while a sequence grows must not make new kernels, and small tensors may begin anywhere
# in a buffer that they share. Triton specializes what lies in tuples.
STEPWISE = (
    "table_width mask_row mask_head mask_query most share from_tokens width sliding_window sink_tokens seen slots "
    "q_len num_splits columns"
)
UNALIGNED = "block_table num_pages exact_lens padding mask sink_logits held_words chosen chosen_pages jobs damaged starts skips"
SPECIALIZED = {
    "do_not_specialize": STEPWISE.split(),
    "do_not_specialize_on_alignment": UNALIGNED.split(),
}


def rows_of(at: At, kv: PagedKV) -> tuple[Any, ...]:
    """Return what each row of a batch holds: block_table, table_width, num_pages, exact_lens, padding and sink_tokens."""
    table = kv.block_table
    return (
        at(table), table.stride(0), at(kv.num_pages), at(kv.exact_lens), at(kv.padding), kv.sink_tokens
    )  # fmt: skip


def refuse_cpu() -> None:
    """Raise CacheOptionError where tensors on the CPU can be no kernel's."""
    if not INTERPRETED:
        raise CacheOptionError(
            "kernel 'triton' needs a GPU, and its tensors are on the CPU; use another backend, or set "
            "TRITON_INTERPRET=1 before Python starts to run it in Triton's interpreter"
        )


class Kernel:
    """A jitted function with its compile-time arguments, which is compiled when it is launched.

    Attributes:
        spec: of the pages; keeps what names the kernel among `PagedKV.launches` by id.
        jit: the function, whose compile-time arguments come last.
        constants: these by name; tail: in the function's order; options: num_warps and the like.
        pointers: argument and place in it of the pointers whose alignment counts; None before the first launch.
        compiled: by which of them are no multiples of 16 bytes (0: none); empty in the interpreter.
    """

    __slots__ = ("compiled", "constants", "jit", "options", "pointers", "spec", "tail")

    def __init__(self, spec: PageSpec, jit: Any, constants: dict[str, Any], **options: Any) -> None:
        self.spec, self.jit, self.constants = spec, jit, constants
        self.tail = tuple(constants[name] for name in jit.arg_names if name in constants)
        # said every time: what Triton does unless told is going to change
        self.options = {"enable_fp_fusion": True, **options}
        self.pointers: list[tuple[int, int]] | None = None
        self.compiled: dict[Any, Any] = {}

    def launch(
        self, x: int, y: int, z: int, index: int, arguments: Callable[[At], tuple[Any, ...]]
    ) -> None:
        """Launch x * y * z programs on GPU `index`, in its current stream.

        Args:
            arguments: returns the run-time arguments; it is given what to hand over for a tensor, its address for a
                launch, the tensor itself for the compiler and the interpreter. Pointers whose alignment counts lie in
                tuples.
        """
        if INTERPRETED:
            self.jit[x, y, z](*arguments(as_bytes), **self.constants, **self.options)
            return None
        if 0 <= index != driver.active.get_current_device():
            with torch.cuda.device(index):
                return self.launch(x, y, z, index, arguments)
        given = arguments(address)
        if self.pointers is None:
            self.pointers = [
                (number, place)
                for number, one in enumerate(arguments(as_bytes))
                if isinstance(one, tuple)
                for place, part in enumerate(one)
                if isinstance(part, torch.Tensor)
            ]
        odd: Any = 0
        for number, place in self.pointers:
            odd |= given[number][place]
        odd %= ALIGNED
        if odd:
            odd = tuple(given[number][place] % ALIGNED == 0 for number, place in self.pointers)
        compiled = self.compiled.get(odd)
        if compiled is None:
            compiled = self.jit.run(
                *arguments(as_bytes), grid=(1, 1, 1), warmup=True, **self.constants, **self.options
            )
            self.compiled[odd] = compiled
        stream: int = driver.active.get_current_stream(max(index, 0))
        # loads the code where it is new, and then may raise OutOfResources; nothing for a profiler of Triton's
        compiled.run(
            x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *given, *self.tail
        )  # fmt: skip
        return None


@dataclass(slots=True, kw_only=True)
class Plan:
    """How to launch one kind of call whose programs share a row's pages.

    Attributes:
        kernel: what is launched; last: what takes the results of its splits.
        grid: rows and programs of each, without the splits.
        stretch: tokens of a split at least; most: splits at most.
        sizes: float32 numbers of each part of the partial results.
        refused: whether the device has too little for the kernel.
    """

    kernel: Kernel
    last: Kernel
    grid: tuple[int, int]
    stretch: int
    most: int
    sizes: tuple[int, ...]
    refused: bool = False

    def splits(self, width: int) -> int:
        """Return the programs that share a row's pages, of which there are at most `width`."""
        tokens = width * self.kernel.spec.keys.page_size
        return max(1, min(self.most, tokens // self.stretch))

    def parts(self, query: torch.Tensor) -> list[torch.Tensor]:
        """Return room for the partial results of a launch, [size] each, float32; the caller keeps it until then."""
        return [query.new_empty(size, dtype=torch.float32) for size in self.sizes]


Kept = TypeVar("Kept", bound=Kernel | Plan)
MOST = 64  # kernels of a layer: shapes that change all the time are not remembered forever


def kept(launches: dict[Any, Any], key: Any, make: Callable[[], Kept]) -> Kept:
    """Return what a layer keeps under `key` in PagedKV.launches, made now where it is new; where these are many, the only one."""
    found: Kept | None = launches.get(key)
    if found is None:
        found = make()
        if len(launches) >= MOST:
            for old in [name for name, one in launches.items() if isinstance(one, Kernel | Plan)]:
                del launches[old]
        launches[key] = found
    return found


def planned(
    call: AttentionCall, prepare: Callable[..., Plan], *more: Any
) -> tuple[AttentionCall, Plan]:
    """Return a call with its query's channels and its mask's columns side by side, and the plan that its layer keeps for such ones.

    Args:
        prepare: makes the plan where it is new, of the call, its meta_params.Queries, Plan.grid, and `more`, on which the plan
            depends besides what there is, of which dtype, and how it lies.
    Raises: CacheOptionError as `refuse_cpu` does.
    """
    if call.query.stride(3) != 1:
        call = replace(call, query=call.query.contiguous())
    if call.mask is not None and call.mask.stride(3) != 1:
        call = replace(call, mask=call.mask.contiguous())
    query, kv, mask, sinks = call.query, call.kv, call.mask, call.sink_logits
    key = (
        prepare, *more, id(kv.spec), query.shape, query.stride(), query.dtype, query.get_device(),
        kv.residual_keys.stride(), kv.residual_values.stride(),
        mask is not None and (mask.dtype, mask.stride(0) >> 31), sinks is not None and sinks.dtype,
        call.softcap is None, call.sliding_window is None, kv.words is None,
    )  # fmt: skip

    def make() -> Plan:
        where = query.device
        if where.type == "cpu":
            refuse_cpu()
        queries = meta_params.Queries.of(call, meta_params.target_isa(where))
        grid = query.shape[0], queries.blocks(query.shape[2])
        return prepare(call, queries, grid, *more)

    return call, kept(kv.launches, key, make)
