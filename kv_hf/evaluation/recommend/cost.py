"""Bytes of each layer and side in each format, and budgets, counted as the allocator counts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from ...cache.paged_cache import PagedCache
from ...config import CacheConfig
from ...formats import cache_names, is_cache_name, key_scheme, value_scheme
from ...spec import (
    MemoryReport,
    PageSpec,
    page_capacity,
    predict_memory,
    sealed_pages,
)

BUDGETS = ("bits", "bytes_per_token", "bytes")
ROUNDING = 0.005  # a budget in bits holds what has that many bits to two decimals: int8 has 8.252


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a paged layer; `window` is that of a sliding one, None where all tokens are held."""

    layer: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None


def layer_shapes(cache: PagedCache) -> list[LayerShape]:
    """Return the shapes of the paged layers of a cache that holds tokens."""
    found = []
    for layer in cache.paged_layers:
        assert layer.spec is not None
        keys, values = layer.spec.sides
        found.append(
            LayerShape(
                layer.layer_idx, keys.num_kv_heads, keys.head_dim, values.head_dim, layer.window
            )
        )
    return found


@dataclass(frozen=True)
class Serving:
    """The load that bytes are counted for: `batch` rows of `context` tokens in a model of `dtype`, right behind a prefill."""

    context: int = 4096
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def tokens_held(self, shape: LayerShape, options: CacheConfig) -> int:
        """Return the tokens that a layer holds of each row: sliding ones give pages back that nobody can see."""
        if shape.window is None:
            return self.context
        sizes = self._sizes(options)
        unseen = max(0, self.context - shape.window + 1 - options.sink_tokens) // options.page_size
        return self.context - min(unseen, sealed_pages(self.context, **sizes)) * options.page_size

    def pages(self, shape: LayerShape, options: CacheConfig) -> int:
        """Return the pages of a layer that storage has room for."""
        held = self.tokens_held(shape, options)
        return page_capacity(self.batch * sealed_pages(held, **self._sizes(options)))

    @staticmethod
    def _sizes(options: CacheConfig) -> dict[str, int]:
        return {
            "page_size": options.page_size,
            "sink_tokens": options.sink_tokens,
            "recent_tokens": options.recent_tokens,
        }


def page_spec(shape: LayerShape, keys: str, values: str, options: CacheConfig, dtype: torch.dtype) -> PageSpec:  # fmt: skip
    """Return what the pages of a layer are like in two formats."""
    return PageSpec.build(
        key_scheme(keys, options.key_group_size),
        value_scheme(values, options.value_group_size),
        num_kv_heads=shape.num_kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        page_size=options.page_size,
        dtype=dtype,
    )


def side_bytes(
    shape: LayerShape, side: str, name: str, options: CacheConfig, serving: Serving
) -> int:
    """Return the bytes of all pages of one layer and side in format `name`, scales included.

    Raises: CacheOptionError where the layer cannot have the format.
    """
    names = {"keys": "exact", "values": "exact", side: name}
    spec = getattr(page_spec(shape, **names, options=options, dtype=serving.dtype), side)
    return serving.pages(shape, options) * int(spec.payload_bytes + spec.scale_bytes)


def stored_numbers(shapes: Sequence[LayerShape], options: CacheConfig, serving: Serving) -> int:
    """Return how many numbers the pages of all layers and sides hold."""
    return sum(
        serving.pages(s, options) * options.page_size * s.num_kv_heads * (s.key_dim + s.value_dim)
        for s in shapes
    )


