"""Times of several contenders in one process: interleaved rounds, medians with spread, and the copy bandwidth.

Machines drift (clocks, neighbours, caches), so that two runs of minutes apart cannot be compared. Here every
round calls every contender once; what disturbs a round disturbs all of them, and the median drops the round.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # far beyond any processor cache


@dataclass(frozen=True)
class Spread:
    """Median and spread of n samples; the unit is that of the samples."""

    p50: float
    p20: float
    p80: float
    mean: float
    max: float
    n: int

    def row(self, prefix: str) -> dict[str, float]:
        """Return the fields as `prefix_p50` and so on, as rows of results/ have them."""
        return {f"{prefix}_{name}": value for name, value in asdict(self).items()}


def quantile(samples: Sequence[float], part: float) -> float:
    """Return the `part` quantile (0 to 1), linear between neighbouring samples. Raises ValueError without samples."""
    if not samples:
        raise ValueError("a quantile needs at least one sample, got none")
    ordered = sorted(samples)
    place = part * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread(samples: Sequence[float]) -> Spread:
    """Summarise samples."""
    return Spread(
        p50=quantile(samples, 0.5),
        p20=quantile(samples, 0.2),
        p80=quantile(samples, 0.8),
        mean=sum(samples) / len(samples),
        max=max(samples),
        n=len(samples),
    )


class Budget:
    """Seconds that a whole run may take; None means no end."""

    def __init__(self, seconds: float | None = None) -> None:
        self.end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds left (not below 0), or None without an end."""
        return None if self.end is None else max(0.0, self.end - time.monotonic())

    @property
    def spent(self) -> bool:
        """True when nothing is left: finish what was begun, start nothing."""
        return self.left == 0.0


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of one call: wall time on a CPU, CUDA events on a GPU.

    The events lie in the stream before and behind the call, so that the time holds the launches that the GPU
    had to wait for, as a user's decode step does.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))


def interleave(
    contenders: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    *,
    warmup: int = 2,
    budget: Budget | None = None,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Call every contender once per round and return the milliseconds of each, warm-up rounds left out.

    Odd rounds go backwards, so that no contender always follows the same neighbour. A spent budget ends the
    run behind the first whole round.

    Args:
        before: called with the name ahead of each call, outside of the time.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        if number > 0 and budget is not None and budget.spent:
            break
        for name in names if number % 2 == 0 else reversed(names):
            before(name)
            took = timed(contenders[name], device)
            if number >= 0:
                times[name].append(took)
    return times


def copy_bandwidth(device: torch.device, rounds: int = 7, nbytes: int | None = None) -> float:
    """Return the GB/s (read plus written) of torch copying a large buffer: what memory gives to a plain program."""
    size = nbytes or COPY_BYTES.get(device.type, COPY_BYTES["cpu"])
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = interleave({"copy": lambda: target.copy_(source)}, rounds, device)["copy"]
    return 2 * size / (1e6 * spread(times).p50)


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Return a replay of `run` as a CUDA graph: the time of the kernels without that of launching them.

    Raises: RuntimeError when the call cannot be captured (it reads from the device, say).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels that are compiled or tuned at their first calls
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
