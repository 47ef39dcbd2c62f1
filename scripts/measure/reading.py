"""Steps that read a part of a long text: caches that choose pages, and choosers that are simulated over exact keys.

A simulated chooser hides from each query the pages that it leaves out. Every query of a forward has a choice of its own, so
that a forward of many gives what as many decode steps would.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kv_hf.backends import registry
from kv_hf.backends.base import AttentionCall
from kv_hf.geometry import Geometry
from kv_hf.read_budget import NEWEST_PAGES, ReadBudget
from kv_hf.spec import LANES

ATTENTION = "kv_hf_simulated_reading"
COUNTED = "c_counted"


@dataclass(frozen=True)
class Chooser:
    """A way to tell in which pages a query's attention lies, without a cache.

    Attributes:
        log_mass: (queries [kv heads, group, queries, head_dim] times the softmax scale, keys [kv heads, pages, page_size,
            head_dim]) -> the log of each page's summed attention weights, or an idea of it: [kv heads, group, queries, pages].
        each_head: whether each kv head reads pages of its own; otherwise all heads of a layer read the same.
        page_size: tokens of a page; None: as many as the caches have.
    """

    log_mass: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    each_head: bool = False
    page_size: int | None = None


def exact_mass(query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return the truth; shapes as in `Chooser.log_mass`."""
    return torch.logsumexp(torch.einsum("hgqd,hpnd->hgqpn", query, pages), -1)


def bound_mass(query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return what the log would be if every token had the most that any key within the page's ranges can have.

    Source: Quest, arXiv 2406.10774, section 3.3.
    """
    low, high = pages.amin(2), pages.amax(2)  # [heads, pages, head_dim]
    most = torch.einsum("hgqd,hpd->hgqp", query.clamp(min=0), high)
    most += torch.einsum("hgqd,hpd->hgqp", query.clamp(max=0), low)
    return most + math.log(pages.shape[2])


def mean_mass(query: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return what the log would be if every token had the mean of the page's keys: never more than the truth.

    InfLLM (arXiv 2402.04617) and many others let one vector stand for a block; the mean is the plainest.
    """
    return torch.einsum("hgqd,hpd->hgqp", query, pages.mean(2)) + math.log(pages.shape[2])


CHOOSERS = {
    "oracle": Chooser(exact_mass),
    "mean": Chooser(mean_mass),
    "quest": Chooser(bound_mass),
    # the paper's pages; it leaves out the first two layers, which are read in part here as all others are
    "quest_16_each_head": Chooser(bound_mass, each_head=True, page_size=16),
    "quest_each_head": Chooser(bound_mass, each_head=True),
}


def tokens_seen(
    chooser: Chooser,
    budget: ReadBudget,
    places: Geometry,
    query: torch.Tensor,
    keys: torch.Tensor,
    scores: torch.Tensor,
) -> torch.Tensor:
    """Return which tokens each query reads: bool [kv heads or 1, 1, queries, tokens].

    The pages with the largest shares of the mass are read, as many as the budget allows, the newest always. The exact
    window is read always.

    Args:
        places: where tokens lie: which are in pages, and which in the exact window.
        query: [kv heads, group, queries, head_dim], of the newest tokens, times the softmax scale.
        keys: [kv heads, tokens, head_dim].
        scores: [kv heads, group, queries, tokens].
    """
    size, sinks, place = places.page_size, places.sink_tokens, scores.device
    queries, tokens = scores.shape[2:]
    before = torch.arange(
        tokens - queries, tokens, device=place
    )  # tokens of the row when a query comes
    sealed = places.sealed(before)[:, None]
    token = torch.arange(tokens, device=place)
    page_of = (token - sinks).div(size, rounding_mode="floor")
    window = ((token < sinks) | (page_of >= sealed)) & (token <= before[:, None])
    pages = int(sealed.max())
    if not pages:
        return window[None, None]
    page = torch.arange(pages, device=place)
    there, newest = page < sealed, page >= sealed - NEWEST_PAGES
    mass = chooser.log_mass(
        query, keys[:, sinks : sinks + pages * size].unflatten(1, (pages, size))
    )
    mass = mass.masked_fill(~there, float("-inf"))
    rest = scores.masked_fill(~window, float("-inf")).logsumexp(-1, keepdim=True)
    shares = torch.cat([mass, rest], -1).softmax(-1)[..., :-1].sum(1)
    if not chooser.each_head:
        shares = shares.sum(0, keepdim=True)
    ranked = shares.masked_fill(newest, float("inf")).masked_fill(~there, -1.0)
    ranks = ranked.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    most = [
        budget.most(count) if at + 1 >= budget.from_tokens else count
        for count, at in zip(sealed[:, 0].tolist(), before.tolist(), strict=True)
    ]
    chosen = (ranks < torch.tensor(most, device=place)[:, None]) & there
    read = torch.zeros(*chosen.shape[:-1], tokens, dtype=torch.bool, device=place)
    read[..., sinks : sinks + pages * size] = chosen.repeat_interleave(size, -1)
    return (read | window)[:, None]


@contextmanager
def simulated(
    model: PreTrainedModel, chooser: Chooser, budget: ReadBudget | None, places: Geometry
) -> Iterator[None]:
    """Let a model read in part for a while, as a cache of this budget would, over the exact keys of a DynamicCache.

    One at a time: transformers keeps one table of attention functions for the process.

    Raises: ValueError for a budget that is no number of pages, and in forwards of several rows, sliding windows, soft caps or sinks of
        attention.
    """
    if budget is None or budget.top_p is not None:
        raise ValueError(f"a simulation must have a number of pages to read, got {budget}")

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        odd = {name for name in ("sliding_window", "softcap", "s_aux") if options.get(name)}
        if odd or query.shape[0] != 1:
            raise ValueError(f"only plain attention of one row is simulated, got {odd or 'rows'}")
        keys, values = key[0], value[0]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        grouped = query[0].unflatten(0, (keys.shape[0], -1)) * scale
        scores = torch.einsum("hgqd,htd->hgqt", grouped, keys)
        seen = tokens_seen(chooser, budget, places, grouped, keys, scores)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out = torch.einsum("hgqt,htd->hgqd", weights, values)
        return out.flatten(0, 1).transpose(0, 1)[None], None

    own = model.config._attn_implementation
    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kw: None)
    try:
        model.set_attn_implementation(ATTENTION)
        yield
    finally:
        model.set_attn_implementation(own)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(ATTENTION, None)


@contextmanager
def counted_pages(found: list[int]) -> Iterator[None]:
    """Register a backend COUNTED, which is the C kernel and appends to `found` how many pages each of its choices takes."""
    own = registry.load("c")
    assert own.choose_pages is not None
    choose = own.choose_pages

    def counted(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
        table, counts = choose(call)
        found.extend(counts.tolist())
        return table, counts

    backend = replace(own, name=COUNTED, choose_pages=counted)
    why_not = functools.partial(registry.why_not, "c")
    registry.register_backend(
        COUNTED, lambda: backend, why_not=why_not, runs_on="cpu", layout=LANES
    )
    try:
        yield
    finally:
        registry.unregister_backend(COUNTED)
