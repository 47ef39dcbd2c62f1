"""A tokenizer of whole words, built without a download."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(size: int = 97) -> Any:
    """Return a tokenizer that knows <pad>, <bos>, <eos> (0 to 2) and the words w0, w1 and so on."""
    words = ["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(size - 3))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
