"""`kv-hf demo`: generate from a long real text with every cache, and show memory, speed and agreement side by side."""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from ..cache.model_shape import CACHE
from ..checks import check_int, extra
from ..printable import tell, tell_error
from ..text_table import say, table_lines, text_width
from ..texts import load_text
from ..version import __version__
from .caches import held_bytes
from .eval_command import check_place
from .models import LoadedModel
from .rows import Row, append_rows, make_row

# what the README offers, the most bytes first
CACHES = ("paged_exact", "paged_int8", "paged_int4", "paged_int3", "paged_int2")


class Clock(BaseStreamer):
    """Notes when it is made, when the prompt is put, and when each token arrives; the first ends the prefill."""

    def __init__(self, on_token: Callable[[], object]) -> None:
        self.times, self.on_token = [time.perf_counter()], on_token

    def put(self, value: Tensor) -> None:
        """Note one arrival: token ids, [tokens]."""
        self.times.append(time.perf_counter())
        if len(self.times) > 2:
            self.on_token()

    def end(self) -> None:
        """Nothing is left to flush."""


def make_prompt(tokenizer: Any, text: str, length: int) -> dict[str, Tensor]:
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


def with_every_cache(model: Any, inputs: Any, new_tokens: int) -> tuple[list[Row], list[list[int]]]:
    """Return the fields of a row of each cache, DynamicCache first, and what each generated, with a bar over all of them."""
    rows, said, names = [], [], ("dynamic", *CACHES)
    prompt = inputs["input_ids"].shape[1]
    greedy = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False}
    with tqdm(total=1 + len(names) * new_tokens, unit="token", file=sys.stderr) as bar:
        bar.set_description("warming up")
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
        bar.update()
        for name in names:
            bar.set_description(name)
            chosen = {} if name == "dynamic" else {"cache_implementation": name}
            clock = Clock(bar.update)
            out = model.generate(
                **inputs, **greedy, **chosen, streamer=clock, return_dict_in_generate=True
            )
            start, _, first, *_, last = clock.times
            row = {"cache": name, "prompt_tokens": prompt, "new_tokens": new_tokens}
            row["kv_bytes"] = held_bytes(out[CACHE])
            row["prefill_tokens_per_s"] = prompt / (first - start)
            row["decode_tokens_per_s"] = (new_tokens - 1) / (last - first)
            rows.append(row)
            said.append(out.sequences[0, prompt:].tolist())
        bar.set_description("generated")
    exact = said[names.index("paged_exact")]
    for row, tokens in zip(rows, said, strict=True):
        row["kv_ratio"] = row["kv_bytes"] / rows[0]["kv_bytes"]
        same = (a == b for a, b in zip(exact, tokens, strict=True))
        row["leading_equal_tokens"] = sum(1 for _ in itertools.takewhile(bool, same))
    return rows, said


def demonstrate(args: argparse.Namespace, prog: str, load: Callable[..., Any] = LoadedModel) -> int:
    """Generate and compare as `args` ask; return the exit code: 0, or 2 for an error that says its reason.

    Args:
        args: of `kv-hf demo`, as kv_hf_cli.py reads them.
        prog: what errors begin with.
        load: makes the model, as `LoadedModel` does.
    """
    transformers_logging.disable_progress_bar()
    try:
        check_int("--new-tokens", args.new_tokens, 2)
        check_int("--prompt-tokens", args.prompt_tokens, 1)
        check_place(args)
        tell(f"kv_hf {__version__}: model {args.model} on {args.device}", flush=True)
        tell("loading the model (a packaged one is converted the first time) ..", flush=True)
        loaded = load(args.model, torch.bfloat16, args.device)
        tokenizer = loaded.tokenizer
        inputs = make_prompt(tokenizer, load_text(args.text), args.prompt_tokens)
        inputs = {name: tensor.to(args.device) for name, tensor in inputs.items()}
        ids = inputs["input_ids"][0]
        tail = " ".join(tokenizer.decode(ids[-60:]).split())
        say(f"prompt: {len(ids)} tokens of {args.text}, ending in: .. {tail}")
        rows, said = with_every_cache(loaded.model, inputs, args.new_tokens)
    except (ValueError, ImportError, OSError) as error:
        tell_error(prog, error)
        return 2
    show(rows, [tokenizer.decode(tokens) for tokens in said])
    if args.record:
        common = {"kind": "demo", "model": args.model, "model_revision": loaded.revision}
        common |= {"device": args.device, "dtype": "bfloat16"}
        append_rows(args.out, [make_row(**common, **row) for row in rows])
    return 0


def show(rows: Sequence[Row], said: Sequence[str]) -> None:
    """Print a table of all caches, and what each of them generated."""
    prompt, new = rows[0]["prompt_tokens"], rows[0]["new_tokens"]
    columns = [
        ("cache", [row["cache"] for row in rows]),
        ("KV MiB", [f"{row['kv_bytes'] / 2**20:.2f}" for row in rows]),
        ("B/token", [f"{row['kv_bytes'] / (prompt + new - 1):.0f}" for row in rows]),
        ("of dynamic", [f"{row['kv_ratio']:.1%}".replace("%", " %") for row in rows]),
        ("prefill/s", [f"{row['prefill_tokens_per_s']:.0f}" for row in rows]),
        ("decode/s", [f"{row['decode_tokens_per_s']:.1f}" for row in rows]),
        ("agreement", [f"{row['leading_equal_tokens']} of {new}" for row in rows]),
    ]
    tell(f"\n{prompt} + {new} tokens, greedy, bf16; prefill and decode in tokens per second\n")
    tell("\n".join(table_lines(columns, text_width())) + "\n")
    for row, text in zip(rows, said, strict=True):
        say(f"{row['cache']}: {text!r}")
        tell("")
    say(
        "agreement: tokens before the first that differs from those of paged_exact. In bf16 the order of sums alone changes "
        "close calls, also between transformers' own attentions. kv-hf doctor tells which kernel reads the pages here."
    )
