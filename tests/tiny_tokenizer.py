"""A byte-pair tokenizer trained on the bundled text in a moment: no download."""

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
