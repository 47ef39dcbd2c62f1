"""Whole decode steps of models, and what caches do between them: every cache side by side, judged by its logits."""

import ctypes
import functools
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kv_hf.cache.model_shape import decoder_config, latent_rank, page_sizes
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.cache_names import all_cache_names
from kv_hf.evaluation.caches import CacheKind, cache_kind, held_bytes, why_not
from kv_hf.evaluation.memory import Meter, kernel_of, measure_footprint, random_prompt
from kv_hf.formats import cache_names
from measure.runner import Contender, Fields, Verdict, check, in_turns, workload
from measure.shapes import RANDOM_MODELS, folder_of, load, random_model

# largest difference of two logits, as a part of the largest. fp32: sums in another order, and on a GPU products of fewer
# digits; 16 bits: what the roundings of some 30 layers come to
ALLOWED = {("cpu", 4): 1e-4, ("cuda", 4): 1e-2, ("cpu", 2): 0.1, ("cuda", 2): 0.1}
# with 64-token pages and 4 sinks no page becomes full between these, where rounding noise alone may flip a code
PROMPT, STEPS = 220, 6
ROUNDS = 24
LATENT_CACHES = ("paged_exact", "paged_fp8", "paged_int8", "paged_int4")
SHARES = (0.25, 0.5)  # of the pages, that `offload` leaves on the device
M_MMAP_THRESHOLD = -3  # of glibc's mallopt


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
        cache.update(keys, random((batch, heads, tokens, sizes["value_dim"])), index)


class Decoding:
    """A model that decodes greedily with one cache.

    Args:
        prompt: [batch, tokens], int64; its last token is the first that a step takes.
        random: random keys and values in place of a prefill.
        room: steps that will be taken, for caches that must know.

    Attributes:
        token: [batch, 1], what the next step takes.
    """

    def __init__(
        self, model: Any, kind: CacheKind, prompt: torch.Tensor, random: bool = True, room: int = 64
    ) -> None:
        self.model, self.kind, self.device = model, kind, prompt.device
        self.token = prompt[:, -1:]
        self.before()
        self.cache = kind.make(model.config, prompt.shape[1] + room + 8)
        if random:
            fill_random(self.cache, model, *prompt.shape)
        else:
            self.logits(prompt)

    def before(self) -> None:
        """Give the model the attention that every cache is used with; not part of a step's time."""
        if self.model.config.get_text_config(decoder=True)._attn_implementation != "sdpa":
            self.model.set_attn_implementation("sdpa")

    def step(self) -> torch.Tensor:
        """Decode one token; return the logits [batch, vocab]."""
        logits = self.logits(self.token)
        self.token = logits.argmax(-1, keepdim=True)
        return logits

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """Run ids [batch, tokens] through the model; return the last logits [batch, vocab]."""
        out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1]

    def finite(self) -> Verdict:
        """Take a step; logits that are not finite are wrong."""
        self.before()
        wrong = not torch.isfinite(self.step()).all()
        return Verdict(self.kind.name, float(wrong), 0.0)


# -- the gate


def logit_verdicts(model: Any) -> Iterator[Verdict]:
    """Decode the same tokens with every paged cache and compare the logits.

    Exact pages are compared with DynamicCache, every other format with the same pages read by the reference kernel.
    """
    prompt = random_prompt(model.config.vocab_size, 1, PROMPT, model.device)
    tokens: list[torch.Tensor] = []

    def decode(name: str) -> torch.Tensor:
        decoding = Decoding(model, cache_kind(name), prompt, random=False)
        logits = []
        for step in range(STEPS):
            if step == len(tokens):  # the first cache decides
                tokens.append(decoding.token)
            decoding.token = tokens[step]
            logits.append(decoding.step()[0].double())
        return torch.stack(logits)  # [steps, vocab]

    exact = decode("dynamic")
    latent = hasattr(model.config, "kv_lora_rank")
    for name in LATENT_CACHES if latent else cache_names():
        right = exact if name == "paged_exact" else decode(f"{name}:kernel=reference")
        apart = (decode(name) - right).abs().max() / right.abs().max()
        yield Verdict(name, float(apart), ALLOWED[model.device.type, model.dtype.itemsize])


