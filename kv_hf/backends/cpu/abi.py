"""All that C and Python agree on, defined here alone: numbers of enums, constants, and the fields of argument blocks.

`native/abi.h` is written from these definitions (`python scripts/write_abi.py`) and committed, so that a build needs no
Python of ours; a test compares the two. Decides no value of a format: those come from kv_hf/formats.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import torch

from ...formats.base import NATIVE_NUMBERS
from ...formats.linear import SCALE_MAX, Float8Format, SignedFormat
from ...page_summary import MIDDLE_TOKENS, MOST_CHANNELS, PART, RANGED_PAGES, Summary
from ...read_budget import NEWEST_PAGES

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # numbers of exact formats
_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_CODE_NAMES = {"signed": "INT", "unsigned": "UINT", "float8": "FLOAT"}


class MaskKind(IntEnum):
    """What an attention mask holds."""

    MASK_NONE = 0
    MASK_BOOL = 1
    MASK_FLOAT = 2


class Isa(IntEnum):
    """Instruction sets, each with all of the former ones."""

    ISA_PORTABLE = 0
    ISA_AVX2 = 1
    ISA_AVX512 = 2
    ISA_VNNI = 3


class Status(IntEnum):
    """What a call returns where something is wrong; a decode's output is then not complete."""

    NO_MEMORY = -1
    NO_SUCH_PAGE = -2
    NO_SUCH_SLOT = -3


def format_numbers() -> dict[str, tuple[int, int]]:
    """Return the formats by their names in C, as (number, bits of a code): the model's dtypes, then the kernels' codes."""
    found = {_DTYPE_NAMES[dtype]: (at, 8 * dtype.itemsize) for dtype, at in DTYPES.items()}
    for (code, bits), number in NATIVE_NUMBERS.items():
        if bits:
            found[f"{_CODE_NAMES[code]}{bits}"] = (number, bits)
    return found


@dataclass(frozen=True)
class Fields:
    """Fields of one kind that follow each other, separated by spaces in `names`, and what they are."""

    names: str
    comment: str = ""
    kind: "str | Struct" = "int64_t"

    def flat(self) -> Iterator[tuple[str, str]]:
        """Yield (name, code for struct) of each number; those of a field in a block are called "field.name"."""
        for name in self.names.split():
            if isinstance(self.kind, Struct):
                for inner, code in self.kind.whole.codes:
                    yield f"{name}.{inner}", code
            else:
                yield name, {"int64_t": "q", "double": "d"}[self.kind]

    def text(self) -> str:
        """Return the declaration in C."""
        kind = self.kind.name if isinstance(self.kind, Struct) else self.kind
        names = ", ".join(self.names.split())
        return f"    {kind} {names};" + (f" /* {self.comment} */" if self.comment else "")


class Part:
    """Neighbouring fields of a block, which are packed together.

    Attributes:
        names: of the fields, in their order.
        codes: (name, code for struct) of each.
        at: bytes in front of the first one.
        size: bytes of all.
        pack_into: of struct.Struct: (memory, offset, *numbers), for packing without a look at names.
    """

    def __init__(self, fields: tuple[Fields, ...], at: int) -> None:
        self.codes = tuple(pair for some in fields for pair in some.flat())
        self.names = tuple(name for name, _ in self.codes)
        self._packer = struct.Struct("=" + "".join(code for _, code in self.codes))
        self.at, self.size = at, self._packer.size
        self.pack_into, self.pack = self._packer.pack_into, self._packer.pack

    def pack_names(self, memory: bytearray, numbers: Mapping[str, float]) -> None:
        """Pack numbers by name, into their places in the block. Raises TypeError unless they are those of this part."""
        if numbers.keys() != set(self.names):
            raise TypeError(
                f"numbers must have the names of all fields and no others; {sorted(set(self.names) ^ numbers.keys())} differ"
            )
        self.pack_into(memory, self.at, *map(numbers.__getitem__, self.names))

    def read(self, memory: bytes | bytearray) -> dict[str, Any]:
        """Return the numbers of a block by name."""
        return dict(zip(self.names, self._packer.unpack_from(memory, self.at), strict=True))


