"""The measurements themselves, in the process of a worker: each yields what goes into a row as soon as it is known."""

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from kv_hf.evaluation.cache_kinds import cache_kind
from kv_hf.evaluation.decode_steps import Decoding, kernel_of, random_prompt
from kv_hf.evaluation.shapes import SHAPES, random_model
from kv_hf.evaluation.timing import captured, copy_bandwidth, interleave, spread, timed

from kv_hf.cache.latent_layer import LatentLayer
from kv_hf.cache_names import parse_cache_name
from kv_hf.doctor import plan_trials
from kv_hf.doctor.kernels import paged_names, report_formats
from kv_hf.formats import is_cache_name
from kv_hf.hf.latent import prepare_latents
from measure.speed import decode_reading
from measure.speed.decode_contenders import Contender, Workload, layers_for, paged, stock
from measure.speed.decode_gate import gate

Fields = dict[str, Any]
ROUNDS = 20
READ_FORMATS = ("int4", "exact")  # whose steps are timed that read a part of the text
WARMUP = 3


def trials(
    device: str, dtype: str, format: str, head_dim: int, page_size: int, latent: Any = None
) -> Iterator[Fields]:
    """Seal and attend in one format, beside the reference: bytes must be the same, results within rounding."""
    place, kind = torch.device(device), getattr(torch, dtype)
    key_dim, value_dim = latent or (head_dim, head_dim)
    ranks = None if latent is None else (key_dim, value_dim)
    reports = report_formats(place, kind, head_dim, page_size, ranks)
    of_format = [report for report in reports if report.format == format]
    for report in of_format:
        refused = [f"{name}: {why}" for name, why in report.others if why is not None]
        yield {"what": "choice", "kernel": report.kernel, "refused": refused, "ok": True}
    plans = plan_trials(of_format, place, kind, page_size, key_dim, value_dim, latent is not None)
    for best, planned in plans:
        if best:
            found = planned.tried().as_dict()
            yield {**found, "ok": found["status"] == "ok"}


def judge(
    device: str, dtype: str, shape: str, context: int, batch: int, format: str
) -> Iterator[Fields]:
    """Decode a token through a cache of one layer, and by the kernel alone, against a softmax in fp64."""
    work = _workload(device, dtype, shape, context, batch, 1)
    for contender in paged(work, format):
        verdict = contender.verdict()
        yield {
            "contender": contender.name, "kernel": contender.kernel, "error": verdict.error,
            "error_allowed": verdict.budget, "ok": verdict.ok,
        }  # fmt: skip


def small_gate(device: str, dtype: str, model: str) -> Iterator[Fields]:
    """Compare logits of a small model in float32 through every paged cache."""
    for result in gate(random_model(model, torch.device(device), torch.float32)):
        yield {
            "cache": result.name, "against": result.against, "error": result.error,
            "error_allowed": result.allowed, "tokens_equal": result.tokens_equal, "ok": result.ok,
        }  # fmt: skip


def kernels(device: str, dtype: str, shape: str, context: int, batch: int) -> Iterator[Fields]:
    """Time attention alone, beside torch's own on keys that lie there, and beside a copy of a large buffer."""
    place = torch.device(device)
    copy = _copy_speed(device)
    layers = layers_for(SHAPES[shape], batch, context, place)
    work = _workload(device, dtype, shape, context, batch, layers)
    makers: list[Callable[[], list[Contender]]] = [lambda: stock(work)]
    makers += [lambda name=name: [paged(work, name)[1]] for name in paged_names()]  # type: ignore[misc]
    for make in makers:
        for contender in make():
            yield {
                "contender": contender.name, "kernel": contender.kernel, "layers": layers, "copy_gb_per_s": copy,
                **_timed_kernel(contender, layers, place, copy),
            }  # fmt: skip
            _forget()


def reading(
    device: str, dtype: str, shape: str, context: int, batch: int, read_tokens: int
) -> Iterator[Fields]:
    """Time a step's attention that reads `read_tokens` tokens of each row, its choice of pages, and one that reads all."""
    place = torch.device(device)
    copy = _copy_speed(device)
    layers = layers_for(SHAPES[shape], batch, context, place)
    work = _workload(device, dtype, shape, context, batch, layers)
    for name in READ_FORMATS:
        for contender in (paged(work, name)[1], *decode_reading.reading(work, name, read_tokens)):
            yield {
                "contender": contender.name, "kernel": contender.kernel, "layers": layers, "copy_gb_per_s": copy,
                **_timed_kernel(contender, layers, place, copy),
            }  # fmt: skip
        _forget()


