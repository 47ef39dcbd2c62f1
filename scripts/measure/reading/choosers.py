"""Ways to tell in which pages a query's attention lies, without a cache: the truth, and what others keep of a page.

Each gives the log of a page's summed attention weights, or of its own idea of that sum, so that pages, and the tokens that are
read anyway, can be compared.

Sources: Quest, arXiv 2406.10774 (section 3.3: the bound from a page's smallest and largest key of each channel). InfLLM, arXiv
2402.04617, and many others let one vector stand for a block; the mean of its keys is the plainest.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

LogMass = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Chooser:
    """A way to choose pages.

    Attributes:
        log_mass: (queries [kv heads, group, queries, head_dim] times the softmax scale, keys [kv heads, pages, page_size,
            head_dim]) -> [kv heads, group, queries, pages].
        each_head: whether each kv head reads pages of its own; otherwise all heads of a layer read the same.
        page_size: tokens of a page; None: as many as the caches have.
    """

    log_mass: LogMass
    each_head: bool = False
    page_size: int | None = None


def exact_mass(query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return the log of each page's summed weights; shapes as in `Chooser.log_mass`."""
    return torch.logsumexp(torch.einsum("hgqd,hpnd->hgqpn", query, pages), -1)


def bound_mass(query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return what the log would be if every token had the most that any key within the page's ranges can have."""
    low, high = pages.amin(2), pages.amax(2)  # [heads, pages, head_dim]
    most = torch.einsum("hgqd,hpd->hgqp", query.clamp(min=0), high)
    most += torch.einsum("hgqd,hpd->hgqp", query.clamp(max=0), low)
    return most + math.log(pages.shape[2])


def mean_mass(query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return what the log would be if every token had the mean of the page's keys: never more than the truth."""
    return torch.einsum("hgqd,hpd->hgqp", query, pages.mean(2)) + math.log(pages.shape[2])


CHOOSERS = {
    "oracle": Chooser(exact_mass),
    "mean": Chooser(mean_mass),
    "quest": Chooser(bound_mass),
    # the paper's pages; it leaves out the first two layers, which are read in part here as all others are
    "quest_16_each_head": Chooser(bound_mass, each_head=True, page_size=16),
    "quest_each_head": Chooser(bound_mass, each_head=True),
}