@functools.lru_cache(maxsize=1)
def judged(model: str, device: torch.device) -> list[Verdict]:
    """Judge a model once in fp32, a random one with two layers, and once as it is timed."""
    if model in RANDOM_MODELS:
        few = {"num_hidden_layers": 2, "vocab_size": 1024}
        found = list(logit_verdicts(random_model(model, device, torch.float32, **few)))
    else:
        found = list(logit_verdicts(load(model, device, "float32")))
    return found + list(logit_verdicts(load(model, device, "bfloat16")))


def right_logits(device: torch.device, model: str, **others: Any) -> list[Verdict]:
    """Return the verdicts on a model's logits with every paged cache."""
    return judged(model, device)


# -- whole steps


def filled(device: torch.device, model: str, context: int, kind: CacheKind) -> Decoding:
    """Return a model with a cache of random keys and values."""
    loaded = load(model, device, "bfloat16")
    return Decoding(loaded, kind, random_prompt(loaded.config.vocab_size, 1, context, device))


def timed_steps(
    found: Sequence[Decoding], model: str, label: str = "cache", ms: str = "step_ms"
) -> list[Fields]:
    """Return the row of each cache, whose steps took turns; ratios are to the first."""
    contenders = [Contender(one.kind.name, one.step, one.before, one.finite) for one in found]
    weights = "random" if model in RANDOM_MODELS else "real"
    facts = {"weights": weights, "batch": 1, "dtype": "bfloat16", "fill": "random"}
    rows = in_turns(contenders, ROUNDS, found[0].device, label=label, ms=ms)
    return [
        {**row, **facts, "kernel": kernel_of(one.cache), "kv_bytes": held_bytes(one.cache)}
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
    transient = []
    for one in found:
        one.before()
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


@dataclass(frozen=True)
class Held:
    """A cache behind three steps, when all buffers are made: their logits, and what memory it takes where."""

    decoding: Decoding
    logits: torch.Tensor
    fields: Fields


def held(device: torch.device, model: str, context: int, options: Fields) -> Held:
    """Fill a paged cache of these options, and take three steps."""
    meter = Meter(device)
    name = ", ".join(f"{name}={value}" for name, value in options.items())
    kind = CacheKind(name, lambda config, _: PagedCache(config, **options))
    decoding = filled(device, model, context, kind)
    meter.restart()
    logits = torch.stack([decoding.step() for _ in range(3)])
    memory, layers = decoding.cache.memory(), decoding.cache.paged_layers
    fields = {
        **{name: options.get(name) for name in ("offload", "device_bytes", "read_tokens")},
        "page_bytes": memory.payload + memory.scales + memory.staging,
        "total_bytes": memory.total,
        "offloaded_bytes": memory.offloaded,
        "layers_outside": sum(layer.storage.offloaded_bytes > 0 for layer in layers),
        "resident_bytes": meter.grown(),
        "resident_peak_stepping": meter.peak(),
    }
    return Held(decoding, logits, fields)


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
    inside = held(device, model, context, {"keys": keys})
    cases = [inside]
    for place in ("cpu", "disk") if device.type == "cuda" else ("disk",):
        more: list[Fields] = [{}, {"read_tokens": read_tokens}]
        if not read_tokens:
            budgets = [int(share * inside.fields["page_bytes"]) for share in SHARES]
            more = [{}, *({"device_bytes": size} for size in budgets)]
        for options in more:
            given = {"keys": keys, "offload": place, **options}
            cases.append(case := held(device, model, context, given))
            if "read_tokens" not in options:  # the same pages wherever they lie
                wrong = not torch.equal(case.logits, inside.logits)
                check([Verdict(case.decoding.kind.name, float(wrong), 0.0)])
    rows = timed_steps([case.decoding for case in cases], model)
    for case, row in zip(cases, rows, strict=True):
        kind = "offload_reading" if read_tokens else "offload"
        ratio = row["step_ms_p50"] / rows[0]["step_ms_p50"]
        yield {**row, **case.fields, "kind": kind, "ratio_to_none": ratio}


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
