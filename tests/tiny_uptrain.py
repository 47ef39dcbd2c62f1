"""Tiny models and texts of an uptraining: a teacher, and its conversion to one kv head."""

from pathlib import Path

import torch
from tiny_models import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kv_hf

WORDS = [f"w{i}" for i in range(92)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of WORDS."""
    vocab = {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def text(count: int, seed: int = 0) -> str:
    """Return so many random words."""
    picks = torch.randint(len(WORDS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in picks)


def make_pair(folder: Path) -> None:
    """Write `teacher`, a random model with 4 kv heads, `student`, its conversion to 1, and texts to train and to evaluate on."""
    make_model("llama", num_key_value_heads=4, max_position_embeddings=64).save_pretrained(folder / "teacher")  # fmt: skip
    make_tokenizer().save_pretrained(folder / "teacher")
    kv_hf.convert_to_gqa(folder / "teacher", folder / "student", 1)
    (folder / "data.txt").write_text(f"{text(700)}\n<|endoftext|>\n{text(300, 1)}")
    (folder / "held.txt").write_text(f"{text(40, 2)}\n<|endoftext|>\n{text(20, 3)}")
