"""`kv-hf demo`: generate from a long real text with every cache, and show memory, speed and agreement side by side."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from ..cache.paged_cache import PagedCache
from ..errors import KVCacheError
from ..extras import extra
from ..printable import tell, tell_error
from ..text_table import say, table_lines, text_width
from ..texts import load_text
from ..version import __version__
from .model_name import check_model_name
from .rows import append_rows, make_row

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DYNAMIC = "dynamic"
# what the README offers, the most bytes first
CACHES = ("paged_exact", "paged_int8", "paged_int4", "paged_int3", "paged_int2")
EXACT = "paged_exact"
ROWS = Path("kv_hf_demo.jsonl")


class Clock(BaseStreamer):
    """Notes when each token arrives: the first `put` is the prompt, the second ends the prefill."""

    def __init__(self, on_token: Any) -> None:
        self.times: list[float] = []
        self.on_token = on_token

    def put(self, value: torch.Tensor) -> None:
        """Note one arrival: token ids, [tokens]."""
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
    if isinstance(cache, PagedCache):
        return cache.memory().total
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def generate_once(
    model: Any, inputs: Any, implementation: str | None, new_tokens: int, on_token: Any
) -> Run:
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
    """Return a prompt of about `length` tokens, [1, tokens] each field: a question about the text, or the text where there is no
    chat.
    """
    ids = tokenizer(text).input_ids
    if tokenizer.chat_template is None:
        return dict(tokenizer(tokenizer.decode(ids[:length]), return_tensors="pt"))
    excerpt = tokenizer.decode(ids[: max(1, length - 64)])
    question = f"{excerpt}\n\nWhat are the main points of this message? Answer in full sentences."
    chat = [{"role": "user", "content": question}]
    with extra("demo", "the chat template of this model"):
        import jinja2  # noqa: F401  (transformers renders templates with it)
    return dict(
        tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    )


def leading_equal(a: list[int], b: list[int]) -> int:
    """Return how many tokens agree before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog=prog,
        allow_abbrev=False,
        description="Generate from a long real text with every cache, and show memory, speed and agreement side by side. Models "
        "with a chat template need pip install -e '.[demo]' in the clone.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    found.add_argument("--model", default=MODEL, help="a hub id or a folder")
    found.add_argument("--text", default="lincoln_1862", help="bundled text or a file")
    found.add_argument("--prompt-tokens", type=int, default=2048, help="about how many")
    found.add_argument("--new-tokens", type=int, default=64, help="generated with each cache")
    found.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="of the model"
    )
    found.add_argument("--record", action="store_true", help="append rows to --out")
    found.add_argument("--out", type=Path, default=ROWS, metavar="FILE", help="file of rows")
    return found


def main(argv: Sequence[str] | None = None, prog: str = "kv-hf demo") -> int:
    """Generate and compare; return the exit code: 0, or 2 for an error that says its reason."""
    return demonstrate(parser(prog).parse_args(sys.argv[1:] if argv is None else list(argv)), prog)


def demonstrate(
    args: argparse.Namespace, prog: str, find_model: Callable[[str], str] = check_model_name
) -> int:
    """Do what `args` ask, and print it; return the exit code of `main`.

    Args:
        args: as `parser` returns them.
        find_model: returns the hub id or folder to load for --model; raises ValueError.
    """
    transformers_logging.disable_progress_bar()
    tell(f"kv_hf {__version__}: model {args.model} on {args.device}", flush=True)
    try:
        tell("loading the model (a packaged one is converted the first time) ..", flush=True)
        source = find_model(args.model)
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        model = model.to(args.device).eval()
        inputs = make_prompt(tokenizer, load_text(args.text), args.prompt_tokens)
    except (KVCacheError, ValueError, ImportError, OSError) as error:
        tell_error(prog, error)
        return 2
    inputs = {name: tensor.to(args.device) for name, tensor in inputs.items()}
    prompt = inputs["input_ids"].shape[1]
    tail = " ".join(tokenizer.decode(inputs["input_ids"][0, -60:]).split())
    say(f"prompt: {prompt} tokens of {args.text}, ending in: .. {tail}")
    runs = _with_every_cache(model, inputs, args.new_tokens)
    show(runs, tokenizer, prompt, args.new_tokens)
    if args.record:
        append_rows(args.out, rows_of(runs, args, prompt))
    return 0


def _with_every_cache(model: Any, inputs: Any, new_tokens: int) -> dict[str, Run]:
    """Return cache -> what it did, DynamicCache first, with a bar over all of them."""
    runs: dict[str, Run] = {}
    names = (DYNAMIC, *CACHES)
    with tqdm(total=1 + len(names) * new_tokens, unit="token", file=sys.stderr) as bar:
        bar.set_description("warming up")
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
        bar.update()
        for name in names:
            bar.set_description(name)
            implementation = None if name == DYNAMIC else name
            runs[name] = generate_once(model, inputs, implementation, new_tokens, bar.update)
        bar.set_description("generated")
    return runs


def show(runs: dict[str, Run], tokenizer: Any, prompt: int, new_tokens: int) -> None:
    """Print a table of all caches, and what each of them generated."""
    cached, exact = prompt + new_tokens - 1, runs[EXACT]
    every = list(runs.values())
    columns = [
        ("KV MiB", [f"{run.kv_bytes / 2**20:.2f}" for run in every]),
        ("B/token", [f"{run.kv_bytes / cached:.0f}" for run in every]),
        ("of dynamic", [f"{100 * run.kv_bytes / runs[DYNAMIC].kv_bytes:.1f} %" for run in every]),
        ("prefill/s", [f"{run.prefill_per_s:.0f}" for run in every]),
        ("decode/s", [f"{run.decode_per_s:.1f}" for run in every]),
        (
            "agreement",
            [f"{leading_equal(exact.tokens, run.tokens)} of {new_tokens}" for run in every],
        ),
    ]
    tell(
        f"\n{prompt} + {new_tokens} tokens, greedy, bf16; prefill and decode in tokens per second\n"
    )
    tell("\n".join(table_lines([("cache", list(runs)), *columns], text_width())) + "\n")
    for name, run in runs.items():
        say(f"{name}: {tokenizer.decode(run.tokens)!r}")
        tell("")
    say(
        "agreement: tokens before the first that differs from those of paged_exact. In bf16 the order of sums alone changes "
        "close calls, also between transformers' own attentions. kv-hf doctor tells which kernel reads the pages here."
    )


def rows_of(runs: dict[str, Run], args: argparse.Namespace, prompt: int) -> list[dict[str, Any]]:
    """Return a row of each cache, with what is needed to repeat it."""
    exact, dynamic = runs[EXACT], runs[DYNAMIC]
    return [
        make_row(
            kind="demo",
            model=args.model,
            device=args.device,
            dtype="bfloat16",
            cache=name,
            prompt_tokens=prompt,
            new_tokens=args.new_tokens,
            kv_bytes=run.kv_bytes,
            kv_ratio=run.kv_bytes / dynamic.kv_bytes,
            prefill_tokens_per_s=run.prefill_per_s,
            decode_tokens_per_s=run.decode_per_s,
            leading_equal_tokens=leading_equal(exact.tokens, run.tokens),
        )
        for name, run in runs.items()
    ]
