"""Contenders of one decode step's attention: what they read, how they run, whether they are right.

A contender holds the same random tokens in `layers` layers, as many as it takes that a step does not find its
keys in a processor cache, and walks through all of them as a model does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from kv_hf.evaluation.shapes import AttentionShape
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kv_hf.backends.base import AttentionCall, Backend
from kv_hf.backends.cpu.decode import paged_attention as c_attention
from kv_hf.backends.cpu.write import write_pair
from kv_hf.backends.dispatch import paged_attention
from kv_hf.backends.inputs import PagedKV
from kv_hf.backends.registry import chooser
from kv_hf.bridge.lazy_kv import view_behind
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.hf.attention import kv_hf_attention
from measure.speed.oracle import Verdict, judge, judge_pages, worst

# bytes of the smallest contender over all layers: past the caches of the processor
COLD_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
MAX_LAYERS = 32


@dataclass
class Workload:
    """Random tokens of `layers` layers and the step that follows them.

    Attributes:
        keys, values: per layer [batch, num_kv_heads, context + 1, head_dim]; the last token is the step's.
        queries: per layer [batch, num_heads, 1, head_dim].
    """

    shape: AttentionShape
    batch: int
    context: int
    layers: int
    dtype: torch.dtype
    device: torch.device
    seed: int = 0
    keys: list[torch.Tensor] = field(init=False)
    values: list[torch.Tensor] = field(init=False)
    queries: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        numbers = torch.Generator(self.device).manual_seed(self.seed)

        def random(heads: int, tokens: int) -> list[torch.Tensor]:
            size = (self.batch, heads, tokens, self.shape.head_dim)
            return [
                torch.randn(size, generator=numbers, device=self.device, dtype=self.dtype)
                for _ in range(self.layers)
            ]

        self.keys = random(self.shape.num_kv_heads, self.context + 1)
        self.values = random(self.shape.num_kv_heads, self.context + 1)
        self.queries = random(self.shape.num_heads, 1)

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.shape.head_dim**-0.5)


def layers_for(shape: AttentionShape, batch: int, context: int, device: torch.device) -> int:
    """Return how many layers keep the smallest format (2 bits, 3 with scales) out of the processor's cache."""
    smallest = max(1, 3 * shape.elements(context) * batch // 8)
    return max(1, min(MAX_LAYERS, -(-COLD_BYTES.get(device.type, COLD_BYTES["cpu"]) // smallest)))


@dataclass
class Contender:
    """One way to attend.

    Attributes:
        kind: "dense" (keys lie there, nothing is appended), "cache" (appending included) or "kernel".
        run: one step through all layers; what is timed.
        prepare: called ahead of each step, outside of the time.
        verdict: runs a step and judges its results.
        nbytes: bytes of one layer that a step reads at least once.
        kernel: name of kv_hf's kernel, or None.
        cache: the pages that it reads, or None.
    """

    name: str
    kind: str
    run: Callable[[], Any]
    verdict: Callable[[], Verdict]
    nbytes: int
    kernel: str | None = None
    prepare: Callable[[], Any] = lambda: None
    cache: PagedCache | None = None


def _judged(work: Workload) -> list[int]:
    return sorted({0, work.layers - 1})


def dense(work: Workload, name: str, attend: Callable[..., torch.Tensor]) -> Contender:
    """Attend by `attend(query, keys, values)` to keys that already hold the new token."""

    def run() -> list[torch.Tensor]:
        return [attend(*of) for of in zip(work.queries, work.keys, work.values, strict=True)]

    def verdict() -> Verdict:
        outs = run()
        return worst(
            [
                judge(
                    outs[i][row].flatten(0, 1),
                    work.queries[i][row, :, 0],
                    work.keys[i][row],
                    work.values[i][row],
                    work.scale,
                )
                for i in _judged(work)
                for row in range(work.batch)
            ]
        )

    nbytes = work.batch * work.shape.dense_bytes(work.context + 1, work.dtype)
    return Contender(name, "dense", run, verdict, nbytes)


def stock(work: Workload) -> list[Contender]:
    """Return torch's own calls on keys that lie there: SDPA, SDPA with packed heads, and flash on a GPU."""
    heads, group, scale = work.shape.num_kv_heads, work.shape.group, work.scale

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=group > 1)

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q.view(len(q), heads, group, -1), k, v, scale=scale)

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa(q, k, v)

    def packed_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return packed(q, k, v)

    found = [dense(work, "sdpa", sdpa), dense(work, "sdpa-packed", packed)]
    if work.device.type == "cuda":
        found += [dense(work, "flash", flash), dense(work, "flash-packed", packed_flash)]
    return found


def dynamic(work: Workload) -> Contender:
    """What transformers does without kv_hf: DynamicCache.update (torch.cat) and its sdpa attention."""
    cache = DynamicCache()
    return _cache_contender(work, "dynamic", cache, sdpa_attention_forward)


def paged(
    work: Workload, name: str, kernel: str = "auto", page_size: int = 64, **options: Any
) -> tuple[Contender, Contender]:
    """Return the whole path through the cache "paged_" + `name`, and the bare kernel on the same pages.

    Args:
        options: of the cache; where steps read a part of it, the bare kernel is judged by what it chose to read.
    """
    config = work.shape.config(work.layers)
    options |= {"kernel": kernel, "page_size": page_size}
    cache = PagedCache.from_implementation(config, f"paged_{name}", options)
    whole = _cache_contender(work, f"paged_{name}", cache, kv_hf_attention)
    whole.kernel = cache.paged_layers[0].store.kernel.name  # type: ignore[union-attr]
    whole.nbytes = _read_bytes(cache)
    whole.cache = cache
    views: list[Any] = []

    def prepare() -> None:
        # own dicts: a CUDA graph reads these very tensors, also after the cache has grown into larger ones
        views[:] = [
            replace(
                kv,
                key_pages=pages_of(kv.key_pages, work.device),
                value_pages=pages_of(kv.value_pages, work.device),
                budget=cache.group.reading.budget,
            )
            for kv in (layer.current_kv() for layer in cache.paged_layers)
        ]

    def run() -> list[torch.Tensor]:
        return [
            paged_attention(AttentionCall(query, kv, work.scale), layer.store.kernel)  # type: ignore[union-attr]
            for query, kv, layer in zip(work.queries, views, cache.paged_layers, strict=True)
        ]

    def verdict() -> Verdict:
        prepare()
        read = [
            _as_read(AttentionCall(query, kv, work.scale), layer.store.kernel)  # type: ignore[union-attr]
            for query, kv, layer in zip(work.queries, views, cache.paged_layers, strict=True)
        ]
        return _verdict_of(work, run(), read)

    bare = Contender(f"kernel_{name}", "kernel", run, verdict, whole.nbytes, whole.kernel, prepare)
    return whole, bare


def pages_of(fields: Any, device: torch.device) -> Any:
    """Return the fields of pages [pages, ..] as a kernel gets them: on a GPU a copy of the mapping, which no growth changes."""
    return fields if device.type == "cpu" else dict(fields)


def _as_read(call: AttentionCall, kernel: Backend) -> PagedKV:
    """Return the pages that a step reads."""
    kv = call.kv
    if kv.budget is None or not kv.budget.chooses(kv.block_table.shape[1], kv.seen):
        return kv
    return kv.with_pages(*chooser(kernel)(call))


def _verdict_of(work: Workload, outs: list[torch.Tensor], views: list[Any]) -> Verdict:
    """Judge the results of all layers on these pages."""
    return worst(
        [
            judge_pages(outs[i][:, :, 0], work.queries[i][:, :, 0], views[i], work.scale)
            for i in _judged(work)
        ]
    )


def kernel_calls(work: Workload, whole: Contender) -> Contender:
    """Return the C kernel's two calls of each layer, the newest token again and attention.

    Args:
        whole: the path through a PagedCache that these calls are a part of; its pages are read.
    """
    cache = whole.cache
    assert cache is not None
    views: list[Any] = []
    newest: list[torch.Tensor] = []
    skips, damaged = torch.zeros(work.batch, dtype=torch.int32), torch.zeros((), dtype=torch.uint8)
    news = [(k[:, :, -1:], v[:, :, -1:]) for k, v in zip(work.keys, work.values, strict=True)]

    def prepare() -> None:
        layers = cache.paged_layers
        before = [view.launches for view in views] or [{} for _ in layers]
        views[:] = [
            replace(layer.current_kv(), launches=kept)
            for layer, kept in zip(layers, before, strict=True)
        ]
        newest[:] = [view.exact_lens - 1 for view in views]

    def run() -> list[torch.Tensor]:
        outs = []
        for query, new, kv, starts in zip(work.queries, news, views, newest, strict=True):
            windows, fields = (
                (kv.residual_keys, kv.residual_values),
                (kv.key_pages, kv.value_pages),
            )
            write_pair(windows, new, starts, skips, None, fields, kv.spec, damaged, kv.launches)
            outs.append(c_attention(AttentionCall(query, kv, work.scale)))
        return outs

    def verdict() -> Verdict:
        prepare()
        return _verdict_of(work, run(), views)

    name = whole.name.replace("paged", "calls")
    return Contender(name, "kernel", run, verdict, whole.nbytes, "c", prepare)


def _cache_contender(
    work: Workload, name: str, cache: Any, attention: Callable[..., Any]
) -> Contender:
    """Append the step's token to a filled cache and attend, layer by layer, as a model's forward does."""
    module: Any = SimpleNamespace(num_key_value_groups=work.shape.group, is_causal=True)
    news = [(k[:, :, -1:], v[:, :, -1:]) for k, v in zip(work.keys, work.values, strict=True)]
    for index in range(work.layers):
        cache.update(work.keys[index][:, :, :-1], work.values[index][:, :, :-1], index)

    def step(index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        keys, values = cache.update(*news[index], index)
        query = work.queries[index]
        out, _ = attention(module, query, keys, values, None, scaling=work.scale)
        return out, keys, values

    def run() -> None:
        for index in range(work.layers):
            step(index)

    def verdict() -> Verdict:
        verdicts = []
        for index in range(work.layers):
            out, keys, values = step(index)  # [batch, 1, num_heads, head_dim]
            if index not in _judged(work):
                continue
            query, view = work.queries[index][:, :, 0], view_behind(keys, values)
            if view is not None:
                verdicts.append(judge_pages(out[:, 0], query, view.kv, work.scale))
            else:
                verdicts += [
                    judge(out[row, 0], query[row], keys[row], values[row], work.scale)
                    for row in range(work.batch)
                ]
        return worst(verdicts)

    nbytes = work.batch * work.shape.dense_bytes(work.context + 1, work.dtype)
    return Contender(name, "cache", run, verdict, nbytes)


def _read_bytes(cache: PagedCache) -> int:
    """Bytes of one layer that a step reads: its sealed pages, and the exact tokens of its windows."""
    spec = cache.paged_layers[0].spec
    assert spec is not None
    rows = cache.group.rows
    return spec.page_bytes * sum(len(row.pages) for row in rows) + sum(
        spec.window_bytes(1, row.exact) for row in rows
    )
