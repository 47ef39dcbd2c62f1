"""Generate from a long real text with every cache, and show memory, speed and agreement side by side.

python scripts/demo.py                      SmolLM2-135M-Instruct from a PyPI package, no network
python scripts/demo.py --model org/name     any causal language model (hub id or folder)
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure.models.packaged import resolve_model
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

import kv_hf
from kv_hf.evaluation.rows import append_rows, make_row
from kv_hf.texts import load_text

DYNAMIC = "dynamic (transformers)"
RESULTS = Path(__file__).parent.parent / "results" / "demo.jsonl"


class Clock(BaseStreamer):
    """Notes when each token arrives: the first `put` is the prompt, the second ends the prefill."""

    def __init__(self, on_token: Any) -> None:
        self.times: list[float] = []
        self.on_token = on_token

    def put(self, value: torch.Tensor) -> None:
        """Note one arrival."""
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self.on_token()

    def end(self) -> None:
        """Nothing is left to flush."""


@dataclass
class Run:
    """What one cache did."""

    kv_bytes: int
    prefill_per_s: float
    decode_per_s: float
    tokens: list[int]


def cache_bytes(cache: Any) -> int:
    """Return the bytes of the keys and values that a cache holds."""
    if isinstance(cache, kv_hf.PagedCache):
        return cache.memory().total
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def run(model: Any, inputs: Any, implementation: str | None, new_tokens: int, on_token: Any) -> Run:
    """Generate greedily with one cache."""
    clock = Clock(on_token)
    start = time.perf_counter()
    out = model.generate(
        **inputs,
        cache_implementation=implementation,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        streamer=clock,
        return_dict_in_generate=True,
    )
    prompt = inputs["input_ids"].shape[1]
    first, last = clock.times[1], clock.times[-1]
    return Run(
        kv_bytes=cache_bytes(out.past_key_values),
        prefill_per_s=prompt / (first - start),
        decode_per_s=(new_tokens - 1) / (last - first),
        tokens=out.sequences[0, prompt:].tolist(),
    )


def make_prompt(tokenizer: Any, text: str, length: int) -> dict[str, torch.Tensor]:
    """Return a prompt of about `length` tokens: a question about the text, or the text where there is no chat."""
    ids = tokenizer(text).input_ids
    if tokenizer.chat_template is None:
        return dict(tokenizer(tokenizer.decode(ids[:length]), return_tensors="pt"))
    excerpt = tokenizer.decode(ids[: max(1, length - 64)])
    question = f"{excerpt}\n\nWhat are the main points of this message? Answer in full sentences."
    chat = [{"role": "user", "content": question}]
    return dict(
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    )


def leading_equal(a: list[int], b: list[int]) -> int:
    """Return how many tokens agree before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", default="lincoln_1862", help="bundled text or a file")
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--record", action="store_true", help="append rows to results/demo.jsonl")
    args = parser.parse_args()

    console = Console()
    console = Console(width=max(console.width, 110))
    transformers_logging.disable_progress_bar()
    console.print(f"[bold]kv_hf {kv_hf.__version__}[/]: model {args.model} on {args.device}")
    with console.status("loading the model (the first time it is converted and cached)"):
        folder = resolve_model(args.model)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model = model.to(args.device).eval()
    inputs = make_prompt(tokenizer, load_text(args.text), args.prompt_tokens)
    inputs = {name: tensor.to(args.device) for name, tensor in inputs.items()}
    prompt = inputs["input_ids"].shape[1]
    tail = tokenizer.decode(inputs["input_ids"][0, -60:])
    console.print(f"prompt: {prompt} tokens of {args.text}, ending in")
    console.print(f"[italic]… {escape(str(tail))}[/]")
    with console.status("warming up"):
        model.generate(**inputs, max_new_tokens=2, do_sample=False)

    names: dict[str, str | None] = {DYNAMIC: None, **{name: name for name in kv_hf.IMPLEMENTATIONS}}
    runs: dict[str, Run] = {}
    with Progress(
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        for name, implementation in names.items():
            task = progress.add_task(name, total=args.new_tokens)
            runs[name] = run(
                model, inputs, implementation, args.new_tokens, lambda t=task: progress.advance(t)
            )

    dynamic, exact = runs[DYNAMIC], runs["paged_exact"]
    table = Table(title=f"{prompt} + {args.new_tokens} tokens, greedy, bf16")
    columns = ("KV MiB", "B/token", "of dynamic", "prefill tok/s", "decode tok/s", "as exact pages")
    table.add_column("cache", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    rows = []
    for name, done in runs.items():
        cached = prompt + args.new_tokens - 1
        same = leading_equal(exact.tokens, done.tokens)
        table.add_row(
            name,
            f"{done.kv_bytes / 2**20:.2f}",
            f"{done.kv_bytes / cached:.0f}",
            f"{100 * done.kv_bytes / dynamic.kv_bytes:.1f} %",
            f"{done.prefill_per_s:.0f}",
            f"{done.decode_per_s:.1f}",
            f"first {same} of {args.new_tokens}",
        )
        rows.append(
            make_row(
                kind="demo",
                model=args.model,
                device=args.device,
                cache=names[name] or "dynamic",
                prompt_tokens=prompt,
                new_tokens=args.new_tokens,
                kv_bytes=done.kv_bytes,
                kv_ratio=done.kv_bytes / dynamic.kv_bytes,
                prefill_tokens_per_s=done.prefill_per_s,
                decode_tokens_per_s=done.decode_per_s,
                leading_equal_tokens=same,
            )
        )
    console.print(table)
    for name, done in runs.items():
        console.print(
            f"[bold]{name}[/]: {escape(repr(tokenizer.decode(done.tokens)))}\n", highlight=False
        )
    console.print(
        "Agreement is counted against paged_exact: in bf16 the order of sums alone changes close calls, also between "
        "transformers' own attentions.\nkv-hf doctor tells which kernel reads the pages here. "
    )
    if args.record:
        append_rows(RESULTS, rows)


if __name__ == "__main__":
    main()
