"""What is measured on a GPU, in which order, and how long each job may take. Measures nothing.

The order is that of importance, because the time may end: first whether all kernels are right (their compilation, on all
cores, is most of that time, and what the later parts launch is compiled there too), then how much of the memory's speed
the kernels reach, then whole models, then latent attention.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kv_hf.doctor.kernels import paged_names
from kv_hf.formats import is_cache_name, native_names
from kv_hf.read_budget import READ_FROM

Size = tuple[int, int]  # (context in tokens, rows)


@dataclass(frozen=True)
class Job:
    """One measurement, small enough to be lost.

    Attributes:
        name: what it is, among those of its part.
        kind: the function that measures it (measure.KINDS).
        settings: its arguments.
        limit: seconds after which it is ended.
    """

    name: str
    kind: str
    settings: dict[str, Any]
    limit: float = 60.0

    def as_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)


@dataclass(frozen=True)
class Part:
    """Jobs that go into one file of rows.

    Attributes:
        until: part of the whole time after which none of its jobs begins, or goes on.
        parallel: whether its jobs may run beside each other, because nothing is timed.
    """

    name: str
    until: float
    jobs: tuple[Job, ...]
    parallel: bool = False


@dataclass(frozen=True)
class Sizes:
    """What to measure on; the defaults are those of `make bench-gpu`.

    Attributes:
        shapes: attention shapes (shapes.SHAPES) whose kernels are timed at `kernel_sizes`, and judged there and at
            `judged` with all of `judged_shapes`.
        read_tokens: tokens that steps read of the texts of `kernel_sizes` that are long enough.
        heads: (head_dim, page size, dtype) of the trials of sealing and attending, in all formats.
        latents: (rank, RoPE channels, dtype) of those of latents.
        model, model_sizes, latent_models: random models (shapes.RANDOM_MODELS) whose whole steps are timed.
        small: a random model whose logits are compared in float32.
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    shapes: tuple[str, ...] = ("llama-8b",)
    kernel_sizes: tuple[Size, ...] = ((2048, 1), (32768, 1), (32768, 16))
    read_tokens: int = 2048
    judged_shapes: tuple[str, ...] = ("llama-8b", "qwen2.5-7b", "llama-70b-layer", "smollm2")
    judged: tuple[Size, ...] = ((1000, 2), (4096, 1))
    heads: tuple[tuple[int, int, str], ...] = (
        (128, 64, "bfloat16"), (64, 64, "bfloat16"), (128, 32, "float16"), (96, 64, "bfloat16"),
        (80, 16, "bfloat16"), (256, 64, "bfloat16"), (64, 64, "float32"),
    )  # fmt: skip
    latents: tuple[tuple[int, int, str], ...] = ((512, 64, "bfloat16"), (512, 64, "float16"))
    small: str = "small"
    model: str = "llama-3.1-8b"
    model_sizes: tuple[Size, ...] = ((2048, 1), (32768, 16))
    latent_models: tuple[str, ...] = ("deepseek-v2-lite-layer", "deepseek-v3-2-layers")
    latent_sizes: tuple[Size, ...] = ((4096, 1), (32768, 1), (32768, 16))
    steps: int = 24
    contenders: tuple[tuple[str, str], ...] = (
        ("dynamic", "eager"), ("paged_int4", "eager"), ("paged_int4", "graph"), ("static", "compiled"),
        ("static", "graph"), ("paged_exact", "eager"), ("paged_int8", "eager"), ("paged_int4", "compiled"),
    )  # fmt: skip
    latent_caches: tuple[str, ...] = field(
        default=("dynamic", "paged_exact", "paged_int8", "paged_int4")
    )


# on a CPU and in seconds, for tests and for trying things out
TINY = Sizes(
    device="cpu", dtype="bfloat16", shapes=("tiny",), kernel_sizes=((70, 1), (100, 2)), judged_shapes=("tiny",),
    judged=((80, 2),), heads=((16, 16, "float32"),), latents=((32, 8, "float32"),), small="tiny", model="tiny",
    model_sizes=((64, 1), (96, 2)), latent_models=("tiny-latent",), latent_sizes=((64, 1),), steps=3,
    contenders=(("dynamic", "eager"), ("paged_int4", "eager"), ("paged_int4", "graph")),
    latent_caches=("dynamic", "paged_int4"),
)  # fmt: skip


