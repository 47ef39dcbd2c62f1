"""Long contexts: what is hidden in a text and found again, read through the store that a cache keeps of it.

After the needle test (G. Kamradt, LLMTest_NeedleInAHaystack) and RULER (arXiv 2404.06654) in words of our own; prompts are made here,
from a seed. RULER's other tasks are lm-eval's (`kv-hf lm-eval`). The context is prefilled; question and answer are decoded.
"""

import math
import random
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..texts import BUNDLED, load_text, longest_context
from .accuracy import Prefill, Progress, read_on
from .caches import CacheKind, cache_kind, held_bytes, why_not
from .models import paged_attention

PROTOCOL = "context prefilled, question and answer decoded from the store"
# task -> needles: "single" hides the code of one thing, "multi_key" those of others beside it, "copy" a list of words
TASKS = {"single": 1, "multi_key": 4, "copy": 1}
COPIED, SECRET = 6, "The secret words are"  # words that copy hides, and how they are introduced
SPARE = 16  # tokens that a generated answer may be longer than the expected one
ROOM = 16  # columns of a preallocated cache beyond prompt and answer
NORMAL_95 = 1.959964  # standard deviations on either side of 95 % of a normal distribution
LINCOLN, NOISE = "lincoln", "noise"
SPEECHES = ("lincoln_1862", "lincoln_1863")  # of LINCOLN
# what RULER calls noise: sentences that say nothing, over and over
NOISE_TEXT = (
    "The road goes up the hill. The water runs down again. Somebody closed a window. "
    "The wind is cold today. Later it will be warm."
)
# a word, or up to three digits of one: "$901,125,674.86" would be twenty tokens at once
PIECE = re.compile(r"\s*(?:[^\s\d]+|\d{1,3}[^\s\d]*)")
# plain things, one word each; none is part of another
NOUNS = (files(__package__) / "data" / "nouns.txt").read_text("utf-8").split()


@dataclass(frozen=True)
class Cell:
    """One place of a grid: `samples` prompts of it are asked.

    Attributes:
        length: tokens of a prompt with room for the answer.
        depth: 0 (begin) to 1 (end) of the text, of the first that is hidden; None: anywhere.
    """

    task: str
    length: int
    depth: float | None = None

    def __str__(self) -> str:
        depth = "" if self.depth is None else f", depth {self.depth:g}"
        return f"{self.task}, length {self.length}{depth}"


