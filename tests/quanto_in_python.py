"""Have quanto unpack its codes in torch, as its own definition does.

Its kernel is compiled at the first use, for up to a minute, and every process waits for ever behind a compiler that was killed.
"""

from importlib.util import find_spec
from types import SimpleNamespace

import torch


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of packed [n, ..], uint8: [n * 8 // bits, ..], the lowest bits of all bytes first."""
    return torch.cat([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)])


if find_spec("optimum") is not None and find_spec("optimum.quanto") is not None:
    from optimum.quanto.library.extensions.cpp import ext

    ext._lib = SimpleNamespace(unpack=unpack)
