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
from measure.runner import Contender, Fields, Verdict, in_turns, workload
from measure.shapes import RANDOM_MODELS, SHAPES, AttentionShape, folder_of, load, random_model

# largest difference of two logits, as a part of the largest. fp32: sums in another order, and on a GPU products of fewer
# digits; 16 bits: what the roundings of some 30 layers come to
ALLOWED = {("cpu", 4): 1e-4, ("cuda", 4): 1e-2, ("cpu", 2): 0.1, ("cuda", 2): 0.1}
# with 64-token pages and 4 sinks no page becomes full between these, where rounding noise alone may flip a code
PROMPT, STEPS = 220, 6
ROOM = 16  # steps beside the timed ones
LONGEST_PROMPT = {"cpu": 2048, "cuda": 32768}  # longer contexts are random keys and values
M_MMAP_THRESHOLD = -3  # of glibc's mallopt


# -- the gate


LATENT_CACHES = ("paged_exact", "paged_fp8", "paged_int8", "paged_int4")


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


def weights(model: str) -> str:
    """Return "random" or "real"."""
    return "random" if model in RANDOM_MODELS else "real"


def finite(decoding: Decoding) -> Verdict:
    """Take a step; logits that are not finite are wrong."""
    decoding.before()
    wrong = not torch.isfinite(decoding.step()).all()
    return Verdict(decoding.kind.name, float(wrong), 0.0)


def timed_steps(
    found: Sequence[Decoding], steps: int, label: str = "cache", ms: str = "step_ms"
) -> Iterator[tuple[Decoding, Fields]]:
    """Yield each cache with the row of its steps, which took turns; ratios are to the first."""
    contenders = [
        Contender(one.kind.name, one.step, one.before, functools.partial(finite, one))
        for one in found
    ]
    rows = in_turns(contenders, steps, found[0].device, label=label, ms=ms)
    return zip(found, rows, strict=True)


def every_cache(
    device: torch.device, model: str, context: int, names: Sequence[str], fill: str, steps: int
) -> Iterator[Fields]:
    """Yield what a step with each of these caches takes and holds."""
    loaded = load(model, device, "bfloat16")
    prompt = random_prompt(loaded.config.vocab_size, 1, context, device)
    kinds = [cache_kind(name) for name in names if why_not(name, device) is None]
    found = [Decoding(loaded, kind, prompt, fill=fill, room=steps + ROOM) for kind in kinds]
    for one in found:
        one.note_peak()
    for one, row in timed_steps(found, steps):
        yield {
            **row, "weights": weights(model), "batch": 1, "dtype": "bfloat16", "fill": fill, "kernel": kernel_of(one.cache),
            "tokens": one.tokens, "prefill_ms": one.prefill_ms, "kv_bytes": one.kv_bytes,
            "kv_ratio": one.kv_bytes / found[0].kv_bytes, "bytes_per_token": one.kv_bytes / one.tokens,
            "transient_bytes": one.transient_bytes,
        }  # fmt: skip


COLUMNS = "kernel step_ms_p50 step_ms_p20 step_ms_p80 ratio_to_dynamic prefill_ms kv_bytes kv_ratio"


@workload(
    "generate",
    grid=[{"model": ["smollm2-135m"], "context": [512, 2048, 8192]}],
    tiny=[{"model": ["tiny"], "context": [64]}],
    gate=right_logits,
    columns=f"cache {COLUMNS}",
)
def generate(device: torch.device, model: str, context: int) -> Iterator[Fields]:
    """A decode step of a model with every cache of transformers and ours, behind a prompt or random keys and values."""
    fill = "prompt" if context <= LONGEST_PROMPT[device.type] else "random"
    yield from every_cache(device, model, context, all_cache_names(), fill, 24)


@workload(
    "mla",
    grid=[
        {"model": [model], "context": [512, 2048, 8192, 32768], "steps": [steps]}
        for model, steps in (("deepseek-v2-lite-layer", 20), ("deepseek-v3-2-layers", 5))
    ],
    tiny=[{"model": ["tiny-latent"], "context": [64], "steps": [2]}],
    kind="generate",
    gate=right_logits,
    columns=f"cache {COLUMNS} bytes_per_token transient_bytes",
)
def mla(device: torch.device, model: str, context: int, steps: int) -> Iterator[Fields]:
    """A decode step of layers with latent attention, of DeepSeek's sizes and random weights."""
    names = ("dynamic", *LATENT_CACHES)
    yield from every_cache(device, model, context, names, "random", steps)