@dataclass(frozen=True)
class Rate:
    """Questions that were answered in full, of all that were asked.

    Attributes:
        found, asked: numbers of questions; at least one was asked.
    """

    found: int
    asked: int

    @classmethod
    def of(cls, scores: Sequence[float]) -> "Rate":
        """Count the scores of 1: a part of an answer is none."""
        return cls(sum(score == 1 for score in scores), len(scores))

    @property
    def share(self) -> float:
        """The part that was found."""
        return self.found / self.asked

    def interval(self) -> tuple[float, float]:
        """Return the 95 % Wilson interval of the share, which has a width where all or none were found.

        Source: E. B. Wilson, 1927, "Probable inference, the law of succession, and statistical inference".
        """
        n, z = self.asked, NORMAL_95
        middle = (self.share + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(self.share * (1 - self.share) / n + (z / n / 2) ** 2)
        return max(0.0, middle - half), min(1.0, middle + half)


@dataclass(frozen=True)
class Haystack:
    """A text in sentences; it begins anew where it ends.

    Attributes:
        name: what the user called it.
        sentences: at least one, each of at least one word.
    """

    name: str
    sentences: tuple[str, ...]

    @cached_property
    def text(self) -> str:
        """All of it in lower case, to look for words that it must not hold."""
        return " ".join(self.sentences).lower()

    @cached_property
    def pieces(self) -> list[list[str]]:
        """The pieces of each sentence, which make it up again."""
        return [PIECE.findall(sentence) for sentence in self.sentences]

    def take(self, pieces: int, start: int = 0) -> list[str]:
        """Return sentences from `start` on that hold exactly `pieces` pieces; the last may be cut behind a piece."""
        taken: list[str] = []
        while pieces > 0:
            parts = self.pieces[(start + len(taken)) % len(self.pieces)]
            sentence = "".join(parts)
            if len(parts) > pieces:
                sentence = "".join(parts[:pieces]).rstrip(" .,;:!?-$") + "."
            taken.append(sentence)
            pieces -= len(parts)
        return taken


def load_haystack(source: str | Path = LINCOLN) -> Haystack:
    """Return the haystack "lincoln" (both bundled speeches), "noise", one of the bundled texts, or a UTF-8 file.

    Raises: ValueError naming the source when it is none of these, or empty.
    """
    name = str(source)
    if name not in (LINCOLN, NOISE, *BUNDLED) and not Path(source).is_file():
        choices = ", ".join((LINCOLN, NOISE, *BUNDLED))
        raise ValueError(f"haystack must be a file or one of {choices}, got {name!r}")
    parts = SPEECHES if name == LINCOLN else (name,)
    text = NOISE_TEXT if name == NOISE else " ".join(map(load_text, parts))
    return Haystack(name, tuple(re.split(r"(?<=[.!?])\s+", " ".join(text.split()))))


def hide(sentences: Sequence[str], needles: Sequence[tuple[float, str]]) -> str:
    """Return the text with each needle at the sentence border that is nearest to its depth.

    Args:
        needles: (depth, sentence); depth 0 is in front of the first sentence, 1 behind the last, measured in words.
            Needles that share a border stand in the order given.
    """
    behind = [0]
    for sentence in sentences:
        behind.append(behind[-1] + len(sentence.split()))
    parts: list[list[str]] = [[sentence] for sentence in ["", *sentences]]
    for depth, needle in needles:
        border = min(range(len(behind)), key=lambda i: abs(behind[i] - depth * behind[-1]))
        parts[border].append(needle)
    return " ".join(part for border in parts for part in border if part)


class Puzzle(NamedTuple):
    """A text that something is hidden in, and a question about it.

    Attributes:
        opening: what the reader is told before the text.
        needles: (depth, sentence) of what is hidden.
        start: sentence of the haystack that the text begins with.
        question: stands behind the text.
        lead: first words of the answer, given to the model.
        expected: the rest of the answer, which a generated answer must hold.
    """

    opening: str
    needles: list[tuple[float, str]]
    start: int
    question: str
    lead: str
    expected: str


def make_puzzle(rng: random.Random, haystack: Haystack, task: str, depth: float | None) -> Puzzle:
    """Return a puzzle of a task; `depth` is where the needle that is asked for lies, None: anywhere.

    A list of words is an answer that only exact recall gives; its first word is given, so that small models go on with
    the list and not with words about it.
    """
    count, copied = TASKS[task], task == "copy"
    things = _drawn(COPIED if copied else count, lambda: rng.choice(NOUNS), haystack.text)
    codes = _drawn(0 if copied else count, lambda: str(rng.randrange(10**6, 10**7)), haystack.text)
    depths = [rng.random() for _ in range(count)]
    depths[0] = depths[0] if depth is None else depth
    start = 0 if haystack.name == NOISE else rng.randrange(len(haystack.sentences))
    opening = f"Read the text below. Secret {'words' if copied else 'codes'} are hidden in it. Remember them: you will be asked "
    if copied:
        first, rest = things[0], " ".join(things[1:])
        needles = [(depths[0], f"{SECRET} {first} {rest}.")]
        question = f"What are the {COPIED} secret words that the text above gives? Repeat them in their order."
        return Puzzle(
            f"{opening}to repeat them.", needles, start, question, f"{SECRET} {first}", rest
        )
    said = [f"The secret code of the {thing} is" for thing in things]
    needles = [(at, f"{lead} {code}.") for at, lead, code in zip(depths, said, codes, strict=True)]
    question = f"What is the secret code of the {things[0]} that the text above gives?"
    return Puzzle(f"{opening}for them.", needles, start, question, said[0], codes[0])


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


class Frame(NamedTuple):
    """The text before and behind the user's words; `chat`: whether a chat template gave them (special tokens are among them)."""

    head: str
    tail: str
    chat: bool

    @classmethod
    def of(cls, tokenizer: Any, chat: bool | None) -> "Frame":
        """Return the tokenizer's chat template around a user's message, or bare lines.

        Args:
            chat: True or False as asked for; None takes the template where there is one.
        Raises: ValueError when a template is asked for that does not exist or hides the message.
        """
        template = getattr(tokenizer, "chat_template", None)
        if not (template if chat is None else chat):
            return cls("", "\n", False)
        if not template:
            raise ValueError("chat=True needs a chat template, and this tokenizer has none")
        said = [{"role": "user", "content": "kv_hf-content"}]
        # enable_thinking is read by templates of models that would think aloud first
        how = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        head, found, tail = tokenizer.apply_chat_template(said, **how).partition("kv_hf-content")
        if not found:
            raise ValueError("chat=True: the tokenizer's chat template leaves the message out")
        return cls(head, tail, True)


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
    tokenizer: Any, haystack: Haystack, frame: Frame, cell: Cell, seed: int, sample: int
) -> Prompt:
    """Return sample number `sample` of a cell: the same for the same arguments, whatever the cache.

    Samples of equal number at different depths have the same text and needles, in another place.

    Returns: the longest prompt of at most `cell.length` tokens, room for the answer included; one more word would
        exceed it.
    Raises: ValueError naming length and task when not even the shortest text fits.
    """
    rng = random.Random(f"{seed}/{cell.task}/{haystack.name}/{cell.length}/{sample}")
    puzzle = make_puzzle(rng, haystack, cell.task, cell.depth)

    def ids(part: str) -> list[int]:
        # a template's text holds its special tokens already
        return list(tokenizer(part, add_special_tokens=not frame.chat, verbose=False).input_ids)

    def at(words: int) -> Prompt:
        body = hide(haystack.take(words, puzzle.start), puzzle.needles)
        context = f"{frame.head}{puzzle.opening}\n\n{body}\n\n"
        text = f"{context}{puzzle.question}{frame.tail}{puzzle.lead}"
        # split where the parts' own tokens and those of the whole agree: a token across a border goes to what is behind
        whole = ids(f"{text} {puzzle.expected}")
        first, last = (_common(ids(part), whole) for part in (context, text))
        return Prompt(whole[:first], whole[first:last], whole[last:], text, puzzle.expected)

    best = at(1)
    if best.tokens > cell.length:
        raise ValueError(
            f"length {cell.length} is too short for the task {cell.task!r}: its shortest prompt and answer take "
            f"{best.tokens} tokens"
        )
    low, high = (
        1,
        1 + cell.length,
    )  # a word is at least one token; lengths grow with words, nearly always
    while high - low > 1:
        middle = (low + high) // 2
        prompt = at(middle)
        if prompt.tokens <= cell.length:
            best, low = prompt, middle
        else:
            high = middle
    return best


