"""Everything about one GPU, in the order of importance, because the time may end; random weights, no network.

First whether all kernels are right, in many processes, whose compilation is most of that time and serves what is timed;
then whole decode steps, eager and as a CUDA graph; the kernels' part of the memory's speed; compiled steps and latents.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from kv_hf.cache.layer_kinds import LatentLayer
from kv_hf.cache.model_shape import CACHE
from kv_hf.cache_names import parse_cache_name
from kv_hf.evaluation.caches import cache_kind
from kv_hf.evaluation.memory import kernel_of, random_prompt
from kv_hf.formats import cache_names, is_cache_name
from kv_hf.hf.latent import prepare_latents
from kv_hf.hf.step_graph import StepGraph
from measure.attention import Step, cold_layers, paged, speeds, stock
from measure.runner import WARMUP, Contender, Device, Fields, check, judge, workload
from measure.shapes import captured, load, random_model
from measure.steps import LATENT_CACHES, ROUNDS, Decoding, logit_verdicts, timed_steps

# of the kernels that are timed
SIZES = [
    {"context": 2048, "batch": 1},
    {"context": 32768, "batch": 1},
    {"context": 32768, "batch": 16},
]
FORMATS = [name.removeprefix("paged_") for name in cache_names()]
READ = 2048  # tokens that steps read of a long text
COLUMNS = "kernel step_ms_p50 step_ms_p20 step_ms_p80 tokens_per_s kv_bytes"

on_gpu = functools.partial(workload, device="cuda")
correctness = functools.partial(on_gpu, file="correctness", limit=130, until=0.33, timed=False)

PAGES: Fields = {
    "context": 1000,
    "batch": 2,
    "page_size": 64,
    "dtype": "bfloat16",
    "format": FORMATS,
}
KERNELS: Fields = {"shape": "llama-8b", "read_tokens": None}
# the larger one fits into 80 GB with keys and values of 16 bits, too
LLAMAS = [
    {"model": "llama-3.1-8b", "context": context, "batch": batch}
    for context, batch in ((2048, 1), (16384, 16))
]
MODELS: list[Fields] = []
for llama in LLAMAS:  # the headline first
    MODELS.append(llama | {"cache": ["dynamic", "paged_int4"], "mode": "eager"})
    MODELS.append(llama | {"cache": ["paged_int4", "static"], "mode": "graph"})
    MODELS.append(llama | {"cache": ["paged_exact", "paged_int8"], "mode": "eager"})
LATENT: Fields = {"model": ["deepseek-v2-lite-layer", "deepseek-v3-2-layers"], "mode": "eager"}
LATENTS = [LATENT | size | {"cache": ["dynamic", *LATENT_CACHES]} for size in SIZES]


@correctness(
    "gpu/pages",
    # the kernels that are timed come first: their compilation must not end up in a later part
    grid=[
        *(PAGES | {"shape": "llama-8b"} | size for size in SIZES),
        PAGES | {"shape": ["qwen2.5-7b", "llama-70b-layer", "smollm2", "heads-96", "heads-256"]},
        PAGES | {"shape": "heads-80", "page_size": 16},
        PAGES | {"shape": "llama-8b", "page_size": 32, "dtype": "float16"},
        PAGES | {"shape": "smollm2", "dtype": "float32"},
    ],
    kind="pages",
    columns="contender kernel error error_allowed",
)
def pages(
    device: Device, shape: str, context: int, batch: int, dtype: str, format: str, **size: int
) -> Iterator[Fields]:
    """Pages hold what the reference stores, and attention to them is right, through the cache and by the kernel alone."""
    contenders = paged(Step(shape, batch, context, 1, dtype, device), format, **size)
    judge(contenders)
    yield from ({"contender": one.name, **one.fields} for one in contenders)


@correctness(
    "gpu/logits",
    grid=[{"model": ["small", "small-latent"], "dtype": ["float32", "bfloat16"]}],
    kind="logits",
    columns="contender error error_allowed",
)
def logits(device: Device, model: str, dtype: str) -> Iterator[Fields]:
    """Logits of small models with every paged cache, beside DynamicCache and the reference kernel."""
    verdicts = list(logit_verdicts(load(model, device, dtype)))
    check(verdicts)
    for one in verdicts:
        yield {"contender": one.name, "error": one.error, "error_allowed": one.allowed}


def paged_alone(part: Fields) -> Fields:
    """Return a part of a grid with its paged caches."""
    return {**part, "cache": [name for name in part["cache"] if is_cache_name(name)]}


@correctness(
    "gpu/warm", grid=list(map(paged_alone, [*MODELS, *LATENTS])), kind="warm", columns="kernel"
)
def warm(device: Device, model: str, **config: Any) -> Iterator[Fields]:
    """A step through a single layer of the models that are timed later: whatever it launches is compiled then."""
    small = random_model(model, device, torch.bfloat16, num_hidden_layers=1, vocab_size=1024)
    decoding = decoding_of(small, **config)
    decoding.run()
    judge([Contender(model, decoding.run, verdict=decoding.finite)])
    yield {"kernel": kernel_of(decoding.cache), "weights": "random", "dtype": "bfloat16"}


def steps(device: Device, model: str, **config: Any) -> Iterator[Fields]:
    """Whole decode steps over random keys and values, eager, as a replayed CUDA graph, or compiled."""
    yield from timed_steps([decoding_of(load(model, device, "bfloat16"), **config)], model)
    torch._dynamo.reset()


timed = functools.partial(on_gpu, kind="steps", columns=COLUMNS)
timed("gpu/steps", MODELS, file="models", limit=50, until=0.6)(steps)


@on_gpu(
    "gpu/kernels",
    grid=[
        *(KERNELS | size | {"format": ["torch", *FORMATS]} for size in SIZES),
        *(
            KERNELS | size | {"format": ["int4", "exact"], "read_tokens": READ}
            for size in SIZES[1:]
        ),
    ],
    kind="kernels",
    file="kernels",
    limit=40,
    until=0.75,
    columns="contender kernel timing ms_p50 ms_p20 ms_p80 gb_per_s part_of_copy",
)
def kernels(
    device: Device, shape: str, context: int, batch: int, format: str, read_tokens: int | None
) -> Iterator[Fields]:
    """Attention alone, beside torch's own on keys that lie there, and beside a copy of a large buffer."""
    layers = cold_layers(shape, batch, context, device)
    work = Step(shape, batch, context, layers, "bfloat16", device)
    bare = stock(work)[1:] if format == "torch" else [paged(work, format, read=read_tokens)[1]]
    yield from speeds(bare, work)


