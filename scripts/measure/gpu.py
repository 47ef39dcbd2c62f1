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
from measure.runner import WARMUP, Contender, Fields, Grid, check, in_turns, judge, workload
from measure.shapes import captured, load, random_model
from measure.steps import LATENT_CACHES, finite, logit_verdicts

SIZES = ((2048, 1), (32768, 1), (32768, 16))  # tokens and rows of the kernels that are timed
MODEL_SIZES = (SIZES[0], SIZES[2])
FORMATS = [name.removeprefix("paged_") for name in cache_names()]
READ = 2048  # tokens that steps read of a long text
STEPS = 24


def _pages(shape: str, context: int, batch: int, page_size: int = 64, dtype: str = "bfloat16") -> Fields:  # fmt: skip
    return {
        "shape": [shape], "context": [context], "batch": [batch], "page_size": [page_size], "dtype": [dtype], "format": FORMATS,
    }  # fmt: skip


@workload(
    "gpu/pages",
    # the kernels that are timed come first: their compilation must not end up in a later part
    grid=[
        *(_pages("llama-8b", context, batch) for context, batch in SIZES),
        *(_pages(shape, 1000, 2) for shape in ("qwen2.5-7b", "llama-70b-layer", "smollm2", "heads-96", "heads-256")),
        _pages("heads-80", 1000, 2, page_size=16), _pages("llama-8b", 1000, 2, 32, "float16"), _pages("smollm2", 1000, 2, 64, "float32"),
    ],
    tiny=[_pages("tiny", 80, 2)],
    kind="pages", file="correctness", columns="contender kernel error error_allowed", limit=120, until=0.33, timed=False, device="cuda",
)  # fmt: skip
def pages(
    device: torch.device, shape: str, context: int, batch: int, page_size: int, dtype: str, format: str
) -> Iterator[Fields]:  # fmt: skip
    """Pages hold what the reference stores, and attention to them is right, through the cache and by the kernel alone."""
    contenders = paged(Step(shape, batch, context, 1, dtype, device), format, page_size=page_size)
    judge(contenders)
    yield from ({"contender": one.name, **one.fields} for one in contenders)


@workload(
    "gpu/logits",
    grid=[{"model": ["small", "small-latent"], "dtype": ["float32", "bfloat16"]}],
    tiny=[{"model": ["tiny", "tiny-latent"], "dtype": ["float32"]}],
    kind="logits", file="correctness", columns="contender error error_allowed", limit=140, until=0.33, timed=False, device="cuda",
)  # fmt: skip
def logits(device: torch.device, model: str, dtype: str) -> Iterator[Fields]:
    """Logits of small models with every paged cache, beside DynamicCache and the reference kernel."""
    verdicts = list(logit_verdicts(load(model, device, dtype)))
    check(verdicts)
    for one in verdicts:
        facts = {"contender": one.name, "weights": "random"}
        yield {**facts, "error": one.error, "error_allowed": one.allowed}


def _grid(model: str, caches: list[tuple[str, str]], *sizes: tuple[int, int]) -> Grid:
    return [
        {"model": [model], "context": [context], "batch": [batch], "cache": [cache], "mode": [mode]}
        for context, batch in sizes
        for cache, mode in caches
    ]


HEADLINE = [
    ("dynamic", "eager"),
    ("paged_int4", "eager"),
    ("paged_int4", "graph"),
    ("static", "graph"),
]
HEADLINE += [("paged_exact", "eager"), ("paged_int8", "eager")]
MODEL = _grid("llama-3.1-8b", HEADLINE, *MODEL_SIZES)
COMPILED = _grid("llama-3.1-8b", [("static", "compiled"), ("paged_int4", "compiled")], *MODEL_SIZES)
LATENT = [(name, "eager") for name in ("dynamic", *LATENT_CACHES)]
LATENTS = [
    *_grid("deepseek-v2-lite-layer", LATENT, (4096, 1), (32768, 1), (32768, 16)),
    *_grid("deepseek-v3-2-layers", LATENT, (4096, 1), (32768, 1), (32768, 16)),
]
TINY = _grid("tiny", [("dynamic", "eager"), ("paged_int4", "eager")], (64, 1), (96, 2))
TINY_LATENT = _grid("tiny-latent", [("paged_int4", "eager")], (64, 1))


@workload(
    "gpu/warm", grid=[one for one in (*MODEL, *LATENTS) if one["cache"][0].startswith("paged")], tiny=TINY[1:2],
    kind="warm", file="correctness", columns="kernel", limit=120, until=0.33, timed=False, device="cuda",
)  # fmt: skip
def warm(device: torch.device, model: str, **config: Any) -> Iterator[Fields]:
    """A step through a single layer of the models that are timed later: whatever it launches is compiled then."""
    few = {"num_hidden_layers": 1, "vocab_size": 1024}
    decoding, run = _decoding(random_model(model, device, torch.bfloat16, **few), **config)
    run()
    judge([Contender(model, run, verdict=lambda: finite(decoding))])
    yield {"kernel": kernel_of(decoding.cache), "weights": "random", "dtype": "bfloat16"}