@dataclass(frozen=True, eq=False)
class Struct:
    """A block of 64-bit fields, in parts that are packed together."""

    name: str
    comment: str
    lines: Mapping[str, tuple[Fields, ...]]

    @cached_property
    def parts(self) -> dict[str, Part]:
        """The parts by name."""
        made: dict[str, Part] = {}
        at = 0
        for name, fields in self.lines.items():
            made[name] = Part(fields, at)
            at += made[name].size
        return made

    @cached_property
    def whole(self) -> Part:
        """All fields as one part."""
        return Part(tuple(some for fields in self.lines.values() for some in fields), 0)

    @property
    def count(self) -> int:
        """Fields, those of blocks within counted one by one."""
        return len(self.whole.names)

    def text(self) -> str:
        """Return the declaration in C."""
        lines = [some.text() for fields in self.lines.values() for some in fields]
        size = f'_Static_assert(sizeof({self.name}) == {8 * self.count}, "fields of 64 bits");'
        return "\n".join(
            [f"/* {self.comment} */", "typedef struct {", *lines, f"}} {self.name};", size]
        )


SIDE = Struct(
    "Side",
    'One side of the pages: codes in layout "lanes" (see spec.SideSpec), scales and offsets in fp16 or fp32.',
    {
        "all": (
            Fields("format dim"),
            Fields(
                "rotated",
                "channels that a Hadamard transform takes together (see quant/codec.py), or 0",
            ),
            Fields(
                "wide wide_format",
                "channels in front, of their page's order, with codes of this format; 0: none",
            ),
            Fields("group_tokens", "tokens that share a scale or an offset"),
            Fields("scale_channels", "channels that share a scale"),
            Fields("scale_dtype", "of scales and offsets: F16, or F32 for latents"),
            Fields(
                "codes_stride scale_stride offset_stride",
                "words, scales and offsets per page and head",
            ),
            Fields("window_dtype", "exact tokens [rows, heads, slots, dim], elements contiguous"),
            Fields("window_row window_head window_slot", "strides in elements"),
            Fields(
                "codes scale offset",
                "pointers to page 0; scale and offset 0 where there are none",
            ),
            Fields(
                "order order_stride",
                "place -> channel, uint8 per page and head, where there are wide channels",
            ),
            Fields("window", "pointer to the exact tokens"),
        )
    },
)

DECODE = Struct(
    "Decode",
    "Attention of the newest tokens.",
    {
        "sides": (Fields("keys values", kind=SIDE),),
        "shapes": (
            Fields("rows heads group q_len page_size sink_tokens"),
            Fields("query_dtype query_row query_head query_at"),
            Fields("out_row out_head out_at", "of the output, in the query's dtype"),
            Fields("sliding_window", "or 0"),
            Fields("mask_kind mask_dtype mask_row mask_head mask_at", "columns are contiguous"),
            Fields("isa"),
            Fields("softmax_scale softcap", "softcap 0: none", "double"),
        ),
        "pointers": (
            Fields("table", "int32 [rows, at least a row's pages]"),
            Fields("table_width", "entries from one row to the next"),
            Fields("num_pages exact_lens padding", "int32 [rows]"),
            Fields("capacity", "pages that every field of both sides has room for"),
            Fields("query out mask"),
            Fields("sink_logits", "float [heads * group], or 0"),
            Fields("threads"),
        ),
    },
)

NEW = Struct(
    "New",
    "New tokens of one side, [rows, heads, q_len, dim] in the window's dtype; strides in elements.",
    {"all": (Fields("is_keys row head at"), Fields("clip", kind="double"))},
)

WRITE = Struct(
    "Write",
    "Append new tokens to the windows of both sides, then seal pages from the windows.",
    {
        "sides": (Fields("keys values", kind=SIDE),),
        "shapes": (
            Fields("new_keys new_values", kind=NEW),
            Fields("rows heads q_len slots page_size", "slots: of a row that both windows have"),
            Fields("isa"),
        ),
        "pointers": (
            Fields("keys_from values_from", "the new tokens; 0: seal alone"),
            Fields("starts skips", "int32 [rows]"),
            Fields("jobs num_jobs", "int32 [num_jobs, 3]: row, first slot, page id"),
            Fields("capacity"),
            Fields("damaged", "uint8, set to 1 where a number had to be made finite"),
            Fields("threads"),
        ),
    },
)

