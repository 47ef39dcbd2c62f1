"""Long contexts: what is hidden in a text and found again, read through the store that a cache keeps of it.

After the needle test (G. Kamradt, LLMTest_NeedleInAHaystack) and RULER (arXiv 2404.06654) in words of our own; prompts are made here,
from a seed. RULER's other tasks are lm-eval's (`kv-hf lm-eval`). The context is prefilled; question and answer are decoded.
"""

import bisect
import itertools
import math
import random
import re
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..cache.model_shape import CACHE
from ..checks import check_choice, check_int
from ..texts import load_text, longest_context, text_names
from .accuracy import Prefill, decoded, measure_held
from .caches import CacheKind, cache_kind, check_runs, layer_shapes
from .models import name_of
from .rows import Row

PROTOCOL = "context prefilled, question and answer decoded from the store"
# task -> things: "single" hides the code of one, "multi_key" those of others beside it, "copy" a list of words
TASKS = {"single": 1, "multi_key": 12, "copy": 6}
SECRET = "The secret words are"  # how copy introduces its list
SPARE = 16  # tokens that a generated answer may be longer than the expected one
ROOM = 16  # columns of a preallocated cache beyond prompt and answer
NORMAL_95 = 1.959964  # standard deviations on either side of 95 % of a normal distribution
# a word, or up to three digits of one: "$901,125,674.86" would be twenty tokens at once
PIECE = re.compile(r"\s*(?:[^\s\d]+|\d{1,3}[^\s\d]*)")
# plain things, one word each; none is part of another
NOUNS = (files(__package__) / "data" / "nouns.txt").read_text("utf-8").split()


