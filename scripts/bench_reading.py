"""Time decode steps that read a part of a long text beside steps that read all of it.

    python scripts/bench_reading.py --contexts 8192 16384 32768 --threads 1 --record

Two measurements of each context, each in one process and in turns. `attention`: all layers' attention over random tokens
of SmolLM2-135M's sizes, reading everything, reading `--read` tokens (choice included), and the choice alone. `model`: a
whole step of the model, its cache filled with random tokens. Texts are random: what is read costs the same as of real ones.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from kv_hf.evaluation.shapes import SHAPES
from kv_hf.evaluation.timing import interleave, spread
from measure.models.packaged import smollm2
from measure.speed.decode_contenders import Workload, paged
from measure.speed.decode_reading import reading
from rich.console import Console
from transformers import AutoModelForCausalLM

import kv_hf
from kv_hf.evaluation.rows import append_rows, check_writable, make_row

RESULTS = Path(__file__).parent.parent / "results" / "reading_speed.jsonl"
LAYERS = 30
console = Console(width=120)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 16384, 32768])
    parser.add_argument("--formats", nargs="+", default=["int4", "k5v3", "int8", "exact"])
    parser.add_argument("--read", type=int, default=2048, help="tokens that a step reads")
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of `attention`")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument(
        "--no-model", action="store_true", help="leave whole steps of the model out"
    )
    parser.add_argument("--record", action="store_true", help=f"append rows to {RESULTS.name}")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def timed_rows(
    kind: str, runs: dict[str, Callable[[], Any]], rounds: int, **facts: Any
) -> list[dict[str, Any]]:
    """Time contenders in turns; ratios are to the first one. With one thread also its processor time, which other programs do not add to."""
    cpu: dict[str, list[float]] = {name: [] for name in runs}

    def metered(name: str) -> Callable[[], None]:
        def call() -> None:
            start = time.thread_time()
            runs[name]()
            cpu[name].append(1e3 * (time.thread_time() - start))

        return call

    times = interleave({name: metered(name) for name in runs}, rounds, torch.device("cpu"))
    first = next(iter(runs))
    return [
        make_row(
            kind=kind, contender=name, device="cpu", dtype="bfloat16", model="smollm2-135m", **facts,
            **spread(samples).row("ms"), ms_min=min(samples), thread_ms_min=min(cpu[name]),
            ratio_of_minima=min(samples) / min(times[first]), ratio_of_thread_minima=min(cpu[name]) / min(cpu[first]),
        )
        for name, samples in times.items()
    ]  # fmt: skip


def attention_rows(context: int, name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a step's attention in all layers: everything read, a part read, and the choice alone."""
    work = Workload(SHAPES["smollm2"], 1, context, args.layers, torch.bfloat16, torch.device("cpu"))
    _, whole = paged(work, name)
    part, choice = reading(work, name, args.read)
    for one in (whole, part, choice):
        verdict = one.verdict()
        if not verdict.ok:
            raise SystemExit(
                f"{one.name} is wrong: {verdict.error:.3g}, allowed {verdict.budget:.3g}"
            )
        one.prepare()
    runs = {"everything": whole.run, "part": part.run, "choice": choice.run}
    facts = {
        "cache": f"paged_{name}",
        "context": context,
        "read_tokens": args.read,
        "layers": args.layers,
    }
    return timed_rows("attention", runs, args.rounds, **facts)


def filled(config: Any, context: int, options: dict[str, Any]) -> kv_hf.PagedCache:
    """Return a cache of the model with `context` random tokens."""
    cache = kv_hf.PagedCache.from_implementation(config, "paged_int4", options)
    numbers = torch.Generator().manual_seed(0)
    shape = (1, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        keys, values = (
            torch.randn(shape, generator=numbers, dtype=torch.bfloat16) for _ in range(2)
        )
        cache.update(keys, values, layer)
    return cache


@torch.no_grad()
def model_rows(context: int, model: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Time whole steps of the model: everything read, and a part."""
    caches = {
        "everything": filled(model.config, context, {}),
        "part": filled(model.config, context, {"read_tokens": args.read}),
    }
    token = torch.tensor([[7]])

    def step(cache: Any) -> Callable[[], None]:
        return lambda: model(token, past_key_values=cache)

    runs = {name: step(cache) for name, cache in caches.items()}
    facts = {"cache": "paged_int4", "context": context, "read_tokens": args.read, "layers": LAYERS}
    return timed_rows("model", runs, args.rounds, **facts)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line per row."""
    for row in rows:
        console.print(
            f"{row['kind']:10} {row['cache']:12} {row['context']:6,} {row['contender']:11} {row['ms_min']:8.2f} ms"
            f"  {row['ratio_of_minima']:.3f}  (processor {row['thread_ms_min']:.2f} ms  {row['ratio_of_thread_minima']:.3f})"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.record:
        check_writable(args.out)
    model = None
    if not args.no_model:
        model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16).eval()
        model.set_attn_implementation("kv_hf")
    for context in args.contexts:
        found = [rows for name in args.formats for rows in attention_rows(context, name, args)]
        if model is not None:
            found += model_rows(context, model, args)
        show(found)
        if args.record:
            append_rows(args.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