def _common(part: Sequence[int], whole: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at their beginning."""
    apart = (i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b)
    return next(apart, min(len(part), len(whole)))


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
        for _ in read_on(model, asked[:-1], cache, len(prompt.context), kind.name):
            pass
        return cache

    whole = torch.cat([asked, answer])[:-1]
    parts = read_on(model, whole, opened(), len(asked) - 1, kind.name)
    logits = torch.cat([part for _, part in parts])
    likelihood = torch.log_softmax(logits.double(), -1).gather(-1, answer[:, None])
    generate: Any = model.generate  # its declared type hides that it is a method
    out = generate(
        asked[None],
        attention_mask=torch.ones_like(asked[None]),
        past_key_values=opened(),  # not every cache can be copied (quanto's tensors cannot)
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


def bytes_per_token(prefill: Prefill, kind: CacheKind) -> dict[str, Any]:
    """Return the bytes that `kind` holds per token of this context, and the dtype that they are counted for: bfloat16.

    Where the prefill is not shared, it is the model's own dtype.
    """
    dtype = torch.bfloat16 if prefill.calls is not None else prefill.model.dtype
    tokens = prefill.ids.shape[1]
    cache = kind.make(prefill.model.config, tokens)
    prefill.fill(cache, dtype)
    found = {"bytes_per_token": held_bytes(cache) / tokens}
    return {**found, "bytes_dtype": str(dtype).removeprefix("torch.")}


def make_cells(
    tasks: Sequence[str], lengths: Sequence[int], depths: Sequence[float | None] = (None,)
) -> list[Cell]:
    """Return the cells of a grid of tasks, lengths and depths, the longest last.

    Raises: ValueError naming the argument for a task that does not exist, a depth outside of 0 to 1, and where there is none.
    """
    if not (tasks and lengths and depths):
        raise ValueError(
            f"tasks, lengths and depths must not be empty, got {tasks}, {lengths}, {depths}"
        )
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    for depth in depths:
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(f"depths must be between 0 and 1, got {depth}")
    order = [(task, length) for task in tasks for length in sorted(lengths)]
    return [Cell(task, length, depth) for task, length in order for depth in depths]


def needle_grid(
    model: PreTrainedModel,
    tokenizer: Any,
    cache_name: str | Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float | None] = (None,),
    samples: int = 3,
    seed: int = 0,
    task: str = "single",
    **how: Any,
) -> list[dict[str, Any]]:
    """Hide a needle at each depth of texts of each length and ask for it: one row per cache, length and depth.

    Args:
        cache_name: one cache (see caches.cache_kind) or several, which then share the prefills.
        depths: from 0, the begin, to 1, the end; None lets it lie anywhere.
        task: one of TASKS.
        **how: haystack, chat, progress and first_sample of `measure_cells`, and the rows and errors that it describes.
    """
    cells = make_cells([task], lengths, depths)
    return list(measure_cells(model, tokenizer, cache_name, cells, samples, seed, **how))


def measure_cells(
    model: PreTrainedModel,
    tokenizer: Any,
    cache_name: str | Sequence[str],
    cells: Sequence[Cell],
    samples: int,
    seed: int,
    haystack: str | Path = LINCOLN,
    chat: bool | None = None,
    progress: Progress | None = None,
    first_sample: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield one row per cell and cache, as cells finish.

    Args:
        model: a causal language model in eval mode, on one device.
        haystack: "lincoln", "noise", a bundled text or a file.
        chat: put the prompts into the tokenizer's chat template; None: where it has one.
        progress: called with the length of each prompt that one cache was asked; None shows a bar in a terminal.
        first_sample: number of the first sample: a later call goes on with other prompts.
    Yields: kind="needle", task, cache, length, depth, score, nll, top1 (means over samples; nll in nats per token of
        the expected answer), found (samples answered in full), rate_low and rate_high (95 % Wilson interval of their
        share), samples, first_sample, scores and nlls (of each sample), prompt_tokens (mean), answer_tokens (mean),
        bytes_per_token with bytes_dtype (of the context of the first sample), haystack, chat, protocol, seed.
    Raises: ValueError naming what is wrong, before the model runs: caches, samples, haystack, lengths beyond the model
        or too short for a task. ValueError when logits are not finite; the cell then gives no row.
    """
    names = [cache_name] if isinstance(cache_name, str) else list(cache_name)
    kinds = [cache_kind(name) for name in names]
    if not kinds or samples < 1 or first_sample < 0:
        raise ValueError(
            f"need a cache, samples of at least 1 and first_sample of at least 0, got {names}, {samples} and {first_sample}"
        )
    for kind in kinds:
        if reason := why_not(kind.name, model.device):
            raise ValueError(f"cache {kind.name!r} cannot be measured here: {reason}")
        try:
            kind.make(model.config, 1)  # transformers' quantized caches refuse sliding layers
        except ValueError as error:
            own = type(model).__name__
            raise ValueError(
                f"cache {kind.name!r} cannot be measured with {own}: {error}"
            ) from error
    hay, frame, most = (
        load_haystack(haystack),
        Frame.of(tokenizer, chat),
        longest_context(model.config),
    )
    for cell in cells:
        if cell.length > most:
            raise ValueError(
                f"length {cell.length} is longer than the model reads: max_position_embeddings is {most}"
            )
        make_prompt(tokenizer, hay, frame, cell, seed, 0)
    total = samples * len(kinds) * sum(cell.length for cell in cells)
    with paged_attention(model), tqdm(total=total, unit="token", disable=None) as bar:
        for cell in cells:
            numbers = range(first_sample, first_sample + samples)
            prompts = [make_prompt(tokenizer, hay, frame, cell, seed, number) for number in numbers]
            found: dict[str, list[Reading]] = {kind.name: [] for kind in kinds}
            stored: dict[str, dict[str, Any]] = {}
            for number, prompt in zip(numbers, prompts, strict=True):
                prefill = Prefill(model, torch.tensor([prompt.context], device=model.device))
                for kind in kinds:
                    try:
                        found[kind.name].append(read(model, tokenizer, kind, prompt, prefill))
                    except ValueError as error:
                        raise ValueError(f"{cell}, sample {number}: {error}") from error
                    if kind.name not in stored:
                        stored[kind.name] = bytes_per_token(prefill, kind)
                    (progress or bar.update)(cell.length)
            asked = {"haystack": hay.name, "chat": frame.chat, "protocol": PROTOCOL, "seed": seed}
            asked |= {"samples": samples, "first_sample": first_sample}
            lengths = [(len(p.context) + len(p.question), len(p.answer)) for p in prompts]
            means = map(statistics.fmean, zip(*lengths, strict=True))
            asked["prompt_tokens"], asked["answer_tokens"] = means
            for name, readings in found.items():
                row = {"kind": "needle", "cache": name, **asdict(cell), **asked, **stored[name]}
                for field in ("score", "nll", "top1"):
                    row[field] = statistics.fmean(getattr(each, field) for each in readings)
                rate = Rate.of([each.score for each in readings])
                row["found"], (row["rate_low"], row["rate_high"]) = rate.found, rate.interval()
                row["scores"] = [each.score for each in readings]
                row["nlls"] = [each.nll for each in readings]
                yield row
