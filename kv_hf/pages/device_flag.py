"""A flag on a device, set by kernels where something is wrong, and looked at without waiting for them."""

from typing import Any

import torch

from . import moved


class DeviceFlag:
    """An int32 scalar: 0, or the sum of what was found wrong.

    Attributes:
        tensor: the scalar; operations on the device change it in place.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), dtype=torch.int32, device=device)
        self._asked: tuple[torch.Tensor, Any] | None = None

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
            answer, event = self._asked
            if event is not None and not event.query():
                return 0
            found = int(answer.numpy())
        answer = torch.empty((), dtype=torch.int32, pin_memory=self.tensor.device.type == "cuda")
        answer.copy_(self.tensor, non_blocking=True)
        event = None
        if self.tensor.device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.tensor.device))
        self._asked = answer, event
        return found
