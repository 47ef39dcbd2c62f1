"""All that C and Python agree on, as Python needs it: `native/abi.h` says what the fields mean, and a test compares the two."""

import struct
from collections.abc import Mapping
from enum import IntEnum

import torch

# of the library that was built from the header of these definitions, and of no other: a digest of the header's text
ABI = 1667980019
MOST_WIDE = 2  # widths of codes in front of those of the other channels
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # numbers of exact formats
DOUBLES = ("softmax_scale", "softcap", "clip", "share")  # all other fields are int64_t


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


class Part:
    """Neighbouring fields of a block, which are packed together.

    Attributes:
        names: of the fields, in their order; those of a block within are called "field.name".
        at: bytes in front of the first one.
        size: bytes of all.
        pack_into: of struct.Struct: (memory, offset, *numbers), for packing without a look at names.
    """

    def __init__(self, names: str, at: int = 0) -> None:
        self.names = tuple(names.split())
        codes = ("d" if name.rpartition(".")[2] in DOUBLES else "q" for name in self.names)
        self._packer = struct.Struct("=" + "".join(codes))
        self.at, self.size = at, self._packer.size
        self.pack_into = self._packer.pack_into

    def pack_names(self, memory: bytearray, numbers: Mapping[str, float]) -> None:
        """Pack numbers by name, into their places in the block. Raises TypeError unless they are those of this part."""
        if numbers.keys() != set(self.names):
            raise TypeError(
                f"numbers must have the names of all fields and no others; {sorted(set(self.names) ^ numbers.keys())} differ"
            )
        self.pack_into(memory, self.at, *map(numbers.__getitem__, self.names))


class Struct:
    """A block of 64-bit fields.

    Args:
        parts: name -> names of the fields that are packed together, one part behind the other.
    Attributes:
        parts: by name.
        whole: all fields as one part.
    """

    def __init__(self, **parts: str) -> None:
        self.parts: dict[str, Part] = {}
        at = 0
        for name, fields in parts.items():
            self.parts[name] = Part(fields, at)
            at += self.parts[name].size
        self.whole = Part(" ".join(parts.values()))

    @property
    def count(self) -> int:
        """Fields, those of blocks within counted one by one."""
        return len(self.whole.names)


def _within(fields: str, names: str) -> str:
    """Return the names of the fields of blocks within."""
    return " ".join(f"{field}.{name}" for field in fields.split() for name in names.split())


_SIDE = (
    "format dim rotated wide.0.format wide.0.channels wide.1.format wide.1.channels group_tokens scale_channels scale_dtype "
    "codes_stride scale_stride offset_stride window_dtype window_row window_head window_slot codes scale offset order order_stride window"
)
_NEW = "is_keys row head at clip"
_SIDES = _within("keys values", _SIDE)
SIDE, NEW = Struct(all=_SIDE), Struct(all=_NEW)
DECODE = Struct(
    sides=_SIDES,
    shapes=(
        "rows heads group q_len page_size sink_tokens query_dtype query_row query_head query_at out_row out_head out_at "
        "sliding_window mask_kind mask_dtype mask_row mask_head mask_at isa softmax_scale softcap"
    ),
    pointers="table table_width num_pages exact_lens padding capacity query out mask sink_logits threads",
)
WRITE = Struct(
    sides=_SIDES,
    shapes=_within("new_keys new_values", _NEW) + " rows heads q_len slots page_size isa",
    pointers="keys_from values_from starts skips jobs num_jobs capacity damaged threads",
)
CHOOSE = Struct(
    call=_within("call", " ".join(DECODE.whole.names)),
    budget="summary words turn most from_tokens share",
    index="held middles",
    choice="table width counts",
)
