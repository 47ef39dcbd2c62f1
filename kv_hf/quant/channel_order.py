"""The order of channels in pages with wide channels: these come first, each kind in the order of the model's channels."""

import torch


def choose(numbers: torch.Tensor, wide: int) -> torch.Tensor:
    """Return the order of each page and head: first the `wide` channels whose pairs have the largest range in the page.

    A pair is channel i and channel i + head_dim / 2, which RoPE rotates into each other: a query has the same energy in both,
    so that errors of both weigh the same, whichever of them happens to move within the page. The range of a pair is the
    larger one of both over the page's tokens; of channels with equal ranges the first ones are wide.

    Args:
        numbers: [pages, num_kv_heads, page_size, head_dim], fp32; head_dim is even.
    Returns: [pages, num_kv_heads, head_dim], int64: place -> channel.
    """
    ranges = numbers.amax(-2) - numbers.amin(-2)
    ranges = torch.maximum(ranges, ranges.roll(ranges.shape[-1] // 2, -1))
    largest = torch.argsort(ranges, dim=-1, descending=True, stable=True)[..., :wide]
    is_wide = torch.zeros_like(ranges, dtype=torch.bool).scatter_(-1, largest, True)
    return torch.argsort((~is_wide).to(torch.uint8), dim=-1, stable=True)


def reorder(numbers: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Bring channels into the order of their page: numbers [.., tokens, head_dim], order [.., head_dim]."""
    return numbers.gather(-1, order.long()[..., None, :].expand(numbers.shape))


def is_order(order: torch.Tensor) -> bool:
    """Say whether each order [.., head_dim], integers, names every channel once: no kernel may read another."""
    places = torch.arange(order.shape[-1], device=order.device)
    return bool((order.long().sort(-1).values == places).all())


def restore(numbers: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Undo `reorder`: numbers [.., tokens, head_dim], order [.., head_dim]."""
    places = order.long()[..., None, :].expand(numbers.shape)
    return torch.empty_like(numbers).scatter_(-1, places, numbers)
