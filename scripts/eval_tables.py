"""Tables of README.md and docs/ about accuracy, from the rows of results/accuracy_vs_memory.jsonl."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from captions import caption
from docs_tables import MODELS, model_title
from recall import Recall

from kv_hf.evaluation.by_text import paired_difference
from kv_hf.formats import cache_names

# what README says of its table
PROTOCOL = {
    "kind": "accuracy",
    "window": 1600,
    "prompt": 512,
    "dtype": "float32",
}
TEXTS = ("held_out", "lincoln_1862")  # the newest protocol first
RECIPES = "recipe"
FORMATS = tuple(name for name in cache_names() if name != "paged_exact")
PEERS = (
    "hqq_int8",
    "quantized_fp8",
    "quanto_int4",
    "quanto_int4_channel",
    "hqq_int4",
    "hqq_int4_channel",
    "kivi_int4",
    "turboquant_int4",
    "quanto_int2",
    "quanto_int2_channel",
    "hqq_int2",
    "hqq_int2_channel",
    "kivi_int2",
    "turboquant_int2",
)
# whose cache it is that begins with this
MAKERS = {"kivi_": "KIVI", "turboquant_package": "turboquant 0.2.0", "turboquant_": "TurboQuant"}
NOTHING = "No run has been recorded yet: `make eval` writes this table."


def table(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return a Markdown table whose first line is its head; `left` columns are aligned to the left."""
    head, *rest = lines
    bars = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, bars, *rest))


def newest(rows: Sequence[dict[str, Any]], **wanted: Any) -> dict[str, dict[str, Any]]:
    """Return the last row of every cache among the rows with these values, in order of their bits."""
    found = {
        row["cache"]: row
        for row in rows
        if all(row.get(name) == value for name, value in wanted.items())
    }
    return dict(sorted(found.items(), key=lambda item: -item[1].get("stored_bits", 0)))


def title(cache: str) -> str:
    """Return a cache's name for people."""
    ours = cache.startswith(("paged_", "recipe:"))
    if ours or cache in ("dynamic", "static"):
        return f"`{cache}`"
    maker = next((name for start, name in MAKERS.items() if cache.startswith(start)), None)
    if maker is None:
        channel = cache.partition(":")[0].endswith("_channel")
        maker = "transformers, keys per channel" if channel else "transformers"
    return f"`{cache}` ({maker})"


def digits(kl: float) -> str:
    """Return a divergence with two digits that count, and never less than five places of none."""
    if kl < 5e-6:
        return "0.00000"
    return f"{kl:.5f}" if kl < 0.01 else f"{kl:.4f}" if kl < 0.1 else f"{kl:.2f}"


def finer_digits(kl: float) -> str:
    """Return a divergence as `digits` does, but with two digits that count below a thousandth, down to a millionth."""
    if 1e-6 <= kl < 1e-3:
        return f"{kl:.{1 - math.floor(math.log10(kl))}f}"
    return digits(kl)


def measured(rows: Sequence[dict[str, Any]], model: str) -> dict[str, dict[str, Any]]:
    """Return the last row of every cache on the held-out texts; where none were measured, on the one text of before."""
    for text in TEXTS:
        found = newest(rows, model=model, text=text, **PROTOCOL)
        if found:
            return found
    return {}


