"""Train a converted checkpoint towards its original: distillation from the original's logits plus cross entropy.

    python scripts/uptrain.py --student model-2 --teacher model --out trained --data text.txt --minutes 20
    python scripts/uptrain.py ... --resume                              behind Ctrl-C, a kill or a crash
    accelerate launch --num_processes 2 scripts/uptrain.py ...          a process per GPU; torchrun on a CPU too

The loop is transformers' Trainer; its states lie in OUT.uptraining until OUT is written. The result is an ordinary checkpoint.
--teacher may name a packaged model (measure/models/packaged.py). --record appends the first and the last figures to
results/uptrain.jsonl.
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure.models.packaged import PACKAGED, resolve_model
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.checkpoint import checkpoint
from transformers import (  # fmt: skip
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from kv_hf.evaluation.rows import append_rows, check_writable, make_row
from kv_hf.files import becoming_folder
from kv_hf.gqa.convert import check_destination
from kv_hf.gqa.source import Source
from kv_hf.printable import tell, tell_error
from kv_hf.records import CONVERSION, UPTRAINING
from kv_hf.texts import documents

RESULTS = Path(__file__).parent.parent / "results" / "uptrain.jsonl"
BETWEEN = "<|endoftext|>"  # what separates the documents of a text file
# positions whose distributions are made at a time: on a CPU few enough to stay in its cache
BLOCK = {"cpu": 16}
HELD = 64  # windows held out of the data where there is no --eval-text


def distillation(own: torch.Tensor, other: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return [KL(teacher || student), cross entropy], means over all positions but the last, in fp32.

    Block by block of positions, whose distributions are made again for the gradient and never kept.

    Args:
        own, other: logits [batch, length, vocabulary] of student and teacher; padding behind the smaller one is left out.
        ids: [batch, length], int64.
    """

    def block(a: torch.Tensor, b: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        log = a.float().log_softmax(-1)
        kl = F.kl_div(log, b.float().log_softmax(-1), reduction="sum", log_target=True)
        return torch.stack([kl, F.nll_loss(log, wanted, reduction="sum")])

    width, targets = min(own.shape[-1], other.shape[-1]), ids[:, 1:].flatten()
    logits = [x[:, :-1, :width].flatten(0, 1) for x in (own, other)]
    rows = BLOCK.get(own.device.type, 1024)
    blocks = zip(*(x.split(rows) for x in (*logits, targets)), strict=True)
    made = [checkpoint(block, *each, use_reentrant=False, preserve_rng_state=False) for each in blocks]  # fmt: skip
    return torch.stack(made).sum(0) / len(targets)


class Distill(Trainer):
    """transformers' Trainer with the original as teacher."""

    def __init__(self, teacher: Any, alpha: float, **how: Any) -> None:
        super().__init__(**how)
        self.teacher, self.alpha = teacher.to(self.args.device).eval().requires_grad_(False), alpha
        # each batch's loss is a mean: the Trainer divides by their number
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:  # fmt: skip
        """Return the loss of a batch; the student stays in evaluation mode, so that it loses no parts by chance (dropout)."""
        ids = inputs["input_ids"]
        model.eval()
        with torch.no_grad():
            other = self.teacher(input_ids=ids, use_cache=False).logits
        kl, entropy = distillation(model(input_ids=ids, use_cache=False).logits, other, ids)
        loss = self.alpha * kl + (1 - self.alpha) * entropy
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss.item()} in step {self.state.global_step}: --resume with a smaller --lr"
            )
        return (loss, {}) if return_outputs else loss


