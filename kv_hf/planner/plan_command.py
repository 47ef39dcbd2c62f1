"""`kv-hf memory CONFIG_OR_MODEL`: what caches take and what fits, from a config alone."""

import argparse
import json

from ..errors import KVCacheError
from ..printable import tell, tell_error
from ..text_table import GAP, text_width, wrap
from ..units import format_bandwidth, format_bytes
from .devices import DEVICES
from .memory_plan import plan
from .source import preset_names, read_preset

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def print_plan(args: argparse.Namespace, prog: str) -> int:
    """Plan and print; return the exit code: 0, or 2 for an error that says its reason.

    Args:
        args: of `kv-hf memory`, as kv_hf_cli.py reads them; but for the first four they are arguments of `kv_hf.plan`.
        prog: what errors begin with.
    """
    given = vars(args)
    model, as_json, presets, devices = (
        given.pop(name) for name in ("model", "json", "list_presets", "list_devices")
    )
    if presets or devices:
        (print_presets if presets else print_devices)()
        return 0
    given["dtype"] = DTYPES.get(args.dtype, args.dtype)
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