@workload(
    "reading/model",
    grid=[{"model": ["smollm2-135m"], "context": [8192, 16384, 32768], "read_tokens": [2048]}],
    tiny=[{"model": ["tiny"], "context": [4300], "read_tokens": [512]}],
    kind="model",
    file="reading_speed",
    columns="contender ms_min thread_ms_min ratio_to_everything",
)
def reading(device: torch.device, model: str, context: int, read_tokens: int) -> Iterator[Fields]:
    """A whole decode step over random keys and values: everything read, and a part of the tokens."""
    loaded = load(model, device, "bfloat16")
    prompt = random_prompt(loaded.config.vocab_size, 1, context, device)
    names = {"everything": "paged_int4", "part": f"paged_int4:read_tokens={read_tokens}"}
    kinds = [replace(cache_kind(name), name=which) for which, name in names.items()]
    found = [Decoding(loaded, kind, prompt, fill="random") for kind in kinds]
    for one, row in timed_steps(found, 12, label="contender", ms="ms"):
        layers = len(one.cache.layers)
        yield {**row, "cache": "paged_int4", "dtype": "bfloat16", "layers": layers}


# -- pages outside of the device


def _offloaded(name: str, **options: Any) -> CacheKind:
    return CacheKind(name, ATTENTION_NAME, lambda config, _: PagedCache(config, **options))


def same_as_first(found: Sequence[Decoding], steps: int) -> Verdict:
    """Take so many steps with each; logits that differ from the first one's in any bit are wrong."""
    first, *others = ([one.step() for _ in range(steps)] for one in found)
    equal = all(torch.equal(a, b) for logits in others for a, b in zip(first, logits, strict=True))
    return Verdict("logits with offload", float(not equal), 0.0)


def _places(device: torch.device) -> tuple[str, ...]:
    return ("cpu", "disk") if device.type == "cuda" else ("disk",)


def equal_logits(device: torch.device, model: str, keys: str, **others: Any) -> Iterator[Verdict]:
    """Decode behind ten pages, one of which is sealed on the way, with and without offload."""
    loaded = load(model, device, "bfloat16")
    prompt = random_prompt(loaded.config.vocab_size, 1, 700, device)
    kinds = [_offloaded("none", keys=keys)]
    kinds += [_offloaded(place, keys=keys, offload=place) for place in _places(device)]
    yield same_as_first([Decoding(loaded, kind, prompt) for kind in kinds], 70)


