"""The one scorer: read a text through a cache as a user's decoding would, and compare with the exact cache.

The protocol: the prompt is one forward on an empty cache (exact attention, like any prefill); from then on
every scored token attends to what a decode step at its position would attend to: sealed pages encoded,
sinks and tail exact. A forward over several tokens gives the same as one token at a time as long as no page
becomes full inside it, so chunks end where pages do; a test compares both.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ..cache.model_shape import CACHE
from ..cache.paged_cache import PagedCache
from ..cache.saved import stored_layers
from ..geometry import Geometry
from ..texts import longest_context
from .caches import CacheKind, LayerShape, cache_kind, held_bytes
from .rows import Row

PROTOCOL = "teacher forced, decode semantics"
EXACT_CHUNK = 64  # tokens per forward where nothing depends on what comes behind a token
BLOCK = 64  # neighbouring tokens that an interval draws together, because their errors go together
LEAST_BLOCKS = 10
RESAMPLES = 2000
KEPT_BYTES = 6 << 30  # of log-probabilities; what goes beyond it is computed anew for each subject
Progress = Callable[[int], object]


def next_chunk(cache: Cache, position: int) -> int:
    """Return how many tokens from `position` on may go into one forward without changing a result.

    Pages are sealed when they are full. A forward of several tokens makes one choice of pages for all of them, and one
    of many reads every page: where a cache chooses pages, tokens go one by one, as they do in `generate`. Exact caches
    encode nothing, so that any chunk will do. A cache of another class is read token by token.
    """
    if isinstance(cache, PagedCache):
        options = cache.options
        places = Geometry(options.page_size, options.sink_tokens, options.recent_tokens)
        room = places.slots - places.exact(position)
        if options.budget is not None:
            whole = options.budget.from_tokens - 1 - position  # tokens that read everything
            room = min(room, max(1, whole))
        return room
    return EXACT_CHUNK if type(cache) in (DynamicCache, StaticCache) else 1


def check_finite(logits: Tensor, whose: str, where: str = "") -> Tensor:
    """Return logits [any shape] as they are. Raises ValueError where they hold nan or infinity."""
    if not torch.isfinite(logits).all():
        raise ValueError(f"{whose} gives logits that are not finite{where and f' {where}'}")
    return logits


@torch.no_grad()
def forward(model: PreTrainedModel, ids: Tensor, cache: Any, keep: int) -> Tensor:
    """Run a forward over ids [rows, tokens] and return logits [rows, n, vocab]: those of the last `keep` or more positions."""
    # logits of a whole context would take more memory than all else
    named = inspect.signature(model.forward).parameters
    last = {"logits_to_keep": keep} if "logits_to_keep" in named else {}
    return model(ids, use_cache=True, **{CACHE: cache}, **last).logits


def last_logits(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Run a forward over ids [rows, tokens] and return the logits of the last position, [rows, vocab]."""
    return forward(model, ids, cache, 1)[:, -1]


