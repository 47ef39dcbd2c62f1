"""Preparations for a forward if the cache's pages may live outside of the device."""

from collections.abc import Sequence
from typing import Any

import torch

from ..backends.dispatch import MAX_DECODE_QUERIES
from ..config import CacheConfig
from ..pages.arena import PageArena
from ..pages.device_budget import DeviceBudget
from ..pages.group import PageGroup
from ..pages.offload import OffloadArena
from ..spec import page_capacity, reserved_pages


def make_arena(options: CacheConfig) -> PageArena:
    """Return the arena that `options` ask for."""
    if options.offload is None:
        return PageArena(options.max_pages)
    budget = DeviceBudget(options.device_pages, options.device_bytes)
    folder = None if options.offload_dir is None else str(options.offload_dir)
    return OffloadArena(options.max_pages, options.offload, budget, folder)


def make_room(
    arena: OffloadArena,
    layers: Sequence[Any],
    groups: Sequence[PageGroup],
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Make room, for all layers, for the pages that an append of keys and values [rows, heads, q_len, head_dim] will seal.

    Layers that have not seen keys yet are taken to have heads like these.
    Raises: DeviceBudgetError, OffloadError (also in a forked process), CacheOptionError, with the cache unchanged.
    """
    arena.check_device(keys.device)
    arena.check_process()
    capacities: dict[int, int] = {}
    slots: dict[int, int] = {}
    batch, q_len = keys.shape[0], keys.shape[2]
    for group in groups:
        count = group.check_append(batch, q_len)
        reserved = reserved_pages(batch, group.reserve, group.pool.max_pages)
        whole = bool(group.rows) and _reads_everything(group, q_len)
        if not count and group.rows and not whole and _is_settled(arena, layers, group):
            continue
        held = {page for row in group.rows for page in row.pages}
        capacity = max(page_capacity(group.pool.ids_after(count)), reserved)
        most = max(page_capacity(len(held) + count), min(reserved, capacity))
        budget = group.reading.usual
        if budget is not None and not whole:
            most = budget.batch_width(most, batch, group.page_size)
        for layer in layers:
            if layer.group is group:
                capacities[layer.layer_idx] = capacity
                slots[layer.layer_idx] = most
    if not capacities:
        return
    expected = {
        layer.layer_idx: (layer.formats.spec_of(keys, values), keys.device)
        for layer in layers
        if layer.store is None
    }
    arena.settle(capacities, slots, expected)


def _is_settled(arena: OffloadArena, layers: Sequence[Any], group: PageGroup) -> bool:
    """Say whether room was made for the pages that a group holds: not so where they came out of a pickle."""
    known = any(arena.room_for(layer.layer_idx) for layer in layers if layer.group is group)
    return known or not any(row.pages for row in group.rows)


def _reads_everything(group: PageGroup, q_len: int) -> bool:
    """Say whether a forward reads all pages of a group whose steps read a part of them, if they can be told."""
    if group.reading.usual is None or not any(row.pages or row.exact for row in group.rows):
        return False  # as every step, or a first forward, which reads no pages
    return q_len > MAX_DECODE_QUERIES or group.reading.budget is None