class Plan(TrainerCallback):
    """How long to train, and the factor of the learning rate: a rise over `warmup` steps, then a cosine to 0.

    The scheduler's state keeps `seconds` and is saved with each checkpoint; on several processes the main one's clock counts.
    """

    def __init__(self, steps: int | None, minutes: float | None, warmup: int) -> None:
        self.steps, self.minutes, self.warmup = steps or 1 << 30, minutes or math.inf, warmup
        self.seconds = 0.0

    def part(self, step: int) -> float:
        """Return the part of the training that is behind `step` steps, from 0 to 1."""
        return min(1.0, max(step / self.steps, self.seconds / 60 / self.minutes))

    def __call__(self, step: int) -> float:
        """Return the factor of the rate of the next step."""
        return (
            min(1.0, (step + 1) / (self.warmup + 1)) * (1 + math.cos(math.pi * self.part(step))) / 2
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock of a step."""
        self._began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Add the time of a step, and end the training, with its state saved, when it is over."""
        passed = torch.tensor(time.monotonic() - self._began, device=args.device)
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(passed, 0)
        self.seconds += float(passed)
        control.should_training_stop |= self.part(state.global_step) >= 1
        control.should_save |= control.should_training_stop


def token_ids(tokenizer: Any, sources: Sequence[str]) -> Iterator[list[int]]:
    """Yield the ids of each document, begun as the tokenizer begins texts, or else ended with EOS."""
    begins = (
        tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer("").input_ids
    )
    for source in sources:
        for text in documents(source, between=BETWEEN, training=True, what="data"):
            ids = tokenizer(text, verbose=False).input_ids
            yield ids if begins else [*ids, tokenizer.eos_token_id]


def windows(documents: Iterator[list[int]], length: int, most: int) -> list[torch.Tensor]:
    """Return windows [length] of documents one behind the other, of at most `most` tokens."""
    ids: list[int] = []
    for document in documents:
        ids += document
        if len(ids) >= most:
            break
    return list(torch.tensor(ids[: min(len(ids), most) // length * length]).view(-1, length))


@torch.no_grad()
def evaluate(model: Any, teacher: Any, held: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Return mean KL to the teacher and perplexities over windows [at most length] each."""
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for window in held:
        ids = window[None].to(model.device)
        own, other = (each(input_ids=ids, use_cache=False).logits for each in (model, teacher))
        kl, entropy = distillation(own, other, ids).tolist()
        theirs = F.cross_entropy(other[0, :-1].float(), ids[0, 1:]).item()
        sums += (len(window) - 1) * torch.tensor([kl, entropy, theirs], dtype=torch.float64)
        count += len(window) - 1
    kl, *entropies = (sums / count).tolist()
    ppl, theirs = (math.exp(min(each, 700)) for each in entropies)
    return {"perplexity": ppl, "teacher_perplexity": theirs, "kl": kl, "scored": count}


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)  # fmt: skip
    for name, text in (("student", "the converted checkpoint"), ("teacher", f"its original: a folder, a model of the hub, {', '.join(PACKAGED)}"), ("out", "a folder that does not exist")):  # fmt: skip
        parser.add_argument(f"--{name}", required=True, help=text)
    parser.add_argument("--data", required=True, nargs="+", help="text files, dataset:PATH,CONFIG,SPLIT,FIELD or bundled texts")  # fmt: skip
    parser.add_argument("--eval-text", help="text that is not trained on; else a part of the data")
    for name, kind, default, text in (
        ("steps", int, None, "updates of the weights"), ("minutes", float, None, "of training; with both, what ends first"),
        ("lr", float, 1e-4, "largest learning rate"), ("warmup", int, 20, "steps up to it"),
        ("batch", int, 8, "windows that a process takes at once"), ("accumulate", int, 1, "batches of a step"),
        ("length", int, 1024, "tokens of a window, at most"), ("alpha", float, 0.9, "weight of the distillation"),
        ("seed", int, 0, "of the order"), ("tokens", int, 50_000_000, "taken from the data, at most"),
        ("save-every", int, 200, "steps between two states"),
    ):  # fmt: skip
        parser.add_argument(
            f"--{name}", type=kind, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of the computation"
    )
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train and write the result; return the figures before and after. Raises ValueError for bad arguments."""
    lengths = [value for value in (args.steps, args.minutes) if value is not None]
    if not lengths or min(lengths) <= 0:
        raise ValueError("--steps or --minutes must be more than 0: one of them says how long to train")  # fmt: skip
    out, work = Path(args.out), Path(f"{args.out.rstrip('/')}.uptraining")
    source, teacher_name = Source.open(args.student), str(resolve_model(args.teacher))
    check_destination(out, source.folder)
    # the Trainer writes trainer_state.json last: a state without it was cut off
    states = sorted(work.glob("checkpoint-*/trainer_state.json"), key=lambda p: int(p.parent.name.split("-")[1]))  # fmt: skip
    if work.exists() and not args.resume:
        raise ValueError(f"{work} holds an unfinished run: --resume goes on with it, or delete it")
    if args.resume and not states:
        raise ValueError(f"--resume: {work} holds no state to go on from")
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    dtype = getattr(torch, args.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    teacher: Any = AutoModelForCausalLM.from_pretrained(teacher_name, dtype=dtype)
    if model.config.get_text_config().vocab_size != teacher.config.get_text_config().vocab_size:
        raise ValueError(f"--student {args.student} and --teacher {args.teacher} have different vocabularies")  # fmt: skip
    length = min(args.length, getattr(model.config.get_text_config(), "max_position_embeddings", None) or args.length)  # fmt: skip
    data = windows(token_ids(tokenizer, args.data), length, args.tokens)
    if args.eval_text:
        held = [torch.tensor(ids[:length]) for ids in token_ids(tokenizer, [args.eval_text]) if len(ids) > 1]  # fmt: skip
    else:
        kept = min(HELD, max(1, len(data) // 20))
        held, data = data[-kept:], data[:-kept]
    if not held or not data:
        raise ValueError(f"--data or --eval-text is shorter than a window of {length} tokens: take more text, or a smaller --length")  # fmt: skip
    plan = Plan(args.steps, args.minutes, args.warmup)
    how = TrainingArguments(
        str(work), max_steps=args.steps or 1 << 30, per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.accumulate,
        learning_rate=args.lr, max_grad_norm=1.0, save_steps=args.save_every, save_total_limit=2, seed=args.seed, logging_steps=10,
        bf16=args.dtype == "bfloat16", use_cpu=not torch.cuda.is_available(), report_to=[], remove_unused_columns=False, dataloader_drop_last=len(data) >= args.batch,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, (0.9, 0.95), weight_decay=0.0)
    trainer = Distill(
        teacher, args.alpha, model=model, args=how, train_dataset=[{"input_ids": ids} for ids in data],
        optimizers=(optimizer, LambdaLR(optimizer, plan)), callbacks=[plan],
    )  # fmt: skip
    main = trainer.is_world_process_zero()
    kept_figures = work / "before.json"
    if not args.resume:
        trainer.accelerator.wait_for_everyone()  # all have seen that there is no run yet
        before = evaluate(model.eval(), trainer.teacher, held)
        if main:
            work.mkdir(parents=True, exist_ok=True)
            kept_figures.write_text(json.dumps(before))
    trainer.train(resume_from_checkpoint=str(states[-1].parent) if states else None)
    step = trainer.state.global_step
    tokens = step * args.batch * args.accumulate * length * how.world_size
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    stored = [t.dtype for t in source.tensors.values() if t.dtype.is_floating_point]
    model.to(max(set(stored), key=stored.count)).float()  # what is measured is what is written
    after = {"step": step, "tokens": tokens, "seconds": round(plan.seconds, 1), **evaluate(model, trainer.teacher, held)}  # fmt: skip
    if not main:
        return []
    figures = [
        {"step": 0, "tokens": 0, "seconds": 0.0, **json.loads(kept_figures.read_text())},
        after,
    ]
    write(out, source, model.to(max(set(stored), key=stored.count)), args, figures)
    shutil.rmtree(work)
    return figures


def write(out: Path, source: Source, model: Any, args: argparse.Namespace, figures: list[dict[str, Any]]) -> None:  # fmt: skip
    """Write the trained model with the student's files, aside and renamed; config.json and the card say what was done."""
    record = {
        "teacher": Path(args.teacher).name,
        "data": [Path(n).name for n in args.data],
        **figures[-1],
    }
    with becoming_folder(out) as folder:
        model.save_pretrained(folder)
        for path in source.beside():
            place = folder / path.relative_to(source.folder)
            place.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, place)
        config = {**source.config, UPTRAINING: record}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        first, last = figures
        (folder / "README.md").write_text(
            f"{source.card().rstrip()}\n\n## Training\n\nTrained towards `{record['teacher']}` on {last['tokens']:,} tokens of "
            f"{', '.join(record['data'])}. On {last['scored']:,} held-out tokens the KL to it fell from {first['kl']:.4f} to "
            f"{last['kl']:.4f} nats, the perplexity from {first['perplexity']:,.2f} to {last['perplexity']:,.2f} "
            f"({last['teacher_perplexity']:,.2f} of the original).\n",
            "utf-8",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Train; 0 when the result is written, 2 for bad arguments and losses that are not finite."""
    args = arguments(argv)
    try:
        if args.record:
            check_writable(args.results)
        figures = train(args)
    except (ValueError, FloatingPointError, OSError) as error:
        tell_error("uptrain.py", error)
        return 2
    for row in figures:
        tell(f"step {row['step']:,}, {row['tokens']:,} tokens, {row['seconds']:.0f} s: KL {row['kl']:.4f}, perplexity {row['perplexity']:,.3f}")  # fmt: skip
    if figures and args.record:
        conversion = json.loads((Path(args.out) / "config.json").read_text()).get(CONVERSION, {})
        settings = {k: v for k, v in vars(args).items() if k not in ("record", "results", "resume", "out")}  # fmt: skip
        common = {
            "kind": "uptrain", "loop": "Trainer", "student": Path(args.student).name, "teacher": Path(args.teacher).name,
            "method": conversion.get("method"), "num_key_value_heads": conversion.get("num_key_value_heads"),
            "data": [Path(n).name for n in args.data], "held_out": args.eval_text and Path(args.eval_text).name, "settings": settings,
        }  # fmt: skip
        append_rows(args.results, [make_row(**common, **row) for row in figures])
    return 0


if __name__ == "__main__":
    sys.exit(main())
