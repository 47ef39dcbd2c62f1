"""Number formats: a `Format` says how numbers become codes, a `Scheme` how one side of a page holds them.

Knows no page layout, no cache and no kernel.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import dist, gcd, isclose
from operator import mul
from typing import Any

import torch

from ..errors import CacheOptionError

SIDES = ("keys", "values", "latent", "k_rope")
WHOLE_PAGE = 0  # a group that spans all tokens of a page
WHOLE_HEAD = 0  # a group that spans all channels of a head
REACH = 64  # channels by which a run may differ from its part
CODE_BITS = {1, 2, 3, 4, 6, 8}  # that a code may have
SCALE_DTYPES = {16: torch.float16, 32: torch.float32}  # by Scheme.scale_bits
# (arithmetic, bits of a code) -> the number by which C's enum Format and Triton know it; exact's 0 to 2 are the dtypes'
NATIVE_NUMBERS = {
    ("none", 0): 0,
    ("signed", 8): 3,
    ("unsigned", 4): 4,
    ("unsigned", 2): 5,
    ("float8", 8): 6,
    ("unsigned", 8): 7,
    ("unsigned", 3): 8,
    ("unsigned", 6): 9,
}

# codes [.., page_size, head_dim], and scales and offsets [.., token groups, channel groups] where there are any
Encoded = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Format(ABC):
    """A number format of stored keys, values, latents or RoPE keys; one object per format, held by the registry.

    The shipped ones are rows of formats/linear.py. A subclass in one file is a format of another arithmetic, which
    `kv_hf.register_format` makes known (docs/formats.md shows one) and the implementations in torch read.

    Attributes:
        name: by which options and files call it: lower-case letters, digits and underscores.
        bits: bits of a code: 1, 2, 3, 4, 6 or 8. Codes of less than 8 bits are packed.
        code_dtype: of the codes that `encode` returns: torch.uint8, or torch.int8 for 8-bit codes with a sign.
        sides: for which it may be used, some of SIDES.
        sized_sides: some of `sides`, the size of whose groups the option `group_size` sets; others have groups of a fixed size.
        k_rope: format of the RoPE keys beside latents in this one, where no option names another.
    """

    name: str
    bits: int
    code_dtype: torch.dtype = torch.uint8
    sides: tuple[str, ...] = ("keys", "values")
    sized_sides: tuple[str, ...] = ()
    k_rope: str = "int8"

    @abstractmethod
    def scheme(self, side: str, group_size: int | None = None) -> "Scheme":
        """Return how numbers of one side are stored; see `made`.

        Args:
            side: one of `sides`.
            group_size: what the option says, for a side of `sized_sides`; None asks for the default, which should fit all models
                (0 and -n do, see Scheme). A model that it does not fit is an error that names the format.
        """

    @abstractmethod
    def encode(self, numbers: torch.Tensor, scheme: "Scheme") -> Encoded:
        """Return the codes of whole pages, and their scales and offsets.

        Each page is encoded by itself: its bytes must not depend on the pages that are encoded with it.

        Args:
            numbers: [pages, num_kv_heads, page_size, head_dim], fp32, finite, within float16's range, without -0. Where
                the scheme says so they are rotated, and wide channels come first (quant/codec.py).
            scheme: as `scheme` returned it, with groups of plain sizes.
        Returns: codes [pages, num_kv_heads, page_size, head_dim] of `code_dtype`, each below 2^bits; scale and offset
            [pages, num_kv_heads, page_size / group tokens, head_dim / group channels] of scheme.scale_dtype, None where
            the scheme has no such group.
        """

    @abstractmethod
    def decode(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor | None,
        offset: torch.Tensor | None,
        scheme: "Scheme",
    ) -> torch.Tensor:
        """Return the numbers of codes as fp32 [pages, num_kv_heads, page_size, head_dim]; the shapes are `encode`'s."""

    @property
    def code(self) -> str:
        """Return what kernels call the arithmetic of the codes; the format's name where no compiled kernel knows it."""
        return self.name

    def made(
        self,
        scale_group: tuple[int, int] | None = None,
        offset_group: tuple[int, int] | None = None,
        **rest: Any,
    ) -> "Scheme":
        """Return a scheme of this format; the arguments are attributes of `Groups`."""
        widths = rest.get("widths")
        bits = widths[-1][0] if widths and _are_widths(widths) else self.bits
        return Scheme(scale_group, offset_group, **rest, format=self, bits=bits)

    def __repr__(self) -> str:
        return self.name

    def __eq__(self, other: object) -> bool:
        """Say whether both have one arithmetic: one class, and the same attributes."""
        return self is other or (type(self) is type(other) and vars(self) == vars(other))

    def __hash__(self) -> int:
        return hash(type(self))

    def __copy__(self) -> "Format":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Format":
        """Return the format itself: there is one object of each."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return get_format, (self.name,)


@dataclass(frozen=True)
class Groups:
    """How the numbers of one side (keys, values, latents or RoPE keys) are grouped, and what is done to them before they are encoded.

    Attributes:
        scale_group: (tokens, channels) that share a scale: n > 0 exactly n, 0 all of the page or of the head,
            -n the largest divisor of at most n (a default, which must fit every model). None: there are no scales.
        offset_group: the same for offsets: `scale_group` again, or groups that no option changes, or None for none.
        axis: whose numbers in a group the option `group_size` sets, "tokens" or "channels"; None: they are fixed.
        clip: part of a group's range that the codes span; numbers beyond it saturate ("unsigned" only).
            Two bits have four codes: losing the extremes costs less than spreading the codes over them.
        scale_bits: bits of a scale and of an offset, as floating-point numbers: 16 or 32.
        rotated: whether codes stand for numbers behind a Hadamard transform of each head's channels (quant/codec.py),
            which spreads a large channel over all others. Values only: what attention makes of them is rotated back once.
        widths: (bits of a code, part of the channels), the widest first, where not all channels get the format's bits: the channels
            whose pairs have the largest ranges in a row's first page get the most. Keys only; a page then holds the order of its
            channels (quant/codec.py).
    """

    scale_group: tuple[int, int] | None
    offset_group: tuple[int, int] | None = None
    axis: str | None = None
    clip: float = 1.0
    scale_bits: int = 16
    rotated: bool = False
    widths: tuple[tuple[int, float], ...] = ()

    def sized(self, size: int | None) -> "Groups":
        """Return these groups with what the option `group_size` says; None keeps them."""
        if size is None or self.axis is None or self.scale_group is None:
            return self
        tokens, channels = self.scale_group
        group = (size, channels) if self.axis == "tokens" else (tokens, size)
        return replace(self, scale_group=group, offset_group=self.offset_group and group)


@dataclass(frozen=True, kw_only=True)
class Scheme(Groups):
    """The storage of one side of a page: groups, in the codes of a format.

    Attributes:
        format: which encodes and decodes.
        bits: bits of a code; 0 for exact storage. Of several widths the least.
        wide: (bits of a code, channels) of the channels in front of those, set by `resolve`. Where all channels get the same
            bits there are none, and `bits` says how many.
    Sources: per-channel keys and per-token values, KIVI (arXiv 2402.02750); removing the channel mean of
    keys, SageAttention (arXiv 2410.02367); rotation, QuaRot (arXiv 2404.00456).
    """

    format: Format
    bits: int
    wide: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for what, fits, rule in self._rules():
            if not fits:
                raise CacheOptionError(
                    f"format {self.name!r}: {what} must be {rule}, got {getattr(self, what)!r}"
                )

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield attributes, whether they fit, and the rule."""
        pair = "(tokens, channels), two whole numbers, or None"
        yield "scale_group", self.scale_group is None or _is_group(self.scale_group), pair
        yield "offset_group", self.offset_group is None or _is_group(self.offset_group), pair
        yield "axis", self.axis in (None, "tokens", "channels"), "'tokens', 'channels' or None"
        clipped = _is_number(self.clip) and 0 < self.clip <= 1
        yield "clip", clipped, "a part of a group's range, above 0 and at most 1"
        yield (
            "scale_bits",
            type(self.scale_bits) is int and self.scale_bits in SCALE_DTYPES,
            "16 or 32",
        )
        by_channel = (self.scale_group or (0, 0))[1] == 1 and self.offset_group == self.scale_group
        yield (
            "widths",
            _are_widths(self.widths) and (by_channel or not self.widths),
            "up to three (bits, part), of falling bits and of parts that add up to 1, of scales and offsets of single channels",
        )

    @property
    def name(self) -> str:
        """Name of the format."""
        return self.format.name

    @property
    def code(self) -> str:
        """What kernels call the arithmetic of the codes.

        "none" (model dtype, no scale), "unsigned" (codes 0 .. 2^bits - 1 from the group's minimum), "signed" (codes -qmax .. qmax
        around the offset), "float8" (e4m3 around the offset), or the name of a format that no compiled kernel knows.
        """
        return self.format.code

    @property
    def is_exact(self) -> bool:
        """True when numbers are stored as they are."""
        return self.bits == 0

    @property
    def native_number(self) -> int | None:
        """Number by which compiled kernels know the codes; None: the implementations in torch alone read them."""
        return NATIVE_NUMBERS.get((self.code, self.bits))

    @property
    def native_wide(self) -> tuple[tuple[int | None, int], ...]:
        """(the same number, channels) of the channels of `wide`."""
        return tuple(
            (NATIVE_NUMBERS.get((self.code, bits)), channels) for bits, channels in self.wide
        )

    @property
    def codes_per_byte(self) -> int:
        """Codes that share a byte (1 for 8-bit codes and for exact storage); those that fill whole bytes, of 3 and 6 bits."""
        return _packed(self.bits, 8) if self.bits else 1

    @property
    def code_dtype(self) -> torch.dtype:
        """Dtype of a code, or of a byte of packed codes; of no meaning for exact storage."""
        return self.format.code_dtype

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of scales and offsets."""
        return SCALE_DTYPES[self.scale_bits]

    def resolve(self, page_size: int, head_dim: int, where: str) -> "Scheme":
        """Replace the "whole" groups by sizes and check that everything divides.

        Raises: CacheOptionError naming `where` (e.g. "keys"), the size and what it must divide.
        """
        if self.is_exact:
            return self
        cut = self._cut(head_dim)
        if cut is None:
            per_byte = min(_packed(bits, 8) for bits, _ in self._parts)
            size = "kv_lora_rank" if where == "latent" else "head_dim"
            packs = f"packs {per_byte} channels into {'a byte' if 8 % self.bits == 0 else 'bytes'}"
            raise CacheOptionError(
                f"{where} format {self.name!r} {packs}, so {size} "
                f"must be a multiple of {per_byte}, got {head_dim}; use 'int8', 'fp8' or 'exact'"
            )
        scale, offset = (
            None if group is None else self._sizes(group, page_size, head_dim, where)
            for group in (self.scale_group, self.offset_group)
        )
        *wide, (bits, _) = cut
        return replace(
            self,
            scale_group=scale,
            offset_group=offset,
            bits=bits,
            clip=self.clip if bits == self.bits else 1.0,
            widths=self.widths if wide else (),
            wide=tuple(wide),
        )

    @property
    def _parts(self) -> tuple[tuple[int, float], ...]:
        return self.widths or ((self.bits, 1.0),)

    def _cut(self, head_dim: int) -> list[tuple[int, int]] | None:
        """Return (bits, channels) of the runs of a head's channels, the widest first; None where none fill whole bytes.

        Each run fills whole words of 32 bits, which C reads, or else bytes. All widths occur and take at most the bits that the
        parts ask for; where that cannot be, as few more as can.
        """
        bits = [width for width, _ in self._parts]
        wanted = [part * head_dim for _, part in self._parts]
        for unit in (32, 8):
            steps = [_packed(width, unit) for width in bits]
            cuts = list(_fillings(steps, wanted, head_dim))
            more = {cut: sum(map(mul, bits, cut)) - sum(map(mul, bits, wanted)) for cut in cuts}
            within = [cut for cut in cuts if all(cut) and more[cut] <= 0]
            beyond = [cut for cut in cuts if more[cut] >= 0]
            if within or beyond:
                cut = min(within or beyond, key=lambda cut: (abs(more[cut]), dist(cut, wanted)))
                return [run for run in zip(bits, cut, strict=True) if run[1]]
        return None

    def _sizes(
        self, group: tuple[int, int], page_size: int, head_dim: int, where: str
    ) -> tuple[int, int]:
        tokens, channels = _size(group[0], page_size), _size(group[1], head_dim)
        option = "group_size" if where in self.format.sized_sides else None
        if page_size % tokens:
            what = option or f"the groups of {tokens} tokens of this format"
            raise CacheOptionError(
                f"{where} format {self.name!r}: {what} must divide page_size {page_size}, got {tokens}"
            )
        if head_dim % channels:
            what = option or f"the groups of {channels} numbers of this format"
            size = "kv_lora_rank" if where == "latent" else "head_dim"
            raise CacheOptionError(
                f"{where} format {self.name!r}: {what} must divide {size} {head_dim}, got {channels}"
            )
        return tokens, channels


def planes(bits: int) -> tuple[int, ...]:
    """Return the bits of the planes that hold codes of so many bits, lowest first: those of 3 and 6 bits lie in two."""
    return {3: (2, 1), 6: (4, 2)}.get(bits, (bits,))


def _packed(bits: int, unit: int) -> int:
    """Return how many codes fill whole units of so many bits in each of their planes."""
    return max(unit // gcd(unit, plane) for plane in planes(bits))


def _fillings(steps: list[int], wanted: list[float], channels: int) -> Iterator[tuple[int, ...]]:
    """Yield sizes, multiples of these steps, that sum up to `channels`: all but the last less than REACH from the wanted ones."""
    first, *rest = steps
    if not rest:
        if channels % first == 0:
            yield (channels,)
        return
    least = max(0, round(wanted[0]) - REACH) // first * first
    for size in range(least, min(channels, round(wanted[0]) + REACH) + 1, first):
        for others in _fillings(rest, wanted[1:], channels - size):
            yield (size, *others)


def _are_widths(widths: object) -> bool:
    """Say whether these are Groups.widths."""
    if not isinstance(widths, tuple) or not all(
        isinstance(one, tuple) and len(one) == 2 and type(one[0]) is int and _is_number(one[1])
        for one in widths
    ):
        return False
    bits, parts = [bits for bits, _ in widths], [part for _, part in widths]
    falling = bits == sorted({*bits} & CODE_BITS, reverse=True)
    fits = len(widths) <= 3 and falling and min(parts, default=1) > 0
    return fits and (not widths or isclose(sum(parts), 1))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_group(group: object) -> bool:
    """Say whether this is a pair of whole numbers."""
    return isinstance(group, tuple) and [type(size) for size in group] == [int, int]


def _size(asked: int, whole: int) -> int:
    if asked < 0:
        return max(size for size in range(1, min(-asked, whole) + 1) if whole % size == 0)
    return asked or whole


FORMATS: dict[str, Format] = {}  # every known format by its name; the registry writes to it


def get_format(name: str) -> Format:
    """Return the format of that name. Raises CacheOptionError where none is registered under it."""
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise CacheOptionError(
            f"format {name!r} is not registered: there are {', '.join(FORMATS)}; one of another package is there once "
            "kv_hf.register_format has been called with it"
        )
    return found