@workload(
    "gpu/steps", grid=MODEL, tiny=TINY, kind="steps", file="models", limit=50, until=0.6, device="cuda",
    columns="kernel step_ms_p50 step_ms_p20 step_ms_p80 tokens_per_s kv_bytes allocated_bytes",
)  # fmt: skip
def steps(device: torch.device, model: str, context: int, batch: int, cache: str, mode: str) -> Iterator[Fields]:  # fmt: skip
    """Whole decode steps over random keys and values, eager, as a replayed CUDA graph, or compiled."""
    decoding, run = _decoding(load(model, device, "bfloat16"), context, batch, cache, mode)
    contender = Contender(cache, run, verdict=None if mode == "graph" else lambda: finite(decoding))
    row = in_turns([contender], STEPS, device, label="cache", ms="step_ms")[0]
    cuda = {"allocated_bytes": torch.cuda.memory_allocated()} if device.type == "cuda" else {}
    yield {
        **row, **cuda, "dtype": "bfloat16", "weights": "random", "kernel": kernel_of(decoding.cache),
        "tokens_held": decoding.tokens, "tokens_per_s": 1e3 * batch / row["step_ms_p50"], "kv_bytes": decoding.kv_bytes,
    }  # fmt: skip
    torch._dynamo.reset()


@workload(
    "gpu/kernels",
    grid=[
        {"shape": ["llama-8b"], "context": [context], "batch": [batch], "format": formats, "read_tokens": [read]}
        for read, formats in ((None, ["torch", *FORMATS]), (READ, ["int4", "exact"]))
        for context, batch in (SIZES if read is None else SIZES[1:])
    ],
    tiny=[{"shape": ["tiny"], "context": [70], "batch": [1], "format": ["torch", "int4"], "read_tokens": [None]}],
    kind="kernels", file="kernels", limit=40, until=0.75, device="cuda",
    columns="contender kernel timing ms_p50 ms_p20 ms_p80 gb_per_s part_of_copy",
)  # fmt: skip
def kernels(
    device: torch.device, shape: str, context: int, batch: int, format: str, read_tokens: int | None
) -> Iterator[Fields]:
    """Attention alone, beside torch's own on keys that lie there, and beside a copy of a large buffer."""
    work = Step(shape, batch, context, cold_layers(shape, batch, context, device), "bfloat16", device)  # fmt: skip
    reading = {"read_tokens": read_tokens} if read_tokens else {}
    contenders = stock(work)[1:] if format == "torch" else [paged(work, format, **reading)[1]]
    for row in speeds(contenders, work):
        yield {**row, "dtype": "bfloat16"}


workload(
    "gpu/compiled", grid=COMPILED, tiny=TINY[:1], kind="steps", file="models", limit=100, until=0.88, device="cuda",
    columns="kernel step_ms_p50 step_ms_p20 step_ms_p80 tokens_per_s kv_bytes",
)(steps)  # fmt: skip
workload(
    "gpu/latents", grid=LATENTS, tiny=TINY_LATENT, kind="steps", file="latents", limit=50, device="cuda",
    columns="kernel step_ms_p50 step_ms_p20 step_ms_p80 tokens_per_s kv_bytes",
)(steps)  # fmt: skip


def _decoding(
    model: Any, context: int, batch: int, cache: str, mode: str
) -> tuple[Decoding, Callable[[], object]]:
    """Return a model with a filled cache, and a call that decodes a token of each row.

    A paged cache in a graph or compiled is the preallocated one (`max_length`).

    Raises: ValueError for a graph on a device that has none.
    """
    if mode == "graph" and model.device.type != "cuda":
        raise ValueError(f"a graph needs a CUDA device, got {model.device}")
    room = STEPS + WARMUP + 20
    if mode != "eager" and is_cache_name(parse_cache_name(cache)[0]):
        cache += f"{',' if ':' in cache else ':'}max_length={context + room}"
    prompt = random_prompt(model.config.vocab_size, batch, context, model.device)
    decoding = Decoding(model, cache_kind(cache), prompt, fill="random", room=room)
    decoding.before()
    if any(isinstance(layer, LatentLayer) for layer in getattr(decoding.cache, "layers", ())):
        prepare_latents(model, decoding.cache.options)  # as generate() does: no prompt went through
    ids = decoding.token.clone()

    def step(forward: Callable[..., Any]) -> Any:
        return forward(input_ids=ids, past_key_values=decoding.cache, use_cache=True, logits_to_keep=1).logits  # fmt: skip

    if mode == "graph":
        return decoding, captured(lambda: step(model))
    if mode == "compiled":
        torch._dynamo.reset()
        compiled = torch.compile(model.forward, mode="reduce-overhead")
        return decoding, lambda: step(compiled)
    return decoding, decoding.step
