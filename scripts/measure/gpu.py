"""Everything about one GPU, in the order of importance, because the time may end; random weights, no network.

First whether all kernels are right, in many processes, whose compilation is most of that time and serves what is timed;
then whole decode steps, eager and as a CUDA graph; the kernels' part of the memory's speed; compiled steps and latents.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from kv_hf.cache.latent_layer import LatentLayer
from kv_hf.cache_names import parse_cache_name
from kv_hf.evaluation.caches import cache_kind
from kv_hf.evaluation.memory import kernel_of, random_prompt
from kv_hf.formats import cache_names, is_cache_name
from kv_hf.hf.latent import prepare_latents
from measure.attention import Step, cold_layers, paged, speeds, stock
from measure.decoding import Decoding
from measure.runner import WARMUP, Contender, Fields, check, in_turns, judge, workload
from measure.shapes import captured, load, random_model
from measure.steps import LATENT_CACHES, ROUNDS, finite, logit_verdicts

SIZES = ((2048, 1), (32768, 1), (32768, 16))  # tokens and rows of the kernels that are timed
ENDS = (SIZES[0], SIZES[2])  # and of models' steps
FORMATS = [name.removeprefix("paged_") for name in cache_names()]
READ = 2048  # tokens that steps read of a long text
CHECKS = {"file": "correctness", "limit": 130, "until": 0.33, "timed": False, "device": "cuda"}
COLUMNS = "kernel step_ms_p50 step_ms_p20 step_ms_p80 tokens_per_s kv_bytes"


def products(fields: str, *parts: tuple[Any, ...]) -> list[dict[str, list[Any]]]:
    """Return a grid whose parts have these fields; what is no list is the only value."""
    return [
        {
            name: value if isinstance(value, list) else [value]
            for name, value in zip(fields.split(), part, strict=True)
        }
        for part in parts
    ]


PAGES = "shape context batch page_size dtype format"


@workload(
    "gpu/pages",
    # the kernels that are timed come first: their compilation must not end up in a later part
    grid=products(
        PAGES,
        *(("llama-8b", context, batch, 64, "bfloat16", FORMATS) for context, batch in SIZES),
        (["qwen2.5-7b", "llama-70b-layer", "smollm2"], 1000, 2, 64, "bfloat16", FORMATS),
        (["heads-96", "heads-256"], 1000, 2, 64, "bfloat16", FORMATS),
        ("heads-80", 1000, 2, 16, "bfloat16", FORMATS),
        ("llama-8b", 1000, 2, 32, "float16", FORMATS),
        ("smollm2", 1000, 2, 64, "float32", FORMATS),
    ),
    kind="pages",
    columns="contender kernel error error_allowed",
    **CHECKS,
)
def pages(
    device: torch.device,
    shape: str,
    context: int,
    batch: int,
    page_size: int,
    dtype: str,
    format: str,
) -> Iterator[Fields]:
    """Pages hold what the reference stores, and attention to them is right, through the cache and by the kernel alone."""
    contenders = paged(Step(shape, batch, context, 1, dtype, device), format, page_size=page_size)
    judge(contenders)
    yield from ({"contender": one.name, **one.fields} for one in contenders)


@workload(
    "gpu/logits",
    grid=[{"model": ["small", "small-latent"], "dtype": ["float32", "bfloat16"]}],
    kind="logits",
    columns="contender error error_allowed",
    **CHECKS,
)
def logits(device: torch.device, model: str, dtype: str) -> Iterator[Fields]:
    """Logits of small models with every paged cache, beside DynamicCache and the reference kernel."""
    verdicts = list(logit_verdicts(load(model, device, dtype)))
    check(verdicts)
    for one in verdicts:
        yield {"contender": one.name, "error": one.error, "error_allowed": one.allowed}


STEPS = "model context batch cache mode"
HEADLINE = (
    ("dynamic", "eager"),
    ("paged_int4", "eager"),
    ("paged_int4", "graph"),
    ("static", "graph"),
    (["paged_exact", "paged_int8"], "eager"),
)
LLAMA = [("llama-3.1-8b", *size) for size in ENDS]
MODELS = products(STEPS, *((*of, *how) for of in LLAMA for how in HEADLINE))
COMPILED = products(STEPS, *((*of, ["static", "paged_int4"], "compiled") for of in LLAMA))
DEEPSEEK = ["deepseek-v2-lite-layer", "deepseek-v3-2-layers"]
LATENTS = products(
    STEPS,
    *((DEEPSEEK, *size, how, "eager") for size in SIZES for how in ("dynamic", [*LATENT_CACHES])),
)


@workload(
    "gpu/warm",
    grid=[one for one in (*MODELS, *LATENTS) if one["cache"][0].startswith("paged")],
    kind="warm",
    columns="kernel",
    **CHECKS,
)
def warm(device: torch.device, model: str, **config: Any) -> Iterator[Fields]:
    """A step through a single layer of the models that are timed later: whatever it launches is compiled then."""
    few = {"num_hidden_layers": 1, "vocab_size": 1024}
    decoding, run = decoding_of(random_model(model, device, torch.bfloat16, **few), **config)
    run()
    judge([Contender(model, run, verdict=lambda: finite(decoding))])
    yield {"kernel": kernel_of(decoding.cache), "weights": "random", "dtype": "bfloat16"}


@workload(
    "gpu/steps",
    grid=MODELS,
    kind="steps",
    file="models",
    limit=50,
    until=0.6,
    device="cuda",
    columns=COLUMNS,
)
def steps(
    device: torch.device, model: str, context: int, batch: int, cache: str, mode: str
) -> Iterator[Fields]:
    """Whole decode steps over random keys and values, eager, as a replayed CUDA graph, or compiled."""
    decoding, run = decoding_of(load(model, device, "bfloat16"), context, batch, cache, mode)
    contender = Contender(cache, run, verdict=None if mode == "graph" else lambda: finite(decoding))
    row = in_turns([contender], ROUNDS, device, label="cache", ms="step_ms")[0]
    yield {
        **row,
        "dtype": "bfloat16",
        "weights": "random",
        "kernel": kernel_of(decoding.cache),
        "tokens_per_s": 1e3 * batch / row["step_ms_p50"],
        "kv_bytes": decoding.kv_bytes,
    }
    torch._dynamo.reset()


KERNELS = "shape context batch format read_tokens"


@workload(
    "gpu/kernels",
    grid=products(
        KERNELS,
        *(("llama-8b", *size, ["torch", *FORMATS], None) for size in SIZES),
        *(("llama-8b", *size, ["int4", "exact"], READ) for size in SIZES[1:]),
    ),
    kind="kernels",
    file="kernels",
    limit=40,
    until=0.75,
    device="cuda",
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


for name, grid, limit, until in (
    ("compiled", COMPILED, 100, 0.88),
    ("latents", LATENTS, 50, 1.0),
):
    workload(
        f"gpu/{name}",
        grid=grid,
        kind="steps",
        file="latents" if name == "latents" else "models",
        limit=limit,
        until=until,
        device="cuda",
        columns=COLUMNS,
    )(steps)


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
    decoding = Decoding(model, cache_kind(cache), prompt, fill="random", room=room)
    decoding.before()
    if any(isinstance(layer, LatentLayer) for layer in getattr(decoding.cache, "layers", ())):
        prepare_latents(model, decoding.cache.options)  # as generate() does: no prompt went through
    ids = decoding.token.clone()

    def step(forward: Callable[..., Any]) -> Any:
        out = forward(
            input_ids=ids, past_key_values=decoding.cache, use_cache=True, logits_to_keep=1
        )
        return out.logits

    if mode == "graph":
        return decoding, captured(lambda: step(model))
    if mode == "compiled":
        torch._dynamo.reset()
        compiled = torch.compile(model.forward, mode="reduce-overhead")
        return decoding, lambda: step(compiled)
    return decoding, decoding.step
