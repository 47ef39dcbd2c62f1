"""The Hadamard transform of a head's channels, by which values are rotated before they are encoded.

    rotated = H x / n        x = H rotated        H: n x n of +1 and -1, H H = n

n is the largest power of two that divides head_dim; channels are rotated in neighbouring runs of n. The mean that `rotate`
takes stays within the range of the numbers, and the division by a power of two is exact, so that every backend gets the
same bits: `STAGES` of sums and differences of two numbers in fp32, in one order.

Source: randomized rotations before quantization, QuaRot (arXiv 2404.00456); here without signs, which gained nothing.
"""

import torch


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
