"""Train a converted checkpoint towards its original: distillation from the original's logits plus cross entropy.

    python scripts/uptrain.py --student model-2 --teacher model --out trained --data a.txt --eval_text b.txt --max_steps 2000
    python scripts/uptrain.py ... --resume                              behind Ctrl-C, a kill or a crash
    accelerate launch --num_processes 2 scripts/uptrain.py ...          a process per GPU; torchrun on a CPU too

The loop is transformers' Trainer; its states lie in OUT.uptraining until OUT is written. The result is an ordinary checkpoint.
All options of TrainingArguments can be given. --teacher may name a packaged model (measure/models/packaged.py).
"""

import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measure.models.packaged import PACKAGED, resolve_model
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from kv_hf.files import becoming_folder
from kv_hf.gqa.convert import check_destination
from kv_hf.gqa.source import Source
from kv_hf.printable import tell, tell_error
from kv_hf.records import UPTRAINING
from kv_hf.texts import documents

ROWS = 64  # positions whose distributions are made at a time
# where this training differs from TrainingArguments' own defaults; what --help shows
DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 20,
    "adam_beta2": 0.95,
    "save_steps": 200,
    "save_total_limit": 2,
    "logging_steps": 10,
    "use_cpu": not torch.cuda.is_available(),
}


@dataclass
class Options:
    """The options that TrainingArguments does not have."""

    student: str = field(metadata={"help": "the converted checkpoint"})
    teacher: str = field(
        metadata={"help": f"its original: a folder, a model of the hub, {', '.join(PACKAGED)}"}
    )
    out: str = field(metadata={"help": "a folder that does not exist"})
    data: list[str] = field(
        metadata={"help": "text files, dataset:PATH,CONFIG,SPLIT,FIELD or bundled texts"}
    )
    eval_text: str = field(metadata={"help": "text to measure on, which is not trained on"})
    length: int = field(metadata={"help": "tokens of a window, at most"}, default=1024)
    tokens: int = field(metadata={"help": "taken from the data, at most"}, default=50_000_000)
    alpha: float = field(metadata={"help": "weight of the distillation"}, default=0.9)
    resume: bool = field(metadata={"help": "go on with an interrupted run"}, default=False)


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
    blocks = zip(*(x.split(ROWS) for x in (*logits, targets)), strict=True)
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    made = [checkpoint(block, *each, **how) for each in blocks]
    return torch.stack(made).sum(0) / len(targets)


