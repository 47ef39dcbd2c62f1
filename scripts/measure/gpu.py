"""Everything about one GPU, in the order of importance, because the time may end; random weights, no network.

First whether all kernels are right, in many processes, whose compilation is most of that time and serves what is timed;
then whole decode steps, eager and as a CUDA graph; the kernels' part of the memory's speed; compiled steps and latents.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kv_hf.cache.layer_kinds import LatentLayer
from kv_hf.cache_names import parse_cache_name
from kv_hf.evaluation.caches import cache_kind, held_bytes
from kv_hf.evaluation.memory import kernel_of, random_prompt
from kv_hf.formats import cache_names, is_cache_name
from kv_hf.hf.latent import prepare_latents
from measure.attention import Step, cold_layers, paged, speeds, stock
from measure.runner import WARMUP, Contender, Fields, check, in_turns, judge, workload
from measure.shapes import captured, load, random_model
from measure.steps import LATENT_CACHES, ROUNDS, Decoding, logit_verdicts

SIZES = ((2048, 1), (32768, 1), (32768, 16))  # tokens and rows of the kernels that are timed
ENDS = (SIZES[0], SIZES[2])  # and of models' steps
FORMATS = [name.removeprefix("paged_") for name in cache_names()]
READ = 2048  # tokens that steps read of a long text
DEEPSEEK = ["deepseek-v2-lite-layer", "deepseek-v3-2-layers"]
COLUMNS = "kernel step_ms_p50 step_ms_p20 step_ms_p80 tokens_per_s kv_bytes"

Part = dict[str, list[Any]]
on_gpu = functools.partial(workload, device="cuda")
correctness = functools.partial(on_gpu, file="correctness", limit=130, until=0.33, timed=False)


def part(**fields: Any) -> Part:
    """Return a part of a grid; what is no list is the only value of its field."""
    return {name: one if isinstance(one, list) else [one] for name, one in fields.items()}


def pages_of(
    shape: str | list[str],
    context: int = 1000,
    batch: int = 2,
    page_size: int = 64,
    dtype: str = "bfloat16",
) -> Part:
    """Return a part of the grid of `pages`: all formats."""
    sizes = {"shape": shape, "context": context, "batch": batch, "page_size": page_size}
    return part(**sizes, dtype=dtype, format=FORMATS)


def steps_of(
    model: str | list[str], sizes: Sequence[tuple[int, int]], mode: str, caches: list[str]
) -> list[Part]:
    """Return parts of a grid of steps: all caches at each of the sizes."""
    return [
        part(model=model, context=context, batch=batch, cache=caches, mode=mode)
        for context, batch in sizes
    ]


LLAMA = "llama-3.1-8b"
# the headline first
MODELS = [
    one
    for size in ENDS
    for mode, caches in (
        ("eager", ["dynamic", "paged_int4"]),
        ("graph", ["paged_int4", "static"]),
        ("eager", ["paged_exact", "paged_int8"]),
    )
    for one in steps_of(LLAMA, [size], mode, caches)
]
LATENTS = steps_of(DEEPSEEK, SIZES, "eager", ["dynamic", *LATENT_CACHES])


@correctness(
    "gpu/pages",
    # the kernels that are timed come first: their compilation must not end up in a later part
    grid=[
        *(pages_of("llama-8b", context, batch) for context, batch in SIZES),
        pages_of(["qwen2.5-7b", "llama-70b-layer", "smollm2", "heads-96", "heads-256"]),
        pages_of("heads-80", page_size=16),
        pages_of("llama-8b", page_size=32, dtype="float16"),
        pages_of("smollm2", dtype="float32"),
    ],
    kind="pages",
    columns="contender kernel error error_allowed",
)
def pages(
    device: torch.device, shape: str, context: int, batch: int, dtype: str, format: str, **size: int
) -> Iterator[Fields]:
    """Pages hold what the reference stores, and attention to them is right, through the cache and by the kernel alone."""
    contenders = paged(Step(shape, batch, context, 1, dtype, device), format, **size)
    judge(contenders)
    yield from ({"contender": one.name, **one.fields} for one in contenders)


@correctness(
    "gpu/logits",
    grid=[part(model=["small", "small-latent"], dtype=["float32", "bfloat16"])],
    kind="logits",
    columns="contender error error_allowed",
)
def logits(device: torch.device, model: str, dtype: str) -> Iterator[Fields]:
    """Logits of small models with every paged cache, beside DynamicCache and the reference kernel."""
    verdicts = list(logit_verdicts(load(model, device, dtype)))
    check(verdicts)
    for one in verdicts:
        yield {"contender": one.name, "error": one.error, "error_allowed": one.allowed}


@correctness(
    "gpu/warm",
    grid=[
        {**one, "cache": paged_names}
        for one in (*MODELS, *LATENTS)
        if (paged_names := [name for name in one["cache"] if name.startswith("paged")])
    ],
    kind="warm",
    columns="kernel",
)
def warm(device: torch.device, model: str, **config: Any) -> Iterator[Fields]:
    """A step through a single layer of the models that are timed later: whatever it launches is compiled then."""
    few = {"num_hidden_layers": 1, "vocab_size": 1024}
    decoding, run = decoding_of(random_model(model, device, torch.bfloat16, **few), **config)
    run()
    judge([Contender(model, run, verdict=decoding.finite)])
    yield {"kernel": kernel_of(decoding.cache), "weights": "random", "dtype": "bfloat16"}


def steps(
    device: torch.device, model: str, context: int, batch: int, cache: str, mode: str
) -> Iterator[Fields]:
    """Whole decode steps over random keys and values, eager, as a replayed CUDA graph, or compiled."""
    decoding, run = decoding_of(load(model, device, "bfloat16"), context, batch, cache, mode)
    contender = Contender(cache, run, verdict=None if mode == "graph" else decoding.finite)
    row = in_turns([contender], ROUNDS, device, label="cache", ms="step_ms")[0]
    yield {
        **row,
        "dtype": "bfloat16",
        "weights": "random",
        "kernel": kernel_of(decoding.cache),
        "tokens_per_s": 1e3 * batch / row["step_ms_p50"],
        "kv_bytes": held_bytes(decoding.cache),
    }
    torch._dynamo.reset()


timed_steps = functools.partial(on_gpu, kind="steps", columns=COLUMNS)
timed_steps("gpu/steps", MODELS, file="models", limit=50, until=0.6)(steps)


@on_gpu(
    "gpu/kernels",
    grid=[
        *(
            part(shape="llama-8b", context=context, batch=batch, format=formats, read_tokens=read)
            for formats, read, sizes in (
                (["torch", *FORMATS], None, SIZES),
                (["int4", "exact"], READ, SIZES[1:]),
            )
            for context, batch in sizes
        )
    ],
    kind="kernels",
    file="kernels",
    limit=40,
    until=0.75,
    columns="contender kernel timing ms_p50 ms_p20 ms_p80 gb_per_s part_of_copy",
)
def kernels(
    device: torch.device, shape: str, context: int, batch: int, format: str, read_tokens: int | None
) -> Iterator[Fields]:
    """Attention alone, beside torch's own on keys that lie there, and beside a copy of a large buffer."""
    layers = cold_layers(shape, batch, context, device)
    work = Step(shape, batch, context, layers, "bfloat16", device)
    reading = {"read_tokens": read_tokens} if read_tokens else {}
    yield from speeds(
        stock(work)[1:] if format == "torch" else [paged(work, format, **reading)[1]], work
    )


