"""Pack 4- and 2-bit codes into bytes and back. Knows nothing of scales.

Byte i holds the codes of channels i, i + n, i + 2n, .. from its lowest bits up, n = bytes per head, so
that unpacking gives runs of neighbouring channels without interleaving.
"""

import torch


def pack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Pack uint8 `codes` (each below 2^bits) along `dim` into bytes.

    Args:
        codes: uint8, any shape; the size along `dim` is a multiple of 8 / bits.
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
    """Undo `pack`: uint8 bytes to uint8 codes, `dim` lengthened by 8 / bits."""
    per_byte = 8 // bits
    if per_byte == 1:
        return packed
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * place)) & mask for place in range(per_byte)], dim)
