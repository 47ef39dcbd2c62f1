"""Measure what caches cost in quality, over models and caches: accuracy, needles, reading in part, MLA.

    python scripts/accuracy_vs_memory.py --models smollm2-135m --caches paged_int4 paged_int8 quanto_int4
    accelerate launch --num_processes 4 scripts/accuracy_vs_memory.py --models a-model another-model
    torchrun --nproc-per-node 2 scripts/accuracy_vs_memory.py --cpu --models a-model another-model
    python scripts/accuracy_vs_memory.py needle --lengths 1024 2048 --caches dynamic paged_int4

Every option takes several values, and every combination is a measurement. A run that was stopped goes on where it was:
what has rows in --out is not measured again. Of several processes (accelerate launch on GPUs, torchrun on CPUs) each takes
its part. What cannot be measured is said at the end, with its reason.
"""

import argparse
import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from measure import quality  # noqa: F401  registers the workloads
from measure.models.packaged import PACKAGED, resolve_model
from measure.peers import known_peers
from measure.runner import RESULTS, WORKLOADS, Workload, parsed, run, table
from transformers.utils import logging as transformers_logging

from kv_hf.cache_names import all_cache_names
from kv_hf.evaluation.rows import check_writable, read_rows

SEVERAL = ("model", "cache", "text", "task", "length", "depth", "contender")


def defaults(work: Workload) -> dict[str, list[Any]]:
    """Return the values of each field of a workload's grid."""
    found: dict[str, list[Any]] = {}
    for part in work.grid:
        for name, values in part.items():
            known = found.setdefault(name, [])
            known += [value for value in values if value not in known]
    return found


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments: options of each kind are the fields of its workload."""
    lines = __doc__.splitlines()
    parser = argparse.ArgumentParser(
        description=lines[0],
        epilog=f"Without KIND: accuracy. Packaged models: {', '.join(PACKAGED)}. Caches: {', '.join(all_cache_names())}.",
    )
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for work in WORKLOADS.values():
        about = (work.measure.__doc__ or "").splitlines()[0]
        kind = kinds.add_parser(work.name, help=about, description=about)
        for name, values in defaults(work).items():
            flag = f"--{name}s" if name in SEVERAL else f"--{name.replace('_', '-')}"
            shown = values[0] if isinstance(values[0], list) else values
            kind.add_argument(flag, dest=name, nargs="+", help=f"default: {shown}")
        kind.add_argument("--out", type=Path, default=RESULTS / f"{work.file or work.name}.jsonl")
        kind.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    return parser.parse_args(argv)


def configurations(work: Workload, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what is to be measured: neighbours share a model and the exact distributions of a text."""
    given = {name: getattr(args, name) or () for name in defaults(work)}
    only = parsed([f"{name}={value}" for name, values in given.items() for value in values])
    if "caches" in only:  # of a needle, which all caches are asked at once
        only["caches"] = [only["caches"]]
    if "model" in only:  # one folder, one name
        only["model"] = [os.path.normpath(m) if os.path.isdir(m) else m for m in only["model"]]
    found = work.configurations(only)
    if not found:
        raise ValueError(f"nothing to measure: no {work.name} has all of {only}")
    shared = ("model", "dtype", "mixing", "text", "window", "prompt")
    return sorted(found, key=lambda config: [str(config.get(name)) for name in shared])


@known_peers()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 when everything has rows, 1 when something has none, 2 for bad arguments, 130 when it was stopped."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not given or (given[0] not in WORKLOADS and given[0] not in ("-h", "--help")):
        given.insert(0, "accuracy")
    args = arguments(given)
    work, out = WORKLOADS[args.kind], args.out
    transformers_logging.disable_progress_bar()
    # processes wait for the slowest one: days, not torch's half an hour
    cpu = args.cpu or not torch.cuda.is_available()
    state = PartialState(cpu=cpu, timeout=datetime.timedelta(days=30))
    try:
        check_writable(out)
        asked = configurations(work, args)
        with (
            state.main_process_first()
        ):  # which converts packaged models; the others find them converted
            for model in {config["model"] for config in asked}:
                resolve_model(model)
        outcome = run(work, asked, device=str(state.device), out=out, processes=state)
        state.wait_for_everyone()  # a process that ends with an error ends the others
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on behind the rows in {out}", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"accuracy_vs_memory.py: {error}", file=sys.stderr)
        return 2
    finally:
        state.destroy_process_group()
    if state.is_main_process:
        cells = {work.cell(config, str(state.device)) for config in asked}
        rows = [row for row in read_rows(out) if row.get("cell") in cells]
        print(table(rows, [*defaults(work), *work.columns.split()]) if rows else "no rows")
        for failure in outcome.failed:
            print(f"no rows for {failure}")
    return int(bool(outcome.failed))


if __name__ == "__main__":
    sys.exit(main())
