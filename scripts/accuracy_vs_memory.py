"""Measure accuracy against memory over models and caches, and write one report.

    python scripts/accuracy_vs_memory.py --models smollm2-135m --caches paged_int4 paged_int8 quanto_int4
    accelerate launch --num_processes 4 scripts/accuracy_vs_memory.py --models a-model another-model --tasks hellaswag
    torchrun --nproc-per-node 2 scripts/accuracy_vs_memory.py --cpu --models a-model another-model
    python scripts/accuracy_vs_memory.py --models smollm2-135m --needle 1024 2048 4096 --context 2048 4096

A run that was stopped goes on where it was: cells whose rows are in --out are not measured again. Of several processes
(accelerate launch on GPUs, torchrun on CPUs) each takes its part of the cells. What cannot be measured is said at the end
and leaves no row.
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
from accelerate.utils import gather_object
from measure.grid.cell import Cell
from measure.grid.loaded import model_revision, weight_bytes
from measure.grid.measure import Bench
from measure.grid.plan import CACHES, plan_cells
from measure.grid.run import finished_cells, run_cells
from measure.models.packaged import PACKAGED, resolve_model
from measure.peers import known_peers
from rich.console import Console
from tqdm import tqdm
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from kv_hf.cache_names import all_cache_names
from kv_hf.evaluation.loaded_model import TextSettings
from kv_hf.evaluation.report.write import write_report
from kv_hf.evaluation.retrieval.puzzles import TASKS
from kv_hf.evaluation.rows import check_writable, read_rows
from kv_hf.texts import load_text, longest_context, text_names

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "accuracy_vs_memory.jsonl"
SENSITIVITY = ROOT / "results" / "sensitivity.jsonl"
REPORT = ROOT / "results" / "report"
Todo = tuple[Cell, str]  # a cell and the revision of its model
console = Console(width=140)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"packaged models: {', '.join(PACKAGED)}; caches: {', '.join(all_cache_names())}, recipe:FILE",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--models",
        nargs="+",
        default=["smollm2-135m"],
        metavar="MODEL",
        help="names, hub ids or folders",
    )
    parser.add_argument(
        "--caches", nargs="+", default=list(CACHES), metavar="NAME[:OPTION=VALUE,..]"
    )
    parser.add_argument(
        "--text",
        nargs="+",
        default=["held_out"],
        help="files, bundled texts or dataset:.., measured one by one; held_out: five bundled texts, each and pooled",
    )
    parser.add_argument("--windows", type=int, default=2, help="texts cut from each; 0: none")
    parser.add_argument("--window", type=int, default=1600, help="tokens of a text")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of it that are not scored")
    parser.add_argument(
        "--divergence", type=int, default=64, help="greedy tokens compared, 0: none"
    )
    parser.add_argument("--tasks", nargs="+", default=[], help="tasks of lm-eval")
    parser.add_argument("--limit", type=int, default=100, help="samples per task, 0: all")
    parser.add_argument("--shots", type=int, help="examples before each question")
    parser.add_argument("--include-path", help="folder with more tasks (scripts/offline_tasks.py)")
    parser.add_argument(
        "--needle",
        nargs="+",
        type=int,
        default=[],
        metavar="LENGTH",
        help="lengths of texts with needles",
    )
    parser.add_argument(
        "--needle-tasks", nargs="+", default=["single"], help=f"some of {', '.join(TASKS)}"
    )
    parser.add_argument(
        "--depths",
        nargs="+",
        type=float,
        default=[0.0, 0.25, 0.5, 0.75, 1.0],
        help="of needles, 0 to 1",
    )
    parser.add_argument("--samples", type=int, default=4, help="needles per length and depth")
    parser.add_argument(
        "--context",
        nargs="+",
        type=int,
        default=[],
        help="lengths at which memory and speed are measured",
    )
    parser.add_argument("--steps", type=int, default=24, help="decode steps of those")
    parser.add_argument(
        "--memory-dtype", default="bfloat16", choices=("bfloat16", "float16", "float32")
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS, help="rows, of earlier runs too")
    parser.add_argument("--report", type=Path, default=REPORT, help="folder of the report")
    parser.add_argument(
        "--sensitivity",
        type=Path,
        default=SENSITIVITY,
        help="rows of scripts/recommend.py, for the report",
    )
    parser.add_argument("--all-models", action="store_true", help="report all models of --out")
    parser.add_argument("--cpu", action="store_true", help="even where there is a GPU")
    args = parser.parse_args(argv)
    # one folder, one name
    args.models = [os.path.normpath(name) if os.path.isdir(name) else name for name in args.models]
    return args


def planned(args: argparse.Namespace, device: torch.device) -> list[Cell]:
    """Return the cells that the arguments ask for."""
    texts = [TextSettings(text, args.windows, args.window, args.prompt) for text in args.text]
    task = {"tasks": args.tasks, "limit": args.limit or None, "num_fewshot": args.shots}
    needle = {"tasks": args.needle_tasks, "lengths": args.needle, "depths": args.depths}
    memory = {"contexts": args.context, "batch": 1, "steps": args.steps, "dtype": args.memory_dtype}
    return plan_cells(
        args.models,
        args.caches,
        {"dtype": args.dtype, "device": device.type, "seed": args.seed},
        texts=texts if args.windows else (),
        divergence_tokens=args.divergence,
        tasks={**task, "include_path": args.include_path} if args.tasks else None,
        needle={**needle, "samples": args.samples} if args.needle else None,
        memory=memory if args.context else None,
    )


def check_lengths(args: argparse.Namespace) -> None:
    """Raise ValueError for a text that is none, or for lengths that a model does not read, before anything is loaded."""
    if args.windows:
        for name in (name for text in args.text for name in text_names(text)):
            load_text(name)
    asked = {
        "--window": [args.window] if args.windows else [],
        "--needle": args.needle,
        "--context (with its steps and 2 to warm up)": [n + args.steps + 2 for n in args.context],
    }
    for model in args.models:
        longest = longest_context(AutoConfig.from_pretrained(resolve_model(model)))
        for name, lengths in asked.items():
            if lengths and max(lengths) > longest:
                raise ValueError(
                    f"{name} must be at most the {longest} tokens that {model} reads, got {max(lengths)}"
                )


def dealt(todo: list[Todo], state: PartialState) -> list[Todo]:
    """Return this process's part: every n-th cell, so that all get cheap and dear ones."""
    return todo[state.process_index :: state.num_processes]


