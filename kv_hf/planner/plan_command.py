"""`kv-hf memory CONFIG_OR_MODEL`: what caches take and what fits, from a config alone."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from ..cache_names import STOCK
from ..errors import KVCacheError
from ..formats import cache_names
from ..printable import tell, tell_error
from ..text_table import GAP, text_width, wrap
from ..units import format_bandwidth, format_bytes
from .devices import DEVICES
from .memory_plan import plan
from .source import preset_names, read_preset

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
