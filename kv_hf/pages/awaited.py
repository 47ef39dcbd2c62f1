"""A number on a device on its way to the host, which does not wait for it."""

import torch


class Awaited:
    """A copy of a scalar, queued behind what the device is doing.

    Args:
        scalar: on any device; what is written to it later does not change the answer.
    """

    def __init__(self, scalar: torch.Tensor) -> None:
        cuda = scalar.device.type == "cuda"
        self._answer = torch.empty((), dtype=scalar.dtype, pin_memory=cuda)
        self._answer.copy_(scalar, non_blocking=True)
        self._event = None
        if cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(scalar.device))

    def look(self) -> int | None:
        """Return the number, or None while it is not there."""
        if self._event is not None and not self._event.query():
            return None
        return int(self._answer.numpy())
