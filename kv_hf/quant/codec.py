"""Whole pages of keys or values encoded and decoded in plain torch: the definition that kernels are tested against.

What a code means is the format's own (kv_hf/formats). Here is what holds for all formats: where codes lie in a page, values
that are rotated, and keys with their wide channels in front.

Byte i of a packed run holds the codes of places i, i + n, i + 2n, .. from its lowest bits up, n = bytes of the run, so that
unpacking gives runs of neighbouring places without interleaving.

The rotation is the Hadamard transform of a head's channels:

    rotated = H x / n        x = H rotated        H: n x n of +1 and -1, H H = n

n is the largest power of two that divides head_dim; channels are rotated in neighbouring runs of n. The mean that `rotate`
takes stays within the range of the numbers, and the division by a power of two is exact, so that every backend gets the
same bits: stages of sums and differences of two numbers in fp32, in one order. Source: randomized rotations before
quantization, QuaRot (arXiv 2404.00456); here without signs, which gained nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from ..formats.base import planes
from ..formats.checked import check_decoded, check_encoded
from ..formats.linear import SCALE_MAX
from ..spec import ROWS, SideSpec, order_dtype


def encode(
    tokens: torch.Tensor, spec: SideSpec, order: torch.Tensor | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Encode full pages.

    Args:
        tokens: [pages, num_kv_heads, page_size, head_dim], the model's dtype.
        spec: the side to encode for.
        order: as of `quantize`.
    Returns: the tensors of `spec.fields` with a leading [pages], and a bool scalar tensor: True when some
        number was not finite or beyond float16's range. Such a number is stored as the nearest finite one
        (nan as 0): the numbers that share its scale stay finite, but an inf leaves them little precision.
    Raises: CacheOptionError where a registered format returns something else than Format.encode promises.
    """
    if spec.scheme.is_exact:
        codes = {"codes": lay_out(tokens, spec)}
        return codes, torch.zeros((), dtype=torch.bool, device=tokens.device)
    fields, damaged = quantize(tokens, spec, order)
    fields["codes"] = lay_out(fields["codes"], spec)
    return fields, damaged


def quantize(
    tokens: torch.Tensor, spec: SideSpec, order: torch.Tensor | None = None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what `encode` returns, with codes as numbers [pages, num_kv_heads, page_size, head_dim] that are not packed.

    The scheme is not exact.

    Args:
        order: [pages or 1, num_kv_heads, head_dim], integers, of the channels where the scheme has wide ones; None: each page's own.
    """
    scheme = spec.scheme
    finite, damaged = finite_of(tokens)
    if scheme.rotated:
        finite = rotate(finite) + 0.0
    if not scheme.wide:
        order = None
    elif order is None:
        order = order_of(finite, spec)
    if order is not None:
        finite = reorder(finite, order)
    encoded = scheme.format.encode(finite, scheme)
    if scheme.native_number is None:  # another package's arithmetic
        check_encoded(encoded, finite.shape, scheme)
    codes, scale, offset = encoded
    fields = {"codes": codes}
    if scale is not None:
        fields["scale"] = scale
    if offset is not None:
        fields["offset"] = offset
    if order is not None:
        order = order.to(order_dtype(spec.head_dim)).expand(len(finite), -1, -1)
        fields["order"] = order.contiguous()
    return fields, damaged


def finite_of(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers [any shape] as fp32 within float16's range, nan as 0 and without -0; and whether some were not, bool scalar tensor."""
    x = tokens.float()
    finite = x.nan_to_num(nan=0.0).clamp(-SCALE_MAX, SCALE_MAX)
    return finite + 0.0, (finite != x).any()  # without -0 a minimum has one bit pattern


def decode(fields: dict[str, torch.Tensor], spec: SideSpec, dtype: torch.dtype) -> torch.Tensor:
    """Decode pages to [pages, num_kv_heads, page_size, head_dim] in `dtype` (computed in fp32)."""
    codes = pick_up(fields["codes"], spec)
    if spec.scheme.is_exact:
        return codes.to(dtype)
    x = dequantize({**fields, "codes": codes}, spec)
    if dtype == torch.float16:
        # a scale rounded up may push the largest code just past float16's range
        x = x.clamp(-SCALE_MAX, SCALE_MAX)
    return x.to(dtype)


def dequantize(fields: Mapping[str, torch.Tensor], spec: SideSpec) -> torch.Tensor:
    """Return what `quantize` gave as numbers [pages, num_kv_heads, page_size, head_dim], fp32."""
    scheme, codes = spec.scheme, fields["codes"]
    x = scheme.format.decode(codes, fields.get("scale"), fields.get("offset"), scheme)
    if scheme.native_number is None:
        check_decoded(x, codes.shape, scheme)
    if scheme.wide:
        x = restore(x, fields["order"])
    return unrotate(x) if scheme.rotated else x


def pack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack uint8 `codes` (each below 2^bits) along `dim` into bytes.

    Args:
        codes: [any shape], uint8; the size along `dim` is a multiple of 8 / bits.
    Returns: uint8 with `dim` shortened by 8 / bits.
    """
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    runs = codes.chunk(per_byte, dim)
    packed = runs[0].clone()
    for place, run in enumerate(runs[1:], 1):
        packed |= run << (bits * place)
    return packed


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Undo `pack`: uint8 bytes [any shape] to uint8 codes, `dim` lengthened by 8 / bits."""
    per_byte = 8 // bits
    if per_byte == 1:
        return packed
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * place)) & mask for place in range(per_byte)], dim)