def _timed_kernel(contender: Contender, layers: int, device: torch.device, copy: float) -> Fields:
    """Judge a contender, and time it where it is right; torch's own calls may refuse."""
    try:
        verdict = contender.verdict()
        judged = {"error": verdict.error, "error_allowed": verdict.budget, "ok": verdict.ok}
        if not verdict.ok:
            return judged
        contender.prepare()
        run, timing = contender.run, "eager"
        if device.type == "cuda":
            run, timing = captured(contender.run), "graph"
    except RuntimeError as error:
        if contender.kernel is not None or isinstance(error, torch.OutOfMemoryError):
            raise
        return {"refused": str(error).splitlines()[0][:200], "ok": True}
    found = spread([ms / layers for ms in interleave({"": run}, ROUNDS, device)[""]])
    speed = contender.nbytes / (1e6 * found.p50)
    return {
        **judged, "timing": timing, **found.row("ms"), "nbytes": contender.nbytes, "gb_per_s": speed,
        "part_of_copy": speed / copy,
    }  # fmt: skip


@torch.no_grad()
def steps(
    device: str, dtype: str, model: str, context: int, batch: int, cache: str, mode: str, steps: int
) -> Iterator[Fields]:
    """Time whole decode steps of a model on a cache of random keys and values.

    Modes: "eager"; "graph" replays a CUDA graph of the eager step; "compiled" is torch.compile's mode "reduce-overhead",
    as transformers takes it. A paged cache in a graph or compiled is the preallocated one (`max_length`).

    Raises: ValueError for a graph on a device that has none.
    """
    place = torch.device(device)
    decoding, run = _decoding(_model(model, device, dtype), context, batch, cache, mode, steps)
    for _ in range(WARMUP):
        run()
    found = spread([timed(run, place) for _ in range(steps)])
    memory = {}
    if place.type == "cuda":
        memory = {
            "allocated_bytes": torch.cuda.memory_allocated(place),
            "reserved_bytes": torch.cuda.memory_reserved(place),
        }
    yield {
        "kernel": kernel_of(decoding.cache), "tokens_held": decoding.tokens, **found.row("step_ms"),
        "tokens_per_s": 1e3 * batch / found.p50, "kv_bytes": decoding.kv_bytes, **memory, "ok": True,
    }  # fmt: skip
    del decoding, run
    torch._dynamo.reset()


@torch.no_grad()
def warm(
    device: str, dtype: str, model: str, context: int, batch: int, cache: str, mode: str, steps: int
) -> Iterator[Fields]:
    """Decode once through a single layer of a model: what `steps` launches is compiled then, whoever runs it."""
    small = random_model(
        model, torch.device(device), getattr(torch, dtype), num_hidden_layers=1, vocab_size=1024
    )
    decoding, run = _decoding(small, context, batch, cache, mode, steps)
    run()
    finite = bool(torch.isfinite(decoding.step()).all())
    yield {"kernel": kernel_of(decoding.cache), "finite": finite, "ok": finite}


def _decoding(
    model: Any, context: int, batch: int, cache: str, mode: str, steps: int
) -> tuple[Decoding, Callable[[], object]]:
    """Return a model with a filled cache, and a call that decodes a token of each row."""
    room = steps + 4 * WARMUP + 8
    if mode != "eager" and is_cache_name(parse_cache_name(cache)[0]):
        cache += f"{',' if ':' in cache else ':'}max_length={context + room}"
    prompt = random_prompt(model.config.vocab_size, batch, context, model.device)
    decoding = Decoding(model, cache_kind(cache), prompt, fill="random", room=room)
    decoding.before()
    layers = getattr(decoding.cache, "layers", ())
    if any(isinstance(layer, LatentLayer) for layer in layers):
        prepare_latents(
            model, decoding.cache.options
        )  # as generate() does: no prompt has gone through the model
    return decoding, _step_of(decoding, mode)


def _step_of(decoding: Decoding, mode: str) -> Callable[[], object]:
    """Return a call that decodes one more token of all rows; in a graph and compiled always the same one."""
    model, ids = decoding.model, decoding.token.clone()

    def step(forward: Callable[..., Any]) -> Any:
        return forward(
            input_ids=ids, past_key_values=decoding.cache, use_cache=True, logits_to_keep=1
        ).logits

    if mode == "graph":
        if ids.device.type != "cuda":
            raise ValueError(f"a graph needs a CUDA device, got {ids.device}")
        return captured(lambda: step(model))
    if mode == "compiled":
        torch._dynamo.reset()
        compiled = torch.compile(model.forward, mode="reduce-overhead")
        return lambda: step(compiled)
    return decoding.step


@functools.lru_cache(maxsize=1)
def _model(name: str, device: str, dtype: str) -> Any:
    return random_model(name, torch.device(device), getattr(torch, dtype))


@functools.lru_cache(maxsize=1)
def _copy_speed(device: str) -> float:
    return copy_bandwidth(torch.device(device))


def _workload(
    device: str, dtype: str, shape: str, context: int, batch: int, layers: int
) -> Workload:
    place, kind = torch.device(device), getattr(torch, dtype)
    return Workload(SHAPES[shape], batch, context, layers, kind, place)


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


KINDS: dict[str, Callable[..., Iterator[Fields]]] = {
    "trials": trials, "judge": judge, "gate": small_gate, "kernels": kernels, "reading": reading, "steps": steps, "warm": warm,
}  # fmt: skip