def accuracy_table(
    rows: Sequence[dict[str, Any]], caches: Sequence[str] = (*FORMATS, RECIPES, *PEERS)
) -> str:
    """Return bits, mean KL of all texts pooled and of the worst one, and what is found again, a table per model.

    Args:
        rows: of kinds "accuracy" and "needle".
        caches: names in the order of the table; RECIPES stands for all recipes.
    """
    blocks = []
    for model in MODELS:
        found = measured(rows, model)
        recall = Recall(rows, model)
        if not found:
            continue
        several = len(next(iter(found.values())).get("texts", {})) > 1
        head = ["cache", "bits", "KL (95 % interval)", *["worst text"] * several]
        lines = [[*head, *recall.heads]]
        shown = []
        recipes = sorted(filter(budget, found), key=lambda name: -float(budget(name).split()[0]))
        for cache in caches:
            for name in recipes if cache == RECIPES else [cache]:
                row = found.get(name)
                if row is None:
                    continue
                shown.append(row)
                line = [f"recipe, {budget(name)}" if cache == RECIPES else title(name)]
                line += [f"{row['stored_bits']:.2f}", _with_interval(row), *[worst(row)] * several]
                lines.append([*line, *recall.cells(name)])
        if shown:
            said = f"{MODELS[model]}, {scored(shown[0])}"
            blocks += [caption([*shown, *recall.rows], said), table(lines)]
    return "\n\n".join(blocks) or NOTHING


def formats_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the accuracy table of our formats alone."""
    return accuracy_table(rows, FORMATS)


def worst(row: dict[str, Any]) -> str:
    """Return the KL of the text that a cache loses most on, and its name; nothing where one text was measured."""
    texts = row.get("texts", {})
    if len(texts) < 2:
        return "-"
    name = row["worst_text"]
    return f"{digits(texts[name]['kl_mean'])} ({name})"


def scored(row: dict[str, Any]) -> str:
    """Return the texts and tokens of a row in words."""
    texts = list(row.get("texts") or [row["text"]])
    named = f"{len(texts)} texts" if len(texts) > 1 else f"one text ({texts[0]})"
    return f"{named}, {row['windows']} windows, {row['tokens']:,} scored tokens"


def budget(cache: str) -> str:
    """Return the budget in the name of a recipe (MODEL-4.5-bits), such as "4.5 bits"; empty for other caches."""
    found = re.fullmatch(r"recipe:.*-([0-9.]+)-bits", cache)
    return f"{found[1]} bits" if found else ""


def _with_interval(row: dict[str, Any], form: Callable[[float], str] = digits) -> str:
    return f"{form(row['kl_mean'])} ({form(row['kl_low'])} to {form(row['kl_high'])})"


def details_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return every measured cache with all figures, a table per model."""
    blocks = []
    for model, name in MODELS.items():
        found = measured(rows, model)
        if not found:
            continue
        first = next(iter(found.values()))
        recall = Recall(rows, model)
        said = f"{name}, {scored(first)}, exact perplexity {first['perplexity_exact']:.2f}"
        blocks.append(caption([*found.values(), *recall.rows], said))
        head = ["cache", "bits", "bytes/token", "KL", "median", "p99", "same top token"]
        lines = [[*head, "perplexity", "same tokens", *recall.heads]]
        for cache, row in found.items():
            lines.append(
                [
                    title(cache),
                    f"{row['stored_bits']:.2f}",
                    f"{row['bytes_per_token']:,.0f}",
                    _with_interval(row),
                    digits(row["kl_median"]),
                    digits(row["kl_p99"]),
                    f"{100 * row['top1']:.1f} %",
                    f"{row['perplexity_delta']:+.2f} % ({row['perplexity_delta_low']:+.2f} to "
                    f"{row['perplexity_delta_high']:+.2f})",
                    f"{row['divergence_mean']:.0f} of {row['divergence_tokens']}"
                    if "divergence_mean" in row
                    else "-",
                    *recall.cells(cache),
                ]
            )
        blocks.append(table(lines))
        if len(first.get("texts", {})) > 1:
            each = caption(found.values(), f"{name}, KL on each text")
            blocks += [each, texts_table(found)]
    return "\n\n".join(blocks) or NOTHING


def texts_table(found: dict[str, dict[str, Any]]) -> str:
    """Return the mean KL of every cache on each text."""
    names = list(next(iter(found.values()))["texts"])
    lines = [["cache", *names]]
    for cache, row in found.items():
        lines.append([title(cache), *(_with_interval(row["texts"][name]) for name in names)])
    return table(lines)


