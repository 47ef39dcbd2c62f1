"""One decode step's attention on random tokens: transformers and torch beside pages, which are judged first.

All contenders hold the same tokens in several layers, so many that a step does not find its keys in the processor's
cache, and walk through all of them as a model does. A contender's field "path" says what it does: "cache" appends and
attends, "dense" attends to keys that lie there, "kernel" attends to pages.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu.library import ISA_NAMES, isa
from kv_hf.backends.dispatch import paged_attention
from kv_hf.backends.error_bound import Rounding, Tokens, attend_exactly, without_offsets
from kv_hf.backends.inputs import PagedKV
from kv_hf.backends.reference.attention import decode_tile
from kv_hf.backends.registry import chooser
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.formats import FORMAT_NAMES
from kv_hf.hf.attention import kv_hf_attention
from kv_hf.spec import SideSpec
from measure.runner import Contender, Fields, Verdict, in_turns, judge, workload
from measure.shapes import SHAPES, captured, copy_bandwidth

COLD_BYTES = {
    "cpu": 64 << 20,
    "cuda": 256 << 20,
}  # of the smallest contender: past any processor's cache
ROUNDS = 20


class Step:
    """Random tokens of some layers, and the step that follows them.

    Attributes:
        keys, values: per layer [batch, num_kv_heads, context + 1, head_dim]; the last token is the step's.
        queries: per layer [batch, num_heads, 1, head_dim].
    """

    def __init__(
        self, shape: str, batch: int, context: int, layers: int, dtype: str, device: torch.device
    ) -> None:
        self.shape, self.layers, self.device = SHAPES[shape], layers, device
        numbers = torch.Generator(device).manual_seed(0)
        kind: torch.dtype = getattr(torch, dtype)

        def random(heads: int, tokens: int) -> list[torch.Tensor]:
            size = (batch, heads, tokens, self.shape.head_dim)
            return [
                torch.randn(size, generator=numbers, device=device, dtype=kind)
                for _ in range(layers)
            ]

        self.keys = random(self.shape.num_kv_heads, context + 1)
        self.values = random(self.shape.num_kv_heads, context + 1)
        self.queries = random(self.shape.num_heads, 1)
        self.scale = self.shape.head_dim**-0.5
        self.dense_bytes = self.keys[0].nbytes + self.values[0].nbytes


def cold_layers(shape: str, batch: int, context: int, device: torch.device) -> int:
    """Return how many layers keep the smallest format (2 bits, 3 with scales) out of the processor's cache."""
    smallest = max(1, 3 * SHAPES[shape].elements(context) * batch // 8)
    return max(1, min(32, -(-COLD_BYTES[device.type] // smallest)))


def stock(work: Step) -> list[Contender]:
    """Return DynamicCache with transformers' sdpa, and torch's SDPA on keys that lie there, with packed heads too."""
    heads, group = work.shape.num_kv_heads, work.shape.group

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, scale=work.scale, enable_gqa=group > 1)

    def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q.view(len(q), heads, group, -1)
        return F.scaled_dot_product_attention(q, k, v, scale=work.scale)

    def dense(name: str, attend: Callable[..., torch.Tensor]) -> Contender:
        def run() -> None:
            for of in zip(work.queries, work.keys, work.values, strict=True):
                attend(*of)

        return Contender(name, run, fields={"path": "dense", "nbytes": work.dense_bytes})

    fields = {"path": "cache", "nbytes": work.dense_bytes}
    run = through_cache(work, DynamicCache(), sdpa_attention_forward)
    dynamic = Contender("dynamic", run, fields=fields)
    return [dynamic, dense("sdpa", sdpa), dense("sdpa-packed", packed)]


def through_cache(
    work: Step, cache: Any, attention: Callable[..., Any]
) -> Callable[[], torch.Tensor]:
    """Fill a cache; return what appends the step's token and attends, layer by layer, as a model's forward does."""
    module: Any = SimpleNamespace(num_key_value_groups=work.shape.group, is_causal=True)
    news = [(k[:, :, -1:], v[:, :, -1:]) for k, v in zip(work.keys, work.values, strict=True)]
    for layer in range(work.layers):
        cache.update(work.keys[layer][:, :, :-1], work.values[layer][:, :, :-1], layer)

    def run() -> torch.Tensor:
        for layer, query in enumerate(work.queries):
            keys, values = cache.update(*news[layer], layer)
            out, _ = attention(module, query, keys, values, None, scaling=work.scale)
        return out[:, 0]  # of the last layer

    return run


def paged(work: Step, name: str, **options: Any) -> tuple[Contender, Contender]:
    """Return the whole path through the cache "paged_" + `name`, and the bare kernel on its pages, each with a verdict.

    Args:
        options: of the cache. Where steps read a part of it, they are judged by what they chose to read.
    """
    config = work.shape.config(work.layers)
    cache = PagedCache.from_implementation(config, f"paged_{name}", options)
    step = through_cache(work, cache, kv_hf_attention)
    kernel: Any = cache.paged_layers[0].store.kernel  # type: ignore[union-attr]
    spec, rows = cache.paged_layers[0].spec, cache.group.rows
    assert spec is not None
    nbytes = spec.page_bytes * sum(len(row.pages) for row in rows)
    nbytes += sum(spec.window_bytes(1, row.exact) for row in rows)
    views: list[PagedKV] = []
    # own dicts: a CUDA graph reads these very tensors, also after the cache has grown into larger ones
    kept = dict if work.device.type == "cuda" else lambda pages: pages

    def before() -> None:
        views[:] = [
            replace(
                kv,
                key_pages=kept(kv.key_pages),
                value_pages=kept(kv.value_pages),
                budget=cache.group.reading.budget,
            )
            for kv in (layer.current_kv() for layer in cache.paged_layers)
        ]

    def run() -> torch.Tensor:
        for query, kv in zip(work.queries, views, strict=True):
            out = paged_attention(AttentionCall(query, kv, work.scale), kernel)
        return out[:, :, 0]

    def judged(contender: str, attend: Callable[[], torch.Tensor]) -> Callable[[], Verdict]:
        def verdict() -> Verdict:
            before()
            out = attend()
            before()
            kv, query = views[-1], work.queries[-1]
            if kv.budget is not None and kv.budget.chooses(kv.block_table.shape[1], kv.seen):
                kv = kv.with_pages(*chooser(kernel)(AttentionCall(query, kv, work.scale)))
            elif not equal_to_reference(work, f"paged_{name}", options, kv):
                return Verdict(contender, float("inf"), 0.0)
            return verdict_of(contender, out, query, kv, work.scale, kernel.name)

        return verdict

    def contender(name: str, path: str, run: Callable[[], torch.Tensor], **of: Any) -> Contender:
        fields = {"path": path, "kernel": kernel.name, "nbytes": nbytes}
        return Contender(name, run, verdict=judged(name, run), fields=fields, **of)

    bare = contender(f"kernel_{name}", "kernel", run, before=before)
    return contender(f"paged_{name}", "cache", step), bare


def equal_to_reference(work: Step, name: str, options: Fields, kv: PagedKV) -> bool:
    """Say whether the last layer's pages hold the very numbers that the reference stores of the same tokens."""
    options = {**options, "kernel": "reference"}
    cache = PagedCache.from_implementation(work.shape.config(1), name, options)
    held = int(kv.num_pages[0]) * kv.page_size + int(kv.exact_lens[0])
    context = work.keys[-1].shape[2] - 1
    keys, values = work.keys[-1], work.values[-1]
    cache.update(keys[:, :, :-1], values[:, :, :-1], 0)
    for _ in range(held - context):  # each step so far has stored the same token
        cache.update(keys[:, :, -1:], values[:, :, -1:], 0)
    right = cache.paged_layers[0].current_kv()
    return all(
        torch.equal(ours.numbers, theirs.numbers)
        for row in range(kv.rows)
        for ours, theirs in zip(stored(kv, row), stored(right, row), strict=True)
    )


def verdict_of(
    name: str, out: torch.Tensor, query: torch.Tensor, kv: PagedKV, scale: float, kernel: str
) -> Verdict:
    """Compare a result [rows, num_heads, head_dim] with a softmax in fp64 over the stored tokens.

    Returns: the error, and how far rounding may move it (backends/error_bound.py), where it is nearest to that or
        furthest beyond.
    """
    integers = kernel == "c" and ISA_NAMES[isa()] == "AVX-512 VNNI"
    rounding = Rounding.of(kernel, query.dtype, integers)
    errors, bounds = [], []
    for row in range(kv.rows):
        right, bound = attend_exactly(query[row], *stored(kv, row), scale, rounding)
        errors.append((out[row].double() - right[:, 0]).abs().flatten())
        bounds.append(bound.flatten())
    error, bound = torch.cat(errors), torch.cat(bounds)
    at = int((error / bound).nan_to_num(nan=float("inf")).argmax())
    return Verdict(name, float(error[at]), float(bound[at]))


def stored(kv: PagedKV, row: int) -> tuple[Tokens, Tokens]:
    """Return a row's keys and values in order, sinks, pages, tail, as their codes say, in fp32."""
    ids = kv.block_table[row : row + 1, : int(kv.num_pages[row])].long()
    sinks, exact = kv.sink_tokens, int(kv.exact_lens[row])
    found = []
    for window, fields, side in (
        (kv.residual_keys, kv.key_pages, kv.spec.keys),
        (kv.residual_values, kv.value_pages, kv.spec.values),
    ):
        own = window[row, :, :exact].float()

        def in_order(own: torch.Tensor, fields: Any, side: SideSpec) -> torch.Tensor:
            pages = decode_tile(fields, side, ids, torch.float32)[0]
            return torch.cat([own[:, :sinks], pages, own[:, sinks:]], 1)

        codes = in_order(own, *without_offsets(fields, side))
        found.append(Tokens(in_order(own, fields, side), codes, side.scheme.rotated))
    return found[0], found[1]


def speeds(contenders: list[Contender], work: Step, rounds: int = ROUNDS) -> Iterator[Fields]:
    """Judge and time contenders; yield their rows per layer, with the speed at which bytes are read.

    On a GPU what appends nothing is replayed as a CUDA graph, which takes its launches out of the time.
    """
    judge(contenders)
    copy = copy_bandwidth(work.device)
    dtype = str(work.keys[0].dtype).removeprefix("torch.")
    for one in contenders:
        graph = work.device.type == "cuda" and one.fields["path"] != "cache"
        one.fields["timing"] = "graph" if graph else "eager"
        if graph:
            one.before()
            one.run, one.before = captured(one.run), lambda: None
    for row in in_turns(contenders, rounds, work.device, scale=1 / work.layers):
        speed = row["nbytes"] / (1e6 * row["ms_p50"])
        yield {
            **row,
            "dtype": dtype,
            "layers": work.layers,
            "gb_per_s": speed,
            "part_of_copy": speed / copy,
        }


@workload(
    "decode",
    grid=[
        {
            "shape": ["llama-8b", "smollm2"],
            "context": [2048, 8192, 16384, 32768],
            "batch": [1],
            "dtype": ["bfloat16"],
        }
    ],
    columns="contender kernel timing ms_p50 ms_p20 ms_p80 ratio_to_dynamic gb_per_s part_of_copy",
)
def decode(
    device: torch.device, shape: str, context: int, batch: int, dtype: str
) -> Iterator[Fields]:
    """Attention of one step, per layer: DynamicCache and torch's own calls beside pages and their bare kernels."""
    layers = cold_layers(shape, batch, context, device)
    work = Step(shape, batch, context, layers, dtype, device)
    contenders = stock(work)
    for name in FORMAT_NAMES:
        contenders += paged(work, name)
    yield from speeds(contenders, work)


@workload(
    "reading/attention",
    grid=[
        {
            "context": [8192, 16384, 32768],
            "format": ["int4", "k5v3", "int8", "exact"],
            "read_tokens": [2048],
        }
    ],
    kind="attention",
    file="reading_speed",
    columns="contender ms_min thread_ms_min ratio_to_everything",
)
def reading(device: torch.device, context: int, format: str, read_tokens: int) -> Iterator[Fields]:
    """Attention of a step in all layers of SmolLM2-135M: everything read, and a part of the tokens."""
    work = Step("smollm2", 1, context, SHAPES["smollm2"].layers, "bfloat16", device)
    everything, part = (paged(work, format, **of)[1] for of in ({}, {"read_tokens": read_tokens}))
    everything.name, part.name = "everything", "part"
    facts = {"model": "smollm2-135m", "cache": f"paged_{format}", "dtype": "bfloat16"}
    for row in in_turns([everything, part], 12, device):
        yield {**facts, **row, "layers": work.layers}
