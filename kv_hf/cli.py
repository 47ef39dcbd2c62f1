"""The command line: `kv-hf doctor` says what would run here, and why; `kv-hf lm-eval` runs lm-eval over our caches;
`kv-hf convert-gqa` writes a checkpoint with fewer kv heads; `kv-hf memory` says what caches take and what fits, and
`kv-hf explore` shows it in a browser.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from .doctor import environment, report_formats, report_model, sizes_of
from .errors import KVCacheError
from .formats import FORMAT_NAMES

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="kv-hf", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what would run here, and why")
    doctor.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    doctor.add_argument(
        "--dtype", choices=DTYPES, help="of the model; default: --model's, else bfloat16"
    )
    doctor.add_argument("--head-dim", type=int, help="default: --model's, else 128")
    doctor.add_argument("--page-size", type=int, default=64)
    doctor.add_argument("--model", help="folder or hub name: say how each layer would be cached")
    commands.add_parser(
        "lm-eval",
        help="lm-eval's command line, which then knows the model class kv_hf",
        add_help=False,
    )
    commands.add_parser(
        "convert-gqa", help="write a checkpoint with fewer kv heads", add_help=False
    )
    commands.add_parser(
        "memory", help="what caches take and what fits, from a config alone", add_help=False
    )
    commands.add_parser("explore", help="the memory planner as a page in a browser", add_help=False)
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["lm-eval"]:
        from .evaluation.harness.__main__ import main as lm_eval

        try:
            lm_eval(arguments[1:])
        # bad arguments, a task or data that is not there
        except (ValueError, ImportError, OSError) as error:
            print(f"kv-hf lm-eval: error: {error}", file=sys.stderr)
            return 2
        return 0
    if arguments[:1] == ["convert-gqa"]:
        from .gqa.command import main as convert_gqa

        return convert_gqa(arguments[1:])
    if arguments[:1] == ["memory"]:
        from .planner.command import main as memory

        return memory(arguments[1:])
    if arguments[:1] == ["explore"]:
        from .planner.explore.command import main as explore

        return explore(arguments[1:])
    args = parser.parse_args(arguments)
    try:
        own = sizes_of(args.model) if args.model is not None else {}
        dtype = DTYPES[args.dtype] if args.dtype else own.get("dtype", torch.bfloat16)
        head_dim = own.get("head_dim", 128) if args.head_dim is None else args.head_dim
        latent = own.get("latent") if args.head_dim is None else None
        print_doctor(torch.device(args.device), dtype, head_dim, args.page_size, latent)
        if args.model is not None:
            print(f"\nLayers of {args.model}:")
            for layers, how in report_model(args.model):
                print(f"  {layers:<14}{how}")
    except (KVCacheError, RuntimeError) as error:  # torch raises RuntimeError for an unknown device
        parser.error(str(error).splitlines()[0])
    return 0


def print_doctor(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    page_size: int,
    latent: tuple[int, int] | None = None,
) -> None:
    """Print the environment, then for every format the kernel that reads its pages on `device`."""
    for what, found in environment():
        print(f"{what:<14}{found}")
    dtype_name = str(dtype).removeprefix("torch.")
    sizes = f"head_dim {head_dim}"
    if latent is not None:
        sizes = f"latents of {latent[0]} and RoPE keys of {latent[1]}"
    print(f"\nPages on {device}: {dtype_name}, {sizes}, page_size {page_size}")
    reports = report_formats(device, dtype, head_dim, page_size, latent)
    for report in reports:
        name = f"paged_{report.format}" if report.format in FORMAT_NAMES else report.format
        print(f"  {name:<14}{report.kernel or 'none'}")
    print("\nWhy not another kernel:")
    for name in {name: None for report in reports for name, _ in report.others}:
        reasons = {
            reason or "can run, but a faster one is there": None
            for report in reports
            for other, reason in report.others
            if other == name
        }
        for reason in reasons:
            print(f"  {name:<14}{reason}")


if __name__ == "__main__":
    sys.exit(main())