def pack_words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes [.., page_size, dim] of 8 bits or less into int16 [.., page_size * bits / 16, dim].

    Word t of a channel holds the codes of tokens t, t + n, t + 2n, .. from its lowest bits up, n = words of a channel:
    a tile of words is a tile of tokens for products over channels and over tokens alike.
    """
    words = torch.zeros((), dtype=torch.int32, device=codes.device)
    for place, run in enumerate(codes.view(torch.uint8).chunk(16 // bits, -2)):
        words = words | run.int() << (bits * place)
    return words.to(torch.int16)


def unpack_words(words: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Undo `pack_words`: codes [.., page_size, dim] of `dtype`, an integer type of 8 bits."""
    mask = (1 << bits) - 1
    runs = [(words.int() >> (bits * place)) & mask for place in range(16 // bits)]
    return torch.cat(runs, -2).to(torch.uint8).view(dtype)


def lay_out(codes: torch.Tensor, spec: SideSpec) -> torch.Tensor:
    """Arrange codes (or exact numbers) [.., page_size, head_dim] as `spec.fields["codes"]` says."""
    if spec.layout == ROWS and spec.token_words:
        return pack_words(codes, spec.scheme.bits)
    if spec.layout == ROWS:
        codes = _packed(codes, spec)
        return (codes.transpose(-1, -2) if spec.token_contiguous else codes).contiguous()
    runs = codes if spec.side == "keys" else codes.transpose(-1, -2)
    return _contiguous(_packed(runs, spec)).view(torch.int32).transpose(-1, -2).contiguous()


def pick_up(laid_out: torch.Tensor, spec: SideSpec) -> torch.Tensor:
    """Undo `lay_out`: codes (exact numbers in the spec's dtype) [.., page_size, head_dim]."""
    if spec.layout == ROWS and spec.token_words:
        return unpack_words(laid_out, spec.scheme.bits, spec.code_dtype)
    if spec.layout == ROWS:
        return _unpacked(laid_out.transpose(-1, -2) if spec.token_contiguous else laid_out, spec)
    runs = _unpacked(_contiguous(laid_out.transpose(-1, -2)).view(spec.code_dtype), spec)
    return runs if spec.side == "keys" else runs.transpose(-1, -2)


def _packed(codes: torch.Tensor, spec: SideSpec) -> torch.Tensor:
    """Pack codes along their last dimension: run by run, and the planes of a run one behind the other."""
    if spec.scheme.is_exact:
        return codes
    runs = spec.runs
    parts = []
    for (bits, _), run in zip(runs, codes.split(_lengths(codes.shape[-1], spec), -1), strict=True):
        low = 0
        for plane in planes(bits):
            parts.append(pack(run if plane == 8 else (run >> low) & ((1 << plane) - 1), plane, -1))
            low += plane
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _unpacked(packed: torch.Tensor, spec: SideSpec) -> torch.Tensor:
    """Undo `_packed`."""
    if spec.scheme.is_exact:
        return packed
    sizes = [
        (bits, plane, length * plane // 8)
        for (bits, _), length in zip(
            spec.runs,
            _lengths(packed.shape[-1] * 8 * spec.head_dim // spec.token_bits, spec),
            strict=True,
        )
        for plane in planes(bits)
    ]
    parts: list[torch.Tensor] = []
    pieces = packed.split([size for _, _, size in sizes], -1)
    for (bits, plane, _), piece in zip(sizes, pieces, strict=True):
        codes = unpack(piece, plane, -1)
        if planes(bits)[-1] == plane and len(planes(bits)) > 1:  # above the plane in front of it
            codes = parts.pop() | codes << (bits - plane)
        parts.append(codes)
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _lengths(codes: int, spec: SideSpec) -> list[int]:
    """Return how many of a run of packed codes belong to each run of channels; tokens are packed as one run."""
    runs = spec.runs
    return [channels for _, channels in runs] if len(runs) > 1 else [codes]


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    """Copy to standard strides: contiguous() leaves those of sizes of 1 alone, which view(dtype) refuses."""
    return x.clone(memory_format=torch.contiguous_format)


def order_of(tokens: torch.Tensor, spec: SideSpec) -> torch.Tensor | None:
    """Return the order that channels of pages [pages, num_kv_heads, page_size, head_dim] have by themselves, see `wide_first`.

    None where all channels have the same bits. That of a row's first page holds for all of its pages (PageWrite.jobs): which
    channels have large ranges is the model's doing, and a kernel brings its queries into the order once.
    """
    wide = [channels for _, channels in spec.scheme.wide]
    return wide_first(finite_of(tokens)[0], wide) if wide else None


def wide_first(numbers: torch.Tensor, wide: Sequence[int]) -> torch.Tensor:
    """Return the order of each page and head: first the wide channels, whose pairs have the largest ranges in the page.

    A pair is channel i and channel i + head_dim / 2, which RoPE rotates into each other: a query has the same energy in both,
    so that errors of both weigh the same, whichever of them happens to move within the page. The range of a pair is the
    larger one of both over the page's tokens; of channels with equal ranges the first ones are wide. Within a width channels
    lie as in the model.

    Args:
        numbers: [pages, num_kv_heads, page_size, head_dim], fp32; head_dim is even.
        wide: channels of each width, the widest first.
    Returns: [pages, num_kv_heads, head_dim], int64: place -> channel.
    """
    ranges = numbers.amax(-2) - numbers.amin(-2)
    ranges = torch.maximum(ranges, ranges.roll(ranges.shape[-1] // 2, -1))
    rank = torch.argsort(torch.argsort(ranges, dim=-1, descending=True, stable=True), dim=-1)
    width = torch.zeros_like(rank)
    for end in accumulate(wide):
        width += rank >= end
    return torch.argsort(width, dim=-1, stable=True)


def reorder(numbers: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Bring channels into the order of their page: numbers [.., tokens, head_dim], order [.., head_dim]."""
    return numbers.gather(-1, order.long()[..., None, :].expand(numbers.shape))


def is_order(order: torch.Tensor) -> bool:
    """Say whether each order [.., head_dim], integers, names every channel once: no kernel may read another."""
    places = torch.arange(order.shape[-1], device=order.device)
    return bool((order.long().sort(-1).values == places).all())


def restore(numbers: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Undo `reorder`: numbers [.., tokens, head_dim], order [.., head_dim]."""
    places = order.long()[..., None, :].expand(numbers.shape)
    return torch.empty_like(numbers).scatter_(-1, places, numbers)


def block(head_dim: int) -> int:
    """Return n: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def rotate(numbers: torch.Tensor) -> torch.Tensor:
    """Rotate fp32 numbers [.., head_dim] for encoding."""
    return unrotate(numbers) / block(numbers.shape[-1])


def unrotate(numbers: torch.Tensor) -> torch.Tensor:
    """Undo `rotate`: fp32 or fp64 [.., head_dim], also a sum of rotated tokens, since the transform is linear."""
    *lead, head_dim = numbers.shape
    size = block(head_dim)
    step = 1
    while step < size:
        pairs = numbers.reshape(*lead, head_dim // (2 * step), 2, step)
        first, second = pairs.unbind(-2)
        numbers = torch.stack((first + second, first - second), -2).reshape(*lead, head_dim)
        step *= 2
    return numbers
