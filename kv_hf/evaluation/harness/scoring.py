"""Log-likelihoods of continuations, each read through the stored cache as a decode step reads it."""

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, QuantizedCache, StaticCache

from ...cache.paged_cache import PagedCache
from ...spec import sealed_pages
from ..cache_kinds import CacheKind, held_bytes
from ..teacher_forcing import next_chunk
from .plan import Prefix, Run


@dataclass
class Held:
    """The contents of caches at their greatest length.

    Attributes:
        bytes, tokens: summed over all caches that were looked at.
        longest: tokens of the longest row.
        encoded: tokens of them in sealed pages; 0 for caches without pages.
        bits_per_element: of sealed pages, scales included; None for caches without pages.
    """

    bytes: int = 0
    tokens: int = 0
    longest: int = 0
    encoded: int = 0
    bits_per_element: float | None = None

    def add(self, cache: Cache, lengths: list[int]) -> None:
        """Count a cache whose rows hold `lengths` tokens; what padding takes in a cache that stores it is left out."""
        share = 1.0
        if not isinstance(cache, PagedCache):
            share = sum(lengths) / max(1, len(lengths) * int(cache.get_seq_length()))
        self.bytes += round(share * held_bytes(cache))
        self.tokens += sum(lengths)
        self.longest = max(self.longest, *lengths)
        if isinstance(cache, PagedCache):
            own = cache.options
            sizes = {
                "page_size": own.page_size,
                "sink_tokens": own.sink_tokens,
                "recent_tokens": own.recent_tokens,
            }
            self.encoded += own.page_size * sum(sealed_pages(n, **sizes) for n in lengths)
            self.bits_per_element = cache.bits_per_element

    @property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of a token, with everything that the caches allocated; None before the first."""
        return self.bytes / self.tokens if self.tokens else None


def shares_rows(cache: Cache) -> bool:
    """Say whether rows may share a batch without changing each other's stored numbers.

    transformers' quantized caches encode padding with the tokens, and share scales or groups among rows.
    """
    return isinstance(cache, PagedCache) or type(cache) in (DynamicCache, StaticCache)


def fork(cache: Cache) -> Cache:
    """Return an independent copy; sealed pages and transformers' encoded tensors, never changed in place, are shared.

    quanto's tensors cannot be copied at all.
    """
    memo: dict[int, Any] = {}
    if isinstance(cache, QuantizedCache):
        for layer in cache.layers:
            for side in ("_quantized_keys", "_quantized_values"):
                encoded = getattr(layer, side, None)
                memo[id(encoded)] = encoded
    return copy.deepcopy(cache, memo)


class CacheScorer:
    """Score batches of shared prefixes on one model.

    Args:
        model: a causal language model, in eval mode, on one input device.
        kind: makes the empty caches.
        pad_id: token that fills rows up; nothing depends on it.
        softmax_dtype: dtype of the log-softmax, None for that of the logits.
        autocast: context of the forwards.
    """

    def __init__(
        self,
        model: Any,
        kind: CacheKind,
        pad_id: int,
        softmax_dtype: torch.dtype | None = None,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.model = model
        self.kind = kind
        self.pad_id = pad_id
        self.softmax_dtype = softmax_dtype
        self.autocast = autocast
        self.held = Held()
        self._arguments = inspect.signature(model.forward).parameters
        self.shares_rows = shares_rows(kind.make(model.config, 1))

    @torch.no_grad()
    def score(self, batch: list[Prefix]) -> Iterator[tuple[int, float, bool]]:
        """Yield (number of the request, sum of its log-probabilities, whether each target is the most likely).

        The prefill runs once; each further run reads a copy of its cache (copies of a PagedCache share its pages).
        Raises: ValueError when a log-probability is nan.
        """
        width = max(len(prefix.tokens) for prefix in batch)
        padding = [width - len(prefix.tokens) for prefix in batch]
        lead = max(0, *(-run.start for prefix in batch for run in prefix.runs))
        rounds = max(len(prefix.runs) for prefix in batch)
        cache = self.kind.make(self.model.config, width + max(p.longest for p in batch))
        ids = [
            [self.pad_id] * left + list(p.tokens) for left, p in zip(padding, batch, strict=True)
        ]
        if any(padding) and isinstance(cache, PagedCache):
            # models whose attention is not transformers' interface cannot tell the cache
            cache.observe_padding(self._mask(padding, width))
        first = self._forward(ids, cache, padding, 0, max(1, lead))
        for number in range(rounds):
            forked = cache if number == rounds - 1 else fork(cache)
            runs = [p.runs[number] if number < len(p.runs) else None for p in batch]
            yield from self._score_runs(forked, runs, first, padding, width)

    def _score_runs(
        self,
        cache: Cache,
        runs: list[Run | None],
        first: torch.Tensor,
        padding: list[int],
        width: int,
    ) -> Iterator[tuple[int, float, bool]]:
        """Feed one run per row; `first` are the last logits of the prefill [rows, lead, vocab]."""
        lengths = [len(run.fed) if run else 0 for run in runs]
        found: list[list[torch.Tensor]] = [[] for _ in runs]
        for row, run in enumerate(runs):
            if run and run.start < 0:
                found[row].append(self._log_softmax(first[row, run.start :], run))
        fed = [list(run.fed) if run else [] for run in runs]
        end = 0
        while end < max(lengths):
            position = end
            end = min(
                max(lengths),
                *(
                    position + next_chunk(cache, width - left + position)
                    for left, length in zip(padding, lengths, strict=True)
                    if position < length
                ),
            )
            ids = [
                row[position:end] + [self.pad_id] * (end - max(position, min(end, len(row))))
                for row in fed
            ]
            logits = self._forward(ids, cache, padding, width + position, end - position)
            for row, run in enumerate(runs):
                if run:
                    low, high = max(position, run.start), min(end, lengths[row])
                    if low < high:
                        part = logits[row, low - position : high - position]
                        found[row].append(self._log_softmax(part, run))
        self.held.add(cache, [width - left + max(lengths) for left in padding])
        for run, parts in zip(runs, found, strict=True):
            if run:
                yield from self._answers(run, torch.cat(parts))

    def _answers(self, run: Run, log_probs: torch.Tensor) -> Iterator[tuple[int, float, bool]]:
        greedy = log_probs.argmax(-1)
        for number, targets in run.answers:
            wanted = torch.tensor(targets, device=log_probs.device)
            total = log_probs.gather(-1, wanted[:, None]).sum()
            yield number, float(total), bool((greedy == wanted).all())

    def _log_softmax(self, logits: torch.Tensor, run: Run) -> torch.Tensor:
        log_probs = torch.log_softmax(logits, -1, dtype=self.softmax_dtype)
        if torch.isnan(log_probs).any():
            raise ValueError(
                f"{self.kind.name} gives logits that are nan for request {run.answers[0][0]}; no score is returned"
            )
        return log_probs

    def _forward(
        self, ids: list[list[int]], cache: Cache, padding: list[int], seen: int, keep: int
    ) -> torch.Tensor:
        """Run tokens [rows, n] behind `seen` columns; return the last `keep` logits [rows, keep, vocab]."""
        device = self.model.device
        tokens = torch.tensor(ids, device=device)
        inputs: dict[str, Any] = {}
        if any(padding):
            end = seen + tokens.shape[1]
            inputs["attention_mask"] = self._mask(padding, end)
            if "position_ids" in self._arguments:
                columns = torch.arange(seen, end, device=device)
                left = torch.tensor(padding, device=device)
                inputs["position_ids"] = (columns - left[:, None]).clamp(min=0)
        if "logits_to_keep" in self._arguments:
            inputs["logits_to_keep"] = keep
        with self.autocast():
            out = self.model(tokens, past_key_values=cache, use_cache=True, **inputs)
        return out.logits[:, -keep:]

    def _mask(self, padding: list[int], columns: int) -> torch.Tensor:
        left = torch.tensor(padding, device=self.model.device)
        return (torch.arange(columns, device=self.model.device) >= left[:, None]).long()
