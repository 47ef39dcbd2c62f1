"""The growth of this process's memory since a moment, and its peak in between."""

import gc

import torch

from .resident import resident, restart_peak


class ResidentMeter:
    """Resident memory of the process: what the system has really given, as any process of the same program has it.

    It is made when everything else is in place: freed blocks are given back first, so that growth is new memory. From then
    on nothing is: what the C library keeps counts as taken. All figures are None where /proc does not tell.
    """

    name = "resident"

    def __init__(self) -> None:
        gc.collect()
        self.base: int | None = resident().get("VmRSS")
        self.restart()

    def restart(self) -> None:
        """Let the peak begin at what is taken now."""
        try:
            restart_peak()
            self._peaks = True
        except OSError:  # a sandbox may forbid it; the peak since the start of the process would be another figure
            self._peaks = False

    def grown(self) -> int | None:
        """Return the bytes taken since the meter was made."""
        return None if self.base is None else resident(trim=False)["VmRSS"] - self.base

    def peak(self) -> int | None:
        """Return the most bytes taken on top of the start, since `restart`."""
        if self.base is None or not self._peaks:
            return None
        return resident(trim=False)["VmHWM"] - self.base


class AllocatedMeter:
    """Memory of a GPU that torch's allocator has given to tensors of this process."""

    name = "allocated"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        self.base = torch.cuda.memory_allocated(device)
        self.restart()

    def restart(self) -> None:
        """Let the peak begin at what is taken now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def grown(self) -> int:
        """Return the bytes taken since the meter was made."""
        return torch.cuda.memory_allocated(self.device) - self.base

    def peak(self) -> int:
        """Return the most bytes taken on top of the start, since `restart`."""
        return torch.cuda.max_memory_allocated(self.device) - self.base


Meter = ResidentMeter | AllocatedMeter


def meter_for(device: torch.device) -> Meter:
    """Return the meter of a device. Raises ValueError for one that is neither a CPU nor CUDA."""
    if device.type == "cpu":
        return ResidentMeter()
    if device.type == "cuda":
        return AllocatedMeter(device)
    raise ValueError(f"device must be a CPU or CUDA to measure memory on, got {str(device)!r}")
