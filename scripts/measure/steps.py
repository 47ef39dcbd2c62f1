"""Whole decode steps of models, and what caches do between them: every cache side by side, judged by its logits."""

import ctypes
import functools
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kv_hf.cache.model_shape import CACHE, decoder_config, latent_rank, page_sizes
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.cache_names import all_cache_names
from kv_hf.evaluation.caches import CacheKind, cache_kind, held_bytes, why_not
from kv_hf.evaluation.memory import Meter, kernel_of, measure_footprint, random_prompt
from kv_hf.formats import cache_names
from measure.runner import (
    Call,
    Contender,
    Device,
    Fields,
    Verdict,
    check,
    equal,
    in_turns,
    workload,
)
from measure.shapes import RANDOM_MODELS, folder_of, load, random_model

# largest difference of two logits, as a part of the largest. fp32: sums in another order, and on a GPU products of fewer
# digits; 16 bits: what the roundings of some 30 layers come to
ALLOWED = {"cpu": 1e-4, "cuda": 1e-2}
ALLOWED_16 = 0.1
# with 64-token pages and 4 sinks no page becomes full between these, where rounding noise alone may flip a code
PROMPT, STEPS = 220, 6
ROUNDS = 24
LATENT_CACHES = ("paged_exact", "paged_fp8", "paged_int8", "paged_int4")
SHARES = (0.25, 0.5)  # of the pages, that `offload` leaves on the device
M_MMAP_THRESHOLD = -3  # of glibc's mallopt
OFFLOADED: Fields = {"model": "smollm2-135m", "keys": ["exact", "int4"]}


def fill_random(cache: Any, model: Any, batch: int, tokens: int) -> None:
    """Put `tokens` random keys and values into every layer, the same for every cache of the same sizes.

    A prefill of a long prompt takes minutes on a CPU, and what a step costs does not depend on the numbers.

    Raises: ValueError for a model whose layers differ in their sizes.
    """
    config = decoder_config(model.config)
    sizes = page_sizes(config)
    if sizes is None:
        raise ValueError(f"the config of {config.model_type} states no single size of a head")
    heads = 1 if latent_rank(config) is not None else config.num_key_value_heads
    numbers = torch.Generator(model.device).manual_seed(0)
    random = functools.partial(
        torch.randn, generator=numbers, device=model.device, dtype=model.dtype
    )
    for index in range(config.num_hidden_layers):
        keys = random((batch, heads, tokens, sizes["key_dim"]))
        values = random((batch, heads, tokens, sizes["value_dim"]))
        cache.update(keys, values, index)


class Decoding:
    """A model that decodes greedily with one cache.

    Args:
        prompt: [batch, tokens], int64; its last token is the first that a step takes.
        random: random keys and values in place of a prefill.
        room: steps that will be taken, for caches that must know.

    Attributes:
        token: [batch, 1], what the next step takes.
        run, verdict: what is timed, and what judges it first; None where nothing is left to judge.
    """

    def __init__(
        self, model: Any, kind: CacheKind, prompt: Tensor, random: bool = True, room: int = 64
    ) -> None:
        self.model, self.kind, self.device = model, kind, prompt.device
        self.token = prompt[:, -1:]
        self.run: Call = self.step
        self.verdict: Callable[[], Verdict] | None = self.finite
        self.cache = kind.make(model.config, prompt.shape[1] + room + 8)
        if random:
            fill_random(self.cache, model, *prompt.shape)
        else:
            self.logits(prompt)

    def step(self) -> Tensor:
        """Decode one token; return the logits [batch, vocab]."""
        logits = self.logits(self.token)
        self.token = logits.argmax(-1, keepdim=True)
        return logits

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Run ids [batch, tokens] through the model; return the last logits [batch, vocab]."""
        out = self.model(ids, use_cache=True, logits_to_keep=1, **{CACHE: self.cache})
        return out.logits[:, -1]

    def finite(self) -> Verdict:
        """Take a step; logits that are not finite are wrong."""
        wrong = not torch.isfinite(self.step()).all()
        return Verdict(self.kind.name, float(wrong), 0.0)


# -- the gate


def logit_verdicts(model: Any) -> Iterator[Verdict]:
    """Decode the same tokens with every paged cache and compare the logits.

    Exact pages are compared with DynamicCache, every other format with the same pages read by the reference kernel.
    """
    prompt = random_prompt(model.config.vocab_size, 1, PROMPT, model.device)
    tokens: list[Tensor] = []

    def decode(name: str) -> Tensor:
        decoding = Decoding(model, cache_kind(name), prompt, random=False)
        logits = []
        for step in range(STEPS):
            if step == len(tokens):  # the first cache decides
                tokens.append(decoding.token)
            decoding.token = tokens[step]
            logits.append(decoding.step()[0].double())
        return torch.stack(logits)  # [steps, vocab]

    exact = decode("dynamic")
    allowed = ALLOWED[model.device.type] if model.dtype == torch.float32 else ALLOWED_16
    latent = hasattr(model.config, "kv_lora_rank")
    for name in LATENT_CACHES if latent else cache_names():
        right = exact if name == "paged_exact" else decode(f"{name}:kernel=reference")
        apart = (decode(name) - right).abs().max() / right.abs().max()
        yield Verdict(name, float(apart), allowed)


@functools.lru_cache(maxsize=1)
def judged(model: str, device: Device) -> list[Verdict]:
    """Judge a model once in fp32, a random one with two layers, and once as it is timed."""
    if model in RANDOM_MODELS:
        exact = random_model(model, device, torch.float32, num_hidden_layers=2, vocab_size=1024)
    else:
        exact = load(model, device, "float32")
    return [*logit_verdicts(exact), *logit_verdicts(load(model, device, "bfloat16"))]


def right_logits(device: Device, model: str, **others: Any) -> list[Verdict]:
    """Return the verdicts on a model's logits with every paged cache."""
    return judged(model, device)


