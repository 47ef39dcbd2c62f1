"""`kv-hf memory CONFIG_OR_MODEL`: what caches take and what fits, from a config alone."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from ..cache_names import STOCK
from ..errors import KVCacheError
from ..formats import cache_names
from ..printable import printable, tell, tell_error
from ..text_table import GAP, table_lines, text_width, wrap
from ..units import format_bandwidth, format_bytes, format_count
from .devices import DEVICES
from .inventory import CachedLayer, Inventory
from .memory_plan import MOST_ROWS, CachePlan, Plan, plan
from .presets import preset_names, read_preset

NO_LIMIT = "no limit"
LEGEND = (
    "context, batch: the largest at the other's size; resident: tokens over all rows, in whole pages; read/token: bytes that a "
    "decode step reads, per token that it makes; tokens/s: what the bandwidth allows at most, over all rows"
)
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


# flag, metavar, help; each is the argument of kv_hf.plan with that name
_OPTIONS = (
    ("--context", "S", "tokens of each row: 8192 or 128k (default: 8192, or what the model was made for if that is less)"),
    ("--prompt", "P", "how many of them came in one prefill (default: the most that any takes)"),
    ("--device", "NAME", "memory and bandwidth of a known device"),
    ("--device-memory", "SIZE", "24GiB (1024**3) or 24GB (1000**3)"),
    ("--bandwidth", "SPEED", "of the device's memory: 3.35TB/s"),
    ("--host-bandwidth", "SPEED", "of the way to offloaded pages: 64GB/s"),
    ("--reserve", "SIZE", "memory to keep free (default: none)"),
    ("--weights", "SIZE", "of all weights, for quantized checkpoints; 0 to leave them out"),
)  # fmt: skip
_NUMBERS = (
    ("--batch", "B", 1, "rows (default: 1)"),
    ("--kv-heads", "G", None, "in place of the model's"),
    ("--tensor-parallel", "N", 1, "devices that share each layer"),
)
_FLAGS = (
    ("--json", "print the plan as JSON"),
    ("--list-presets", "list the presets, and stop"),
    ("--list-devices", "list known devices, and stop"),
)


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    says = "Say what the caches of a model take, what fits and how fast memory lets it decode. Loads no weights."
    found = argparse.ArgumentParser(prog=prog, allow_abbrev=False, description=says)
    model = "hub id, folder, config.json, or a preset such as llama-3.1-8b"
    found.add_argument("model", nargs="?", metavar="CONFIG_OR_MODEL", help=model)
    names = (
        f"{', '.join([*STOCK[:3], *cache_names()])}, with options of kv_hf.CacheConfig, such as "
    )
    names += "paged_int4:keys=int8,offload=cpu (default: the common ones)"
    many: Any = {"nargs": "+", "action": "extend", "dest": "caches"}
    found.add_argument("--cache", "--caches", metavar="NAME[:OPTION=VALUE,...]", help=names, **many)
    for flag, metavar, text in _OPTIONS:
        found.add_argument(flag, metavar=metavar, help=text)
    for flag, metavar, default, text in _NUMBERS:
        found.add_argument(flag, type=int, metavar=metavar, default=default, help=text)
    kinds = (*DTYPES, *DTYPES.values())
    found.add_argument(
        "--dtype", choices=kinds, help="of weights and cache (default: the config's)"
    )
    for flag, text in _FLAGS:
        found.add_argument(flag, action="store_true", help=text)
    return found


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf memory") -> int:
    """Plan and print; return the exit code: 0, or 2 for an error that says its reason."""
    asked = parser(prog)
    given = vars(asked.parse_args(sys.argv[1:] if argv is None else list(argv)))
    model, as_json, presets, devices = (
        given.pop(name) for name in ("model", "json", "list_presets", "list_devices")
    )
    if presets or devices:
        (print_presets if presets else print_devices)()
        return 0
    if model is None:
        asked.error("CONFIG_OR_MODEL is missing; --list-presets shows models that need no download")
    given |= {"dtype": DTYPES.get(given["dtype"], given["dtype"]), "reserve": given["reserve"] or 0}
    try:
        found = plan(model, **given)
    except (KVCacheError, OSError) as error:
        tell_error(prog, error)
        return 2
    tell(json.dumps(found.as_dict(), indent=2) if as_json else str(found))
    return 0


def print_devices() -> None:
    """Print the known devices with their memory and bandwidth, and the sources of both."""
    for device in DEVICES.values():
        memory = "" if device.memory is None else format_bytes(device.memory)
        figures = f"{device.name:<15}{memory:>11}{format_bandwidth(device.bandwidth):>13}"
        sources = "; ".join(one for one in (device.memory_source, device.source) if one)
        tell("\n".join(wrap(f"{figures}  {sources}", text_width(), len(figures) + GAP)))


def print_presets() -> None:
    """Print the shipped presets: name and hub id."""
    names = preset_names()
    wide = max(map(len, names), default=0) + GAP
    for name in names:
        tell(f"{name:<{wide}}{read_preset(name)['model']}")


# -- a plan as lines for people: what the model keeps, a row per cache, and notes ---------------------------------


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
