"""One decode step's attention on random tokens: transformers and torch beside pages, which are judged first.

All contenders hold the same tokens in several layers, so many that a step does not find its keys in the processor's
cache, and walk through all of them as a model does. A contender's field "path" says what it does: "cache" appends and
attends, "dense" attends to keys that lie there, "kernel" attends to pages.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kv_hf.backends.base import AttentionCall, PagedKV
from kv_hf.backends.dispatch import paged_attention
from kv_hf.backends.reference.attention import errors_of
from kv_hf.backends.reference.pages import dense_side
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.formats import format_names
from kv_hf.hf.attention import kv_hf_attention
from measure.runner import Call, Contender, Device, Fields, Verdict, in_turns, judge, workload
from measure.shapes import SHAPES, captured, copy_bandwidth

# of the smallest contender: past any processor's cache
COLD_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
ROUNDS = 20


class Step:
    """Random tokens of some layers, and the step that follows them.

    Attributes:
        tensors: per layer (query, keys, values): [batch, num_heads, 1, head_dim], and twice
            [batch, num_kv_heads, context + 1, head_dim], whose last token is the step's.
    """

    def __init__(
        self, shape: str, batch: int, context: int, layers: int, dtype: str, device: Device
    ) -> None:
        self.shape = SHAPES[shape]
        self.layers, self.device, self.dtype = layers, device, dtype
        numbers = torch.Generator(device).manual_seed(0)
        like: Any = {"generator": numbers, "device": device, "dtype": getattr(torch, dtype)}

        dim, kv_heads = self.shape.head_dim, self.shape.num_kv_heads
        stored = (batch, kv_heads, context + 1, dim)
        sizes = ((batch, self.shape.num_heads, 1, dim), stored, stored)
        self.tensors = [[torch.randn(size, **like) for size in sizes] for _ in range(layers)]
        self.scale = dim**-0.5

    def fill(self, cache: Any) -> None:
        """Give a cache all tokens but the last one."""
        for layer, (_, keys, values) in enumerate(self.tensors):
            cache.update(keys[:, :, :-1], values[:, :, :-1], layer)

    def through(self, cache: Any, attention: Callable[..., Any]) -> Tensor:
        """Append the last token and attend, layer by layer, as a model's forward does; return the last layer's result."""
        module: Any = SimpleNamespace(num_key_value_groups=self.shape.group, is_causal=True)
        for layer, (query, keys, values) in enumerate(self.tensors):
            given = cache.update(keys[:, :, -1:], values[:, :, -1:], layer)
            out, _ = attention(module, query, *given, None, scaling=self.scale)
        return out[:, 0]  # [batch, num_heads, head_dim]


def cold_layers(shape: str, batch: int, context: int, device: Device) -> int:
    """Return how many layers keep the smallest format (2 bits, 3 with scales) out of the processor's cache."""
    smallest = 3 / 8 * batch * SHAPES[shape].elements(context)
    return min(32, math.ceil(COLD_BYTES[device.type] / smallest))


def stock(work: Step) -> list[Contender]:
    """Return DynamicCache with transformers' sdpa, and torch's SDPA on keys that lie there, with packed heads too."""
    group = work.shape.group
    _, keys, values = work.tensors[0]
    nbytes = keys.nbytes + values.nbytes
    cache = DynamicCache()
    work.fill(cache)

    def contender(name: str, path: str, run: Call) -> Contender:
        return Contender(name, run, fields={"path": path, "nbytes": nbytes})

    def sdpa() -> None:
        for q, k, v in work.tensors:
            F.scaled_dot_product_attention(q, k, v, scale=work.scale, enable_gqa=group > 1)

    def packed() -> None:
        for q, k, v in work.tensors:
            one_group = q.unflatten(1, (-1, group)).squeeze(3)
            F.scaled_dot_product_attention(one_group, k, v, scale=work.scale)

    return [
        contender("dynamic", "cache", lambda: work.through(cache, sdpa_attention_forward)),
        contender("sdpa", "dense", sdpa),
        contender("sdpa-packed", "dense", packed),
    ]