# what rows of one table of peers have in common
PEER_RUN = ("model", "model_revision", "text_digest", "window", "prompt", "dtype")


def peers_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return ours and the caches of others at their best (rows of results/peers.jsonl), by their bits: a table per run."""
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault(tuple(row[name] for name in PEER_RUN), []).append(row)
    blocks = []
    for run in runs.values():
        found = newest(run)
        first = next(iter(found.values()))
        windows = "1 window" if first["windows"] == 1 else f"{first['windows']} windows"
        said = f"{model_title(first)}, {first['text']}: {windows} of {first['window']:,} tokens, {first['tokens']:,} of them scored"
        blocks.append(caption(found.values(), said))
        head = ["cache", "bits, all", "bits, encoded", "bytes/token", "KL (95 % interval)", "p99"]
        lines = [[*head, "same top token"]]
        for cache, row in found.items():
            encoded = row["bits_per_element"]
            lines.append(
                [
                    title(cache),
                    f"{row['stored_bits']:.2f}",
                    f"{encoded:.2f}" if encoded else "",
                    f"{row['bytes_per_token']:,.0f}",
                    _with_interval(row),
                    digits(row["kl_p99"]),
                    f"{100 * row['top1']:.1f} %",
                ]
            )
        blocks.append(table(lines))
    return "\n\n".join(blocks) or NOTHING


def recipes_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return recipes beside the uniform format of ours that takes as many bytes, or the least more."""
    one = ["bytes/token", "KL", "found at 8k"]
    lines = [["model", "recipe", *one, "uniform", *one, "difference of KL"]]
    shown: list[dict[str, Any]] = []
    for model, name in MODELS.items():
        found, recall = measured(rows, model), Recall(rows, model)
        ours = [row for cache, row in found.items() if cache.startswith("paged_")]
        for cache, row in found.items():
            larger = [one for one in ours if one["bytes"] >= row["bytes"]]
            if not cache.startswith("recipe:") or not larger:
                continue
            other = min(larger, key=lambda one: one["bytes"])
            shown += [row, other]
            lines.append(
                [
                    name,
                    cache.removeprefix("recipe:"),
                    f"{row['bytes_per_token']:,.0f}",
                    _with_interval(row),
                    recall.words(cache),
                    title(other["cache"]),
                    f"{other['bytes_per_token']:,.0f}",
                    _with_interval(other),
                    recall.words(other["cache"]),
                    difference(row, other),
                ]
            )
    if not shown:
        return NOTHING
    said = "; ".join(dict.fromkeys(f"{model_title(row)}, {scored(row)}" for row in shown))
    return f"{caption(shown, said)}\n\n{table(lines, left=2)}"


def difference(row: dict[str, Any], other: dict[str, Any]) -> str:
    """Return how much more a cache loses than another on the same texts, with its paired 95 % interval."""
    if "kl_blocks" not in row or row["text_digest"] != other.get("text_digest"):
        return "-"
    mean, low, high = paired_difference(row["kl_blocks"], other["kl_blocks"])
    return f"{mean:+.5f} ({low:+.5f} to {high:+.5f})"


# what rows of one table have in common
LATENT_RUN = (
    "model",
    "model_revision",
    "mixing",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "dtype",
    "text_digest",
    "window",
    "prompt",
)
MIXED = {
    "random": "a random orthogonal basis: every channel holds something of each direction",
    "none": "keys and values side by side",
    "principal": "the principal axes, strongest first",
    "whitened": "axes scaled to equal energy, then turned at random: every channel as large as any other",
}


