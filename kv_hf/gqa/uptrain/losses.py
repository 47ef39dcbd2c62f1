"""The loss of an uptraining: distillation from the original's logits, and cross entropy with the text."""

from typing import Any

import torch

# positions whose distributions are made at a time: on a CPU few enough that they stay in its cache
ROWS = {"cpu": 16}
MANY_ROWS = 1024


def rows_at_once(tensor: torch.Tensor) -> int:
    """Return how many positions are taken at a time on the device of logits [positions, vocabulary]."""
    return ROWS.get(tensor.device.type, MANY_ROWS)


def shares(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return softmax [rows, vocabulary] and log of its denominator [rows], with one exponential per logit."""
    found = logits.softmax(-1)
    top = logits.argmax(-1, keepdim=True)
    return found, (logits.gather(-1, top) - found.gather(-1, top).log()).squeeze(-1)


def in_full(logits: torch.Tensor) -> torch.Tensor:
    """Return logits [positions, vocabulary] in fp32, or in fp64 if they are fp64."""
    return logits if logits.dtype == torch.float64 else logits.float()


class _Distillation(torch.autograd.Function):
    """Loss and gradient in one pass over blocks of positions: no distribution of all positions is ever kept."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        teacher: torch.Tensor,
        targets: torch.Tensor,
        alpha: float,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient = torch.empty_like(logits)
        count = logits.shape[0]
        sums = torch.zeros(2, dtype=torch.float64, device=logits.device)  # KL, cross entropy
        for begin in range(0, count, rows_at_once(logits)):
            part = slice(begin, begin + rows_at_once(logits))
            own, other = in_full(logits[part]), teacher[part].to(in_full(logits[part]).dtype)
            picked = targets[part].unsqueeze(-1)
            whole, scale = shares(own)
            sums[1] += (scale - own.gather(-1, picked).squeeze(-1)).sum(dtype=torch.float64)
            found = whole
            if temperature != 1:
                own, other = own / temperature, other / temperature
                found, scale = shares(own)
            wanted, other_scale = shares(other)
            kl = torch.linalg.vecdot(wanted, other - own) - other_scale + scale
            sums[0] += kl.sum(dtype=torch.float64) * temperature**2
            # d KL / d logits = temperature * (found - wanted), d cross entropy / d logits = whole - one at the target
            slope = wanted.mul_(-alpha * temperature).add_(found, alpha=alpha * temperature)
            slope.add_(whole, alpha=1 - alpha)
            slope.scatter_add_(-1, picked, torch.full_like(picked, alpha - 1, dtype=own.dtype))
            gradient[part] = slope.div_(count)
        ctx.save_for_backward(gradient)
        kl, entropy = (sums / count).float().unbind()
        ctx.mark_non_differentiable(kl, entropy)
        return alpha * kl + (1 - alpha) * entropy, kl, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None


def distillation_loss(
    logits: torch.Tensor,
    teacher: torch.Tensor,
    ids: torch.Tensor,
    *,
    alpha: float,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (alpha * KL + (1 - alpha) * cross entropy, KL, cross entropy), means over all positions but the last.

    KL = temperature^2 * sum_v p(v) log(p(v) / q(v)), p = softmax(teacher / temperature), q = softmax(logits / temperature).

    Args:
        logits, teacher: [batch, length, vocabulary], of the token that follows each; the teacher's may be wider or narrower in
            padding behind the vocabulary, which is left out.
        ids: [batch, length].
    """
    width = min(logits.shape[-1], teacher.shape[-1])
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Distillation.apply(
        logits[:, :-1, :width].reshape(-1, width),
        teacher[:, :-1, :width].reshape(-1, width),
        ids[:, 1:].reshape(-1),
        alpha,
        temperature,
    )
    return found


def kl_and_entropy(
    logits: torch.Tensor, teacher: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sums in float64 over positions: KL(teacher || student), cross entropy of the student, of the teacher.

    Args:
        logits, teacher: [positions, vocabulary].
        targets: [positions].
    """
    sums = torch.zeros(3, dtype=torch.float64, device=logits.device)
    width = min(logits.shape[-1], teacher.shape[-1])
    for begin in range(0, logits.shape[0], rows_at_once(logits)):
        part = slice(begin, begin + rows_at_once(logits))
        own, other = in_full(logits[part, :width]), in_full(teacher[part, :width])
        picked = targets[part].unsqueeze(-1)
        _, scale = shares(own)
        wanted, other_scale = shares(other)
        kl = torch.linalg.vecdot(wanted, other - own) - other_scale + scale
        for place, values in enumerate(
            (kl, scale - own.gather(-1, picked)[:, 0], other_scale - other.gather(-1, picked)[:, 0])
        ):
            sums[place] += values.sum(dtype=torch.float64)
    return sums[0], sums[1], sums[2]
