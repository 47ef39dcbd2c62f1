"""Contenders that read a part of a long text: a step's choice of pages and attention to them, and the choice alone."""

from dataclasses import replace

import torch

from kv_hf.backends.base import AttentionCall
from kv_hf.backends.inputs import PagedKV
from kv_hf.backends.reference.selection import choose_by_mass, page_mass
from kv_hf.backends.registry import chooser
from measure.speed.decode_contenders import Contender, Workload, paged, pages_of
from measure.speed.oracle import Verdict

LEAST_PART = 0.99  # of the mass that the reference's choice has, where masses are nearly equal


def _mass_of(
    mass: torch.Tensor, kv: PagedKV, choice: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Return the mass [rows] of the pages of a choice, of masses [rows, columns of the block table]."""
    table, counts = choice
    found = []
    for row in range(kv.rows):
        ids = kv.block_table[row, : int(kv.num_pages[row])]
        read = torch.isin(ids, table[row, : int(counts[row])])
        found.append(mass[row, : len(ids)][read].sum())
    return torch.stack(found)


def reading(work: Workload, name: str, read_tokens: int) -> list[Contender]:
    """Return a step that reads `read_tokens` tokens of each row, and its choice of pages alone.

    The step is judged by the softmax over the pages that it chose, the choice by the mass that the reference sees in them.
    """
    whole, bare = paged(work, name, read_tokens=read_tokens)
    cache = whole.cache
    assert cache is not None
    layers = cache.paged_layers
    views: list[PagedKV] = []

    def prepare() -> None:
        # own dicts: a CUDA graph reads these very tensors, also after the cache has grown into larger ones
        views[:] = [
            replace(
                kv, key_pages=pages_of(kv.key_pages, work.device), budget=cache.group.reading.budget
            )
            for kv in (layer.current_kv() for layer in layers)
        ]

    def choose(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        kernel = layers[index].store.kernel  # type: ignore[union-attr]
        return chooser(kernel)(AttentionCall(work.queries[index], views[index], work.scale))

    def run() -> list[torch.Tensor]:
        return [choose(index)[0] for index in range(work.layers)]

    def verdict() -> Verdict:
        prepare()
        mass, window = page_mass(AttentionCall(work.queries[0], views[0], work.scale))
        ours, best = (
            _mass_of(mass, views[0], choice)
            for choice in (choose(0), choose_by_mass(mass, window, views[0]))
        )
        missed = float((1 - ours / best).max())
        return Verdict(missed, 1 - LEAST_PART)

    title = f"{name} read_tokens={read_tokens}"
    bare.name = f"kernel_{title}"
    spec = layers[0].spec
    assert spec is not None
    # of a page's tokens a quarter of the codes of keys is read, at least
    pages = sum(len(row.pages) for row in cache.group.rows)
    summed = spec.keys.payload_bytes // 4 * pages
    bare.nbytes = summed + spec.page_bytes * (read_tokens // spec.keys.page_size) * work.batch
    return [
        bare,
        Contender(f"choose_{title}", "kernel", run, verdict, summed, whole.kernel, prepare),
    ]
