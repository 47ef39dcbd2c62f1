"""Whole decode steps of models, and what caches do between them: every cache side by side, judged by its logits."""

import ctypes
import functools
import gc
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from kv_hf.cache.paged_cache import PagedCache
from kv_hf.cache_names import all_cache_names
from kv_hf.evaluation.caches import CacheKind, cache_kind, held_bytes, why_not
from kv_hf.evaluation.memory import Meter, kernel_of, measure_footprint, random_prompt
from kv_hf.formats import ATTENTION_NAME, cache_names
from measure.decoding import Decoding
from measure.runner import Contender, Fields, Verdict, check, in_turns, workload
from measure.shapes import RANDOM_MODELS, SHAPES, AttentionShape, folder_of, load, random_model

# largest difference of two logits, as a part of the largest. fp32: sums in another order, and on a GPU products of fewer
# digits; 16 bits: what the roundings of some 30 layers come to
ALLOWED = {("cpu", 4): 1e-4, ("cuda", 4): 1e-2, ("cpu", 2): 0.1, ("cuda", 2): 0.1}
# with 64-token pages and 4 sinks no page becomes full between these, where rounding noise alone may flip a code
PROMPT, STEPS = 220, 6
ROUNDS = 24
LATENT_CACHES = ("paged_exact", "paged_fp8", "paged_int8", "paged_int4")
SHARES = (0.25, 0.5)  # of the pages, that `offload` leaves on the device
M_MMAP_THRESHOLD = -3  # of glibc's mallopt


# -- the gate