def wilson(found: int, asked: int) -> tuple[float, float]:
    """Return the 95 % Wilson interval of the share found / asked, which has a width where all or none were found.

    Source: E. B. Wilson, 1927, "Probable inference, the law of succession, and statistical inference".
    """
    share, z = found / asked, NORMAL_95
    wider = 1 + z * z / asked
    middle = (share + z * z / (2 * asked)) / wider
    half = z / wider * math.sqrt(share * (1 - share) / asked + (z / asked / 2) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


class Haystack(NamedTuple):
    """A text in sentences; it begins anew where it ends.

    Attributes:
        name: what the user called it.
        sentences: at least one, each in the pieces that make it up, of which it has at least one.
    """

    name: str
    sentences: list[list[str]]

    @classmethod
    def of(cls, name: str, text: str) -> "Haystack":
        """Cut a text into sentences, and each into pieces."""
        return cls(name, [PIECE.findall(one) for one in re.split(r"(?<=[.!?])\s+", text)])

    def take(self, pieces: int, start: int = 0) -> list[str]:
        """Return sentences from `start` on that hold exactly `pieces` pieces; the last may be cut behind a piece."""
        taken: list[str] = []
        while pieces > 0:
            parts = self.sentences[(start + len(taken)) % len(self.sentences)]
            sentence = "".join(parts[:pieces])
            taken.append(sentence if len(parts) <= pieces else sentence.rstrip(" .,;:!?-$") + ".")
            pieces -= len(parts)
        return taken


def load_haystack(source: str | Path = "lincoln") -> Haystack:
    """Return a text, or the texts of a set one behind the other, as `texts.text_names` and `texts.load_text` take them."""
    text = " ".join(map(load_text, text_names(source)))
    return Haystack.of(str(source), " ".join(text.split()))


def hide(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> str:
    """Return the text with each needle at the sentence border that is nearest to its depth.

    Args:
        needles: (depth, sentence); depth 0 is in front of the first sentence, 1 behind the last, measured in words.
            Needles that share a border stand in the order given.
    """
    behind = [0]
    for sentence in sentences:
        behind.append(behind[-1] + len(sentence.split()))
    parts = [[sentence] for sentence in ["", *sentences]]
    for depth, needle in needles:
        distances = [abs(words - depth * behind[-1]) for words in behind]
        parts[distances.index(min(distances))].append(needle)
    return " ".join(part for border in parts for part in border if part)


def _drawn(count: int, draw: Callable[[], str], avoid: str) -> list[str]:
    """Return `count` different strings of `draw`, none of them in `avoid`.

    Raises: ValueError when a thousand draws did not give them.
    """
    found: list[str] = []
    for _ in range(1000):
        if len(found) == count:
            return found
        word = draw()
        if word not in found and word not in avoid:
            found.append(word)
    raise ValueError("haystack holds nearly every name that could be hidden in it")


def frame_of(tokenizer: Any) -> tuple[str, str]:
    """Return the text before and behind the user's words: the tokenizer's chat template, special tokens included, or a bare line.

    Raises: ValueError when the template hides the message.
    """
    if not getattr(tokenizer, "chat_template", None):
        return "", "\n"
    said = [{"role": "user", "content": "kv_hf-content"}]
    # enable_thinking is read by templates of models that would think aloud first
    how = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    head, found, tail = tokenizer.apply_chat_template(said, **how).partition("kv_hf-content")
    if not found:
        raise ValueError("tokenizer has a chat template that leaves the message out; take another")
    return head, tail


class Prompt(NamedTuple):
    """Token ids of one sample.

    Attributes:
        context: everything in front of the question; prefilled.
        question: question, template and the first words of the answer; read through the cache.
        answer: what is expected behind them.
        text: the text of context and question.
        expected: what a generated answer must hold.
    """

    context: list[int]
    question: list[int]
    answer: list[int]
    text: str
    expected: str

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and the room for the answer."""
        return len(self.context) + len(self.question) + len(self.answer) + SPARE


def make_prompt(
    tokenizer: Any,
    haystack: Haystack,
    task: str,
    length: int,
    depth: float | None = None,
    seed: int = 0,
    sample: int = 0,
) -> Prompt:
    """Return sample number `sample`: the same for the same arguments, whatever the cache.

    Samples of equal number at different depths have the same text and needles, in another place. A list of words is an answer
    that only exact recall gives; its first word is given, so that small models go on with the list and not with words about it.

    Args:
        depth: where the needle that is asked for lies, see `hide`; None: anywhere.
    Returns: the longest prompt of at most `length` tokens, room for the answer included; one more word would exceed it.
    Raises: ValueError naming length and task when not even the shortest text fits.
    """
    rng = random.Random(f"{seed}/{task}/{haystack.name}/{length}/{sample}")
    avoid = " ".join(map("".join, haystack.sentences)).lower()
    things = _drawn(TASKS[task], lambda: rng.choice(NOUNS), avoid)
    if task == "copy":
        what, how = "words", "to repeat them"
        facts = [(f"{SECRET} {things[0]}", " ".join(things[1:]))]
        question = f"What are the {len(things)} secret words that the text above gives? Repeat them in their order."
    else:
        what, how = "codes", "for them"
        codes = _drawn(len(things), lambda: str(rng.randrange(10**6, 10**7)), avoid)
        leads = [f"The secret code of the {thing} is" for thing in things]
        facts = list(zip(leads, codes, strict=True))
        question = f"What is the secret code of the {things[0]} that the text above gives?"
    depths = [rng.random() for _ in facts]
    depths[0] = depths[0] if depth is None else depth
    needles = [(at, f"{lead} {rest}.") for at, (lead, rest) in zip(depths, facts, strict=True)]
    opening = f"Read the text below. Secret {what} are hidden in it. Remember them: you will be asked {how}."
    start = rng.randrange(len(haystack.sentences))
    lead, expected = facts[0]
    head, tail = frame_of(tokenizer)

    def ids(part: str) -> list[int]:
        # a template's text holds its special tokens already
        return list(tokenizer(part, add_special_tokens=not head, verbose=False).input_ids)

    def at(words: int) -> Prompt:
        context = f"{head}{opening}\n\n{hide(haystack.take(words, start), needles)}\n\n"
        text = f"{context}{question}{tail}{lead}"
        # split where the parts' own tokens and those of the whole agree: a token across a border goes to what is behind
        whole = ids(f"{text} {expected}")
        first, last = (_common(ids(part), whole) for part in (context, text))
        return Prompt(whole[:first], whole[first:last], whole[last:], text, expected)

    # a word is at least one token; lengths grow with words, nearly always
    words = bisect.bisect_right(range(1 + length), length, lo=1, key=lambda n: at(n).tokens) - 1
    if not words:
        raise ValueError(
            f"length {length} is too short for the task {task!r}: its shortest prompt and answer take {at(1).tokens} tokens"
        )
    return at(words)


def _common(part: Sequence[int], whole: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at their beginning."""
    for count, (one, other) in enumerate(zip(part, whole, strict=False)):
        if one != other:
            return count
    return min(len(part), len(whole))


class Reading(NamedTuple):
    """The result of one sample.

    Attributes:
        score: 1 where the expected words stand in the generated answer, whole, whatever their case; else 0.
        nll: mean of -log p of the expected answer's tokens, nats.
        top1: part of these tokens that were the most likely ones.
        generated: the answer.
    """

    score: float
    nll: float
    top1: float
    generated: str


def read(
    model: PreTrainedModel, tokenizer: Any, kind: CacheKind, prompt: Prompt, prefill: Prefill
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
        for _ in decoded(model, asked[:-1], cache, len(prompt.context), kind.name):
            pass
        return cache

    whole = torch.cat([asked, answer])[:-1]
    parts = decoded(model, whole, opened(), len(asked) - 1, kind.name)
    logits = torch.cat([part for _, part in parts])
    likelihood = torch.log_softmax(logits.double(), -1).gather(-1, answer[:, None])
    generate: Any = model.generate  # its declared type hides that it is a method
    out = generate(
        asked[None],
        attention_mask=torch.ones_like(asked[None]),
        **{CACHE: opened()},  # not every cache can be copied (quanto's tensors cannot)
        max_new_tokens=len(answer) + SPARE,
        do_sample=False,  # a checkpoint's own sampling and penalty would work against copying an answer from the text
        num_beams=1,
        repetition_penalty=1.0,
        pad_token_id=model.generation_config.pad_token_id or 0,
        disable_compile=True,
    )
    generated = str(tokenizer.decode(out[0, len(asked) :], skip_special_tokens=True))
    found = re.search(rf"(?<!\w){re.escape(prompt.expected)}(?!\w)", generated, re.IGNORECASE)
    top1 = (logits.argmax(-1) == answer).double().mean().item()
    return Reading(float(found is not None), -likelihood.mean().item(), top1, generated)


def needle_grid(
    model: PreTrainedModel,
    tokenizer: Any,
    cache_name: str | Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float | None] = (None,),
    samples: int = 3,
    seed: int = 0,
    task: str = "single",
    *,
    haystack: str | Path = "lincoln",
    first_sample: int = 0,
) -> list[Row]:
    """Hide a needle at each depth of texts of each length and ask for it: one row per length, depth and cache.

    Prompts are put into the tokenizer's chat template where it has one.

    Args:
        model: a causal language model in eval mode, on one device.
        cache_name: one cache (see caches.cache_kind) or several, which then share the prefills.
        lengths: tokens of a prompt with room for the answer.
        depths: of the needle that is asked for, from 0, the begin, to 1, the end; None lets it lie anywhere.
        samples: prompts that are asked at each length and depth.
        task: one of TASKS.
        haystack: a set of bundled texts ("lincoln": both speeches), one of them, a file or a dataset, see `texts.load_text`.
        first_sample: number of the first sample: a later call goes on with other prompts.
    Returns: rows with kind="needle", task, model, cache, length, depth, score, nll, top1 (means over samples; nll in nats per token of
        the expected answer), found (samples answered in full), rate_low and rate_high (95 % Wilson interval of their
        share), samples, first_sample, scores and nlls (of each sample), prompt_tokens (mean), answer_tokens (mean),
        bytes_per_token with bytes_dtype (of the first sample's context, see `measure_held`), haystack, chat (whether there
        is a template), protocol, seed.
    Raises: ValueError naming what is wrong, before the model runs: caches, samples, haystack, task, depths, lengths beyond
        the model or too short for a task. ValueError when logits are not finite.
    """
    names = [cache_name] if isinstance(cache_name, str) else list(cache_name)
    kinds, most = [cache_kind(name) for name in names], longest_context(model.config)
    if not (names and lengths and depths):
        given = f"{names}, {lengths} and {depths}"
        raise ValueError(f"cache_name, lengths and depths must not be empty, got {given}")
    check_int("samples", samples, 1)
    check_int("first_sample", first_sample, 0)
    check_choice("task", task, TASKS)
    for depth in depths:
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(f"depths must be between 0 and 1, got {depth}")
    if max(lengths) > most:
        raise ValueError(
            f"length {max(lengths)} is longer than the model reads: max_position_embeddings is {most}"
        )
    for name in names:
        check_runs(name, model)
    hay = load_haystack(haystack)
    numbers = range(first_sample, first_sample + samples)
    prompts = {}
    for cell in itertools.product(sorted(lengths), depths):
        asked = [make_prompt(tokenizer, hay, task, *cell, seed, number) for number in numbers]
        prompts[cell] = asked
    rows = []
    total = len(kinds) * sum(length * len(asked) for (length, _), asked in prompts.items())
    with tqdm(total=total, unit="token", disable=None) as bar:
        shapes = layer_shapes(model)
        for (length, depth), asked in prompts.items():
            found: list[list[Reading]] = [[] for _ in kinds]
            for prompt in asked:
                prefill = Prefill(model, torch.tensor([prompt.context], device=model.device))
                for kind, readings in zip(kinds, found, strict=True):
                    readings.append(read(model, tokenizer, kind, prompt, prefill))
                    bar.update(length)
            tokens = len(asked[0].context)
            for kind, readings in zip(kinds, found, strict=True):
                scores, nlls, top1, _ = map(list, zip(*readings, strict=True))
                right = scores.count(1)  # a part of an answer is none
                low, high = wilson(right, samples)
                held = measure_held(model.config, shapes, kind, tokens, tokens)
                row = {
                    "kind": "needle",
                    "model": name_of(model.config),
                    "task": task,
                    "samples": samples,
                    "first_sample": first_sample,
                    "haystack": hay.name,
                    "chat": bool(frame_of(tokenizer)[0]),
                    "protocol": PROTOCOL,
                    "seed": seed,
                    "cache": kind.name,
                    "length": length,
                    "depth": depth,
                    "prompt_tokens": fmean(len(one.context + one.question) for one in asked),
                    "answer_tokens": fmean(len(one.answer) for one in asked),
                    "bytes_per_token": held["bytes_per_token"],
                    "bytes_dtype": held["bytes_dtype"],
                    "score": fmean(scores),
                    "nll": fmean(nlls),
                    "top1": fmean(top1),
                    "scores": scores,
                    "nlls": nlls,
                    "found": right,
                    "rate_low": low,
                    "rate_high": high,
                }
                rows.append(row)
    return rows
