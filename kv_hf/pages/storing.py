"""How tensors that outlive a forward are made and written, whatever mode the caller runs in."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def storing() -> Iterator[None]:
    """Make ordinary tensors without gradients: those made in inference mode could not be written to later."""
    with torch.inference_mode(False), torch.no_grad():
        yield