CHOOSE = Struct(
    "Choose",
    "The choice of the pages that a step reads; no values, mask or sliding window.",
    {
        "call": (Fields("call", kind=DECODE),),
        "budget": (
            Fields("summary", "of the keys: enum Summary"),
            Fields("words", "of a token's codes that are read, ALL_CHANNELS and ORDER apart"),
            Fields(
                "turn",
                "words from one to the one that RoPE turns with it, counted round; 0: none",
            ),
            Fields("most", "pages that are read of a row; 0: no bound"),
            Fields("from_tokens", "tokens of a row from which on pages are chosen"),
            Fields("share top_p", "0: none", "double"),
        ),
        "index": (
            Fields(
                "held",
                "int32 [heads, words]: the words of a token's codes that are there, the keys being an index; 0: all",
            ),
            Fields(
                "middles",
                "of the channels of an index of exact keys, [pages, heads, dim] in the window's dtype, or 0",
            ),
        ),
        "choice": (
            Fields("table width", "int32 [rows, width], written"),
            Fields("counts", "int32 [rows], written"),
        ),
    },
)

STRUCTS = (SIDE, DECODE, NEW, WRITE, CHOOSE)


def _constants() -> list[str]:
    """Return the definitions of formats' numbers. Powers of two are written exactly."""
    bits = ", ".join(str(bits) for _, bits in format_numbers().values())
    e4m3 = Float8Format
    return [
        f"#define FORMAT_BITS {{{bits}}} /* of a code, by enum Format */",
        f"#define SCALE_MAX {SCALE_MAX}f /* largest scale, offset and number: that of fp16 */",
        f"#define SIGNED_TOP {SignedFormat.top}f /* largest code of INT8 */",
        "/* FLOAT8: its largest number, bits of its mantissa, and the bias of its exponent */",
        f"#define FLOAT8_TOP {e4m3.top}f",
        f"#define FLOAT8_MANTISSA {e4m3.mantissa_bits}",
        f"#define FLOAT8_BIAS {e4m3.exponent_bias}",
        f"#define FLOAT8_LEAST_NORMAL 0x1p{1 - e4m3.exponent_bias}f",
        "/* what FLOAT8's bits, moved into a float, fall short of the number by */",
        f"#define FLOAT8_LIFT 0x1p{127 - e4m3.exponent_bias}f",
        "/* the float whose spacing is FLOAT8's smallest number: adding it rounds to multiples of that */",
        f"#define FLOAT8_ROUNDER 0x1p{24 - e4m3.exponent_bias - e4m3.mantissa_bits}f",
        "/* of page_summary.py and read_budget.py */",
        f"#define MOST_CHANNELS {MOST_CHANNELS} /* of a head that is read in part */",
        f"#define MOST_WORDS {MOST_CHANNELS // PART} /* that are read of a token's codes */",
        f"#define RANGED_PAGES {RANGED_PAGES}",
        f"#define MIDDLE_TOKENS {MIDDLE_TOKENS}",
        f"#define NEWEST_PAGES {NEWEST_PAGES}",
    ]


def _enum(name: str, numbers: Mapping[str, int]) -> str:
    members = ", ".join(f"{member} = {number}" for member, number in numbers.items())
    return f"enum {name} {{ {members} }};"


def _body() -> str:
    """Return all declarations of the header."""
    formats = {name: number for name, (number, _) in format_numbers().items()}
    isas = {one.name: one.value for one in Isa}
    return "\n\n".join(
        [
            _enum("Format", {**formats, "NUM_FORMATS": len(formats)}),
            "\n".join(_constants()),
            _enum("MaskKind", {one.name: one.value for one in MaskKind}),
            _enum("Summary", {one.name: one.value for one in Summary}),
            _enum("Isa", {**isas, "NUM_ISAS": len(isas)}),
            f"/* {Status.__doc__} */\n" + _enum("Status", {one.name: one.value for one in Status}),
            *(one.text() for one in STRUCTS),
        ]
    )


BODY = _body()
# a digest of all names, numbers, orders and comments: a comment says what a field means
ABI = zlib.crc32(BODY.encode()) & 0x7FFFFFFF


def header() -> str:
    """Return the text of native/abi.h."""
    return (
        "/* Written by scripts/write_abi.py from the definitions of abi.py beside this folder: change them there.\n"
        " * A block is packed once per layer. Fields that change from call to call lie together, at the end. */\n"
        "#ifndef KV_HF_ABI_H\n#define KV_HF_ABI_H\n\n#include <stdint.h>\n\n"
        "/* of a library that was built from these declarations, and no others */\n"
        f"#define KV_HF_ABI {ABI}\n\n{BODY}\n\n#endif\n"
    )
