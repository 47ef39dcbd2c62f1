"""Read one prompt through a cache: the context is prefilled, question and answer are decoded from the store."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..cache_kinds import CacheKind, held_bytes
from ..prefill import Prefill
from ..teacher_forcing import decoded_logits, next_chunk
from .prompt import Prompt

ROOM = 16  # columns of a preallocated cache beyond prompt and answer


@dataclass(frozen=True)
class Reading:
    """The result of one sample.

    Attributes:
        score: part of the expected strings in the generated answer.
        nll: mean of -log p of the expected answer's tokens, nats.
        top1: part of these tokens that were the most likely ones.
        generated: the answer.
    """

    score: float
    nll: float
    top1: float
    generated: str


def bytes_per_token(prefill: Prefill, kind: CacheKind) -> tuple[float, str]:
    """Return (bytes per token, dtype) that `kind` holds of this context, counted as a bfloat16 model's.

    Where the prefill is not shared, the bytes are those of the model's own dtype.
    """
    dtype = torch.bfloat16 if prefill.calls is not None else prefill.model.dtype
    tokens = prefill.ids.shape[1]
    cache = kind.make(prefill.model.config, tokens)
    prefill.fill(cache, dtype)
    return held_bytes(cache) / tokens, str(dtype).removeprefix("torch.")


def read(
    model: PreTrainedModel,
    tokenizer: Any,
    kind: CacheKind,
    prompt: Prompt,
    prefill: Prefill,
    chunk: Callable[[Any, int], int] = next_chunk,
) -> Reading:
    """Ask one prompt through one cache: score the expected answer, and generate one.

    Raises: ValueError naming the cache when logits are not finite.
    """
    asked = torch.tensor(prompt.context + prompt.question, device=model.device)
    answer = torch.tensor(prompt.answer, device=model.device)

    def opened() -> Any:
        """Return a cache that has read all but the question's last token, whose logits belong to the answer."""
        cache = kind.make(model.config, prompt.tokens + ROOM)
        prefill.fill(cache)
        for _, logits in decoded_logits(model, asked[:-1], cache, len(prompt.context), chunk):
            check_finite(logits, kind.name)
        return cache

    cache = opened()
    whole = torch.cat([asked, answer])[:-1]
    parts = decoded_logits(model, whole, cache, len(asked) - 1, chunk)
    logits = torch.cat([part for _, part in parts])
    check_finite(logits, kind.name)
    del cache  # not every cache can be copied (quanto's tensors cannot): a second one is filled for the free answer
    likelihood = torch.log_softmax(logits.double(), -1).gather(-1, answer[:, None])[:, 0]
    generated = _generate(model, tokenizer, opened(), asked, prompt.new_tokens)
    return Reading(
        score=found_part(generated, prompt.expected),
        nll=-likelihood.mean().item(),
        top1=(logits.argmax(-1) == answer).double().mean().item(),
        generated=generated,
    )


def _generate(
    model: PreTrainedModel, tokenizer: Any, cache: Any, asked: torch.Tensor, new_tokens: int
) -> str:
    # a checkpoint's own sampling and its penalty on repetition would work against copying an answer from the text
    generate: Any = model.generate  # its declared type hides that it is a method
    out = generate(
        asked[None],
        attention_mask=torch.ones_like(asked[None]),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        pad_token_id=model.generation_config.pad_token_id or 0,
        disable_compile=True,
    )
    return str(tokenizer.decode(out[0, len(asked) :], skip_special_tokens=True))


def check_finite(logits: torch.Tensor, name: str) -> None:
    """Raise ValueError when logits [any shape] of the cache `name` hold nan or infinity."""
    if not torch.isfinite(logits).all():
        raise ValueError(f"{name} gives logits that are not finite")


def found_part(generated: str, expected: tuple[str, ...]) -> float:
    """Return the part of the expected strings that stand in a text as whole words; case does not matter."""
    hits = [
        re.search(rf"(?<!\w){re.escape(each)}(?!\w)", generated, re.IGNORECASE) for each in expected
    ]
    return sum(hit is not None for hit in hits) / len(expected)