def measure_cells(args: argparse.Namespace, state: PartialState, cells: list[Cell]) -> list[str]:
    """Measure this process's part of the cells; return what could not be measured, of all processes."""
    # the main process converts packaged models, the others find them converted
    with state.main_process_first():
        revisions = {model: model_revision(model) for model in args.models}
        sizes = {model: weight_bytes(model) for model in args.models}
    finished = finished_cells(args.out)
    known = [(cell, revisions[cell.model]) for cell in cells]
    todo = [(cell, revision) for cell, revision in known if cell.key(revision) not in finished]
    state.wait_for_everyone()  # before the first of them writes
    if state.is_main_process and len(todo) < len(cells):
        console.print(f"{len(cells) - len(todo)} of {len(cells)} cells are finished already")
    # memory and speed are measured where nothing else runs
    alone = [one for one in todo if one[0].kind == "memory"]
    own = dealt([one for one in todo if one[0].kind != "memory"], state)

    def say(text: str) -> None:
        tqdm.write(text, file=sys.stderr)

    bench = Bench(state.device, say)

    def cost(cell: Cell) -> float:
        return cell.tokens * sizes[cell.model] / 1e12

    mine = [*own, *alone] if state.is_main_process else own
    with tqdm(
        total=sum(cost(cell) for cell, _ in mine),
        desc=f"process {state.process_index}" if state.num_processes > 1 else "cells",
        position=state.process_index,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed} gone, {remaining} left{postfix}",
    ) as bar:

        def measure(cell: Cell) -> list[dict[str, Any]]:
            bar.set_postfix_str(str(cell))
            return bench.measure(cell)

        def done(cell: Cell) -> None:
            bar.update(cost(cell))

        failures = run_cells(own, measure, args.out, done, say)
        state.wait_for_everyone()
        if state.is_main_process:
            failures += run_cells(alone, measure, args.out, done, say)
    gathered = gather_object(failures) if state.num_processes > 1 else failures
    return list(gathered)


@known_peers()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the grid and write the report; 0 when every cell has rows, 1 when some have none, 2 for bad arguments."""
    args = arguments(argv)
    transformers_logging.disable_progress_bar()
    # processes wait for the slowest one: days, not torch's half an hour
    cpu = args.cpu or not torch.cuda.is_available()
    state = PartialState(cpu=cpu, timeout=datetime.timedelta(days=30))
    try:
        if state.is_main_process:
            check_writable(args.out)
        check_lengths(args)
        cells = planned(args, state.device)
        if not cells:
            raise ValueError("nothing to measure: give --windows, --tasks, --needle or --context")
        failures = measure_cells(args, state, cells)
        if state.is_main_process:
            measured = [*read_rows(args.out), *read_rows(args.sensitivity)]
            rows = [row for row in measured if row["model"] in args.models or args.all_models]
            if rows:
                for path in write_report(rows, args.report):
                    console.print(f"wrote {path}", highlight=False)
            else:
                console.print("no report: nothing was measured")
        state.wait_for_everyone()  # a process that ends with an error ends the others
    except KeyboardInterrupt:
        console.print(f"stopped; the same command goes on behind the rows in {args.out}")
        return 130
    except (ValueError, OSError) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {error}", highlight=False)
        return 2
    finally:
        state.destroy_process_group()
    if state.is_main_process:
        for failure in failures:
            console.print(f"[bold red]no row for[/] {failure}", highlight=False)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