COMPILED = [llama | {"cache": ["static", "paged_int4"], "mode": "compiled"} for llama in LLAMAS]
timed("gpu/compiled", COMPILED, file="models", limit=100, until=0.88)(steps)
timed("gpu/latents", LATENTS, file="latents", limit=50)(steps)


def decoding_of(model: Any, context: int, batch: int, cache: str, mode: str) -> Decoding:
    """Return a model with a filled cache, whose `run` decodes a token of each row in this mode.

    A paged cache in a graph or compiled is the preallocated one (`max_length`), and its graph is the one of generate().
    Where that gives up, `run` raises RuntimeError: steps of Python are no figure for a graph.
    """
    room, is_paged = ROUNDS + WARMUP + 20, is_cache_name(parse_cache_name(cache)[0])
    if mode != "eager" and is_paged:
        cache += f":max_length={context + room}"
    prompt = random_prompt(model.config.vocab_size, batch, context, model.device)
    decoding = Decoding(model, cache_kind(cache), prompt, room=room)
    if any(isinstance(layer, LatentLayer) for layer in decoding.cache.layers):
        prepare_latents(model, decoding.cache.options)  # as generate() does: no prompt went through
    ids = decoding.token.clone()
    how = {CACHE: decoding.cache, "use_cache": True, "logits_to_keep": 1}

    @torch.no_grad()
    def run() -> torch.Tensor:
        logits: torch.Tensor = call(input_ids=ids, **how).logits
        if reason := getattr(call, "given_up", None):
            raise RuntimeError(f"no graph: {reason}")
        return logits

    if mode == "graph" and is_paged:
        call: Any = StepGraph(model, decoding.cache)
        decoding.run = run
    elif mode == "graph":
        decoding.run, decoding.verdict = captured(lambda: decoding.logits(ids)), None
    elif mode == "compiled":
        torch._dynamo.reset()
        # inductor's own graphs would replay no Python, which plans each step of a paged cache
        call = torch.compile(model.forward, mode=None if is_paged else "reduce-overhead")
        decoding.run = run
    return decoding
