"""A word-level tokenizer and made-up task files for the tiny models: lm-eval without a network."""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import yaml

WORDS = [f"w{number}" for number in range(4, 97)]
CHAT_TEMPLATE = (
    "{% for message in messages %}w5 {{ message['content'] }} w6 {% endfor %}"
    "{% if add_generation_prompt %}w7 {% endif %}"
)


@cache
def tiny_tokenizer() -> Any:
    """Return a tokenizer of 97 words that are separated by spaces."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{w: i for i, w in enumerate(WORDS, 4)}}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )


def sentence(length: int, seed: int) -> str:
    """Return `length` random words."""
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(length))


TASKS: dict[str, dict[str, Any]] = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_word": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": ["w4", "w5", "w6"],
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    },
    "tiny_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "tiny_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["w9"], "do_sample": False, "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder: Path, docs: int = 6) -> Path:
    """Write data and task files into `folder`; return it."""
    rows = [
        {
            "question": sentence(30 + 13 * number, number),
            "choices": [sentence(length, 100 * number + length) for length in (3, 9, 25)],
            "label": number % 3,
            "text": sentence(70 + 20 * number, 50 + number),
        }
        for number in range(docs)
    ]
    data = folder / "docs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        config = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "num_fewshot": 0,
            "metadata": {"version": 1.0},
            **task,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return folder
