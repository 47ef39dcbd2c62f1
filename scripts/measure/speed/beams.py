"""What beam search asks of a cache in each step: rows in another order, then one token more in every layer."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from kv_hf.evaluation.cache_kinds import CacheKind, held_bytes
from kv_hf.evaluation.shapes import AttentionShape
from kv_hf.evaluation.timing import Budget, interleave, spread

from kv_hf.cache.paged_cache import PagedCache

PARTS = ("reorder", "append")


class Beams:
    """A cache of some beams with one history, without a model.

    Args:
        shape, layers: sizes of the cache.
        beams: rows; all begin with the same `context` random tokens.
    """

    def __init__(
        self,
        kind: CacheKind,
        shape: AttentionShape,
        layers: int,
        beams: int,
        context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.name, self.beams, self.device = kind.name, beams, device
        self._shape, self._dtype = shape, dtype
        self._numbers = torch.Generator(device).manual_seed(0)
        self._choices = random.Random(0)
        self.cache = kind.make(shape.config(layers), context + 64)
        for layer in range(layers):
            self.cache.update(*self._states(1, context), layer)
        self.cache.batch_repeat_interleave(beams)
        self.step()  # rows get their own copies of what is not shared, and storage room for what follows

    def _states(self, rows: int, tokens: int) -> torch.Tensor:
        size = (2, rows, self._shape.num_kv_heads, tokens, self._shape.head_dim)
        numbers = torch.randn(
            size, generator=self._numbers, device=self.device, dtype=torch.float32
        )
        return numbers.to(self._dtype)

    def prepare(self) -> None:
        """Draw the next step's order of rows (some continue twice, some not at all) and its token."""
        order = [self._choices.randrange(self.beams) for _ in range(self.beams)]
        self.order = torch.tensor(order, device=self.device)
        self.new = [tuple(self._states(self.beams, 1)) for _ in self.cache.layers]

    def reorder(self) -> None:
        """Let row i continue row order[i], in all layers."""
        self.cache.reorder_cache(self.order)

    def append(self) -> None:
        """Append one token to every row, in all layers."""
        for layer, (keys, values) in enumerate(self.new):
            self.cache.update(keys, values, layer)

    def step(self) -> None:
        """Prepare and take a whole step."""
        self.prepare()
        self.reorder()
        self.append()

    @property
    def copied_bytes(self) -> int:
        """Bytes of keys and values that a reorder() of all rows writes: everything, or the windows of pages alone."""
        if isinstance(self.cache, PagedCache):
            return self.cache.memory().tail
        return held_bytes(self.cache)


def wrong_beams(
    kinds: Sequence[CacheKind],
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    layers: int = 2,
    beams: int = 4,
    context: int = 150,
    steps: int = 140,
) -> list[str]:
    """Take the same random steps with every cache; return the names of those that then hold other numbers.

    The first kind must be DynamicCache. A paged cache must hold, bit for bit, what a new one of the same formats
    holds when it is given DynamicCache's keys and values at once: rows that share pages are rows all the same.
    """
    found = [Beams(kind, shape, layers, beams, context, dtype, device) for kind in kinds]
    for _ in range(steps):
        for each in found:
            each.step()
    right, *others = found
    wrong = []
    for kind, each in zip(kinds[1:], others, strict=True):
        fresh = kind.make(shape.config(layers), 0)
        for index, layer in enumerate(right.cache.layers):
            fresh.update(layer.keys, layer.values, index)
        pairs = zip(each.cache.layers, fresh.layers, strict=True)
        same = all(
            torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs
        )
        if not same:
            wrong.append(kind.name)
    return wrong


def beam_steps(
    kinds: Sequence[CacheKind],
    shape: AttentionShape,
    layers: int,
    context: int,
    *,
    beams: int = 4,
    steps: int = 20,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device,
    budget: Budget | None = None,
) -> list[dict[str, Any]]:
    """Return, for each cache, milliseconds of reorder and append over all layers, and the bytes that it copies.

    The first kind is what ratios refer to.
    """
    found = {kind.name: Beams(kind, shape, layers, beams, context, dtype, device) for kind in kinds}
    owners = {f"{name} {part}": found[name] for name in found for part in PARTS}
    times = interleave(
        {key: getattr(each, key.rpartition(" ")[2]) for key, each in owners.items()},
        steps,
        device,
        budget=budget,
        before=lambda key: owners[key].prepare(),
    )
    middle = {key: spread(samples) for key, samples in times.items()}
    both = {name: sum(middle[f"{name} {part}"].p50 for part in PARTS) for name in found}
    return [
        {
            "cache": name,
            "beams": beams,
            "layers": layers,
            **middle[f"{name} reorder"].row("reorder_ms"),
            **middle[f"{name} append"].row("append_ms"),
            "step_ms_p50": both[name],
            "copied_bytes": each.copied_bytes,
            "kv_bytes": held_bytes(each.cache),
            "ratio_to_dynamic": both[kinds[0].name] / both[name],
        }
        for name, each in found.items()
    ]
