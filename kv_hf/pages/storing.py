"""Tensors that outlive a forward: made and written alike in every mode (inference, no_grad) of the caller."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def storing() -> Iterator[None]:
    """Make ordinary tensors without gradients: those made in inference mode could not be written to later."""
    with torch.inference_mode(False), torch.no_grad():
        yield