# -- whole steps


def filled(device: Device, model: str, context: int, kind: CacheKind) -> Decoding:
    """Return a model with a cache of random keys and values."""
    loaded = load(model, device, "bfloat16")
    return Decoding(loaded, kind, random_prompt(loaded.config.vocab_size, 1, context, device))


def timed_steps(
    found: Sequence[Decoding], model: str, label: str = "cache", ms: str = "step_ms"
) -> list[Fields]:
    """Return the row of each cache, whose steps took turns; ratios are to the first."""
    contenders = [Contender(one.kind.name, one.run, verdict=one.verdict) for one in found]
    rows = in_turns(contenders, ROUNDS, found[0].device, label=label, ms=ms)
    for one, row in zip(found, rows, strict=True):
        batch = len(one.token)
        row |= {
            "weights": "random" if model in RANDOM_MODELS else "real",
            "batch": batch,
            "dtype": "bfloat16",
            "fill": "random",
            "kernel": kernel_of(one.cache),
            "tokens_per_s": 1e3 * batch / row[f"{ms}_p50"],
            "kv_bytes": held_bytes(one.cache),
        }
    return rows


COLUMNS = "kernel step_ms_p50 step_ms_p20 step_ms_p80 ratio_to_dynamic kv_bytes bytes_per_token"


@workload(
    "generate",
    grid=[{"model": "smollm2-135m", "context": [512, 2048, 8192]}],
    gate=right_logits,
    columns=f"cache {COLUMNS}",
)
def generate(device: Device, model: str, context: int) -> Iterator[Fields]:
    """A decode step of a model with every cache of transformers and ours, or with all that hold latents."""
    latent = hasattr(load(model, device, "bfloat16").config, "kv_lora_rank")
    names = ("dynamic", *LATENT_CACHES) if latent else all_cache_names()
    kinds = [cache_kind(name) for name in names if why_not(name, device) is None]
    found = [filled(device, model, context, kind) for kind in kinds]
    transient = []
    for one in found:
        meter = Meter(device)
        one.step()
        transient.append(meter.peak())
    for one, row, peak in zip(found, timed_steps(found, model), transient, strict=True):
        per_token = row["kv_bytes"] / int(one.cache.get_seq_length())
        yield {**row, "bytes_per_token": per_token, "transient_bytes": peak}


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
    grid=[{"model": "smollm2-135m", "context": [8192, 16384, 32768], "read_tokens": 2048}],
    kind="model",
    file="reading_speed",
    columns="contender ms_min thread_ms_min ratio_to_everything",
)
def reading(device: Device, model: str, context: int, read_tokens: int) -> Iterator[Fields]:
    """A whole decode step over random keys and values: everything read, and a part of the tokens."""
    everything = replace(cache_kind("paged_int4"), name="everything")
    part = replace(cache_kind(f"paged_int4:read={read_tokens}"), name="part")
    found = [filled(device, model, context, kind) for kind in (everything, part)]
    for row in timed_steps(found, model, label="contender", ms="ms"):
        yield {**row, "cache": "paged_int4"}


