"""The places of codes inside a page: codes of less than 8 bits packed into bytes, and the two layouts of a page.

Byte i of a packed run holds the codes of places i, i + n, i + 2n, .. from its lowest bits up, n = bytes of
the run, so that unpacking gives runs of neighbouring places without interleaving. Knows nothing of scales.
"""

import torch

from ..spec import ROWS, SideSpec, planes


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
