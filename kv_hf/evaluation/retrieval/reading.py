"""Read one prompt through a cache: the context is prefilled, question and answer are decoded from the store."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..cache_kinds import CacheKind, held_bytes
from ..teacher_forcing import next_chunk
from .prompt import Prompt

ROOM = 16  # columns of a preallocated cache beyond prompt and answer
Call = tuple[torch.Tensor, torch.Tensor, int, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Reading:
    """What one sample gave.

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


class Recorder(DynamicCache):
    """An exact cache that writes down what a prefill hands to it, to hand it to other caches."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.calls: list[Call] = []

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kw: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append as DynamicCache does, and remember the call."""
        self.calls.append((key_states, value_states, layer_idx, args, kw))
        return super().update(key_states, value_states, layer_idx, *args, **kw)


class Prefill:
    """The prefill of one context, computed once for all caches.

    A prefill on an empty cache attends to its own exact keys and values whatever the cache, so that all caches are
    given the same ones; each stores them in its own way. Models with layers of another kind than attention
    (linear attention, convolutions) keep states that are no keys and values: there each cache has its own prefill.
    """

    def __init__(self, model: PreTrainedModel, context: list[int]) -> None:
        self.model, self.context = model, context
        self.calls: list[Call] | None = None
        recorder = Recorder(model.config)
        if all(
            type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in recorder.layers
        ):
            self._forward(recorder)
            self.calls = recorder.calls

    @torch.no_grad()
    def fill(self, cache: Any, dtype: torch.dtype | None = None) -> None:
        """Let an empty cache hold the context, its numbers rounded to `dtype` if given (its bytes are then another's)."""
        if self.calls is None:
            self._forward(cache)
            return
        for keys, values, layer, args, kw in self.calls:
            cache.update(
                keys.to(dtype or keys.dtype), values.to(dtype or values.dtype), layer, *args, **kw
            )

    @torch.no_grad()
    def _forward(self, cache: Any) -> None:
        ids = torch.tensor([self.context], device=self.model.device)
        # logits of a long context would take more memory than all else
        last = {"logits_to_keep": 1} if "logits_to_keep" in _parameters(self.model) else {}
        self.model(ids, past_key_values=cache, use_cache=True, **last)

    def bytes_per_token(self, kind: CacheKind) -> tuple[float, str]:
        """Return (bytes per token, dtype) that `kind` holds of this context, counted as a bfloat16 model's.

        Where the prefill is not shared, the bytes are those of the model's own dtype.
        """
        dtype = torch.bfloat16 if self.calls is not None else self.model.dtype
        cache = kind.make(self.model.config, len(self.context))
        self.fill(cache, dtype)
        return held_bytes(cache) / len(self.context), str(dtype).removeprefix("torch.")


def _parameters(model: PreTrainedModel) -> Any:
    return inspect.signature(model.forward).parameters


@torch.no_grad()
def decoded_logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    cache: Any,
    position: int,
    chunk: Callable[[Any, int], int] = next_chunk,
) -> Iterator[torch.Tensor]:
    """Yield fp32 logits [chunk, vocab] of ids[position:], read through a cache that holds ids[:position].

    Chunks are those that change no result (teacher_forcing.next_chunk): each token attends to what a decode step
    at its position would attend to.
    """
    while position < len(ids):
        end = min(len(ids), position + chunk(cache, position))
        yield (
            model(ids[None, position:end], past_key_values=cache, use_cache=True).logits[0].float()
        )
        position = end


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
        for logits in decoded_logits(model, asked[:-1], cache, len(prompt.context), chunk):
            check_finite(logits, kind.name)
        return cache

    cache = opened()
    whole = torch.cat([asked, answer])[:-1]
    logits = torch.cat(list(decoded_logits(model, whole, cache, len(asked) - 1, chunk)))
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
    """Raise ValueError when logits hold nan or infinity."""
    if not torch.isfinite(logits).all():
        raise ValueError(f"{name} gives logits that are not finite")


def found_part(generated: str, expected: tuple[str, ...]) -> float:
    """Return the part of the expected strings that stand in a text as whole words; case does not matter."""
    hits = [
        re.search(rf"(?<!\w){re.escape(each)}(?!\w)", generated, re.IGNORECASE) for each in expected
    ]
    return sum(hit is not None for hit in hits) / len(expected)
