"""Attention that hides from each query the pages that a chooser leaves out, over the exact keys of a DynamicCache.

Every query of a forward has a choice of its own, so that a forward of many gives what as many decode steps would.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kv_hf.geometry import Geometry
from kv_hf.read_budget import NEWEST_PAGES, ReadBudget
from measure.reading.choosers import Chooser

ATTENTION = "kv_hf_simulated_reading"


class Simulation:
    """Reading in part, as a cache of these options would, with another way to choose pages.

    Args:
        chooser: tells in which pages the attention lies.
        budget: how many pages are read; without top_p.
        places: where tokens lie: which are in pages, and which in the exact window, which is read always.
    Raises: ValueError for a budget with top_p.
    """

    def __init__(self, chooser: Chooser, budget: ReadBudget, places: Geometry) -> None:
        if budget.top_p is not None:
            raise ValueError(
                f"a simulation reads a number of pages, not up to a mass: top_p={budget.top_p}"
            )
        self.chooser, self.budget, self.places = chooser, budget, places

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend as transformers asks its attention functions to.

        Args:
            query: [1, num_heads, queries, head_dim], of the newest tokens.
            key, value: [1, num_kv_heads, tokens, head_dim].
        Returns: [1, queries, num_heads, head_dim], and no weights.
        Raises: ValueError for several rows, and for sliding windows, soft caps and sinks of attention.
        """
        odd = {name for name in ("sliding_window", "softcap", "s_aux") if options.get(name)}
        if odd or query.shape[0] != 1:
            raise ValueError(f"only plain attention of one row is simulated, got {odd or 'rows'}")
        keys, values = key[0], value[0]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        grouped = query[0].unflatten(0, (keys.shape[0], -1)) * scale
        scores = torch.einsum("hgqd,htd->hgqt", grouped, keys)
        seen = self._seen(grouped, keys, scores)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out = torch.einsum("hgqt,htd->hgqd", weights, values)
        return out.flatten(0, 1).transpose(0, 1)[None], None

    def _seen(self, query: torch.Tensor, keys: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return which tokens each query reads: bool [kv heads or 1, 1, queries, tokens].

        Args:
            query: [kv heads, group, queries, head_dim], times the softmax scale.
            keys: [kv heads, tokens, head_dim].
            scores: [kv heads, group, queries, tokens].
        """
        size, sinks = self.places.page_size, self.places.sink_tokens
        queries, tokens = scores.shape[2:]
        before = torch.arange(tokens - queries, tokens)  # tokens of the row when a query comes
        sealed = self.places.sealed(before)
        token = torch.arange(tokens)
        page = (token - sinks).div(size, rounding_mode="floor")
        window = (token < sinks) | (page >= sealed[:, None])
        window &= token <= before[:, None]
        pages = int(sealed.max())
        if not pages:
            return window[None, None]
        paged = keys[:, sinks : sinks + pages * size].unflatten(1, (pages, size))
        there = torch.arange(pages) < sealed[:, None]
        mass = self.chooser.log_mass(query, paged).masked_fill(~there, float("-inf"))
        rest = scores.masked_fill(~window, float("-inf")).logsumexp(-1, keepdim=True)
        shares = torch.cat([mass, rest], -1).softmax(-1)[..., :-1].sum(1)
        if not self.chooser.each_head:
            shares = shares.sum(0, keepdim=True)
        chosen = self._best(shares, sealed, before)  # [kv heads or 1, queries, pages]
        read = torch.zeros(*chosen.shape[:-1], tokens, dtype=torch.bool)
        read[..., sinks : sinks + pages * size] = chosen.repeat_interleave(size, -1)
        return (read | window)[:, None]

    def _best(
        self, shares: torch.Tensor, sealed: torch.Tensor, before: torch.Tensor
    ) -> torch.Tensor:
        """Return the pages with the largest shares, as many as the budget allows, the newest always; the first of equals."""
        page = torch.arange(shares.shape[-1])
        there = page < sealed[:, None]
        newest = there & (page >= sealed[:, None] - NEWEST_PAGES)
        ranked = shares.masked_fill(~there, -1.0).masked_fill(newest, float("inf"))
        order = ranked.argsort(dim=-1, descending=True, stable=True)
        ranks = torch.empty_like(order).scatter(-1, order, page.expand_as(order))
        counts = [
            self.budget.most(pages) if tokens + 1 >= self.budget.from_tokens else pages
            for pages, tokens in zip(sealed.tolist(), before.tolist(), strict=True)
        ]
        return (ranks < torch.tensor(counts)[:, None]) & there


@contextmanager
def reads_by(model: PreTrainedModel, simulation: Simulation) -> Iterator[None]:
    """Let a model attend through a simulation for a while. One at a time: transformers keeps one table for the process."""
    own = model.config._attn_implementation
    AttentionInterface.register(ATTENTION, simulation.attend)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kw: None)
    try:
        model.set_attn_implementation(ATTENTION)
        yield
    finally:
        model.set_attn_implementation(own)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(ATTENTION, None)
