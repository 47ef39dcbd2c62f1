"""A plan as lines for people: what the model keeps, a row per cache, and notes."""

import shutil
import sys
from collections.abc import Sequence

from ..printable import printable, tell
from ..units import format_bandwidth, format_bytes, format_count
from .fit import MOST_ROWS
from .inventory import CachedLayer, Inventory
from .memory_plan import CachePlan, Plan

NO_LIMIT = "no limit"
GAP = 2  # blanks between columns

Columns = list[tuple[str, list[str]]]


def describe_layers(inventory: Inventory) -> str:
    """Return what the layers of a cache hold, equal ones counted together: "32 x 8 kv heads of 128"."""
    counts: dict[str, int] = {}
    for layer in inventory.layers:
        name = describe_layer(layer)
        counts[name] = counts.get(name, 0) + 1
    return "; ".join(f"{count} x {name}" for name, count in counts.items())


def describe_layer(layer: CachedLayer) -> str:
    """Return what one layer of a cache holds."""
    parts = []
    if layer.latent:
        parts.append(f"a latent of {layer.key_dim} and a RoPE key of {layer.value_dim}")
    elif layer.kv_heads:
        dims = f"{layer.key_dim}"
        if layer.value_dim != layer.key_dim:
            dims = f"{layer.key_dim} (keys) and {layer.value_dim} (values)"
        parts.append(f"{layer.kv_heads} kv head{'s' * (layer.kv_heads > 1)} of {dims}")
    if layer.window is not None:
        parts.append(f"window of {layer.window:,}")
    if layer.index_dim:
        parts.append(f"indexer key of {layer.index_dim}")
    if layer.states:
        shapes = " and ".join("x".join(map(str, state.shape)) for state in layer.states)
        parts.append(f"state{'s' * (len(layer.states) > 1)} of {shapes}")
    if layer.readers > 1:
        parts.append(f"read by {layer.readers} layers")
    return ", ".join(parts) or "nothing of its own"


def header_lines(plan: Plan) -> list[str]:
    """Return the lines above the table: model, layers, weights, device."""
    model = plan.inventory
    lines = [
        f"{model.name} ({model.model_type}, {model.dtype}): batch {plan.batch:,}, context {plan.context:,}",
        f"layers: {describe_layers(model)}",
    ]
    if plan.weights is not None:
        known = "" if model.parameters is None else f", {format_count(model.parameters)} parameters"
        lines.append(f"weights: {format_bytes(plan.weights)}{known}")
    if model.experts:
        lines[-1] += f", {model.experts_per_token} of {model.experts} experts per token"
    device = [] if plan.device is None else [plan.device]
    if plan.device_memory is not None:
        device.append(format_bytes(plan.device_memory))
    if plan.reserve:
        device.append(f"{format_bytes(plan.reserve)} kept free")
    if plan.bandwidth is not None:
        device.append(format_bandwidth(plan.bandwidth))
    if device:
        lines.append(f"device: {', '.join(device)}")
    if plan.tensor_parallel > 1:
        lines.append(
            f"tensor parallel: all bytes are those of one of {plan.tensor_parallel} devices"
        )
    return [printable(line) for line in lines]


def columns(plan: Plan) -> tuple[Columns, Columns]:
    """Return (heading, cells) of every column that the plan can fill: what is held, and what fits and is read."""
    rows = plan.rows
    held = [
        ("cache", [printable(row.cache) for row in rows]),
        ("bytes/token", [_number(row.bytes_per_token) for row in rows]),
        ("cache bytes", [format_bytes(row.total) for row in rows]),
    ]
    if any(row.memory.offloaded for row in rows):
        held.append(("outside", [format_bytes(row.memory.offloaded) for row in rows]))
    held.append(("ratio", [f"{row.ratio:,.2f}x" for row in rows]))
    if plan.weights is not None:
        held.append(("with weights", [format_bytes(plan.weights + row.total) for row in rows]))
    more: Columns = []
    if plan.available is not None:
        held.append(("fits", ["yes" if row.fits else "no" for row in rows]))
        more = [
            ("context", [_limit(plan, row, "context") for row in rows]),
            ("batch", [_limit(plan, row, "batch") for row in rows]),
            ("resident", [_limit(plan, row, "resident_tokens") for row in rows]),
        ]
    more.append(("read/token", [format_bytes(row.decode.bytes_per_token) for row in rows]))
    if plan.bandwidth is not None:
        more.append(("tokens/s", [_number(row.tokens_per_second or 0) for row in rows]))
    return held, more