def logit_verdicts(model: Any) -> Iterator[Verdict]:
    """Decode the same tokens with every paged cache and compare the logits.

    Exact pages are compared with DynamicCache, every other format with the same pages read by the reference kernel.
    Greedy tokens must be equal too, unless the two best logits are closer than twice the difference.
    """
    prompt = random_prompt(model.config.vocab_size, 1, PROMPT, model.device)

    def decode(
        name: str, kernel: str, tokens: Sequence[torch.Tensor] = ()
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        decoding = Decoding(model, cache_kind(name, kernel), prompt)
        fed, logits = [], []
        for step in range(STEPS):
            decoding.token = tokens[step] if tokens else decoding.token
            fed.append(decoding.token)
            logits.append(decoding.step()[0].double())
        return fed, torch.stack(logits)  # [steps, vocab]

    tokens, exact = decode("dynamic", "auto")
    latent = hasattr(model.config, "kv_lora_rank")
    for name in LATENT_CACHES if latent else cache_names():
        right = exact if name == "paged_exact" else decode(name, "reference", tokens)[1]
        found = decode(name, "auto", tokens)[1]
        apart = (found - right).abs().amax(-1)
        best = right.topk(2).values
        clear = best[:, 0] - best[:, 1] > 2 * apart
        other = bool((clear & (found.argmax(-1) != right.argmax(-1))).any())
        error = float("inf") if other else float(apart.max() / right.abs().max())
        yield Verdict(name, error, ALLOWED[model.device.type, model.dtype.itemsize])


@functools.lru_cache(maxsize=1)
def _judged(model: str, device: torch.device) -> list[Verdict]:
    """Judge a model once in fp32, a random one with two layers, and once as it is timed."""
    if model in RANDOM_MODELS:
        few = {"num_hidden_layers": 2, "vocab_size": 1024}
        found = list(logit_verdicts(random_model(model, device, torch.float32, **few)))
    else:
        found = list(logit_verdicts(load(model, device, "float32")))
    return found + list(logit_verdicts(load(model, device, "bfloat16")))


def right_logits(device: torch.device, model: str, **others: Any) -> list[Verdict]:
    """Return the verdicts on a model's logits with every paged cache."""
    return _judged(model, device)


# -- whole steps


def filled(device: torch.device, model: str, context: int, kind: CacheKind) -> Decoding:
    """Return a model with a cache of random keys and values: what a step costs does not depend on the numbers."""
    loaded = load(model, device, "bfloat16")
    prompt = random_prompt(loaded.config.vocab_size, 1, context, device)
    return Decoding(loaded, kind, prompt, fill="random")


def finite(decoding: Decoding) -> Verdict:
    """Take a step; logits that are not finite are wrong."""
    decoding.before()
    wrong = not torch.isfinite(decoding.step()).all()
    return Verdict(decoding.kind.name, float(wrong), 0.0)


def weights(model: str) -> str:
    """Return "random" or "real"."""
    return "random" if model in RANDOM_MODELS else "real"


def timed_steps(
    found: Sequence[Decoding], model: str, label: str = "cache", ms: str = "step_ms"
) -> list[Fields]:
    """Return the row of each cache, whose steps took turns; ratios are to the first."""
    contenders = [
        Contender(one.kind.name, one.step, one.before, functools.partial(finite, one))
        for one in found
    ]
    facts = {"weights": weights(model), "batch": 1, "dtype": "bfloat16", "fill": "random"}
    rows = in_turns(contenders, ROUNDS, found[0].device, label=label, ms=ms)
    return [
        {**row, **facts, "kernel": kernel_of(one.cache), "kv_bytes": one.kv_bytes}
        for one, row in zip(found, rows, strict=True)
    ]


COLUMNS = "kernel step_ms_p50 step_ms_p20 step_ms_p80 ratio_to_dynamic kv_bytes bytes_per_token"


@workload(
    "generate",
    grid=[{"model": ["smollm2-135m"], "context": [512, 2048, 8192]}],
    gate=right_logits,
    columns=f"cache {COLUMNS}",
)
def generate(device: torch.device, model: str, context: int) -> Iterator[Fields]:
    """A decode step of a model with every cache of transformers and ours, or with all that hold latents."""
    latent = hasattr(load(model, device, "bfloat16").config, "kv_lora_rank")
    names = ("dynamic", *LATENT_CACHES) if latent else all_cache_names()
    kinds = [cache_kind(name) for name in names if why_not(name, device) is None]
    found = [filled(device, model, context, kind) for kind in kinds]
    for one in found:
        one.note_peak()
    for one, row in zip(found, timed_steps(found, model), strict=True):
        per_token = one.kv_bytes / one.tokens
        yield {**row, "bytes_per_token": per_token, "transient_bytes": one.transient_bytes}


workload(
    "latents",
    grid=[
        {
            "model": ["deepseek-v2-lite-layer", "deepseek-v3-2-layers"],
            "context": [512, 2048, 8192, 32768],
        }
    ],
    kind="generate",
    file="mla",
    gate=right_logits,
    columns=f"cache {COLUMNS} transient_bytes",
)(generate)


@workload(
    "reading/model",
    grid=[{"model": ["smollm2-135m"], "context": [8192, 16384, 32768], "read_tokens": [2048]}],
    kind="model",
    file="reading_speed",
    columns="contender ms_min thread_ms_min ratio_to_everything",
)
def reading(device: torch.device, model: str, context: int, read_tokens: int) -> Iterator[Fields]:
    """A whole decode step over random keys and values: everything read, and a part of the tokens."""
    names = {"everything": "paged_int4", "part": f"paged_int4:read_tokens={read_tokens}"}
    kinds = [replace(cache_kind(name), name=which) for which, name in names.items()]
    found = [filled(device, model, context, kind) for kind in kinds]
    for row in timed_steps(found, model, label="contender", ms="ms"):
        yield {**row, "cache": "paged_int4"}


# -- pages outside of the device


def with_options(**options: Any) -> CacheKind:
    """Return the kind of a paged cache of these options, named by them."""
    name = ", ".join(f"{name}={value}" for name, value in options.items())
    return CacheKind(name, ATTENTION_NAME, lambda config, _: PagedCache(config, **options))


def three_steps(decoding: Decoding) -> torch.Tensor:
    """Return the logits of three steps, behind which all buffers are made."""
    return torch.stack([decoding.step() for _ in range(3)])


@workload(
    "offload",
    grid=[
        {
            "model": ["smollm2-135m"],
            "keys": ["exact", "int4"],
            "context": contexts,
            "read_tokens": [read],
        }
        for contexts, read in (([8192, 32768], None), ([8192, 16384], 2048))
    ],
    columns="cache layers_outside page_bytes total_bytes resident_bytes resident_peak_stepping step_ms_p50 ratio_to_none",
)
def offload(
    device: torch.device, model: str, keys: str, context: int, read_tokens: int | None
) -> Iterator[Fields]:
    """Decode steps with pages outside of the device, by budget or read in part, and the memory that grows for them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # freed blocks go back to the system, or growth would say little
        mallopt(M_MMAP_THRESHOLD, 1 << 18)
    load(model, device, "bfloat16")
    found: list[Decoding] = []
    held: list[Fields] = []
    right = torch.empty(0)

    def add(**options: Any) -> None:
        nonlocal right
        meter = Meter(device)
        one = filled(device, model, context, with_options(keys=keys, **options))
        meter.restart()
        logits = three_steps(one)
        right = right if found else logits
        if "read_tokens" not in options:  # the same pages wherever they lie: not a bit may differ
            check([Verdict(one.kind.name, float(not torch.equal(logits, right)), 0.0)])
        memory, layers = one.cache.memory(), one.cache.paged_layers
        found.append(one)
        held.append(
            {
                **{name: options.get(name) for name in ("offload", "device_bytes", "read_tokens")},
                "page_bytes": memory.payload + memory.scales + memory.staging,
                "total_bytes": memory.total,
                "offloaded_bytes": memory.offloaded,
                "layers_outside": sum(layer.storage.offloaded_bytes > 0 for layer in layers),
                "resident_bytes": meter.grown(),
                "resident_peak_stepping": meter.peak(),
            }
        )

    add()
    for place in ("cpu", "disk") if device.type == "cuda" else ("disk",):
        add(offload=place)
        if read_tokens:
            add(offload=place, read_tokens=read_tokens)
        for share in () if read_tokens else SHARES:
            add(offload=place, device_bytes=int(share * held[0]["page_bytes"]))
    rows = timed_steps(found, model)
    for fields, row in zip(held, rows, strict=True):
        kind = "offload_reading" if read_tokens else "offload"
        ratio = row["step_ms_p50"] / rows[0]["step_ms_p50"]
        yield {**row, **fields, "kind": kind, "ratio_to_none": ratio}


# -- beams


class Beams:
    """A cache of some beams with one history, and no model: new order of rows, then one token more.

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
        device: torch.device,
    ) -> None:
        self.kind, self.beams, self.shape = kind, beams, shape
        self.numbers, self.choices = torch.Generator(device).manual_seed(0), random.Random(0)
        self.cache = kind.make(self.shape.config(layers), context + 64)
        for layer in range(layers):
            self.cache.update(*self._states(1, context), layer)
        self.cache.batch_repeat_interleave(beams)
        self.prepare()
        self.step()  # rows get copies of what is not shared, and storage room for what follows

    def _states(self, rows: int, tokens: int) -> torch.Tensor:
        size = (2, rows, self.shape.num_kv_heads, tokens, self.shape.head_dim)
        numbers = torch.randn(size, generator=self.numbers, device=self.numbers.device)
        return numbers.to(torch.bfloat16)

    def prepare(self) -> None:
        """Draw the next step's order of rows (some continue twice, some not at all) and its tokens."""
        order = [self.choices.randrange(self.beams) for _ in range(self.beams)]
        self.order = torch.tensor(order, device=self.numbers.device)
        self.new = [tuple(self._states(self.beams, 1)) for _ in self.cache.layers]

    def step(self) -> None:
        """Let row i continue row order[i], and append one token to every row, in all layers."""
        self.cache.reorder_cache(self.order)
        for layer, (keys, values) in enumerate(self.new):
            self.cache.update(keys, values, layer)


