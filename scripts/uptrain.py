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
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from measure.models.packaged import resolve_model
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments

from kv_hf.files import becoming_folder
from kv_hf.gqa.convert import check_destination, copy_files
from kv_hf.gqa.source import Source
from kv_hf.model_fields import UPTRAINING
from kv_hf.printable import tell_error
from kv_hf.texts import documents

ROWS = 64  # positions whose distributions are made at a time


def distillation(own: torch.Tensor, other: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return [KL(teacher || student), cross entropy], means over all positions but the last, in fp32.

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
    # distributions are made again for the gradient, and never kept
    made = [checkpoint(block, *each, use_reentrant=False) for each in blocks]
    return torch.stack(made).sum(0) / len(targets)


class Distill(Trainer):
    """transformers' Trainer with the original as teacher, and texts `held` [at most length] to measure on."""

    def __init__(self, teacher: Any, alpha: float, held: list[torch.Tensor], **how: Any) -> None:
        super().__init__(**how)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.alpha, self.held = alpha, held
        self.model_accepts_loss_kwargs = False  # the Trainer divides: each loss is a mean

    def losses(self, model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [KL, cross entropy] and the teacher's logits; the student loses no parts by chance (dropout)."""
        theirs = self.teacher(input_ids=ids, use_cache=False).logits
        own = model.eval()(input_ids=ids, use_cache=False).logits
        return distillation(own, theirs, ids), theirs

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Return the loss of a batch. Raises FloatingPointError for one that is not finite."""
        found = self.losses(model, inputs["input_ids"])[0]
        loss = self.alpha * found[0] + (1 - self.alpha) * found[1]
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}: --resume with a smaller --learning_rate")
        return loss

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Log and return the mean KL to the teacher, and perplexities."""
        sums, count = torch.zeros(3, dtype=torch.float64), 0
        for window in self.held:
            ids = window[None].to(self.args.device)
            own, logits = self.losses(self.model, ids)
            entropy = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
            sums += (len(window) - 1) * torch.stack([*own, entropy]).double().cpu()
            count += len(window) - 1
        kl, *entropies = (sums / count).tolist()
        ppl, theirs = (math.exp(min(each, 700)) for each in entropies)
        found = {"kl": kl, "perplexity": ppl, "teacher_perplexity": theirs, "scored": count}
        self.log(dict(found))
        return found


def token_ids(tokenizer: Any, sources: Sequence[str]) -> Iterator[list[int]]:
    """Yield the ids of each document, begun as the tokenizer begins texts, or else ended with EOS."""
    begin = tokenizer.bos_token_id
    ends = [] if begin in tokenizer("").input_ids else [tokenizer.eos_token_id]
    for source in sources:
        for text in documents(source, between="<|endoftext|>", training=True, what="data"):
            yield tokenizer(text, verbose=False).input_ids + ends


def states_of(work: Path, resume: bool) -> list[Path]:
    """Return the states of an interrupted run, in order. Raises ValueError where --resume is missing, or has nothing."""
    # the Trainer writes trainer_state.json last: a state without it was cut off
    found = [path.parent for path in work.glob("checkpoint-*/trainer_state.json")]
    if work.exists() and not resume:
        raise ValueError(f"{work} holds an unfinished run: --resume goes on with it, or delete it")
    if resume and not found:
        raise ValueError(f"--resume: {work} holds no state to go on from")
    return sorted(found, key=lambda path: int(path.name.split("-")[1]))


def train(how: TrainingArguments, args: Any) -> None:
    """Train and write the result. Raises ValueError or OSError for bad arguments before a model is loaded, if that can be seen."""
    work = args.out.with_name(f"{args.out.name}.uptraining")
    source, original = Source.open(args.student), resolve_model(args.teacher)
    check_destination(args.out, source.folder)
    states = states_of(work, args.resume)
    how.distributed_state.wait_for_everyone()  # all have seen which states there are
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.folder)
    model: Any = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    dtype = torch.bfloat16 if how.bf16 else torch.float32
    teacher: Any = AutoModelForCausalLM.from_pretrained(original, dtype=dtype)
    text = model.config.get_text_config()
    if text.vocab_size != teacher.config.get_text_config().vocab_size:
        raise ValueError(f"{args.student} and {args.teacher} have different vocabularies")
    length = min(args.length, getattr(text, "max_position_embeddings", None) or args.length)
    ids = list(islice(chain.from_iterable(token_ids(tokenizer, args.data)), args.tokens))
    data = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    if not len(data):
        raise ValueError(f"--data is shorter than a window of {length} tokens: take more text")
    held = [torch.tensor(ids[:length]) for ids in token_ids(tokenizer, [args.eval_text])]
    how.output_dir = str(work)
    how.dataloader_drop_last = len(data) >= how.per_device_train_batch_size
    rows = [{"input_ids": window} for window in data]
    trainer = Distill(teacher, args.alpha, held, model=model, args=how, train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(states[-1]) if states else None)
    stored = [t.dtype for t in source.tensors.values() if t.dtype.is_floating_point]
    dtype = max(set(stored), key=stored.count)
    model.to(dtype).float()  # what is measured is what is written
    trainer.evaluate()
    figures = [row for row in trainer.state.log_history if "kl" in row]
    batch = how.train_batch_size * how.gradient_accumulation_steps * how.world_size
    for row in figures:
        row["tokens"] = row["step"] * batch * length
    if trainer.is_world_process_zero():
        write(args, source, model.to(dtype), figures)
        shutil.rmtree(work)


def write(args: Any, source: Source, model: Any, figures: list[dict[str, Any]]) -> None:
    """Write the trained model with the student's files, aside and renamed; config.json and the card say what was done."""
    first, last = figures[0], figures[-1]
    teacher, data = Path(args.teacher).name, [Path(name).name for name in args.data]
    card = (
        f"{source.card().rstrip()}\n\n## Training\n\nTrained towards `{teacher}` on {last['tokens']:,} tokens of "
        f"{', '.join(data)}. On {last['scored']:,} held-out tokens the KL to it fell from {first['kl']:.4f} to "
        f"{last['kl']:.4f} nats, the perplexity from {first['perplexity']:,.2f} to {last['perplexity']:,.2f} "
        f"({last['teacher_perplexity']:,.2f} of the original).\n"
    )
    record = {UPTRAINING: {"teacher": teacher, "data": data, "before": first, **last}}
    with becoming_folder(args.out) as folder:
        model.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)  # the student's is copied
        copy_files(source, source.others(), folder)
        (folder / "config.json").write_text(json.dumps(source.config | record, indent=2))
        (folder / "README.md").write_text(card, "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Train; 0 when the result is written, 2 for bad arguments and losses that are not finite."""
    parser = HfArgumentParser(TrainingArguments, description=__doc__)  # type: ignore[arg-type]
    add = parser.add_argument
    add("--student", required=True, help="the converted checkpoint")
    add("--teacher", required=True, help="its original: a folder, or a name")
    add("--out", required=True, type=Path, help="a folder that does not exist")
    add("--data", required=True, nargs="+", help="files, dataset:PATH,.. or bundled texts")
    add("--eval_text", required=True, help="text to measure on, which is not trained on")
    add("--length", type=int, default=1024, help="tokens of a window, at most")
    add("--tokens", type=int, default=50_000_000, help="taken from the data, at most")
    add("--alpha", type=float, default=0.9, help="weight of the distillation")
    add("--resume", action="store_true", help="go on with an interrupted run")
    parser.set_defaults(learning_rate=1e-4, lr_scheduler_type="cosine", warmup_steps=20)
    parser.set_defaults(adam_beta2=0.95, save_steps=200, save_total_limit=2, logging_steps=10)
    parser.set_defaults(use_cpu=not torch.cuda.is_available(), eval_on_start=True)
    try:
        train(*parser.parse_args_into_dataclasses(argv))
    except (ValueError, FloatingPointError, OSError) as error:
        tell_error("uptrain.py", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
