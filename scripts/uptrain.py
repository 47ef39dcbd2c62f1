"""Train a converted checkpoint towards its original: distillation from the original's logits plus cross entropy.

    python scripts/uptrain.py --student OUT/model-1-kv-head --teacher ORIGINAL --out OUT/trained --data text.txt --minutes 20
    python scripts/uptrain.py --student A --teacher B --out C --data self dataset:roneneldan/TinyStories --steps 2000 --eval-text held.txt
    python scripts/uptrain.py ... --resume            # behind Ctrl-C, or a crash
    accelerate launch scripts/uptrain.py ...          # a process per GPU
    accelerate launch --multi_gpu --num_processes 2 scripts/uptrain.py ...  # two processes, on a CPU too

"self" is text sampled from the original, which is kept under $KV_HF_HOME/samples. The result is an ordinary checkpoint folder.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import torch
from measure.models.packaged import PACKAGED, resolve_model
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from kv_hf.evaluation.rows import append_rows, check_writable, commit, make_row
from kv_hf.gqa.checkpoint import read_json
from kv_hf.gqa.uptrain import UptrainReport, UptrainSettings, uptrain
from kv_hf.gqa.uptrain.progress import SETTINGS, Progress, work_folder
from kv_hf.gqa.uptrain.settings import DTYPES, TRAINED
from kv_hf.records import CONVERSION

RESULTS = Path(__file__).parent.parent / "results" / "uptrain.jsonl"
DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(UptrainSettings) if field.default is not MISSING
}
console = Console(width=140)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog=f"packaged models: {', '.join(PACKAGED)}"
    )

    def add(name: str, kind: Any, text: str, **more: Any) -> None:
        default = DEFAULTS[name]
        shown = "" if default is None else f" (default: {default})"
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=default, help=text + shown, **more)

    parser.add_argument("--student", required=True, help="the converted checkpoint")
    parser.add_argument("--teacher", required=True, help="its original: folder, hub id or packaged")
    parser.add_argument("--out", required=True, type=Path, help="folder for the result")
    parser.add_argument(
        "--data", required=True, nargs="+", metavar="TEXT",
        help="text files, dataset:PATH,CONFIG,SPLIT,FIELD, bundled texts, or self: sampled from the teacher",
    )  # fmt: skip
    parser.add_argument("--eval-text", help="text that is not trained on; else a part of the data")
    add("steps", int, "updates of the weights")
    add("minutes", float, "of training, without evaluations")
    add("lr", float, "largest learning rate")
    add("warmup", int, "steps up to it")
    add("batch", int, "windows that a process takes at once")
    add("accumulate", int, "batches of a step")
    add("length", int, "tokens of a window (default: the model's, at most 1024)")
    add("alpha", float, "weight of the distillation; the rest is the cross entropy's")
    add("temperature", float, "of the distillation")
    add("train", str, "parameters that are trained", choices=TRAINED)
    add("dtype", str, "of the computation", choices=DTYPES)
    add("weight_decay", float, "of AdamW")
    add("clip", float, "largest norm of a gradient")
    add("seed", int, "of the order and of sampled text")
    add("tokens", int, "taken from the data, at most")
    add("sample_tokens", int, "sampled, for --data self")
    add("save_every", int, "steps between two states")
    add("evaluations", int, "during training")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--record", action="store_true", help=f"append the curve to {RESULTS.name}")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def show(report: UptrainReport) -> None:
    """Print the curve of a run."""
    table = Table(title=f"{report.student}: {report.steps:,} steps, {report.tokens:,} tokens")
    for head in ("step", "tokens", "seconds", "loss", "perplexity", "original", "KL"):
        table.add_column(head, justify="right")
    for row in report.curve:
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        table.add_row(
            f"{row['step']:,}", f"{row['tokens']:,}", f"{row['seconds']:.0f}", loss, f"{row['perplexity']:,.3f}",
            f"{row['teacher_perplexity']:,.3f}", f"{row['kl']:.4f}",
        )  # fmt: skip
    console.print(table)


def rows_of(report: UptrainReport, settings: UptrainSettings, args: Any) -> list[dict[str, Any]]:
    """Return the rows of a curve, with what is needed to repeat it."""
    conversion = read_json(args.out / "config.json").get(CONVERSION, {})
    common = {
        "kind": "uptrain", "student": Path(args.student).name, "teacher": Path(args.teacher).name,
        "method": conversion.get("method"), "num_key_value_heads": conversion.get("num_key_value_heads"),
        "data": [Path(name).name for name in args.data], "held_out": args.eval_text and Path(args.eval_text).name,
        "threads": torch.get_num_threads(), "settings": asdict(settings),
    }  # fmt: skip
    if len(report.rates) > 1:
        common["lr_from_step"] = report.rates
    return [make_row(**common, **row) for row in report.curve]


def main(argv: Sequence[str] | None = None) -> int:
    """Train; 0 when the result is written, 1 when the run was interrupted, 2 for bad arguments."""
    args = arguments(argv)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    main_process = os.environ.get("RANK", "0") == "0"
    bars: dict[str, Any] = {}

    def bar(name: str, done: int, of: int, unit: str, note: str = "") -> None:
        if not main_process:
            return
        if name not in bars:
            bars[name] = tqdm(desc=name, unit=unit, initial=done - 1)
        found = bars[name]
        found.total = of
        found.set_postfix_str(note, refresh=False)
        found.update(done - found.n)
        if name == "sampling" and done >= of:
            found.close()

    def stepped(progress: Progress) -> None:
        loss, kl, entropy = progress.losses[-1]
        note = f"loss {loss:.4f}, KL {kl:.4f}, cross entropy {entropy:.4f}"
        found = progress.evaluations[-1]
        note += f"; perplexity {found['perplexity']:,.2f} at step {found['step']}"
        bar("training", progress.step, progress.planned, "step", note)

    try:
        settings = UptrainSettings(**{name: getattr(args, name) for name in DEFAULTS})
        if args.record:
            check_writable(args.results)
            commit()  # of the code that runs, whatever is edited meanwhile
        report = uptrain(
            args.student, resolve_model(args.teacher), args.out, args.data, settings, held=args.eval_text,
            resume=args.resume, progress=stepped, sampling=lambda done, of: bar("sampling", done, of, "token"),
        )  # fmt: skip
    except KeyboardInterrupt:  # training itself takes Ctrl-C as a request and ends with a state
        begun = (work_folder(args.out) / SETTINGS).is_file()
        kept = (
            "what was sampled and saved before is kept; --resume goes on."
            if begun
            else "nothing is left of it."
        )
        console.print(f"Stopped: {kept}", highlight=False)
        return 1
    except (ValueError, OSError) as error:
        who = "" if main_process else f"process {os.environ['RANK']}: "
        console.print(
            f"{who}[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False
        )
        return 2
    finally:
        for each in bars.values():
            each.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if not main_process:
        return 0 if report.finished else 1
    show(report)
    if report.became_worse:
        first, last = report.curve[0]["kl"], report.curve[-1]["kl"]
        console.print(
            f"[bold yellow]worse than before[/]: KL {last:.4f} to the teacher, and {first:.4f} without training. Take a smaller "
            f"--lr (it was {args.lr:g}), more text or more time.", highlight=False,
        )  # fmt: skip
    if not report.finished:
        console.print(f"Stopped and saved at step {report.steps:,}; --resume goes on.")
        return 1
    if args.record:
        append_rows(args.results, rows_of(report, settings, args))
    console.print(f"Written to {args.out}.", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
