"""Tell how far a model's keys and values are from the limits at which formats count as too narrow (docs/formats.md).

    python scripts/strain_table.py --model smollm2-135m --text novel.txt code.txt tables.txt

Keys and values come from one forward per text. They are measured as they are, and with channels of the first kv head scaled,
as a model may have them whose outputs are the same. A row of the table is the damage over the usual one of a format: least,
median and most over layers and texts, the worst head of each.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure.models.packaged import resolve_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kv_hf.cache.wider_formats import SIDES, limit
from kv_hf.formats import format_names, key_scheme, value_scheme
from kv_hf.quant.strain import Sample, usual_damage
from kv_hf.spec import PageSpec

PAGE, SINKS = 64, 4
Change = Callable[[torch.Tensor], torch.Tensor]


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="a folder, or a packaged model")
    parser.add_argument("--text", nargs="+", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=772, help="of each text")
    known = dict.fromkeys([*format_names("keys"), *format_names("values")])
    parser.add_argument("--formats", nargs="+", default=[*known], choices=known)
    return parser.parse_args(argv)


def scaled(factor: float, channels: Sequence[int]) -> Change:
    """Return a change that multiplies channels of the first head of pages [n, heads, page, dim]."""

    def change(pages: torch.Tensor) -> torch.Tensor:
        pages = pages.clone()
        pages[:, 0, :, list(channels)] *= factor
        return pages

    return change


def changes(side: str, dim: int) -> dict[str, Change]:
    """Return what is done to keys or values, by name."""
    if side == "keys":
        return {"as it is": scaled(1, [0]), "RoPE pair x50": scaled(50, [3, 3 + dim // 2])}
    loud = {f"channel 5 x{factor}": scaled(factor, [5]) for factor in (10, 100)}
    return {"as it is": scaled(1, [0]), **loud, "all x1e-4": lambda pages: pages * 1e-4}


@torch.no_grad()
def first_and_last_pages(
    model: torch.nn.Module, ids: torch.Tensor
) -> list[tuple[torch.Tensor, ...]]:
    """Return, for each layer, two pages of keys and of values, [2, heads, page, dim], of a text of tokens [1, n]."""
    cache: Any = DynamicCache()
    model(ids, past_key_values=cache, logits_to_keep=1)
    last = SINKS + (ids.shape[1] - SINKS) // PAGE * PAGE - PAGE
    return [
        tuple(
            torch.stack([side[0, :, first : first + PAGE] for first in (SINKS, last)])
            for side in (layer.keys, layer.values)
        )
        for layer in cache.layers
    ]


def spec_of(name: str, keys: torch.Tensor, values: torch.Tensor) -> PageSpec:
    """Return pages whose sides have the format `name`, and the other side is exact where the format is for one."""
    first, second = (name if name in format_names(side) else "exact" for side in SIDES)
    return PageSpec.build(
        key_scheme(first),
        value_scheme(second),
        num_kv_heads=keys.shape[1],
        key_dim=keys.shape[3],
        value_dim=values.shape[3],
        page_size=PAGE,
        dtype=keys.dtype,
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    folder = args.model if Path(args.model).is_dir() else resolve_model(args.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    layers = []
    for text in args.text:
        ids = tokenizer(text.read_text(), return_tensors="pt").input_ids[:, : args.tokens]
        layers += first_and_last_pages(model, ids)
    print("| format | limit | numbers | least | median | most | small numbers: most |")
    print("|---|---:|---|---:|---:|---:|---:|")
    for name in args.formats:
        spec = spec_of(name, *layers[0])
        for side, what in enumerate(SIDES):
            one = spec.sides[side]
            if one.scheme.is_exact:
                continue
            usual = usual_damage(one)
            for label, change in changes(what, one.head_dim).items():
                strains = []
                for pages in layers:
                    changed = [change(p) if place == side else p for place, p in enumerate(pages)]
                    strains.append(Sample(*changed).strain(spec, side))
                levels = [found.level / usual for found in strains]
                print(
                    f"| {name} {what} | {limit(one) / usual:.0f} | {label} | {min(levels):.3g} | {median(levels):.3g} | "
                    f"{max(levels):.3g} | {max(found.shrinkage for found in strains):.3g} |",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
