"""A plan: what it says about each cache, and the table that people read."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import CacheOptionError
from ..printable import printable
from ..spec import MemoryReport
from ..text_table import table_lines, text_width, wrap
from ..units import format_bandwidth, format_bytes, format_count
from .inventory import CachedLayer, Inventory

MOST_ROWS = 1 << 16  # larger batches are not searched
NO_LIMIT = "no limit"
LEGEND = (
    "context, batch: the largest at the other's size; resident: tokens over all rows, in whole pages; read/token: bytes that a "
    "decode step reads, per token that it makes; tokens/s: what the bandwidth allows at most, over all rows"
)


@dataclass(frozen=True)
class Fit:
    """The largest loads in the memory behind the weights. None: nothing grows, or the limit lies beyond all use.

    Attributes:
        context: tokens of each row at the batch of the plan.
        batch: rows at the context of the plan; None: MOST_ROWS or more.
        resident_tokens: tokens over all rows of the plan's batch, in whole pages: what an engine may admit.
    """

    context: int | None
    batch: int | None
    resident_tokens: int | None


@dataclass(frozen=True)
class Decode:
    """Bytes that one decode step of all rows reads.

    Attributes:
        batch: rows, each of which gets a token in a step.
        weights: of the model, of routed experts the share that is expected to be asked for; None where not known.
        cache: keys, values and states, once per layer of the model that reads them.
        offloaded: part of `cache` that is fetched to the device first.
    """

    batch: int
    weights: int | None
    cache: int
    offloaded: int = 0

    @property
    def step_bytes(self) -> int:
        """Bytes of a step."""
        return (self.weights or 0) + self.cache

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a step per token that it makes."""
        return self.step_bytes / self.batch

    def tokens_per_second(self, bandwidth: int, host_bandwidth: int | None = None) -> float:
        """Return the tokens per second over all rows that memory allows at most.

        A bound, not a forecast: computing, writing, launching kernels and talking between devices take their time on top.

        Args:
            bandwidth: of the device's memory, bytes per second.
            host_bandwidth: of the way from offloaded pages to the device; None leaves that way out.
        """
        seconds = self.step_bytes / bandwidth
        if host_bandwidth is not None:
            seconds = max(seconds, self.offloaded / host_bandwidth)
        return self.batch / seconds if seconds else float("inf")


@dataclass(frozen=True)
class CachePlan:
    """One cache of a plan. Bytes are those of one device.

    Attributes:
        cache: its name, with options behind a colon.
        memory: what it holds at the plan's batch and context, by part; `memory.offloaded` lies outside of the device.
        bytes_per_token: of one more token of one row in the long run, on the device; windows that are full do not grow.
        offloaded_bytes_per_token: the same of offloaded pages.
        ratio: bytes of a DynamicCache / `memory.total`.
        decode: bytes that a decode step reads.
        tokens_per_second: over all rows, at most; None without a bandwidth.
        fit: what the memory behind the weights holds; None without `device_memory` or where the weights are not known.
        fits: whether weights, reserve and cache go into the device's memory; None where `fit` is.
    """

    cache: str
    memory: MemoryReport
    bytes_per_token: float
    offloaded_bytes_per_token: float
    ratio: float
    decode: Decode
    tokens_per_second: float | None
    fit: Fit | None
    fits: bool | None

    @property
    def total(self) -> int:
        """Bytes of the cache on the device."""
        return self.memory.total


@dataclass(frozen=True)
class Plan:
    """Memory of the caches of a model, at a batch and a context.

    Attributes:
        inventory: of the whole model.
        batch, context: rows, and tokens of each that the cache holds.
        prompt: tokens of a row that came in one prefill, or None.
        tensor_parallel: devices that share the model; all bytes are those of one of them.
        weights: bytes of the weights, None where their number is not known.
        device: name of a known device, or None.
        device_memory, bandwidth, host_bandwidth: in bytes and bytes per second, None where not given.
        reserve: bytes of the device that are kept free of weights and caches.
        rows: one per cache.
        notes: what was assumed, and what does not fit, in words.
    """

    inventory: Inventory
    batch: int
    context: int
    prompt: int | None
    tensor_parallel: int
    weights: int | None
    device: str | None
    device_memory: int | None
    bandwidth: int | None
    host_bandwidth: int | None
    reserve: int
    rows: tuple[CachePlan, ...]
    notes: tuple[str, ...]

    @property
    def available(self) -> int | None:
        """Bytes behind weights and reserve, below zero where these do not fit; None where one of them is not known."""
        if self.device_memory is None or self.weights is None:
            return None
        return self.device_memory - self.reserve - self.weights

    def __str__(self) -> str:
        """Return the table that `kv-hf memory` prints, as wide as the terminal."""
        return plain_table(self, text_width())

    def row(self, cache: str) -> CachePlan:
        """Return the row of a cache by its name. Raises CacheOptionError for one that was not planned."""
        for row in self.rows:
            if row.cache == cache:
                return row
        names = ", ".join(row.cache for row in self.rows)
        raise CacheOptionError(f"cache must be one of the plan's ({names}), got {cache!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return the plan for JSON, totals included, the model's config left out."""
        found = asdict(replace(self, inventory=replace(self.inventory, config=None)))
        del found["inventory"]["config"]
        found["available"] = self.available
        for given, row in zip(found["rows"], self.rows, strict=True):
            given["memory"]["total"] = row.total
            given["decode"]["step_bytes"] = row.decode.step_bytes
            given["decode"]["bytes_per_token"] = row.decode.bytes_per_token
        return found


# -- a plan as lines for people: what the model keeps, a row per cache, and notes ---------------------------------


def describe_layers(inventory: Inventory) -> str:
    """Return what the layers of a cache hold, equal ones counted together: "32 x 8 kv heads of 128"."""
    counts = Counter(map(describe_layer, inventory.layers))
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
        ("ratio", [f"{row.ratio:,.2f}x" for row in rows]),
    ]
    if plan.weights is not None:
        found.append(("with weights", [format_bytes(plan.weights + row.total) for row in rows]))
    if plan.available is not None:
        found.append(("fits", ["yes" if row.fits else "no" for row in rows]))
    if any(row.memory.offloaded for row in rows):
        found.append(("offloaded", [format_bytes(row.memory.offloaded) for row in rows]))
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
    if row.decode.offloaded and plan.host_bandwidth is None:
        return "-"
    return _number(row.tokens_per_second or 0)


def plain_table(plan: Plan, width: int | None = None) -> str:
    """Return the plan as lines of text, of at most `width` characters where that is possible."""
    head, tail = (
        [one for line in lines for one in wrap(line, width)]
        for lines in (header_lines(plan), [LEGEND, *_notes(plan)])
    )
    return "\n".join([*head, "", *table_lines(columns(plan), width), "", *tail])


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