# -- pages outside of the device


def held(
    device: Device, model: str, context: int, options: Fields
) -> tuple[Decoding, Tensor, Fields]:
    """Fill a paged cache of these options, and take three steps, behind which all buffers are made.

    Returns: the cache, the logits of the steps, and what memory it takes where.
    """
    meter = Meter(device)
    name = ", ".join(f"{name}={value}" for name, value in options.items())
    kind = CacheKind(name, lambda config, _: PagedCache(config, **options))
    decoding = filled(device, model, context, kind)
    meter.restart()
    logits = torch.stack([decoding.step() for _ in range(3)])
    memory, layers = decoding.cache.memory(), decoding.cache.paged_layers
    fields = {
        "offload": options.get("offload"),
        "device_bytes": options.get("device_bytes"),
        "read_tokens": options.get("read"),
        "page_bytes": memory.payload + memory.scales + memory.staging,
        "total_bytes": memory.total,
        "offloaded_bytes": memory.offloaded,
        "layers_outside": sum(layer.storage.offloaded_bytes > 0 for layer in layers),
        "resident_bytes": meter.grown(),
        "stepping_bytes": meter.peak(),
    }
    return decoding, logits, fields


@workload(
    "offload",
    grid=[
        OFFLOADED | {"context": 32768, "read_tokens": None},
        OFFLOADED | {"context": [8192, 16384], "read_tokens": 2048},
    ],
    columns="cache layers_outside page_bytes total_bytes resident_bytes stepping_bytes step_ms_p50 ratio_to_none",
)
def offload(
    device: Device, model: str, keys: str, context: int, read_tokens: int | None
) -> Iterator[Fields]:
    """Decode steps with pages outside of the device, by budget or read in part, and the memory that grows for them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # freed blocks go back to the system, or growth would say little
        mallopt(M_MMAP_THRESHOLD, 1 << 18)
    load(model, device, "bfloat16")
    decoding, right, inside = held(device, model, context, {"keys": keys})
    found, facts = [decoding], [inside]
    more: list[Fields] = [{}]
    if read_tokens:
        more.append({"read": read_tokens})
    else:
        more += [{"device_bytes": int(share * inside["page_bytes"])} for share in SHARES]
    places = ("cpu", "disk") if device.type == "cuda" else ("disk",)
    for place, options in itertools.product(places, more):
        given = {"keys": keys, "offload": place, **options}
        decoding, logits, fields = held(device, model, context, given)
        if "read" not in options:  # the same pages wherever they lie
            check([equal(decoding.kind.name, logits, right)])
        found.append(decoding)
        facts.append(fields)
    rows = timed_steps(found, model)
    for row, fields in zip(rows, facts, strict=True):
        yield {
            **row,
            **fields,
            "kind": "offload_reading" if read_tokens else "offload",
            "ratio_to_none": row["step_ms_p50"] / rows[0]["step_ms_p50"],
        }


# -- memory


@workload(
    "memory",
    grid=[
        {
            "model": "smollm2-135m",
            "context": [4096, 6144],
            "cache": ["dynamic", "paged_int8", "paged_int4", "paged_int2"],
            "batch": 1,
            "dtype": "bfloat16",
            "steps": 8,
        }
    ],
    file="resident",
    columns="held_bytes prefill_grown_bytes steps_grown_bytes peak_bytes",
)
def memory(device: Device, model: str, cache: str, context: int, **how: Any) -> list[Fields]:
    """What each cache takes in memory as the system sees it, each alone in a fresh process."""
    gc.collect()
    load.cache_clear()
    how |= {"device": str(device), "threads": torch.get_num_threads()}
    named = RANDOM_MODELS[model] if model in RANDOM_MODELS else folder_of(model)
    return [{**measure_footprint(named, cache, context, **how), "model": model}]