def latent_accuracy_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return what caches of latents lose (rows of scripts/mla_accuracy.py): a table per basis of the latents."""
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        runs.setdefault(tuple(row[name] for name in LATENT_RUN), []).append(row)
    blocks = []
    for run in runs.values():
        found = newest(run)
        first = next(iter(found.values()))
        rank, rope = first["kv_lora_rank"], first["qk_rope_head_dim"]
        said = (
            f"{model_title(first)} as MLA, latents of {rank} in {MIXED[first['mixing']]}; RoPE keys of "
            f"{rope}. {first['windows']} windows of {first['window']:,} tokens, {first['tokens']:,} of them scored; stock "
            f"`DynamicCache`: perplexity {first['perplexity_exact']:.3f}, {first['bytes_exact'] / first['window']:,.0f} bytes "
            "per token"
        )
        blocks.append(caption(found.values(), said))
        head = ["latents", "read", "bits", "bytes/token", "KL (95 % interval)", "median", "p99"]
        lines = [[*head, "same top token", "perplexity"]]
        for cache, row in found.items():
            lines.append(
                [
                    f"`{cache}`" if cache.startswith("paged_") else cache,
                    row["reads"],
                    f"{row['stored_bits']:.2f}",
                    f"{row['bytes_per_token']:,.0f}",
                    _with_interval(row, finer_digits),
                    finer_digits(row["kl_median"]),
                    finer_digits(row["kl_p99"]),
                    f"{100 * row['top1']:.1f} %",
                    f"{row['perplexity']:,.{2 if row['perplexity'] < 1000 else 0}f}",
                ]
            )
        blocks.append(table(lines, left=2))
    return (
        "\n\n".join(blocks)
        or "No run has been recorded yet: `scripts/mla_accuracy.py --record` writes this table."
    )


def tasks_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the newest values of lm-eval's metrics: a row per task and metric, a column per cache."""
    found: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "task":
            which = (row["model"], row["task"], row["metric"], str(row["samples"]))
            found.setdefault(which, {})[row["cache"]] = row
    if not found:
        return NOTHING
    caches = list(dict.fromkeys(cache for values in found.values() for cache in values))
    lines = [["model", "task", "metric", "questions", *map(title, caches), "in sealed pages"]]
    for (model, *rest), values in found.items():
        cells = [values.get(cache) for cache in caches]
        shares = [row["encoded_share"] for row in values.values() if row.get("encoded_share")]
        lines.append(
            [
                MODELS.get(model, model),
                *rest,
                *("" if row is None else _with_error(row) for row in cells),
                f"{100 * max(shares):.0f} %" if shares else "",
            ]
        )
    shown = [row for values in found.values() for row in values.values()]
    said = "Tasks of lm-eval through each cache, the newest row of each"
    return f"{caption(shown, said)}\n\n{table(lines, left=3)}"


def _with_error(row: dict[str, Any]) -> str:
    error = row.get("stderr")
    return f"{row['value']:.4g}" + (f" ± {error:.2g}" if error else "")


# what rows of one table of options have in common
ABLATION_RUN = ("model", "text", "windows", "window", "prompt", "dtype")


def ablation_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return int4 and int2 under other options of the cache, as rows with "options" have them: a table per model."""
    runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["cache"] in ("paged_int4", "paged_int2_v1"):
            runs.setdefault(tuple(row[name] for name in ABLATION_RUN), []).append(row)
    blocks = []
    for run in runs.values():
        if not any(row["options"] for row in run):
            continue
        first = run[0]
        head = ["options", "int4: bits", "KL", "median", "int2: bits", "KL", "median"]
        found: dict[str, dict[str, dict[str, Any]]] = {"default": {}}
        for row in run:
            options = ", ".join(f"`{name}={value}`" for name, value in row["options"].items())
            found.setdefault(options or "default", {})[row["cache"]] = row
        lines = [head]
        for options, caches in found.items():
            line = [options]
            for cache in ("paged_int4", "paged_int2_v1"):
                one = caches[cache]
                line.append(f"{one['bits_per_element']:.2f}")
                line += [digits(one["kl_mean"]), digits(one["kl_median"])]
            lines.append(line)
        said = f"{model_title(first)}, {scored(first)}, a page of 64 tokens and 4 sinks by default"
        blocks += [caption(run, said), table(lines)]
    return "\n\n".join(blocks) or NOTHING
