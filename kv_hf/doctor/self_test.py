"""The self-test: trials in the order of their weight, as many as a few seconds hold."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..notices import silenced
from .findings import BROKEN
from .generation import plan_generations
from .kernels import FormatReport, report_formats
from .trials import RANK, ROPE, Planned, Trial, plan_trials

SECONDS = 5.0


@dataclass(frozen=True)
class SelfTest:
    """The results of the self-test.

    Attributes:
        trials: one for each format and kernel, and the generations.
        seconds: that it took.
    """

    trials: tuple[Trial, ...]
    seconds: float

    @property
    def failed(self) -> list[Trial]:
        """The trials that went wrong."""
        return [trial for trial in self.trials if trial.status == BROKEN]

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "seconds": round(self.seconds, 3),
            "trials": [trial.as_dict() for trial in self.trials],
        }


def run_self_test(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    latent: tuple[int, int] | None = None,
    *,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> SelfTest:
    """Encode, seal and attend in every format with every kernel that can run, and generate with tiny models.

    What "auto" would take comes first, then the generations, then the other kernels. A trial that has not begun when
    the time is over is left out, and says so; the first use of a Triton kernel compiles it, which takes its time.

    Args:
        device, dtype, head_dim, page_size, latent: as `report_formats` takes them; without `latent` the formats of
            latents are tried with DeepSeek's sizes.
        seconds: after which no further trial begins.
        clock: gives seconds.
    """
    start = clock()
    done = []
    with silenced(), torch.inference_mode():
        for planned in _planned(device, dtype, head_dim, page_size, latent):
            if clock() - start < seconds:
                done.append(planned.tried())
            else:
                done.append(planned.left_out(f"the {seconds:g} seconds were over"))
    return SelfTest(tuple(done), clock() - start)


def _planned(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    latent: tuple[int, int] | None,
) -> list[Planned]:
    ranks = latent or (RANK, ROPE)
    both: list[tuple[list[FormatReport], int, int, bool]] = [
        (report_formats(device, dtype, head_dim, page_size), head_dim, head_dim, False),
        (report_formats(device, dtype, head_dim, page_size, ranks), *ranks, True),
    ]
    plans = [
        plan
        for reports, key_dim, value_dim, of_latents in both
        for plan in plan_trials(reports, device, dtype, page_size, key_dim, value_dim, of_latents)
    ]
    best = [planned for is_best, planned in plans if is_best]
    others = [planned for is_best, planned in plans if not is_best]
    return [*best, *plan_generations(device), *others]
