"""Which of several caches to take: what they lose against what they hold, within a budget, and as a picture."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..cache.identity import drops_numbers
from ..cache_names import QUANTIZED, parse_cache_name
from ..checks import extra
from ..files import replace_text, replacing
from ..formats import cache_names
from ..hub import why_not_model
from ..printable import short
from .caches import check_runs
from .models import Measured, TextSettings
from .rows import Row


@dataclass(frozen=True)
class Recommendation:
    """The measured cache that loses least within a budget.

    Attributes:
        cache: its name with options, as commands take it.
        cache_implementation, cache_config: the same, as `model.generate` takes it.
        bits: bits per number that it holds, everything counted, at the measured length.
        kl, kl_low, kl_high: mean KL divergence from the exact cache, nats per token, and its 95 % interval.
        rows: of every measured cache (see `Measured.accuracy`), those beyond the budget too.
    """

    cache: str
    cache_implementation: str
    cache_config: dict[str, Any]
    bits: float
    kl: float
    kl_low: float
    kl_high: float
    rows: list[Row]


def interval(row: Mapping[str, Any]) -> str:
    """Return the KL of a row, or of a text in it, with its 95 % interval."""
    return "{kl_mean:z.5f} ({kl_low:z.5f} to {kl_high:z.5f})".format_map(row)


def check_bits(bits: float) -> None:
    """Raise ValueError for a budget that is no number of bits above 0."""
    if not isinstance(bits, int | float) or not 0 < bits < math.inf:
        raise ValueError(
            f"bits must be a number above 0 of bits per stored number, such as 5, got {bits!r}"
        )


def best(rows: Sequence[Row], bits: float) -> Row:
    """Return the row of the cache that loses least among those that hold at most `bits` bits per number.

    Raises: ValueError where none is so small.
    """
    check_bits(bits)
    within = [row for row in rows if row["stored_bits"] <= bits]
    if not within:
        least = min(rows, key=lambda row: row["stored_bits"])
        raise ValueError(
            f"no cache holds at most {bits:g} bits per number: the smallest, {least['cache']}, holds "
            f"{least['stored_bits']:.2f} at {least['window']} tokens"
        )
    return min(within, key=lambda row: row["kl_mean"])


def evaluate(
    model: Any,
    tokenizer: Any = None,
    text: Any = "held_out",
    caches: Sequence[str] | None = None,
    *,
    windows: int = 2,
    window: int = 1600,
    prompt: int = 512,
) -> list[Row]:
    """Measure what caches lose on a text and what they hold; on a terminal a bar says how far it is.

        for row in kv_hf.evaluate(model, tokenizer, "my.txt", ["paged_int8", "paged_int4"]):
            print(f"{row['cache']}: {row['stored_bits']:.1f} bits, same token {row['top1']:.1%}")

    Args:
        model: a causal language model in eval mode.
        tokenizer: None loads the one that lies beside the model's weights, where the text is not given as ids.
        text: a file, a bundled text, a set of them or a dataset; a text itself; or token ids, [tokens] or [texts, tokens].
            Give text of the kind that the model will read.
        caches: names with options, see `caches.cache_kind`; None takes every paged cache that has a name.
        windows, window, prompt: see `TextSettings`.
    Returns: a row of each cache, see `Measured.accuracy`.
    Raises: ValueError for a bad name of a cache and a bad text before anything is measured; what a cache refuses with its
        first tokens (a kernel, too small a max_length) when its turn comes.
    """
    names = [*(cache_names() if caches is None else caches)]
    if isinstance(caches, str) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"caches must be a list of names of caches, at least one, got {short(caches)}"
        )
    if isinstance(model, str | Path):
        raise ValueError(
            f"model must be a loaded model in eval mode, got {short(model)}; load it with AutoModelForCausalLM.from_pretrained"
        )
    if isinstance(tokenizer, str | Path):
        raise ValueError(
            f"tokenizer must be a tokenizer or None, got {short(tokenizer)}; a text is given as text="
        )
    if drops_numbers(model):
        raise ValueError("model is in training mode and drops numbers at random; call model.eval()")
    for name in names:
        check_runs(name, model)
    if tokenizer is None and isinstance(text, str | Path):
        name = model.name_or_path
        if reason := why_not_model(name):
            raise ValueError(f"tokenizer must be given: none lies beside model {name!r} ({reason})")
        tokenizer = AutoTokenizer.from_pretrained(name)
    measured = Measured(model, tokenizer)
    settings = TextSettings(measured.give(text), windows, window, prompt)
    return [measured.accuracy(name, settings) for name in names]


def recommend(
    model: Any,
    bits: float,
    *,
    caches: Sequence[str] | None = None,
    tokenizer: Any = None,
    text: Any = "held_out",
    windows: int = 2,
    window: int = 1600,
    prompt: int = 512,
) -> Recommendation:
    """Measure caches on a model and a text, and return the one that loses least within a budget.

        found = kv_hf.recommend(model, 5)
        model.generate(**inputs, cache_implementation=found.cache_implementation, cache_config=found.cache_config)

    Args:
        model: a causal language model in eval mode.
        bits: the budget: bits per number, scales, tails and tables counted, for a text of `window` tokens.
        caches, tokenizer, text, windows, window, prompt: as of `evaluate`.
    Raises: ValueError for a bad budget, cache or text before anything is measured; for a budget that no cache meets.
    """
    check_bits(bits)
    rows = evaluate(model, tokenizer, text, caches, windows=windows, window=window, prompt=prompt)
    row = best(rows, bits)
    name, options = parse_cache_name(row["cache"])
    if name in QUANTIZED:  # a short name of measurements: generate() has one for all of these
        name, options = "quantized", QUANTIZED[name] | options
    held, mean, low, high = (row[f] for f in ("stored_bits", "kl_mean", "kl_low", "kl_high"))
    return Recommendation(row["cache"], name, options, held, mean, low, high, rows)


def front(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of which no other holds as little and loses less, by rising bits."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["stored_bits"], row["kl_mean"])):
        if not found or row["kl_mean"] < found[-1]["kl_mean"]:
            found.append(row)
    return found


def pareto(rows: Sequence[Row], path: str | Path) -> list[Path]:
    """Draw what caches lose against what they hold, with the Pareto front, and write the same as a Markdown table beside it.

    Args:
        rows: of kind "accuracy", one model and text; of several of one cache the newest counts.
        path: the picture (.png, .svg, .pdf; PNG without an ending); the table has the ending .md.
    Returns: the files written.
    Raises: ValueError for rows of several models or texts and where there is none.
    """
    rows = list({row["cache"]: row for row in rows}.values())
    titles = {f"{row.get('model') or 'model'}, {row['text']}" for row in rows}
    if len(titles) != 1:
        raise ValueError(f"rows must be of one model and text, got {sorted(titles) or 'none'}")
    with extra("eval", "the plot"):
        from matplotlib.figure import Figure
    best_ones, path = front(rows), Path(path)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        at, mean = row["stored_bits"], row["kl_mean"]
        ends = [[max(0.0, mean - row["kl_low"])], [max(0.0, row["kl_high"] - mean)]]
        colour = "tab:blue" if row["cache"].startswith("paged_") else "tab:gray"
        axes.errorbar(at, mean, ends, fmt="o", color=colour)
        beside: Any = {"xytext": (4, 4), "textcoords": "offset points", "fontsize": 7}
        axes.annotate(row["cache"], (at, mean), **beside)
    line = [[row[field] for row in best_ones] for field in ("stored_bits", "kl_mean")]
    axes.plot(*line, color="tab:blue", linewidth=1, zorder=0)
    axes.set_yscale("symlog", linthresh=1e-6)
    axes.margins(x=0.15)  # names stay inside
    axes.set(title=titles.pop(), xlabel="bits per number", ylabel="KL from the exact cache, nats")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as aside:
        figure.savefig(aside, dpi=150, format=path.suffix[1:] or "png")
    lines = [
        "| cache | bits | B/token | KL (95 % interval) | top-1 | on the front |",
        "|---" * 6 + "|",
    ]
    for row in sorted(rows, key=lambda row: -row["stored_bits"]):
        cells = [f"`{row['cache']}`", f"{row['stored_bits']:.2f}", f"{row['bytes_per_token']:.0f}"]
        cells += [interval(row), f"{row['top1']:.1%}", "yes" if row in best_ones else ""]
        lines.append(f"| {' | '.join(cells)} |")
    table = path.with_suffix(".md")
    replace_text(table, "\n".join(lines) + "\n")
    return [path, table]
