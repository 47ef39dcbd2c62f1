"""A plan as lines for people: what the model keeps, a row per cache, and notes."""

from collections.abc import Sequence

from ..printable import printable, tell
from ..text_table import table_lines, text_width, wrap
from ..units import format_bandwidth, format_bytes, format_count
from .fit import MOST_ROWS
from .inventory import CachedLayer, Inventory
from .memory_plan import CachePlan, Plan

NO_LIMIT = "no limit"


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


def columns(plan: Plan) -> list[tuple[str, list[str]]]:
    """Return (heading, cells) of every column that the plan can fill: what is held, then what fits and is read."""
    rows = plan.rows
    found = [
        ("cache", [printable(row.cache) for row in rows]),
        ("bytes/token", [_number(row.bytes_per_token) for row in rows]),
        ("cache bytes", [format_bytes(row.total) for row in rows]),
    ]
    found.append(("ratio", [f"{row.ratio:,.2f}x" for row in rows]))
    if plan.weights is not None:
        found.append(("with weights", [format_bytes(plan.weights + row.total) for row in rows]))
    if plan.available is not None:
        found.append(("fits", ["yes" if row.fits else "no" for row in rows]))
    if any(row.memory.offloaded for row in rows):
        found.append(("outside", [format_bytes(row.memory.offloaded) for row in rows]))
    if plan.available is not None:
        found += [
            ("context", [_limit(plan, row, "context") for row in rows]),
            ("batch", [_limit(plan, row, "batch") for row in rows]),
            ("resident", [_limit(plan, row, "resident_tokens") for row in rows]),
        ]
    found.append(("read/token", [format_bytes(row.decode.bytes_per_token) for row in rows]))
    if plan.bandwidth is not None:
        found.append(("tokens/s", [_speed(plan, row) for row in rows]))
    return found


def _speed(plan: Plan, row: CachePlan) -> str:
    """Return tokens per second, "-" where nobody said how fast the pages outside of the device can be read."""
    if row.decode.outside and plan.host_bandwidth is None:
        return "-"
    return _number(row.tokens_per_second or 0)


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
    head, tail = (
        [one for line in lines for one in wrap(line, width)]
        for lines in (header_lines(plan), [*legend(plan), *_notes(plan)])
    )
    return "\n".join([*head, "", *table_lines(columns(plan), width), "", *tail])


def print_plan(plan: Plan) -> None:
    """Print a plan as wide as the terminal, and in 80 columns where the output is no terminal."""
    tell(plain_table(plan, text_width()))


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
