"""Tokenizers without a download: of made-up words, and of byte pairs and words, trained on the bundled texts in a moment."""

import random
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kv_hf.texts import load_text

SPECIAL = ["<pad>", "<s>", "</s>", "<|user|>", "<|bot|>"]
TEMPLATE = (
    "<s>{% for message in messages %}<|user|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
# a template that goes on as the model did: an answer stands where the generation prompt asked for it
TURNS = (
    "<s>{% for message in messages %}{{ '<|bot|>' if message['role'] == 'assistant' else '<|user|>' }}{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)


@cache
def _trained(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(load_text("lincoln_1863").splitlines(), trainer)
    return tokenizer


def make_tokenizer(size: int = 1000, chat: bool = False) -> Any:
    """Return a tokenizer of `size` tokens, with a chat template if asked for."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_trained(size), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE if chat else None
    return tokenizer


@cache
def _trained_words(size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(
        vocab_size=size, special_tokens=[*SPECIAL, "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(load_text("novel").splitlines(), trainer)
    return tokenizer


def make_word_tokenizer(size: int = 1000) -> Any:
    """Return a tokenizer of `size` words with a chat template: what it decodes it encodes to the same ids again.

    The tokens of a random model are no text, and byte pairs of them would be other ones in the next turn of a chat.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_trained_words(size),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TURNS
    return tokenizer


WORDS = [f"w{number}" for number in range(4, 97)]
CHAT_TEMPLATE = (
    "{% for message in messages %}w5 {{ message['content'] }} w6 {% endfor %}"
    "{% if add_generation_prompt %}w7 {% endif %}"
)


@cache
def tiny_tokenizer() -> Any:
    """Return a tokenizer of 97 words that are separated by spaces."""
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
