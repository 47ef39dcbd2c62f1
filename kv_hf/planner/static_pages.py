"""Bytes of a PagedCache with max_length: everything is allocated at the first forward."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..config import CacheConfig
from ..errors import CacheOptionError, UnsupportedModelError
from ..row_pages import RowPages
from ..spec import TABLE_DTYPE, pages_report
from .figures import Figures
from .inventory import Inventory
from .paged import check_options, layer_formats, open_slots, page_groups


def static_pages(
    inventory: Inventory,
    options: CacheConfig,
    row_tokens: Sequence[int],
    dtype: torch.dtype,
    layout: str,
) -> Figures:
    """Return what a PagedCache of these options takes."""
    check_options(options)
    length, columns = options.max_length, max(row_tokens, default=0)
    assert length is not None
    if columns > length:
        raise CacheOptionError(
            f"max_length={length} has no room for a row of {columns} tokens (row_tokens)"
        )
    others = {layer.cache_class for layer in inventory.layers} - {"DynamicLayer"}
    if others or any(layer.latent for layer in inventory.layers):
        raise UnsupportedModelError(
            f"max_length={length}: {inventory.name!r} has layers ({', '.join(sorted(others)) or 'latent attention'}) that a "
            "preallocated cache cannot hold; leave max_length out"
        )
    groups = page_groups(inventory, layer_formats(inventory, options), dtype, layout)
    specs, rows = list(groups.get(None, {}).values()), len(row_tokens)
    sizes = RowPages(options.page_size, options.sink_tokens, 0)
    held = [sizes.sealed(tokens) for tokens in row_tokens]
    pages = rows * sizes.sealed(length)
    report = pages_report(specs, sizes, row_tokens, held, pages)
    # pages of each row, its three lengths, and the columns seen by all
    tables = (pages + 3 * rows) * TABLE_DTYPE.itemsize + torch.int64.itemsize
    free = (pages - sum(held)) * sum(spec.page_bytes for spec in specs)
    return Figures(replace(report, tables=tables), free + open_slots(specs, sizes, row_tokens))
