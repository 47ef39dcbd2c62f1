"""What a backend is: the functions that it offers, and the one argument of its attention. Computes nothing."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .inputs import PagedKV


# not frozen, which would make it slower to make: there is one per layer and step
@dataclass(slots=True, eq=False)
class AttentionCall:
    """One call of paged attention: the newest tokens of each row attend to all of the row's tokens; nobody changes one.

        out[b, h, i] = softmax(cap(softmax_scale * q[b, h, i] @ K[b, h // group].T) + mask) @ V[b, h // group]
        cap(s) = softcap * tanh(s / softcap), or s

    Attributes:
        query: [rows, num_heads, q_len, query_dim], fp64, fp32, fp16 or bf16; the last q_len tokens.
        kv: keys and values, the q_len tokens included.
        softmax_scale: factor of the scores.
        mask: [rows or 1, num_heads or 1, q_len, seen] over columns (padding included): bool (True = attend)
            or additive float. None: causal inside the q_len tokens, everything before them visible.
        softcap: bound of the scores, or None.
        sink_logits: [num_heads], a learnt extra logit in the softmax's denominator, or None.
        sliding_window: tokens that a query sees, itself included, or None for all; on top of the mask.
    """

    query: torch.Tensor
    kv: PagedKV
    softmax_scale: float
    mask: torch.Tensor | None = None
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None
    sliding_window: int | None = None


@dataclass(frozen=True)
class Backend:
    """One implementation of attention over pages: its functions do what those of the same names in `reference` do.

    Attributes:
        name: one of config.KERNELS.
        attend: takes an AttentionCall, returns [rows, num_heads, q_len, out_dim] in the query's dtype.
        write_pair, seal_pair: as reference.pairs.write_pair and reference.pairs.seal_pair.
        dense: writes one side of a layer out, as reference.dense.dense_side does.
        choose_pages: takes an AttentionCall whose kv has a budget, and returns the block table [rows, width] and the
            pages of each row [rows] that the step reads, as reference.selection.choose_pages does.
        max_queries: queries up to which reading the pages is better than writing one layer out for SDPA.
    """

    name: str
    attend: Callable[[AttentionCall], torch.Tensor]
    write_pair: Callable[..., None]
    seal_pair: Callable[..., None]
    dense: Callable[[PagedKV, str], torch.Tensor]
    choose_pages: Callable[[AttentionCall], tuple[torch.Tensor, torch.Tensor]]
    max_queries: int = 16