def make_plan(sizes: Sizes) -> tuple[Part, ...]:
    """Return the parts in the order in which they run."""
    return (
        Part("correctness", 0.33, tuple(_correctness(sizes)), parallel=True),
        Part("kernels", 0.48, tuple(_kernels(sizes))),
        Part("models", 0.88, tuple(_models(sizes))),
        Part("latents", 1.0, tuple(_latents(sizes))),
    )


def _correctness(sizes: Sizes) -> Iterator[Job]:
    """Yield the kernels that are timed later first: their compilation must not end up in a later part."""
    timed = [(shape, *size) for shape in sizes.shapes for size in sizes.kernel_sizes]
    others = [(shape, *size) for shape in sizes.judged_shapes for size in sizes.judged]
    for shape, context, batch in timed:
        yield from _judged(sizes, shape, context, batch)
    for job in (*_models(sizes), *_latents(sizes)):
        if job.settings["mode"] != "compiled" and is_cache_name(job.settings["cache"]):
            yield Job(job.name, "warm", job.settings, 120)
    yield _job(sizes, "gate", f"{sizes.small} float32", {"model": sizes.small}, 140)
    for shape, context, batch in others:
        yield from _judged(sizes, shape, context, batch)
    for head_dim, page_size, dtype in sizes.heads:
        for name in paged_names():
            of = {"format": name, "head_dim": head_dim, "page_size": page_size, "dtype": dtype}
            yield _job(sizes, "trials", f"{name} d{head_dim} page {page_size} {dtype}", of, 120)
    for rank, rope, dtype in sizes.latents:
        for name in native_names("latent"):
            of = {"format": name, "head_dim": 64, "page_size": 64, "dtype": dtype}
            title = f"latents {name} {rank}+{rope} {dtype}"
            yield _job(sizes, "trials", title, {**of, "latent": [rank, rope]}, 120)


def _judged(sizes: Sizes, shape: str, context: int, batch: int) -> Iterator[Job]:
    for name in paged_names():
        of = {"shape": shape, "context": context, "batch": batch, "format": name}
        yield _job(sizes, "judge", f"{shape} {context}x{batch} {name}", of, 120)


def _kernels(sizes: Sizes) -> Iterator[Job]:
    for shape in sizes.shapes:
        for context, batch in sizes.kernel_sizes:
            of = {"shape": shape, "context": context, "batch": batch}
            yield _job(sizes, "kernels", f"{shape} {context}x{batch}", of, 40)
    # behind all others: it compiles what it times
    for shape in sizes.shapes:
        for context, batch in sizes.kernel_sizes:
            if context > sizes.read_tokens and context >= READ_FROM:
                of = {
                    "shape": shape,
                    "context": context,
                    "batch": batch,
                    "read_tokens": sizes.read_tokens,
                }
                title = f"{shape} {context}x{batch} read_tokens={sizes.read_tokens}"
                yield _job(sizes, "reading", title, of, 60)


def _models(sizes: Sizes) -> Iterator[Job]:
    for context, batch in sizes.model_sizes:
        yield from _steps(sizes, sizes.model, context, batch, sizes.contenders)


def _latents(sizes: Sizes) -> Iterator[Job]:
    caches = [(name, "eager") for name in sizes.latent_caches]
    for model in sizes.latent_models:
        for context, batch in sizes.latent_sizes:
            yield from _steps(sizes, model, context, batch, caches)


def _steps(
    sizes: Sizes, model: str, context: int, batch: int, contenders: Sequence[tuple[str, str]]
) -> Iterator[Job]:
    for cache, mode in contenders:
        of = {"model": model, "context": context, "batch": batch, "cache": cache, "mode": mode}
        title = f"{model} {context}x{batch} {cache} {mode}"
        limit = 100 if mode == "compiled" else 50
        yield _job(sizes, "steps", title, {**of, "steps": sizes.steps}, limit)


def _job(sizes: Sizes, kind: str, name: str, settings: dict[str, Any], limit: float) -> Job:
    return Job(name, kind, {"device": sizes.device, "dtype": sizes.dtype, **settings}, limit)
