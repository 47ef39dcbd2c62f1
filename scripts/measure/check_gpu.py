"""The first hour on a GPU: whether a cache is right there, within a minute; and the launch parameters that are fastest.

The rest of correctness is that of gpu.py. What is fastest becomes rows of tuning.jsonl, each beside the time of what the
package chooses by itself.
"""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from kv_hf.backends.base import AttentionCall
from kv_hf.backends.dispatch import paged_attention
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.doctor.kernels import Subject
from kv_hf.doctor.self_test import BROKEN, plan_trials, tried
from kv_hf.errors import KVCacheWarning
from kv_hf.evaluation.memory import in_words
from measure.attention import ROUNDS, Step, cold_layers, paged, verdict_of
from measure.gpu import PAGES, SIZES, decoding_of, on_gpu
from measure.runner import (
    Contender,
    Device,
    Fields,
    Verdict,
    WrongResultError,
    check,
    in_turns,
    judge,
)
from measure.shapes import captured, load
from measure.steps import ALLOWED

# formats of the doctor's trials: those that pages are sealed in and read by
TRIED = ("paged_int4", "paged_int8", "paged_exact", "paged_int3", "latents in int4")
WARPS, STAGES = (1, 2, 4), (2, 3, 4)
TIMES = (0.5, 1, 2, 4)  # the package's number of splits


@on_gpu(
    "first",
    grid=[{"what": ["compiled", "graph", "generate", *TRIED, "choice"]}],  # the longest first
    limit=150,  # a compiled step alone takes more than a minute
    until=0.05,
    timed=False,
    columns="contender error error_allowed",
)
def first(
    device: Device,
    what: str,
    model: str = "small",
    shape: str = "llama-8b",
    context: int = 8192,
    read_tokens: int = 1024,
) -> Iterator[Fields]:
    """Kernels against the reference, the choice of pages, a step in a graph and a compiled one, and a whole generation."""
    if what == "choice":
        work = Step(shape, 1, context, 1, "bfloat16", device)
        contenders = paged(work, "int4", read=read_tokens)
        judge(contenders)
        yield from ({"contender": one.name, **one.fields} for one in contenders)
    elif what in ("compiled", "graph"):
        verdict = step_verdict(device, model, what)
        check([verdict])
        yield {"contender": what, "error": verdict.error, "error_allowed": verdict.allowed}
    else:
        for trial, run in plan_trials(Subject(device)):
            if what in (trial.what, trial.format):
                done = tried(trial, run)
                check([Verdict(f"{trial.what}, {done.detail}", float(done.status == BROKEN), 0.0)])
                yield {"contender": trial.what, "kernel": trial.kernel}


def step_verdict(device: Device, model: str, mode: str) -> Verdict:
    """Compare the logits of the third step in a graph, or compiled, with those of an eager one; giving a graph up is wrong."""
    loaded = load(model, device, "float32")
    with warnings.catch_warnings():
        warnings.simplefilter("error", KVCacheWarning)
        found, right = (decoding_of(loaded, 300, 2, "paged_int4", how) for how in (mode, "eager"))
        ids = right.token
        for _ in range(3):
            got: Any = found.run()
            wanted = right.logits(ids)
    apart = (got[:, -1] - wanted).abs().max() / wanted.abs().max()
    return Verdict(mode, float(apart), ALLOWED["cuda"])


@on_gpu(
    "tuning",
    grid=[
        PAGES
        | {"shape": "llama-8b", "dtype": "bfloat16", "format": ["int4", "int8", "exact", "int3"]}
        | size
        for size in SIZES
    ],
    limit=240,
    columns="num_warps num_stages times ms_p50 ratio_to_chosen best",
)
def tuning(
    device: Device, shape: str, context: int, batch: int, dtype: str, format: str, page_size: int
) -> Iterator[Fields]:
    """Attention with every number of warps, stages and splits, beside what the package chooses; the best one says so."""
    layers = cold_layers(shape, batch, context, device)
    work = Step(shape, batch, context, layers, dtype, device)
    cache = PagedCache.from_implementation(
        work.shape.config(layers), f"paged_{format}", {"page_size": page_size}
    )
    work.fill(cache)
    contenders = [launched_with(work, cache, {"num_warps": None, "num_stages": None, "times": 1})]
    for values in itertools.product(WARPS, STAGES, TIMES):
        how = dict(zip(("num_warps", "num_stages", "times"), values, strict=True))
        try:
            contenders.append(launched_with(work, cache, how))
        except WrongResultError:
            raise
        except Exception as error:  # too much shared memory, or what a compiler raises
            yield how | {"refused": in_words(error)}
    rows = in_turns(contenders, ROUNDS, device, scale=1 / layers)
    fastest = min(rows, key=lambda row: row["ms_p50"])
    yield from (row | {"best": row is fastest} for row in rows)


def launched_with(work: Step, cache: Any, how: Fields) -> Contender:
    """Return attention with these launch parameters, judged; on a GPU it is captured as a graph."""
    kernel = cache.paged_layers[0].store.kernel
    views = [replace(layer.current_kv(), launches={}) for layer in cache.paged_layers]
    calls = [
        AttentionCall(query, kv, work.scale)
        for (query, _, _), kv in zip(work.tensors, views, strict=True)
    ]

    def run() -> torch.Tensor:
        for call in calls:
            out = paged_attention(call, kernel)
        return out[:, :, 0]

    name = "chosen" if how["num_warps"] is None else "tried"
    with launch_parameters_of(**how):
        check([verdict_of(name, run(), calls[-1])])
        timed = captured(run) if work.device.type == "cuda" else run
    return Contender(name, timed, fields={**how, "kernel": kernel.name})


@contextmanager
def launch_parameters_of(
    num_warps: int | None, num_stages: int | None, times: float
) -> Iterator[None]:
    """Launch attention with these, and with the package's number of splits times that; None: what the package chooses."""
    from kv_hf.backends.triton import decode, meta_params

    rule, most, tiles = meta_params.launch_parameters, decode.most_splits, decode.MIN_TILES

    def launched(*asked: Any) -> tuple[int, int]:
        warps, stages = rule(*asked)
        return num_warps or warps, num_stages or stages

    with ExitStack() as changed:
        for module, name, value in (
            (meta_params, "launch_parameters", launched),
            (decode, "most_splits", lambda *asked: max(1, int(times * most(*asked)))),
            (decode, "MIN_TILES", max(1, int(tiles / times))),
        ):
            changed.enter_context(patch.object(module, name, value))
        yield
