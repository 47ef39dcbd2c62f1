"""`kv-hf memory CONFIG_OR_MODEL`: what caches take and what fits, from a config alone."""

import argparse
import json
import sys
from collections.abc import Sequence

from ..cache_names import STOCK
from ..errors import KVCacheError
from ..formats import cache_names
from ..printable import tell, tell_error
from ..text_table import GAP, text_width, wrap
from ..units import format_bandwidth, format_bytes
from .devices import DEVICES
from .inventory import Inventory
from .memory_plan import plan
from .presets import preset_names, read_preset
from .table import describe_layers, print_plan

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Say what the caches of a model take, what fits and how fast memory lets it decode. Loads no weights.",
    )
    found.add_argument(
        "model",
        nargs="?",
        metavar="CONFIG_OR_MODEL",
        help="hub id, folder, config.json, or a preset such as llama-3.1-8b",
    )
    found.add_argument("--batch", type=int, default=1, metavar="B", help="rows (default: 1)")
    found.add_argument(
        "--context",
        metavar="S",
        help="tokens of each row: 8192 or 128k (default: 8192, or what the model was made for if that is less)",
    )
    found.add_argument(
        "--prompt",
        metavar="P",
        help="how many of them came in one prefill (default: the most that any takes)",
    )
    found.add_argument(
        "--cache",
        "--caches",
        nargs="+",
        action="extend",
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"{', '.join([*STOCK[:3], *cache_names()])} or recipe:PATH, with options of kv_hf.CacheConfig, such as "
        "paged_int4:keys=int8,offload=cpu (default: the common ones)",
    )
    found.add_argument("--device", metavar="NAME", help="memory and bandwidth of a known device")
    found.add_argument("--device-memory", metavar="SIZE", help="24GiB (1024**3) or 24GB (1000**3)")
    found.add_argument("--bandwidth", metavar="SPEED", help="of the device's memory: 3.35TB/s")
    found.add_argument(
        "--host-bandwidth", metavar="SPEED", help="of the way to offloaded pages: 64GB/s"
    )
    found.add_argument("--reserve", metavar="SIZE", help="memory to keep free (default: none)")
    found.add_argument(
        "--weights",
        metavar="SIZE",
        help="of all weights, for quantized checkpoints; 0 to leave them out",
    )
    found.add_argument(
        "--dtype",
        choices=(*DTYPES, *DTYPES.values()),
        help="of weights and cache (default: the config's)",
    )
    found.add_argument("--kv-heads", type=int, metavar="G", help="in place of the model's")
    found.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="devices that share each layer"
    )
    found.add_argument("--json", action="store_true", help="print the plan as JSON")
    found.add_argument("--list-presets", action="store_true", help="list the presets, and stop")
    found.add_argument("--list-devices", action="store_true", help="list known devices, and stop")
    return found


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf memory") -> int:
    """Plan and print; return the exit code: 0, or 2 for an error that says its reason."""
    asked = parser(prog)
    args = asked.parse_args(sys.argv[1:] if argv is None else list(argv))
    if args.list_devices:
        print_devices()
        return 0
    if args.list_presets:
        print_presets()
        return 0
    if args.model is None:
        asked.error("CONFIG_OR_MODEL is missing; --list-presets shows models that need no download")
    try:
        found = plan(
            args.model,
            caches=args.cache,
            batch=args.batch,
            context=args.context,
            prompt=args.prompt,
            device=args.device,
            device_memory=args.device_memory,
            bandwidth=args.bandwidth,
            host_bandwidth=args.host_bandwidth,
            reserve=0 if args.reserve is None else args.reserve,
            weights=args.weights,
            dtype=DTYPES.get(args.dtype, args.dtype),
            kv_heads=args.kv_heads,
            tensor_parallel=args.tensor_parallel,
        )
    except (KVCacheError, OSError) as error:
        tell_error(prog, error)
        return 2
    if args.json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print_plan(found)
    return 0


def print_devices() -> None:
    """Print the known devices with their memory and bandwidth, and the sources of both."""
    for device in DEVICES.values():
        memory = "" if device.memory is None else format_bytes(device.memory)
        figures = f"{device.name:<15}{memory:>11}{format_bandwidth(device.bandwidth):>13}"
        sources = "; ".join(one for one in (device.memory_source, device.source) if one)
        _print_wrapped(f"{figures}  {sources}", hang=len(figures) + GAP)


def print_presets() -> None:
    """Print the shipped presets: name, hub id, and what their layers hold."""
    names = preset_names()
    wide = max(map(len, names), default=0) + GAP
    for name in names:
        preset = read_preset(name)
        inventory = Inventory.from_dict(preset["inventory"])
        text = f"{name:<{wide}}{preset['model']}: {describe_layers(inventory)}"
        _print_wrapped(text, hang=wide)


def _print_wrapped(line: str, hang: int) -> None:
    tell("\n".join(wrap(line, text_width(), hang)))