class Recorder(DynamicCache):
    """An exact cache that writes down what a prefill hands to it, to hand it to other caches."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.calls: list[tuple[Any, Any]] = []

    def update(self, *args: Any, **kw: Any) -> Any:
        """Append keys and values [batch, num_kv_heads, q_len, head_dim] as DynamicCache does, and remember the call."""
        self.calls.append((args, kw))
        return super().update(*args, **kw)


class Prefill:
    """The prefill of some contexts of one length, computed once for all caches.

    A prefill on an empty cache attends to its own exact keys and values whatever the cache, so that all caches are
    given the same ones; each stores them in its own way. Models with layers of another kind than attention
    (linear attention, convolutions) keep states that are no keys and values: there each cache has its own prefill.

    Attributes:
        ids: [rows, tokens], int64, on the model's device.
        calls: what the exact cache was given; nothing where each cache has its own prefill.
    """

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        recorder = Recorder(model.config)
        plain = (DynamicLayer, DynamicSlidingWindowLayer)
        shared = all(type(layer) in plain for layer in recorder.layers)
        self._logits = last_logits(model, ids, recorder) if shared else None
        self.calls = recorder.calls

    @torch.no_grad()
    def fill(self, cache: Any) -> Tensor:
        """Let an empty cache hold the context and return the logits behind it, [rows, vocab]."""
        if self._logits is None:
            return last_logits(self.model, self.ids, cache)
        for args, kw in self.calls:
            cache.update(*args, **kw)
        return self._logits


@torch.no_grad()
def decoded(
    model: PreTrainedModel, ids: Tensor, cache: Cache, position: int, name: str = "the cache"
) -> Iterator[tuple[int, Tensor]]:
    """Yield (position, logits) of ids[position:] chunk by chunk, read through a cache.

    Args:
        model: a causal language model, in eval mode.
        ids: [tokens], int64, on the model's device.
        cache: holds the tokens before `position`, see `Prefill.fill`; all of them afterwards.
        name: what an error calls the cache.
    Yields: the position of the chunk's first token, and fp32 logits [chunk, vocab]: row i predicts the token
        behind position + i.
    Raises: ValueError for logits that are not finite.
    """
    while position < len(ids):
        end = min(len(ids), position + next_chunk(cache, position))
        out = model(ids[None, position:end], use_cache=True, **{CACHE: cache})
        yield position, check_finite(out.logits[0].float(), name, f"at token {position}")
        position = end


class ExactReference:
    """Log-probabilities of `texts` behind their prompts, read through transformers' DynamicCache.

    Args:
        model: a causal language model in eval mode.
        texts: token ids [tokens] of each text, on the model's device.
        prompt_tokens: leading tokens of each text that are not scored; at least two must remain.
    Raises: ValueError when there is no text, when one is longer than the model reads or not longer than the prompt.
    """

    def __init__(self, model: PreTrainedModel, texts: Iterable[Tensor], prompt_tokens: int) -> None:
        self.model, self.texts, self.prompt_tokens = model, list(texts), prompt_tokens
        self._left = KEPT_BYTES
        self._kept: dict[int, Tensor] = {}
        self.prefill = functools.cache(self._prefill)
        if not self.texts:
            raise ValueError("texts must hold at least one text, got none")
        tokens, longest = [len(ids) for ids in self.texts], longest_context(model.config)
        if max(tokens) > longest:
            raise ValueError(
                f"a text of {max(tokens)} tokens is longer than the {longest} that the model reads (max_position_embeddings)"
            )
        if not 1 <= prompt_tokens < min(tokens) - 1:
            raise ValueError(
                f"prompt_tokens must leave at least two of a text's {min(tokens)} tokens to score, got {prompt_tokens}"
            )

    def _prefill(self, number: int) -> Prefill:
        """Return the prefill of text `number`, with which every subject begins."""
        return Prefill(self.model, self.texts[number][None, : self.prompt_tokens])

    def read(self, number: int, cache: Cache, name: str) -> Iterator[tuple[int, Tensor]]:
        """Return what `decoded` yields, (position, logits [chunk, vocab]), of text `number` through an empty cache."""
        self.prefill(number).fill(cache)
        return decoded(self.model, self.texts[number], cache, self.prompt_tokens, name)

    def log_probs(self, number: int) -> Tensor:
        """Return the log-probabilities of text `number`: fp32 [scored tokens, vocab] on the model's device.

        Raises: ValueError when the model itself gives logits that are not finite.
        """
        if number in self._kept:
            return self._kept[number]
        cache, name = DynamicCache(config=self.model.config), "the model, with the exact cache,"
        parts = self.read(number, cache, name)
        found = torch.cat([torch.log_softmax(logits, -1) for _, logits in parts])
        if found.nbytes <= self._left:
            self._left -= found.nbytes
            self._kept[number] = found
        return found


class Scored(NamedTuple):
    """Per-token figures of one text against the exact distributions, on the CPU.

    Attributes:
        kl: KL(exact || subject) in nats, [scored tokens], fp64.
        same: whether the most likely next token is the same, [scored tokens].
        loss, loss_exact: negative log-likelihoods of the next token, [scored tokens - 1] each, fp64.
        bits: stored bits per number with scales, without the exact tail; None if unknown.
    """

    kl: Tensor
    same: Tensor
    loss: Tensor
    loss_exact: Tensor
    bits: float | None = None


def distances(exact: Tensor, subject: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """Return kl, same, loss and loss_exact of `Scored` of log-probabilities [n, vocab]; `targets` [n or n - 1] follow them."""
    # may be below 0 by about 1e-8, by rounding; cut off, it would not average out
    kl = (exact.exp() * (exact - subject)).sum(-1).double()
    same = exact.argmax(-1) == subject.argmax(-1)

    def loss(of: Tensor) -> Tensor:
        return -of[: len(targets)].gather(-1, targets[:, None])[:, 0].double().cpu()

    return kl.cpu(), same.cpu(), loss(subject), loss(exact)


def score(
    reference: ExactReference,
    make: Callable[[], Cache],
    name: str = "the cache",
    progress: Progress = lambda tokens: None,
) -> list[Scored]:
    """Read each text of `reference` through a cache that `make` returns, and compare every scored token with the exact cache.

    Args:
        make: returns an empty cache.
        name: what an error calls the cache.
        progress: called with the tokens scored since the last call.
    Raises: ValueError for logits that are not finite.
    """
    found, prompt = [], reference.prompt_tokens
    for number, ids in enumerate(reference.texts):
        exact, cache, parts = reference.log_probs(number), make(), []
        targets = ids[prompt + 1 :]
        for position, logits in reference.read(number, cache, name):
            part = slice(position - prompt, position - prompt + len(logits))
            parts.append(distances(exact[part], logits.log_softmax(-1), targets[part]))
            progress(len(logits))
        kl, same, loss, loss_exact = map(torch.cat, zip(*parts, strict=True))
        found.append(Scored(kl, same, loss, loss_exact, bits_per_element(cache)))
    return found


def bits_per_element(cache: Any) -> float | None:
    """Return the mean stored bits per number of a full page over all layers in pages, scales included; None of other caches."""
    specs = [layer.spec for layer in getattr(cache, "paged_layers", ()) if layer.spec is not None]
    return sum(spec.bits_per_element for spec in specs) / len(specs) if specs else None


def measure_accuracy(
    model: PreTrainedModel,
    texts: Iterable[Tensor],
    subjects: Mapping[str, Callable[[], Cache]],
    prompt_tokens: int,
    progress: Progress = lambda tokens: None,
) -> dict[str, Row]:
    """Compare caches with the exact one on the same texts, token by token in effect.

    Args:
        model: a causal language model in eval mode, on one device.
        texts: token ids [tokens] of each text; the first `prompt_tokens` of each are not scored.
        subjects: name -> function that makes an empty cache.
        progress: called with the tokens scored for one subject since the last call.
    Returns: the fields of each subject's row, see `summary`.
    Raises: ValueError when there is no text, when one is longer than the model reads or not longer than the prompt,
        or when a subject gives logits that are not finite (no figure is returned then).
    """
    reference = ExactReference(model, texts, prompt_tokens)
    return {
        name: summary(score(reference, make, name, progress)) for name, make in subjects.items()
    }


def summary(scored: Sequence[Scored]) -> Row:
    """Return the figures of all these texts together, KL in nats from the exact cache to the subject, as fields of a row.

    Returns:
        tokens: scored tokens.
        kl_mean, kl_median, kl_p99, kl_p999: of KL(exact || subject) per token.
        kl_low, kl_high: 95 % interval of the mean (block bootstrap, see `block_interval`).
        top1: part of the tokens after which the same token is the most likely.
        perplexity, perplexity_exact: of the text behind the prompts.
        perplexity_delta: how much higher the subject's perplexity is, in percent of the exact one.
        perplexity_delta_low, perplexity_delta_high: its 95 % interval, from differences token by token.
        bits_per_element: stored bits per number with scales, without the exact tail; None if unknown.
    """
    kls, sames, losses, exacts, bits = zip(*scored, strict=True)
    kl, same, loss, exact = map(torch.cat, (kls, sames, losses, exacts))
    kl_low, kl_high = block_interval(kls)
    low, high = block_interval([one - other for one, other in zip(losses, exacts, strict=True)])
    return {
        "tokens": len(kl),
        "bits_per_element": bits[-1],
        "kl_mean": kl.mean().item(),
        "kl_median": kl.median().item(),
        "kl_p99": kl.quantile(0.99).item(),
        "kl_p999": kl.quantile(0.999).item(),
        "kl_low": kl_low,
        "kl_high": kl_high,
        "top1": same.double().mean().item(),
        "perplexity": loss.mean().exp().item(),
        "perplexity_exact": exact.mean().exp().item(),
        "perplexity_delta": 100 * math.expm1((loss - exact).mean().item()),
        "perplexity_delta_low": 100 * math.expm1(low),
        "perplexity_delta_high": 100 * math.expm1(high),
    }


def block_interval(
    texts: Sequence[Tensor], block: int = BLOCK, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean of per-token figures.

    Blocks of neighbouring tokens of one text are drawn with replacement (moving neither across texts nor within
    one), so that a few hard passages widen the interval as they should. Of less than ten blocks nothing could be
    told: blocks are shorter there.

    Args:
        texts: [tokens] of each text.
    Source: the block bootstrap, Kuensch 1989 (with fixed blocks, Carlstein 1986).
    """
    tokens = sum(len(text) for text in texts)
    block = max(1, min(block, tokens // LEAST_BLOCKS))
    blocks = [part for text in texts for part in text.double().split(block)]
    sums = torch.stack([part.sum() for part in blocks])
    counts = torch.tensor([float(len(part)) for part in blocks], dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(blocks), (resamples, len(blocks)), generator=generator, device="cpu")
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = (means.quantile(place).item() for place in (0.025, 0.975))
    return low, high


def measure_held(
    config: Any,
    shapes: Sequence[LayerShape],
    kind: CacheKind,
    tokens: int,
    prompt_tokens: int,
    scored: Any = None,
) -> Row:
    """Return the bytes of a cache behind a prompt of `prompt_tokens` and decoding up to `tokens`. Runs no model.

    Distances are measured in fp32, where rounding of the model itself does not blur them; people serve in bf16. So the
    bytes come from a twin: the same cache, filled with random keys and values in bf16, token by token behind the prompt.

    Args:
        config: the model's config.
        shapes: of every layer, see `caches.layer_shapes`.
        scored: a cache of this kind that has read a text: where that has widened the formats of layers, the twin has them too.
    Returns: bytes and bytes_exact, everything that the cache and DynamicCache hold (scales, tails and tables too);
        bytes_per_token; stored_bits, bits per number: those of bf16 times bytes / bytes_exact; bytes_dtype.
    Raises: ValueError for a model whose layers hold none.
    """

    def filled(cache: Any) -> int:
        numbers = torch.Generator().manual_seed(0)
        for count in (prompt_tokens, *itertools.repeat(1, tokens - prompt_tokens)):
            for index, (heads, *dims) in layers:
                sides = ((1, heads, count, dim) for dim in dims)
                drawn = (torch.randn(side, generator=numbers, device="cpu") for side in sides)
                states = [one.bfloat16() for one in drawn]
                cache.update(*states, index)
        return held_bytes(cache)

    twin = kind.make(config, tokens)
    if isinstance(scored, PagedCache):
        twin = scored.fresh(layers=stored_layers(scored), widen="never")

    layers = [(index, shape) for index, shape in enumerate(shapes) if shape is not None]
    if not layers:
        raise ValueError("the model keeps no keys and values, of which bits could be counted")
    size, exact = filled(twin), filled(cache_kind("dynamic").make(config, tokens))
    return {
        "bytes": size,
        "bytes_exact": exact,
        "bytes_per_token": size / tokens,
        "stored_bits": 16 * size / exact,
        "bytes_dtype": "bfloat16",
    }
