"""`kv-hf uptrain`: train a converted checkpoint towards its original, with a bar and the curve as a table."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from ...printable import tell, tell_error
from ...text_table import say, table_lines, text_width
from .progress import SETTINGS, Progress, work_folder
from .run import UptrainReport, uptrain
from .settings import DTYPES, TRAINED, UptrainSettings

DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(UptrainSettings) if field.default is not MISSING
}
EXAMPLES = """\
  kv-hf uptrain --student ./model-2 --teacher ./model --out ./trained --data text.txt --minutes 20
  kv-hf uptrain ... --resume                         behind Ctrl-C, or a crash
  accelerate launch -m kv_hf uptrain ...             a process per GPU
  accelerate launch --multi_gpu --num_processes 2 -m kv_hf uptrain ...   two processes, on a CPU too

"self" as --data is text sampled from the original, which is kept under $KV_HF_HOME/samples. The result is an ordinary
checkpoint folder. Needs pip install -e '.[train]' in the clone."""


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Train a converted checkpoint towards its original: distillation from the original's logits plus cross "
        "entropy.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, kind: Any, text: str, **more: Any) -> None:
        default = DEFAULTS[name]
        shown = "" if default is None else f" (default: {default})"
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=default, help=text + shown, **more)

    parser.add_argument("--student", required=True, help="the converted checkpoint")
    parser.add_argument("--teacher", required=True, help="its original: folder or hub id")
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
    return parser


def show(report: UptrainReport) -> None:
    """Print the curve of a run."""
    forms: dict[str, tuple[str, Callable[[Any], str]]] = {
        "tokens": ("tokens", "{:,}".format),
        "seconds": ("seconds", "{:.0f}".format),
        "loss": ("loss", lambda loss: "" if loss is None else f"{loss:.4f}"),
        "perplexity": ("perplexity", "{:,.3f}".format),
        "teacher_perplexity": ("original", "{:,.3f}".format),
        "kl": ("KL", "{:.4f}".format),
    }
    tell(f"{report.student}: {report.steps:,} steps, {report.tokens:,} tokens\n")
    columns = [
        (heading, [form(row[field]) for row in report.curve])
        for field, (heading, form) in forms.items()
    ]
    steps = [f"{row['step']:,}" for row in report.curve]
    tell("\n".join(table_lines([("step", steps), *columns], text_width())))


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf uptrain") -> int:
    """Train; return the exit code: 0 where the result is written, 1 for an interrupted run, 2 for bad arguments."""
    return train(parser(prog).parse_args(sys.argv[1:] if argv is None else list(argv)), prog)


def train(
    args: argparse.Namespace,
    prog: str,
    finished: Callable[[UptrainReport, UptrainSettings], object] = lambda report, settings: None,
) -> int:
    """Train as `args` ask, with bars; return the exit code of `main`.

    Args:
        args: as `parser` returns them.
        finished: called in the main process with the report of a run that wrote its result.
    """
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    is_main = os.environ.get("RANK", "0") == "0"
    bars = Bars(is_main)
    try:
        settings = UptrainSettings(**{name: getattr(args, name) for name in DEFAULTS})
        report = uptrain(
            args.student, args.teacher, args.out, args.data, settings, held=args.eval_text,
            resume=args.resume, progress=bars.stepped, sampling=bars.sampled,
        )  # fmt: skip
    except KeyboardInterrupt:  # training itself takes Ctrl-C as a request and ends with a state
        begun = (work_folder(args.out) / SETTINGS).is_file()
        kept = "what was sampled and saved before is kept; --resume goes on."
        say(f"Stopped: {kept if begun else 'nothing is left of it.'}")
        return 1
    except (ValueError, OSError) as error:
        tell_error(prog if is_main else f"{prog}, process {os.environ['RANK']}", error)
        return 2
    finally:
        bars.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    if not is_main:
        return 0 if report.finished else 1
    return _tell_end(report, settings, args, finished)


def _tell_end(
    report: UptrainReport,
    settings: UptrainSettings,
    args: argparse.Namespace,
    finished: Callable[[UptrainReport, UptrainSettings], object],
) -> int:
    show(report)
    if report.became_worse:
        first, last = report.curve[0]["kl"], report.curve[-1]["kl"]
        say(
            f"worse than before: KL {last:.4f} to the teacher, and {first:.4f} without training. Take a smaller --lr (it was "
            f"{args.lr:g}), more text or more time."
        )
    if not report.finished:
        say(f"Stopped and saved at step {report.steps:,}; --resume goes on.")
        return 1
    finished(report, settings)
    say(f"Written to {args.out}.")
    return 0


class Bars:
    """The bars of a run, one for each kind of work; none in processes beside the main one."""

    def __init__(self, shown: bool) -> None:
        self.shown = shown
        self.bars: dict[str, Any] = {}

    def stepped(self, progress: Progress) -> None:
        """Show a step of the training."""
        loss, kl, entropy = progress.losses[-1]
        found = progress.evaluations[-1]
        note = f"loss {loss:.4f}, KL {kl:.4f}, cross entropy {entropy:.4f}"
        note += f"; perplexity {found['perplexity']:,.2f} at step {found['step']}"
        self._show("training", progress.step, progress.planned, "step", note)

    def sampled(self, done: int, of: int) -> None:
        """Show tokens that were sampled."""
        self._show("sampling", done, of, "token")
        if self.shown and done >= of:
            self.bars["sampling"].close()

    def close(self) -> None:
        """Leave the bars as they are."""
        for bar in self.bars.values():
            bar.close()

    def _show(self, name: str, done: int, of: int | None, unit: str, note: str = "") -> None:
        if not self.shown:
            return
        if name not in self.bars:
            self.bars[name] = tqdm(desc=name, unit=unit, initial=done - 1)
        bar = self.bars[name]
        bar.total = of
        bar.set_postfix_str(note, refresh=False)
        bar.update(done - bar.n)
