"""The distance of a student from its teacher on held-out text."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator

from .losses import kl_and_entropy


@dataclass(frozen=True)
class Evaluation:
    """Figures over the scored tokens of the held-out windows.

    Attributes:
        perplexity, teacher_perplexity: of the student, of the teacher.
        kl: mean KL(teacher || student) in nats.
        scored: tokens.
    """

    perplexity: float
    teacher_perplexity: float
    kl: float
    scored: int

    def row(self) -> dict[str, Any]:
        """Return the figures by name."""
        return asdict(self)


def batches(windows: Sequence[list[int]], batch: int) -> list[list[list[int]]]:
    """Return windows of like length together, `batch` at most."""
    order = sorted(windows, key=len)
    return [order[i : i + batch] for i in range(0, len(order), batch)]


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, student: Any, teacher: Any, windows: Sequence[list[int]], batch: int
) -> Evaluation:
    """Return the figures of all windows, which are shared out between the processes.

    Args:
        student, teacher: on the accelerator's device, in evaluation mode.
        windows: token ids, of two tokens at least.
    """
    model = accelerator.unwrap_model(student)
    device = accelerator.device
    sums = torch.zeros(4, dtype=torch.float64)
    mine = batches(windows, batch)[accelerator.process_index :: accelerator.num_processes]
    for group in mine:
        lengths = [len(ids) for ids in group]
        padded = torch.zeros(len(group), max(lengths), dtype=torch.long)
        for row, ids in enumerate(group):
            padded[row, : len(ids)] = torch.tensor(ids)
        scored = torch.arange(max(lengths) - 1)[None] < torch.tensor(lengths)[:, None] - 1
        padded, scored = padded.to(device), scored.to(device)
        with accelerator.autocast():
            found = model(padded, use_cache=False).logits[:, :-1][scored]
        wanted = teacher(padded, use_cache=False).logits[:, :-1][scored]
        parts = kl_and_entropy(found, wanted, padded[:, 1:][scored])
        sums += torch.stack([*parts, scored.sum().to(parts[0])]).cpu()
    # as two halves in fp32, because not every backend adds float64
    whole = accelerator.reduce(sums.float().to(device), "sum").cpu().double()
    rest = accelerator.reduce((sums - sums.float().double()).float().to(device), "sum").cpu()
    kl, own, other, count = (whole + rest.double()).tolist()
    return Evaluation(
        perplexity(own / count), perplexity(other / count), max(0.0, kl / count), int(count)
    )


def perplexity(entropy: float) -> float:
    """Return exp(entropy), at most the largest float."""
    return math.exp(min(entropy, 700.0))