@workload(
    "offload",
    grid=[
        {"model": ["smollm2-135m"], "keys": ["exact", "int4"], "context": contexts, "shares": [[0.0, 0.25, 0.5]], "read_tokens": [read]}
        for contexts, read in (([8192, 32768], None), ([8192, 16384], 2048))
    ],
    tiny=[{"model": ["tiny"], "keys": ["int4"], "context": [600], "shares": [[0.0, 0.9]], "read_tokens": [None, 512]}],
    gate=equal_logits,
    columns="cache layers_outside page_bytes offloaded_bytes resident_bytes resident_peak_stepping step_ms_p50 ratio_to_none",
)  # fmt: skip
def offload(
    device: torch.device,
    model: str,
    keys: str,
    context: int,
    shares: list[float],
    read_tokens: int | None,
) -> Iterator[Fields]:
    """Decode steps with pages outside of the device, by budget or read in part, and the memory that grows for them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # freed blocks go back to the system, or growth would say little
        mallopt(M_MMAP_THRESHOLD, 1 << 18)
    loaded = load(model, device, "bfloat16")
    prompt = random_prompt(loaded.config.vocab_size, 1, context, device)
    found: list[Decoding] = []
    held: list[Fields] = []

    def add(place: str | None, share: float = 0.0, read: int | None = None) -> None:
        options: Fields = {} if place is None else {"offload": place}
        if share:
            options["device_bytes"] = int(share * held[0]["page_bytes"])
        name = ", ".join(
            filter(
                None, (place or "none", f"{share:.0%}" * bool(share), f"{read} read" * bool(read))
            )
        )
        meter = Meter(device)
        kind = _offloaded(name, keys=keys, **options, **({"read_tokens": read} if read else {}))
        one = Decoding(loaded, kind, prompt, fill="random")
        meter.restart()
        for _ in range(3):  # buffers are made at the first step
            one.step()
        memory = one.cache.memory()
        outside = [layer.storage.offloaded_bytes > 0 for layer in one.cache.paged_layers]
        found.append(one)
        held.append({
            "offload": place, "device_bytes": options.get("device_bytes"), "read_tokens": read,
            "page_bytes": memory.payload + memory.scales + memory.staging, "total_bytes": memory.total,
            "offloaded_bytes": memory.offloaded, "layers_outside": sum(outside),
            "resident_bytes": meter.grown(), "resident_peak_stepping": meter.peak(),
        })  # fmt: skip

    add(None)
    for place in _places(device):
        for share in shares[:1] if read_tokens else shares:
            add(place, share)
        if read_tokens:
            add(place, read=read_tokens)
    facts = {
        "kind": "offload_reading" if read_tokens else "offload", "weights": weights(model), "dtype": "bfloat16", "fill": "random",
    }  # fmt: skip
    for fields, (_, row) in zip(held, timed_steps(found, 24), strict=True):
        yield {**facts, **row, **fields, "ratio_to_none": 1 / row["ratio_to_none"]}


# -- beams


class Beams:
    """A cache of some beams with one history, and no model: new order of rows, then one token more.

    Args:
        shape, layers: sizes of the cache.
        beams: rows; all begin with the same `context` random tokens.
    """

    def __init__(
        self, kind: CacheKind, shape: AttentionShape, layers: int, beams: int, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:  # fmt: skip
        self.name, self.beams, self.shape, self.dtype = kind.name, beams, shape, dtype
        self.numbers, self.choices = torch.Generator(device).manual_seed(0), random.Random(0)
        self.cache = kind.make(self.shape.config(layers), context + 64)
        for layer in range(layers):
            self.cache.update(*self._states(1, context), layer)
        self.cache.batch_repeat_interleave(beams)
        self.step()  # rows get copies of what is not shared, and storage room for what follows

    def _states(self, rows: int, tokens: int) -> torch.Tensor:
        size = (2, rows, self.shape.num_kv_heads, tokens, self.shape.head_dim)
        numbers = torch.randn(size, generator=self.numbers, device=self.numbers.device)
        return numbers.to(self.dtype)

    def prepare(self) -> None:
        """Draw the next step's order of rows (some continue twice, some not at all) and its tokens."""
        order = [self.choices.randrange(self.beams) for _ in range(self.beams)]
        self.order = torch.tensor(order, device=self.numbers.device)
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
        """Bytes of keys and values that a new order of all rows writes: everything, or the windows of pages alone."""
        paged = isinstance(self.cache, PagedCache)
        return self.cache.memory().tail if paged else held_bytes(self.cache)


BEAM_CACHES = ("dynamic", "paged_exact", "paged_int4")


def equal_beams(device: torch.device, shape: str, beams: int, **others: Any) -> Iterator[Verdict]:
    """Take the same random steps with every cache, and compare what they hold."""
    yield from beam_verdicts(
        [cache_kind(name) for name in BEAM_CACHES], SHAPES[shape], beams, device
    )


def beam_verdicts(
    kinds: Sequence[CacheKind],
    shape: AttentionShape,
    beams: int,
    device: torch.device,
    steps: int = 140,
) -> Iterator[Verdict]:
    """Judge all caches but the first, DynamicCache.

    A cache must hold, bit for bit, what a new one of the same formats holds when it is given DynamicCache's keys and
    values at once: rows that share pages are rows all the same.
    """
    found = [Beams(kind, shape, 2, beams, 150, torch.bfloat16, device) for kind in kinds]
    for _ in range(steps):
        for each in found:
            each.step()
    for kind, each in zip(kinds[1:], found[1:], strict=True):
        fresh = kind.make(each.shape.config(2), 0)
        for index, layer in enumerate(found[0].cache.layers):
            fresh.update(layer.keys, layer.values, index)
        pairs = zip(each.cache.layers, fresh.layers, strict=True)
        same = [torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs]
        yield Verdict(kind.name, float(not all(same)), 0.0)