def paged(work: Step, name: str, **options: Any) -> tuple[Contender, Contender]:
    """Return the whole path through the cache "paged_" + `name`, and the bare kernel on its pages, each with a verdict.

    Pages must hold the very numbers that the reference stores. A CUDA graph of the kernel holds as long as the cache does
    not grow: do not time both then.

    Args:
        options: of the cache. Where steps read a part of it, they are judged by what they chose to read.
    """
    config = work.shape.config(work.layers)
    cache = PagedCache.from_implementation(config, f"paged_{name}", options)
    work.fill(cache)
    layers, rows = cache.paged_layers, cache._group.rows
    kernel: Any = layers[0].store.kernel  # type: ignore[union-attr]
    spec, budget = layers[0].spec, cache._group.reading.budget
    assert spec is not None
    nbytes = spec.page_bytes * sum(len(row.pages) for row in rows)
    nbytes += sum(spec.window_bytes(1, row.exact) for row in rows)
    same = equal_to_reference(work, f"paged_{name}", options, layers[-1].current_kv())
    views: list[PagedKV] = []

    def before() -> None:
        views[:] = [replace(layer.current_kv(), budget=budget) for layer in layers]

    def run() -> Tensor:
        for (query, _, _), kv in zip(work.tensors, views, strict=True):
            out = paged_attention(AttentionCall(query, kv, work.scale), kernel)
        return out[:, :, 0]

    def verdict(contender: str, attend: Callable[[], Tensor]) -> Verdict:
        if not same:
            return Verdict(f"{contender}, stored", float("inf"), 0.0)
        before()
        out = attend()
        before()
        kv, query = views[-1], work.tensors[-1][0]
        if budget is not None and budget.chooses(kv.block_table.shape[1], kv.seen):
            kv = kv.with_pages(*kernel.choose_pages(AttentionCall(query, kv, work.scale)))
        return verdict_of(contender, out, AttentionCall(query, kv, work.scale))

    def contender(path: str, attend: Callable[[], Tensor], **of: Any) -> Contender:
        title = f"{'paged' if path == 'cache' else path}_{name}"
        fields = {"path": path, "kernel": kernel.name, "nbytes": nbytes}
        return Contender(title, attend, verdict=lambda: verdict(title, attend), fields=fields, **of)

    bare = contender("kernel", run, before=before)
    return contender("cache", lambda: work.through(cache, kv_hf_attention)), bare


def equal_to_reference(work: Step, name: str, options: Fields, kv: PagedKV) -> bool:
    """Say whether the last layer holds the numbers that the reference stores of the same tokens."""
    options = {**options, "kernel": "reference"}
    cache = PagedCache.from_implementation(work.shape.config(1), name, options)
    _, keys, values = work.tensors[-1]
    cache.update(keys[:, :, :-1], values[:, :, :-1], 0)
    right = cache.paged_layers[0].current_kv()
    return all(
        torch.equal(dense_side(kv, side), dense_side(right, side)) for side in ("keys", "values")
    )


def verdict_of(name: str, out: Tensor, call: AttentionCall) -> Verdict:
    """Compare a result [rows, num_heads, head_dim] of a call with the reference's in fp64.

    Returns: the error, and how far rounding may move it, where it is nearest to that or furthest beyond.
    """
    errors, allowed = (found.flatten() for found in errors_of(out[:, :, None], call))
    worst = int((errors / allowed).nan_to_num(nan=float("inf")).argmax())
    return Verdict(name, float(errors[worst]), float(allowed[worst]))


def speeds(contenders: list[Contender], work: Step) -> Iterator[Fields]:
    """Judge and time contenders; yield their rows per layer, with the speed at which bytes are read.

    On a GPU what appends nothing is replayed as a CUDA graph, which takes its launches out of the time.
    """
    judge(contenders)
    copy = copy_bandwidth(work.device)
    for one in contenders:
        graph = work.device.type == "cuda" and one.fields["path"] != "cache"
        one.fields |= {"timing": "graph" if graph else "eager", "dtype": work.dtype}
        if graph:
            one.before()
            one.run, one.before = captured(one.run), lambda: None
    for row in in_turns(contenders, ROUNDS, work.device, scale=1 / work.layers):
        speed = row["nbytes"] / (1e6 * row["ms_p50"])
        yield {**row, "layers": work.layers, "gb_per_s": speed, "part_of_copy": speed / copy}


@workload(
    "decode",
    grid=[
        {
            "shape": ["llama-8b", "smollm2"],
            "context": [2048, 8192, 16384, 32768],
            "batch": 1,
            "dtype": "bfloat16",
        }
    ],
    columns="contender kernel timing ms_p50 ms_p20 ms_p80 ratio_to_dynamic gb_per_s part_of_copy",
)
def decode(device: Device, shape: str, context: int, batch: int, dtype: str) -> Iterator[Fields]:
    """Attention of one step, per layer: DynamicCache and torch's own calls beside pages."""
    layers = cold_layers(shape, batch, context, device)
    work = Step(shape, batch, context, layers, dtype, device)
    contenders = stock(work)
    for name in format_names("keys", "values"):
        contenders += paged(work, name)[:1]
    yield from speeds(contenders, work)


@workload(
    "reading/attention",
    grid=[
        {
            "context": [8192, 16384, 32768],
            "format": ["int4", "int3", "int8"],
            "read_tokens": 2048,
        }
    ],
    kind="attention",
    file="reading_speed",
    columns="contender ms_min thread_ms_min ratio_to_everything",
)
def reading(device: Device, context: int, format: str, read_tokens: int) -> Iterator[Fields]:
    """Attention of a step in all layers of SmolLM2-135M: everything read, and a part of the tokens."""
    work = Step("smollm2", 1, context, SHAPES["smollm2"].layers, "bfloat16", device)
    _, everything = paged(work, format)
    _, part = paged(work, format, read=read_tokens)
    everything.name, part.name = "everything", "part"
    facts = {"model": "smollm2-135m", "cache": f"paged_{format}", "dtype": "bfloat16"}
    for row in in_turns([everything, part], 12, device):
        yield {**facts, **row, "layers": work.layers}
