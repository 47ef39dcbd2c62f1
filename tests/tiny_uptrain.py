"""Tiny models, texts and runs of uptraining."""

from pathlib import Path

import torch
from tiny_models import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kv_hf.gqa.convert import convert_to_gqa
from kv_hf.gqa.uptrain import UptrainSettings, uptrain

WORDS = [f"w{i}" for i in range(92)]
SHORT = UptrainSettings(steps=6, lr=3e-3, warmup=0, batch=2, length=16, evaluations=1, save_every=2)


def make_tokenizer(words=WORDS):
    special = ["<unk>", "<s>", "</s>"]
    vocab = {word: i for i, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def save(folder, tokenizer=None, **options):
    options = {"num_key_value_heads": 4, "max_position_embeddings": 64, **options}
    make_model("llama", **options).save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder


def text(count, seed=0):
    picks = torch.randint(len(WORDS), (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(WORDS[i] for i in picks)


def run(folders, out, settings=SHORT, **options):
    options = {"data": [[text(400), text(300, 1)]], "held": [text(40, 2), text(20, 3)], **options}
    return uptrain(*folders, out, settings=settings, **options)


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


def bytes_of(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def make_pair(folder):
    """Return (student, teacher): a random model with 4 kv heads, and its conversion to 1."""
    teacher = save(folder / "teacher")
    convert_to_gqa(teacher, folder / "student", 1)
    return folder / "student", teacher