BEAM_CACHES = ("dynamic", "paged_exact", "paged_int4")


def equal_beams(device: torch.device, shape: str, beams: int, **others: Any) -> Iterator[Verdict]:
    """Take the same random steps with every cache, and compare what they hold."""
    kinds = [cache_kind(name) for name in BEAM_CACHES]
    yield from beam_verdicts(kinds, SHAPES[shape], beams, device)


def beam_verdicts(
    kinds: Sequence[CacheKind], shape: AttentionShape, beams: int, device: torch.device
) -> Iterator[Verdict]:
    """Judge all caches but the first, DynamicCache, behind 140 steps.

    A cache must hold, bit for bit, what a new one of the same formats holds when it is given DynamicCache's keys and
    values at once: rows that share pages are rows all the same.
    """
    found = [Beams(kind, shape, 2, beams, 150, device) for kind in kinds]
    for each in found:
        for _ in range(140):
            each.prepare()
            each.step()
    for each in found[1:]:
        fresh = each.kind.make(each.shape.config(2), 0)
        for index, layer in enumerate(found[0].cache.layers):
            fresh.update(layer.keys, layer.values, index)
        pairs = zip(each.cache.layers, fresh.layers, strict=True)
        same = [torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs]
        yield Verdict(each.kind.name, float(not all(same)), 0.0)


@workload(
    "beams",
    grid=[{"shape": ["smollm2"], "beams": [4], "context": [512, 2048, 8192, 32768]}],
    gate=equal_beams,
    columns="cache step_ms_p50 ratio_to_dynamic kv_bytes",
)
def beams(device: torch.device, shape: str, beams: int, context: int) -> Iterator[Fields]:
    """What beam search asks of a cache in each step, by length of the context."""
    heads, layers = SHAPES[shape], SHAPES[shape].layers
    kinds = [cache_kind(name) for name in BEAM_CACHES]
    found = [Beams(kind, heads, layers, beams, context, device) for kind in kinds]
    contenders = [Contender(one.kind.name, one.step, one.prepare) for one in found]
    rows = in_turns(contenders, ROUNDS, device, label="cache", ms="step_ms")
    for one, row in zip(found, rows, strict=True):
        yield {**row, "layers": layers, "dtype": "bfloat16", "kv_bytes": held_bytes(one.cache)}


# -- memory


@workload(
    "memory",
    grid=[
        {
            "model": ["smollm2-135m"],
            "context": [4096, 6144],
            "cache": ["dynamic", "paged_int8", "paged_int4", "paged_int2"],
            "batch": [1],
            "dtype": ["bfloat16"],
            "steps": [8],
        }
    ],
    file="resident",
    columns="held_bytes prefill_grown_bytes steps_grown_bytes peak_bytes",
)
def memory(device: torch.device, model: str, cache: str, context: int, **how: Any) -> list[Fields]:
    """What each cache takes in memory as the system sees it, each alone in a fresh process."""
    gc.collect()
    load.cache_clear()
    how |= {"device": str(device), "threads": torch.get_num_threads()}
    named = RANDOM_MODELS[model] if model in RANDOM_MODELS else folder_of(model)
    return [{**measure_footprint(named, cache, context, **how), "model": model}]