def tables(plan: Plan, width: int | None) -> list[Columns]:
    """Return the columns as one table, or as two where one is wider than `width` characters."""
    held, more = columns(plan)
    whole = held + more
    if width is None or sum(_widths(whole)) + GAP * (len(whole) - 1) <= width:
        return [whole]
    return [held, held[:1] + more]


def _widths(table: Columns) -> list[int]:
    return [max(len(heading), *map(len, cells), 0) for heading, cells in table]


def legend(plan: Plan) -> list[str]:
    """Return what headings mean, for those that are there."""
    lines = []
    if plan.available is not None:
        lines.append(
            f"context: the largest at batch {plan.batch:,}; batch: the largest at context {plan.context:,}; resident: tokens "
            f"over {plan.batch:,} row{'s' * (plan.batch > 1)}, in whole pages"
        )
    reads = "read/token: bytes that a decode step reads, per token that it makes"
    if plan.bandwidth is not None:
        reads += "; tokens/s: what the bandwidth allows at most, over all rows"
    return [*lines, reads]


def plain_table(plan: Plan, width: int | None = None) -> str:
    """Return the plan as lines of text, of at most `width` characters where that is possible."""
    lines = header_lines(plan)
    for table in tables(plan, width):
        widths = _widths(table)
        lines.append("")
        for row in (
            [heading for heading, _ in table],
            *zip(*(cells for _, cells in table), strict=True),
        ):
            first, *others = row
            cells = [cell.rjust(wide) for cell, wide in zip(others, widths[1:], strict=True)]
            lines.append((" " * GAP).join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join([*lines, "", *legend(plan), *_notes(plan)])


def print_plan(plan: Plan) -> None:
    """Print a plan: on a terminal with rich where it is installed, else as plain text."""
    if not sys.stdout.isatty():
        tell(plain_table(plan))
        return
    width = shutil.get_terminal_size().columns
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # it belongs to the extras
        tell(plain_table(plan, width))
        return
    console = Console(width=width)
    if console.is_dumb_terminal:  # rich takes it to be 80 characters wide, and cuts cells off
        tell(plain_table(plan, width))
        return
    for line in header_lines(plan):
        console.print(Text(line))
    for columns_of in tables(plan, width):
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        for position, (heading, _) in enumerate(columns_of):
            table.add_column(heading, justify="right" if position else "left", no_wrap=True)
        for cells in zip(*(cells for _, cells in columns_of), strict=True):
            table.add_row(*(Text(cell) for cell in cells))
        console.print()
        console.print(table)
    console.print()
    for line in [*legend(plan), *_notes(plan)]:
        console.print(Text(line))


def _notes(plan: Plan) -> Sequence[str]:
    most = plan.inventory.max_positions
    beyond = any(
        most is not None and row.fit is not None and (row.fit.context or 0) > most
        for row in plan.rows
    )
    notes = list(plan.notes)
    if beyond:
        notes.append(f"* more than the {most:,} positions that the model was made for")
    return [f"note: {printable(note)}" for note in notes]


def _limit(plan: Plan, row: CachePlan, what: str) -> str:
    assert row.fit is not None
    found = getattr(row.fit, what)
    if found is None:
        return f"{MOST_ROWS:,}+" if what == "batch" else NO_LIMIT
    most = plan.inventory.max_positions
    return f"{found:,}" + "*" * (what == "context" and most is not None and found > most)


def _number(count: float) -> str:
    if count == int(count) or count >= 1000:
        return f"{count:,.0f}"
    return f"{count:,.1f}"
