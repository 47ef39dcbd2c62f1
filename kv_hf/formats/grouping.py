"""Tensors of whole pages cut into groups that share a scale or an offset, in plain torch."""

import torch


def split(numbers: torch.Tensor, group: tuple[int, int] | None) -> torch.Tensor:
    """Cut [.., tokens, channels] into groups: [.., token groups, group tokens, channel groups, group channels].

    The extremes of each group are `split(numbers, group).amin((-3, -1))`, [.., token groups, channel groups].

    Args:
        group: (tokens, channels) of a group, which divide the sizes.
    """
    assert group is not None
    *lead, tokens, channels = numbers.shape
    return numbers.reshape(*lead, tokens // group[0], group[0], channels // group[1], group[1])


def join(groups: torch.Tensor) -> torch.Tensor:
    """Undo `split`: [.., token groups, group tokens, channel groups, group channels] to [.., tokens, channels]."""
    return groups.flatten(-2).flatten(-3, -2)


def over_groups(per_group: torch.Tensor) -> torch.Tensor:
    """Return [.., token groups, channel groups] as fp32, broadcastable against what `split` returns."""
    return per_group.float()[..., :, None, :, None]


def divisor(scale: torch.Tensor) -> torch.Tensor:
    """Return scales [any shape] to divide by, fp32: 1 where a scale is 0.

    The numbers of a group with scale 0 are all the same, and so are its codes.
    """
    scale = scale.float()
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def divided(numbers: torch.Tensor, by: float) -> torch.Tensor:
    """Return numbers [any shape] / by in their dtype, rounded once.

    On a GPU torch multiplies by the reciprocal of a plain number, which rounds twice.
    """
    return numbers / torch.full_like(numbers, by)