COMPILED = steps_of(LLAMA, ENDS, "compiled", ["static", "paged_int4"])
timed_steps("gpu/compiled", COMPILED, file="models", limit=100, until=0.88)(steps)
timed_steps("gpu/latents", LATENTS, file="latents", limit=50)(steps)


def decoding_of(
    model: Any, context: int, batch: int, cache: str, mode: str
) -> tuple[Decoding, Callable[[], object]]:
    """Return a model with a filled cache, and a call that decodes a token of each row.

    A paged cache in a graph or compiled is the preallocated one (`max_length`).

    Raises: ValueError for a graph on a device that has none.
    """
    if mode == "graph" and model.device.type != "cuda":
        raise ValueError(f"a graph needs a CUDA device, got {model.device}")
    room = ROUNDS + WARMUP + 20
    if mode != "eager" and is_cache_name(parse_cache_name(cache)[0]):
        cache += f":max_length={context + room}"
    prompt = random_prompt(model.config.vocab_size, batch, context, model.device)
    decoding = Decoding(model, cache_kind(cache), prompt, room=room)
    if any(isinstance(layer, LatentLayer) for layer in getattr(decoding.cache, "layers", ())):
        prepare_latents(model, decoding.cache.options)  # as generate() does: no prompt went through
    if mode == "eager":
        return decoding, decoding.step
    ids = decoding.token.clone()
    if mode == "graph":
        return decoding, captured(lambda: decoding.logits(ids))
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, mode="reduce-overhead")
    how = {"past_key_values": decoding.cache, "use_cache": True, "logits_to_keep": 1}
    return decoding, lambda: compiled(input_ids=ids, **how).logits
