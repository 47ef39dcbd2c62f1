"""The two models of an uptraining: the converted one, that learns, and its original, that teaches."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ...errors import ConversionError
from ..calibration_text import tokenizer_of
from ..checkpoint import Checkpoint
from ..structure import load_config

LENGTH = 1024  # of a window, where the model would take more


@dataclass(frozen=True)
class Pair:
    """Student and teacher as checkpoints, before any weight is read.

    Attributes:
        student, teacher: opened.
        tokenizer: the student's.
        longest: tokens that both models take.
    """

    student: Checkpoint
    teacher: Checkpoint
    tokenizer: Any
    longest: int

    @classmethod
    def open(cls, student: str | Path, teacher: str | Path) -> "Pair":
        """Open both. Raises ConversionError unless they have one vocabulary and a tokenizer."""
        own, other = Checkpoint.open(student), Checkpoint.open(teacher)
        configs = [load_config(each.folder).get_text_config(decoder=True) for each in (own, other)]
        sizes = [config.vocab_size for config in configs]
        tokenizers = [tokenizer_of(own), tokenizer_of(other)]
        tables = [tokenizer.get_vocab() for tokenizer in tokenizers]
        if sizes[0] != sizes[1] or tables[0] != tables[1]:
            what = f"{sizes[0]:,} and {sizes[1]:,} tokens" if sizes[0] != sizes[1] else "the tokens"
            raise ConversionError(
                f"student {str(student)!r} and teacher {str(teacher)!r} have different vocabularies ({what}): the "
                "teacher must be the model that the student was made from"
            )
        longest = min(getattr(config, "max_position_embeddings", None) or LENGTH for config in configs)  # fmt: skip
        return cls(own, other, tokenizers[0], int(longest))

    def window(self, length: int | None) -> int:
        """Return the tokens of a window. Raises ConversionError for more than the models take."""
        if length is None:
            return min(self.longest, LENGTH)
        if length > self.longest:
            raise ConversionError(
                f"length must be at most {self.longest}, which the models take, got {length}"
            )
        return length


def load_student(pair: Pair, train: str) -> Any:
    """Return the student in fp32, ready to train: `train` is "all" or "attention".

    It stays in evaluation mode: a student that imitates a teacher is not to lose parts of itself by chance (dropout, noise in
    routers), and a run is to give the same losses again.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(pair.student.folder, dtype=torch.float32)
    model.config.use_cache = False
    model.eval()
    if train == "attention":
        kept = attention_parameters(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in kept)
    return model


def load_teacher(pair: Pair, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the teacher, that is only read."""
    model: Any = AutoModelForCausalLM.from_pretrained(pair.teacher.folder, dtype=dtype)
    return model.to(device).eval().requires_grad_(False)


def attention_parameters(model: Any) -> set[str]:
    """Return the names of all parameters within modules whose class is called .. Attention ..

    Raises: ConversionError where there is none.
    """
    kept = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if "Attention" in type(module).__name__
        for name, _ in module.named_parameters()
    }
    if not kept:
        raise ConversionError(
            f"train='attention': no module of {type(model).__name__} is called attention; train 'all'"
        )
    return kept


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of most of a checkpoint's weights."""
    counts: dict[torch.dtype, int] = {}
    for tensor in checkpoint.tensors.values():
        if tensor.dtype.is_floating_point:
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.nbytes
    return max(counts, key=lambda dtype: counts[dtype]) if counts else torch.float32


def digest(checkpoint: Checkpoint) -> str:
    """Return what tells the weights of a checkpoint from others: a digest of its config and its files."""
    found = hashlib.sha256((checkpoint.folder / "config.json").read_bytes())
    for file in sorted(checkpoint.files):
        with (checkpoint.folder / file).open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()[:16]
