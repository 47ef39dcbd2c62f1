"""A flag on a device, set by kernels where something is wrong, and looked at without waiting for them."""

from typing import Any

import torch

from . import moved


class Arriving:
    """A copy of a scalar on its way to the host, queued after what the device is doing.

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


class DeviceFlag:
    """An int32 scalar: 0, or the sum of what was found wrong.

    Attributes:
        tensor: the scalar; operations on the device change it in place.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), dtype=torch.int32, device=device)
        self._asked: Arriving | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Everything but a question of this process."""
        return {"tensor": self.tensor, "_asked": None}

    def clear(self) -> None:
        """Forget what was wrong."""
        self.tensor.zero_()
        self._asked = None

    def look(self) -> int:
        """Return what is known by now, and ask again: elsewhere than on the CPU an answer is some steps old."""
        if moved.is_host(self.tensor.device):
            return int(self.tensor)
        found = 0
        if self._asked is not None:
            answer = self._asked.look()
            if answer is None:
                return 0
            found = answer
        self._asked = Arriving(self.tensor)
        return found