class Distill(Trainer):
    """transformers' Trainer with the original as teacher."""

    def __init__(self, teacher: Any, alpha: float, **how: Any) -> None:
        super().__init__(**how)
        self.teacher, self.alpha = teacher.to(self.args.device).eval().requires_grad_(False), alpha
        # each batch's loss is a mean: the Trainer divides by their number
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch; the student stays in evaluation mode, so that it loses no parts by chance (dropout)."""
        ids = inputs["input_ids"]
        model.eval()
        with torch.no_grad():
            other = self.teacher(input_ids=ids, use_cache=False).logits
        kl, entropy = distillation(model(input_ids=ids, use_cache=False).logits, other, ids)
        loss = self.alpha * kl + (1 - self.alpha) * entropy
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss.item()} in step {self.state.global_step}: --resume with a smaller --learning_rate"
            )
        return (loss, {}) if return_outputs else loss


def token_ids(tokenizer: Any, sources: Sequence[str]) -> Iterator[list[int]]:
    """Yield the ids of each document, begun as the tokenizer begins texts, or else ended with EOS."""
    begins = (
        tokenizer.bos_token_id is not None and tokenizer.bos_token_id in tokenizer("").input_ids
    )
    for source in sources:
        for text in documents(source, between="<|endoftext|>", training=True, what="data"):
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


def states_of(work: Path, resume: bool) -> list[Path]:
    """Return the states of an interrupted run, in order. Raises ValueError where --resume is missing, or has nothing."""
    # the Trainer writes trainer_state.json last: a state without it was cut off
    found = [path.parent for path in work.glob("checkpoint-*/trainer_state.json")]
    if work.exists() and not resume:
        raise ValueError(f"{work} holds an unfinished run: --resume goes on with it, or delete it")
    if resume and not found:
        raise ValueError(f"--resume: {work} holds no state to go on from")
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def train(args: Options, how: TrainingArguments) -> list[dict[str, Any]]:
    """Train and write the result; return the figures before and after. Raises ValueError for bad arguments."""
    if how.max_steps <= 0:
        raise ValueError(f"--max_steps must be more than 0, got {how.max_steps}")
    out, work = Path(args.out), Path(f"{args.out.rstrip('/')}.uptraining")
    source, teacher_name = Source.open(args.student), resolve_model(args.teacher)
    check_destination(out, source.folder)
    states = states_of(work, args.resume)
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    load = AutoModelForCausalLM.from_pretrained
    model: Any = load(source.folder, dtype=torch.float32)
    teacher: Any = load(teacher_name, dtype=torch.bfloat16 if how.bf16 else torch.float32)
    text, other = (each.config.get_text_config() for each in (model, teacher))
    if text.vocab_size != other.vocab_size:
        raise ValueError(
            f"--student {args.student} and --teacher {args.teacher} have different vocabularies"
        )
    length = min(args.length, getattr(text, "max_position_embeddings", None) or args.length)
    data = windows(token_ids(tokenizer, args.data), length, args.tokens)
    held = [torch.tensor(ids[:length]) for ids in token_ids(tokenizer, [args.eval_text])]
    if not held or not data:
        raise ValueError(
            f"--data is shorter than a window of {length} tokens: take more text, or a smaller --length"
        )
    how.output_dir = str(work)
    how.dataloader_drop_last = len(data) >= how.per_device_train_batch_size
    rows = [{"input_ids": ids} for ids in data]
    trainer = Distill(teacher, args.alpha, model=model, args=how, train_dataset=rows)
    main = trainer.is_world_process_zero()
    first = work / "before.json"
    if not args.resume:
        trainer.accelerator.wait_for_everyone()  # all have seen that there is no run yet
        before = evaluate(model.eval(), trainer.teacher, held)
        if main:
            work.mkdir(parents=True, exist_ok=True)
            first.write_text(json.dumps({"step": 0, "tokens": 0, "seconds": 0.0, **before}))
    ended = trainer.train(resume_from_checkpoint=str(states[-1]) if states else None)
    step = trainer.state.global_step
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    stored = [t.dtype for t in source.tensors.values() if t.dtype.is_floating_point]
    dtype = max(set(stored), key=stored.count)
    model.to(dtype).float()  # what is measured is what is written
    after = {
        "step": step,
        "tokens": step
        * how.train_batch_size
        * how.gradient_accumulation_steps
        * length
        * how.world_size,
        "seconds": round(ended.metrics["train_runtime"], 1),
        **evaluate(model, trainer.teacher, held),
    }
    if not main:
        return []
    figures = [json.loads(first.read_text()), after]
    write(out, source, model.to(dtype), args, figures)
    shutil.rmtree(work)
    return figures


def write(
    out: Path, source: Source, model: Any, args: Options, figures: list[dict[str, Any]]
) -> None:
    """Write the trained model with the student's files, aside and renamed; config.json and the card say what was done."""
    record = {
        "teacher": Path(args.teacher).name,
        "data": [Path(n).name for n in args.data],
        "before": figures[0],
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
    parser = HfArgumentParser((Options, TrainingArguments), description=__doc__)  # type: ignore[arg-type]
    parser.set_defaults(**DEFAULTS)
    args, how = parser.parse_args_into_dataclasses(None if argv is None else list(argv))
    try:
        figures = train(args, how)
    except (ValueError, FloatingPointError, OSError) as error:
        tell_error("uptrain.py", error)
        return 2
    for row in figures:
        tell(
            f"step {row['step']:,}, {row['tokens']:,} tokens, {row['seconds']:.0f} s: KL {row['kl']:.4f}, "
            f"perplexity {row['perplexity']:,.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
