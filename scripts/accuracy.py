"""Measure how far quantized caches are from the exact one on real text, and append rows to results/.

    python scripts/accuracy.py --model smollm2-135m
    python scripts/accuracy.py --model qwen2.5-coder-1.5b --windows 2

Every figure is read through the stored cache, token by token in effect (kv_hf.evaluation.teacher_forcing).
"""

import argparse
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import kv_hf
from kv_hf.evaluation.accuracy import measure_accuracy
from kv_hf.evaluation.packaged_models import PACKAGED, resolve_model
from kv_hf.evaluation.rows import append_rows, make_row
from kv_hf.evaluation.texts import BUNDLED, load_text, token_windows

RESULTS = Path(__file__).parent.parent / "results" / "accuracy.jsonl"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    packaged = ", ".join(PACKAGED)
    parser.add_argument("--model", default="smollm2-135m", help=f"{packaged}, a hub id or a folder")
    parser.add_argument(
        "--text", default="lincoln_1862", help=f"a file, or one of {', '.join(BUNDLED)}"
    )
    parser.add_argument(
        "--caches", nargs="+", default=list(kv_hf.IMPLEMENTATIONS), choices=kv_hf.IMPLEMENTATIONS
    )
    parser.add_argument(
        "--option",
        nargs="*",
        default=[],
        metavar="NAME=VALUE",
        help="integer cache options, e.g. sink_tokens=0 recent_tokens=32",
    )
    parser.add_argument("--windows", type=int, default=5, help="texts cut from the source")
    parser.add_argument("--window", type=int, default=1536, help="tokens of a text")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of it that are not scored")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    options = {name: int(value) for name, value in (item.split("=") for item in args.option)}
    folder = resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    model = model.to(args.device).eval()
    model.set_attn_implementation("kv_hf")
    token_ids = tokenizer(load_text(args.text)).input_ids
    windows = token_windows(token_ids, args.window, args.windows)
    texts = [torch.tensor(window, device=args.device) for window in windows]

    def maker(name: str):  # type: ignore[no-untyped-def]
        return lambda: kv_hf.PagedCache.from_implementation(model.config, name, options)

    scored = len(texts) * (args.window - args.prompt) * len(args.caches)
    with tqdm(total=scored, unit="token", desc=args.model) as bar:
        results = measure_accuracy(
            model, texts, {name: maker(name) for name in args.caches}, args.prompt, bar.update
        )

    table = Table(title=f"{args.model}, {args.text}: distance from the exact cache")
    for column in ("cache", "bits", "KL mean", "KL median", "KL p99", "top-1", "ppl", "exact ppl"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    rows = []
    for name, found in results.items():
        table.add_row(
            name,
            f"{found.bits_per_element:.2f}",
            f"{found.kl_mean:.5f}",
            f"{found.kl_median:.5f}",
            f"{found.kl_p99:.4f}",
            f"{100 * found.top1:.1f} %",
            f"{found.perplexity:.3f}",
            f"{found.perplexity_exact:.3f}",
        )
        rows.append(
            make_row(
                kind="accuracy",
                model=args.model,
                text=args.text,
                cache=name,
                options=options,
                windows=len(texts),
                window=args.window,
                prompt=args.prompt,
                dtype=args.dtype,
                protocol="teacher forced, decode semantics",
                **asdict(found),
            )
        )
    append_rows(args.out, rows)
    Console().print(table)


if __name__ == "__main__":
    main()