@workload(
    "beams",
    grid=[{"shape": ["smollm2"], "beams": [4], "context": [512, 2048, 8192, 32768]}],
    tiny=[{"shape": ["tiny"], "beams": [4], "context": [100]}],
    gate=equal_beams,
    columns="cache step_ms_p50 reorder_ms_p50 append_ms_p50 ratio_to_dynamic copied_bytes kv_bytes",
)
def beams(device: torch.device, shape: str, beams: int, context: int) -> Iterator[Fields]:
    """What beam search asks of a cache in each step, by length of the context."""
    heads, layers = SHAPES[shape], SHAPES[shape].layers
    kinds = [cache_kind(name) for name in BEAM_CACHES]
    found = {kind.name: Beams(kind, heads, layers, beams, context, torch.bfloat16, device) for kind in kinds}  # fmt: skip
    parts: dict[str, list[Fields]] = {}
    for part in ("reorder", "append"):
        contenders = [Contender(name, getattr(each, part), each.prepare) for name, each in found.items()]  # fmt: skip
        parts[part] = in_turns(contenders, 20, device, label="cache", ms=f"{part}_ms")
    both = [a["reorder_ms_p50"] + b["append_ms_p50"] for a, b in zip(*parts.values(), strict=True)]
    for reordered, appended, step_ms in zip(*parts.values(), both, strict=True):
        each = found[reordered["cache"]]
        yield {
            **reordered, **appended, "layers": layers, "dtype": "bfloat16", "step_ms_p50": step_ms,
            "ratio_to_dynamic": both[0] / step_ms, "copied_bytes": each.copied_bytes, "kv_bytes": held_bytes(each.cache),
        }  # fmt: skip


# -- memory

FOOTPRINT: dict[str, list[Any]] = {"model": ["smollm2-135m"], "batch": [1], "dtype": ["bfloat16"]}


@workload(
    "memory",
    grid=[{**FOOTPRINT, "context": [1024, 4096], "cache": list(all_cache_names()), "steps": [72], "run": [1]}],
    tiny=[{**FOOTPRINT, "model": ["tiny"], "context": [80], "cache": ["dynamic", "paged_int4"], "steps": [2], "run": [1]}],
    columns="held_bytes bytes_per_token prefill_grown_bytes steps_grown_bytes peak_bytes prefill_tokens_per_s decode_tokens_per_s",
)  # fmt: skip
def memory(
    device: torch.device, model: str, cache: str, context: int, batch: int, dtype: str, steps: int, run: int, speed: bool = True
) -> Iterator[Fields]:  # fmt: skip
    """What each cache takes in memory, by part and as the system sees it, each alone in fresh processes."""
    gc.collect()
    load.cache_clear()
    yield measure_footprint(
        model if model in RANDOM_MODELS else folder_of(model), cache, context, batch, dtype=dtype, device=str(device),
        steps=steps, threads=torch.get_num_threads(), speed=speed,
    ) | {"model": model}  # fmt: skip


@workload(
    "resident",
    grid=[{**FOOTPRINT, "context": [4096, 6144], "cache": ["dynamic", "paged_int8", "paged_int4", "paged_int2"], "steps": [8], "run": [1, 2]}],
    tiny=[{**FOOTPRINT, "model": ["tiny"], "context": [80], "cache": ["paged_int4"], "steps": [2], "run": [1]}],
    kind="memory",
    columns="held_bytes prefill_grown_bytes steps_grown_bytes peak_bytes",
)  # fmt: skip
def resident(device: torch.device, **config: Any) -> Iterator[Fields]:
    """How much processes grow with each cache; nothing is timed."""
    yield from memory(device, **config, speed=False)
