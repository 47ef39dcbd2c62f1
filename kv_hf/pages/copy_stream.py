"""In which order copies and kernels run: one after the other, or copies beside kernels on a stream of their own."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch


class CopyStream(Protocol):
    """The order of copies to the device and kernels: a copy stream, or none.

    Attributes:
        buffers: staging buffers that make sense: two where a copy can run while the other one is read.
    """

    buffers: int

    def mark(self) -> Any:
        """Return an event behind everything that kernels and writes have been given to do so far."""
        ...

    def run(self, copy: Callable[[], None], after: Iterable[Any]) -> Any:
        """Copy behind the events `after`; return an event behind the copy."""
        ...

    def join(self, event: Any) -> None:
        """Let kernels that come now wait for `event`."""
        ...

    def keep(self, target: torch.Tensor) -> None:
        """Keep the memory of `target` [any shape] from being used again before the copies into it are done, even if it is dropped."""
        ...

    def wait(self) -> None:
        """Wait until everything is done, for reading outside memory on the host."""
        ...


class InOrder:
    """Copies at once: on a CPU there is nothing that would run beside."""

    buffers = 1

    def mark(self) -> None:
        """Nothing is ever outstanding."""

    def run(self, copy: Callable[[], None], after: Iterable[Any]) -> None:
        """Copy now."""
        copy()

    def join(self, event: Any) -> None:
        """Nothing to wait for."""

    def keep(self, target: torch.Tensor) -> None:
        """Keep nothing: no copy into `target` [any shape] runs on when it is dropped."""

    def wait(self) -> None:
        """Nothing to wait for."""


class SideStream:
    """Copies on a CUDA stream of their own, beside the kernels of the caller's current stream."""

    buffers = 2

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """Return an event at the end of the current stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def run(
        self, copy: Callable[[], None], after: Iterable[torch.cuda.Event | None]
    ) -> torch.cuda.Event:
        """Give the copy to the side stream."""
        for event in after:
            if event is not None:
                self.stream.wait_event(event)
        with torch.cuda.stream(self.stream):
            copy()
        return self.stream.record_event()

    def join(self, event: torch.cuda.Event | None) -> None:
        """Let the current stream wait."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def keep(self, target: torch.Tensor) -> None:
        """Tell the allocator that the stream writes to `target` [any shape].

        A cache is often dropped while its next layer is being fetched.
        """
        target.record_stream(self.stream)

    def wait(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self.device)


def lane_for(device: torch.device) -> CopyStream:
    """Return the lane of a device."""
    return SideStream(device) if device.type == "cuda" else InOrder()
