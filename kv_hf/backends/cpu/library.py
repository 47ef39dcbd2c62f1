"""Find and load the compiled library, know why it cannot be used, and pack the argument blocks of abi.py. Compiles nothing."""

import ctypes
import functools
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch

from ...errors import CacheMismatchError
from ...quant.codec import block
from ...spec import PageFields, PageSpec, SideSpec
from .abi import ABI, DTYPES, MOST_WIDE, Part, Status

ISA_NAMES = ("portable C", "AVX2", "AVX-512", "AVX-512 VNNI")  # by abi.Isa
# a lesser instruction set than the processor has, by a word or its number; "none": no library at all
ISA_VARIABLE = "KV_HF_ISA"
ISA_WORDS = ("portable", "avx2", "avx512", "vnni")
LIBRARY_VARIABLE = "KV_HF_LIBRARY"  # a file to load in place of the installed library: one built with sanitizers, say
FOLDER = Path(__file__).parent
_PROCESS = os.getpid()  # that imported this module


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    """Return (library, "") or (None, reason)."""
    if os.environ.get(ISA_VARIABLE) == "none":
        return None, f"{ISA_VARIABLE}=none turns the C kernel off"
    chosen = os.environ.get(LIBRARY_VARIABLE)
    if chosen and not Path(chosen).is_file():
        return (
            None,
            f"{LIBRARY_VARIABLE} must name a compiled C library, got {chosen!r}, which is no file",
        )
    found = [Path(chosen)] if chosen else compiled_files()
    if not found:
        return None, (
            "the C kernel was not compiled when kv_hf was installed, and decoding on a CPU is slower; install a C compiler "
            "(gcc or clang) and install kv_hf again with KV_HF_BUILD_KERNEL=required"
        )
    path = found[0]
    if _is_checkout() and any(
        source.stat().st_mtime > path.stat().st_mtime for source in (FOLDER / "native").iterdir()
    ):
        return None, f"{path.name} is older than its sources; install kv_hf again"
    try:
        library = ctypes.CDLL(str(path))
        if library.kv_hf_abi() != ABI:
            return (
                None,
                f"{path.name} was compiled from other sources than these; install kv_hf again",
            )
    except (OSError, AttributeError) as error:
        return None, f"{path.name} cannot be loaded ({error}); install kv_hf again"
    for name in ("kv_hf_decode", "kv_hf_decode_latent", "kv_hf_choose_pages", "kv_hf_write"):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int64
    library.kv_hf_isa.restype = ctypes.c_int64
    asked, best = os.environ.get(ISA_VARIABLE), int(library.kv_hf_isa())
    if asked is not None and asked not in (*ISA_WORDS[: best + 1], *map(str, range(best + 1))):
        words = ", ".join(f"{word} ({index})" for index, word in enumerate(ISA_WORDS[: best + 1]))
        return None, (
            f"{ISA_VARIABLE} must be one of {words} on this processor, or none, got {asked!r}"
        )
    library.kv_hf_use_openmp.argtypes = [ctypes.c_void_p]
    openmp = _torch_openmp()
    library.kv_hf_use_openmp(openmp and openmp.GOMP_parallel)
    return library, ""


def compiled_files() -> list[Path]:
    """Return the compiled libraries that lie here, the one to load first; none where there was no compiler."""
    return sorted(FOLDER.glob("_native*.so"), key=lambda path: ".abi3." not in path.name)


def _is_checkout() -> bool:
    """Say whether the sources are worked on here: an installed copy has file times of no meaning."""
    return (FOLDER.parents[2] / "pyproject.toml").is_file()


def _torch_openmp() -> ctypes.CDLL | None:
    """Return the OpenMP that torch has loaded and that has an entry GOMP_parallel, or None.

    LLVM's and Intel's OpenMP offer that entry too. Only a library that is already there is taken. In a forked process
    its threads are gone, and a call would wait for them for ever. (A library that was loaded before the fork forgets the
    address by itself, see pool.c.)
    """
    if os.getpid() != _PROCESS:
        return None
    folder = Path(torch.__file__).parent / "lib"
    bundled = [str(path) for path in sorted(folder.glob("lib*omp*"))]
    for name in (*bundled, "libgomp.so.1", "libomp.so", "libiomp5.so", "libomp.dylib"):
        try:
            openmp = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        except OSError:
            continue
        if hasattr(openmp, "GOMP_parallel"):
            return openmp
    return None


def end_idle_threads() -> None:
    """End the OpenMP threads that the calling thread keeps for itself; its next parallel operator makes them anew.

    Each thread of Python keeps a set. Where all sets together are more than the cores, GNU's OpenMP puts idle threads to sleep
    at once, and waking them takes longer than many an operator of a decode step.
    """
    openmp = _torch_openmp()
    if openmp is not None and hasattr(openmp, "omp_pause_resource_all"):
        # omp_pause_soft; in a parallel region it fails, and does nothing
        openmp.omp_pause_resource_all(1)