def predict_layers(
    shapes: Sequence[LayerShape], options: CacheConfig, num_layers: int, serving: Serving
) -> MemoryReport:
    """Predict what PagedCache.memory() says right behind a prefill, without a tensor.

    Args:
        shapes: of the paged layers.
        options: formats and sizes.
        num_layers: of the model, those that are not paged included.
    """
    reports = []
    for window in dict.fromkeys(shape.window for shape in shapes):
        group = [shape for shape in shapes if shape.window == window]
        specs = []
        for shape in group:
            keys, values = (scheme.name for scheme in options.schemes(shape.layer, num_layers))
            specs.append(page_spec(shape, keys, values, options, serving.dtype))
        rows = [serving.tokens_held(group[0], options)] * serving.batch
        reports.append(
            predict_memory(
                specs,
                rows,
                sink_tokens=options.sink_tokens,
                recent_tokens=options.recent_tokens,
            )
        )
    total = {
        one.name: sum(getattr(report, one.name) for report in reports)
        for one in fields(MemoryReport)
    }
    return MemoryReport(**{**total, "tokens": serving.context * serving.batch})


@dataclass(frozen=True)
class Budget:
    """The memory that may be used: `amount` of `kind`, one of BUDGETS; or as much as a uniform cache (`like`)."""

    kind: str
    amount: float = 0.0
    like: str = ""

    @classmethod
    def parse(cls, given: object) -> "Budget":
        """Read a budget: a number of bits, "bits=4.5", "bytes_per_token=9000", "bytes=2e9" or "paged_int4".

        Raises: ValueError naming the budget.
        """
        if isinstance(given, Budget):
            return given
        if isinstance(given, (int, float)) and not isinstance(given, bool):
            return cls("bits", cls._amount(given, given))
        if isinstance(given, str):
            if is_cache_name(given):
                return cls("like", like=given)
            named = re.fullmatch(rf"({'|'.join(BUDGETS)})=(.+)", given)
            if named:
                return cls(named[1], cls._amount(named[2], given))
        raise ValueError(
            "budget must be a number of bits, 'bits=..', 'bytes_per_token=..', 'bytes=..' or one of "
            f"{', '.join(cache_names())}, got {given!r}"
        )

    @staticmethod
    def _amount(text: float | str, given: object) -> float:
        try:
            amount = float(text)
        except ValueError:
            amount = float("nan")
        if not 0 < amount < float("inf"):
            raise ValueError(f"budget must be a positive number, got {given!r}")
        return amount

    def __str__(self) -> str:
        return self.like or f"{self.kind}={self.amount:g}"

    def page_bytes(
        self,
        shapes: Sequence[LayerShape],
        options: CacheConfig,
        num_layers: int,
        serving: Serving,
    ) -> int:
        """Return the bytes that all pages together may take."""
        if self.kind == "bits":
            bits = self.amount + ROUNDING
            return int(bits * stored_numbers(shapes, options, serving) / 8)
        if self.kind == "like":
            like = CacheConfig.from_options(self.like, None)
            return sum(
                side_bytes(shape, side, scheme.name, options, serving)
                for shape in shapes
                for side, scheme in zip(
                    ("keys", "values"), like.schemes(shape.layer, num_layers), strict=True
                )
            )
        outside = predict_layers(shapes, options, num_layers, serving)
        allowed = self.amount * (
            serving.context * serving.batch if self.kind == "bytes_per_token" else 1
        )
        return int(allowed + 1e-6) - outside.tail - outside.tables


def choices_of(
    shapes: Sequence[LayerShape],
    kl: Mapping[tuple[int, str, str], float],
    formats: Mapping[str, Sequence[str]],
    options: CacheConfig,
    serving: Serving,
) -> list[tuple[tuple[int, str], list[tuple[str, int, float]]]]:
    """Return, for each layer and side, (format, bytes, KL) of each format, the largest first.

    `kl` maps (layer, side, format) to the KL of that alone, `formats` a side to its formats. More bytes are never counted as worse: where noise says
    so, the smaller format gets the larger one's KL.
    """
    made = []
    for shape in shapes:
        for side in ("keys", "values"):
            names = formats[side]
            costs = {name: side_bytes(shape, side, name, options, serving) for name in names}
            row, worst = [], 0.0
            for name in sorted(names, key=lambda one: (-costs[one], kl[shape.layer, side, one])):
                worst = max(worst, kl[shape.layer, side, name])
                row.append((name, costs[name], worst))
            made.append(((shape.layer, side), row))
    return made
