"""Draw how one layer of one step chooses pages: docs/images/page_selection.png.

    python scripts/reading_picture.py --text novel --length 8192 --layer 10

A real step of SmolLM2-135M: the attention mass that its pages have, what their summaries say of it, and which of them are read.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from measure.models.packaged import smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer

import kv_hf
from kv_hf.backends import dispatch
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.reference import selection
from kv_hf.texts import text_windows

IMAGE = Path(__file__).parent.parent / "docs" / "images" / "page_selection.png"
READ, LEFT = "#1f6feb", "#c9d1d9"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", default="novel")
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--layer", type=int, default=10)
    parser.add_argument("--keys", default="int4")
    parser.add_argument("--read", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=IMAGE)
    return parser.parse_args(argv)


@torch.no_grad()
def step_of(args: argparse.Namespace) -> AttentionCall:
    """Return the attention of one layer in the step behind the text, over exact pages with a budget."""
    folder = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.set_attn_implementation("kv_hf")
    ids = torch.tensor(text_windows(tokenizer, args.text, args.length, 1))
    cache = kv_hf.PagedCache(
        model.config, keys=args.keys, read_tokens=args.read, kernel="reference"
    )
    model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
    calls: list[AttentionCall] = []
    own = dispatch._of_chosen_pages

    def keep(call: AttentionCall, kernel: object) -> AttentionCall:
        calls.append(call)
        return own(call, kernel)  # type: ignore[arg-type]

    dispatch._of_chosen_pages = keep
    try:
        model(ids[:, -1:], past_key_values=cache)
    finally:
        dispatch._of_chosen_pages = own
    return calls[args.layer]


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the picture."""
    args = arguments(argv)
    call = step_of(args)
    kv, heads = call.kv, call.query.shape[1]
    pages = int(kv.num_pages[0])
    guessed = selection.page_mass(call)[0][0, :pages] / heads
    mass = selection.page_mass(call, whole_keys=True)[0][0, :pages] / heads
    table, counts = selection.choose_pages(call)
    held = kv.block_table[0, :pages].tolist()
    read = [held.index(page) for page in table[0, : int(counts[0])].tolist()]
    colours = [READ if page in set(read) else LEFT for page in range(pages)]
    figure, axes = plt.subplots(2, 1, figsize=(9, 4.2), sharex=True, layout="constrained")
    for axis, bars, title in (
        (
            axes[0],
            guessed,
            "1. What a quarter of the keys' channels tells: estimated attention to each page, all heads together",
        ),
        (
            axes[1],
            mass,
            "2. What is read: the newest page and the largest estimates (blue). Height: the attention that a page really has",
        ),
    ):
        axis.bar(range(pages), (100 * bars).tolist(), width=0.9, color=colours)
        axis.set_title(title, fontsize=9, loc="left")
        axis.set_ylabel("% of attention")
        axis.set_yscale("log")
        axis.set_ylim(bottom=1e-3)
        axis.spines[["top", "right"]].set_visible(False)
    part = float(mass[read].sum() / mass.sum())
    axes[1].set_xlabel(
        f"page of {kv.page_size} tokens. SmolLM2-135M, {args.keys}, layer {args.layer}, {args.text} of {args.length:,} tokens: "
        f"{len(read)} of {pages} pages\nare read, which have {part:.1%} of the attention to pages",
        fontsize=8,
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    print(f"{len(read)} of {pages} pages, {part:.4f} of the mass of pages; wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