def library() -> ctypes.CDLL:
    """Return the loaded library. Raises RuntimeError with the reason where there is none."""
    loaded, reason = _loaded()
    if loaded is None:
        raise RuntimeError(reason)
    return loaded


def threads() -> str:
    """Return in words whose threads the kernels run on."""
    return "threads made for each call" if _torch_openmp() is None else "torch's OpenMP threads"


def missing() -> str | None:
    """Return why there is no library, or None."""
    return _loaded()[1] or None


@functools.cache
def isa() -> int:
    """Return the instruction set in use, an index of ISA_NAMES."""
    best = int(library().kv_hf_isa())
    asked = os.environ.get(ISA_VARIABLE, str(best))
    return ISA_WORDS.index(asked) if asked in ISA_WORDS else int(asked)


class Block:
    """The memory of one argument block, kept between calls for the fields that stay.

    Copies and pickles of a block are empty: tensors lie elsewhere there.

    Attributes:
        memory, address: the block itself.
        key: what the fields depend on that are not packed at every call: sizes, options, and tensors by id; empty at first.
        kept: these tensors, or weak references to them, which tell whether another one has got an id.
        call: the compiled function that the block is for.
    """

    __slots__ = ("address", "call", "kept", "key", "memory")

    def __init__(self, fields: int) -> None:
        self.memory = bytearray(8 * fields)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.key: tuple[Any, ...] = ()
        self.kept: tuple[Any, ...] = ()
        self.call: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Block, (len(self.memory) // 8,)


def take_block(launches: MutableMapping[Any, Any], name: str, fields: int) -> Block:
    """Return the block that is kept under `name`, which is put back behind a call; until then it is nobody else's."""
    found = launches.pop(name, None)
    return Block(fields) if found is None else found


def side_fields(
    spec: SideSpec, fields: Mapping[str, torch.Tensor], window: torch.Tensor
) -> tuple[int, ...]:
    """Return the fields of abi.SIDE, in their order: formats, strides and pointers of one side.

    Args:
        fields: tensors of spec.fields with a leading [pages].
        window: [rows, num_kv_heads, slots, head_dim], the spec's dtype; the last dimension is contiguous.
    Returns: strides in elements; a pointer is 0 where there is no such tensor.
    """
    scheme, codes = spec.scheme, fields["codes"]
    scale, offset = fields.get("scale"), fields.get("offset")
    order = fields.get("order")
    row, head, slot, _ = window.stride()
    groups = scheme.scale_group or (0, 1)
    wide = [number or 0 for run in (*scheme.native_wide, *[(0, 0)] * MOST_WIDE) for number in run]
    dtype = DTYPES[spec.dtype]
    return (
        dtype if scheme.is_exact else scheme.native_number or 0,
        spec.head_dim,
        block(spec.head_dim) if scheme.rotated else 0,
        *wide[: 2 * MOST_WIDE],
        groups[0],
        groups[1],
        DTYPES[spec.scale_dtype],
        codes.stride(1),
        0 if scale is None else scale.stride(1),
        0 if offset is None else offset.stride(1),
        dtype,
        row,
        head,
        slot,
        codes.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if offset is None else offset.data_ptr(),
        0 if order is None else order.data_ptr(),
        0 if order is None else order.stride(1),
        window.data_ptr(),
    )


def pack_sides(
    block: Block,
    part: Part,
    spec: PageSpec,
    fields: tuple[Mapping[str, torch.Tensor], ...],
    windows: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Pack what `side_fields` returns of keys and of values: fields [pages, ..] and windows [rows, heads, slots, dim]."""
    sides = zip(spec.sides, fields, windows, strict=True)
    numbers = [number for side in sides for number in side_fields(*side)]
    part.pack_into(block.memory, part.at, *numbers)


def with_room(
    sides: tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]],
) -> tuple[PageFields, PageFields]:
    """Return both sides' fields, [pages, ..] each, with their room, beyond which C reads and writes no page, and a mark.

    Staged pages are fetched then; others have no mark, and are packed at every call.
    """
    keys, values = sides
    if type(keys) is PageFields and type(values) is PageFields:
        return keys, values
    return PageFields(keys), PageFields(values)


def raise_for(status: int, table: str, capacity: int, slots: int = 0) -> None:
    """Raise what a number of abi.Status means, where a call returned one; `table` names the argument of page ids."""
    if status == Status.NO_MEMORY:
        raise MemoryError("no memory for the C kernel's intermediate results")
    if status == Status.NO_SUCH_PAGE:
        raise CacheMismatchError(
            f"{table} must name pages that there is room for, 0 to {capacity - 1}, and names a page outside of them; it "
            "was made for other pages"
        )
    if status == Status.NO_SUCH_SLOT:
        raise CacheMismatchError(
            f"starts, skips and jobs must name rows and slots of the windows, 0 to {slots - 1}, and name a place outside of "
            "them; they were made for other windows"
        )
