"""Tables of docs/ about fewer kv heads: perplexity against kv bytes before and after training, and kv heads times bits."""

from collections.abc import Sequence
from typing import Any

from captions import caption
from eval_tables import table

from kv_hf.evaluation.report.levers import find_levers, kv_heads, origin
from kv_hf.evaluation.report.select import groups

METHODS = ("first", "mean", "align", "svd")
# what the rows call a model -> what people do, and the number of windows that the docs speak of
MODELS = {"stories15M": "stories15M", "SmolLM2-135M-Instruct": "SmolLM2-135M-Instruct"}
NOTHING = "No run has been recorded yet: `scripts/gqa_quality.py --record` writes this table."
Row = dict[str, Any]


def conversions_table(rows: Sequence[Row]) -> str:
    """Return perplexity by kv heads and method, a table per model; of each cell the row with the most windows, then the newest."""
    blocks = []
    for model, title in MODELS.items():
        cells: dict[tuple[int, str], Row] = {}
        for row in sorted(
            (row for row in rows if row["model"] == model and "-up" not in row["checkpoint"]),
            key=lambda row: row["windows"],
        ):
            if "samples" not in row["checkpoint"]:
                cells[row["kv_heads"], row["method"]] = row
        original = next((row for (_, how), row in cells.items() if how == "original"), None)
        if original is None:
            continue
        said = (
            f"{title}, perplexity without training: {original['windows']} windows of at most {original['window']} tokens, "
            f"{original['tokens']:,} scored ({original['text']}); the original has {original['kv_heads']} kv heads, "
            f"{original['kv_bytes_per_token']:,} kv bytes per token in bf16 and a perplexity of {original['perplexity']:.2f}. "
            f"{original['note'].capitalize()}"
        )
        blocks.append(caption(cells.values(), said))
        lines = [["kv heads", "kv bytes per token", *(f"`{method}`" for method in METHODS)]]
        for heads in sorted({heads for heads, how in cells if how != "original"}, reverse=True):
            found = {method: cells.get((heads, method)) for method in METHODS}
            held = next(row for row in found.values() if row)["kv_bytes_per_token"]
            lines.append(
                [
                    str(heads),
                    f"{held:,}",
                    *(f"{row['perplexity']:,.2f}" if row else "-" for row in found.values()),
                ]
            )
        blocks.append(table(lines))
    return "\n\n".join(blocks) or NOTHING


def uptraining_table(rows: Sequence[Row]) -> str:
    """Return the newest curve of each teacher, number of kv heads and method: a line per evaluation."""
    head = ["student", "kv heads", "largest lr", "step", "tokens", "seconds", "of the processor"]
    lines = [[*head, "perplexity", "KL to the original"]]
    runs: dict[tuple[str, int, str], list[Row]] = {}  # the newest of each
    for row in rows:
        key = (row["teacher"], -_heads(row), row["method"])
        if row["step"] == 0:
            runs[key] = []
        runs[key].append(row)
    for _, run in sorted(runs.items()):
        for at, row in enumerate(run):
            lines.append(
                [
                    f"{row['teacher']}, `{row['method']}`" if at == 0 else "",
                    f"{row['num_key_value_heads'][0]} to {_heads(row)}" if at == 0 else "",
                    f"{row['settings']['lr']:g}" if at == 0 else "",
                    f"{row['step']:,}",
                    f"{row['tokens']:,}",
                    f"{row['seconds']:,.0f}",
                    f"{row['cpu_seconds']:,.0f}",
                    f"{row['perplexity']:,.2f}",
                    f"{row['kl']:.3f}",
                ]
            )
    if not runs:
        return NOTHING
    shown = [{**row, "dtype": row["settings"]["dtype"]} for run in runs.values() for row in run]
    said = "Training towards the original, the newest run of each student"
    return f"{caption(shown, said)}\n\n{table(lines)}"


def _heads(row: Row) -> int:
    return int(row["num_key_value_heads"][1])


def levers_table(rows: Sequence[Row]) -> str:
    """Return perplexity and bytes of the caches that all models of a set have, by falling bytes."""
    blocks = []
    for levers in find_levers(groups(rows)):
        shared = levers.original.protocol
        said = (
            f"{levers.original.model}, {shared['windows']} windows of {shared['window']:,} tokens, {shared['prompt']} of each "
            f"not scored; exact perplexity of the original: {levers.exact:.2f}"
        )
        blocks.append(caption([row for _, row in levers.common()], said))
        lines = [["kv heads", "how", "cache", "bytes/token", "perplexity", "times the original"]]
        for group, row in sorted(levers.common(), key=lambda pair: -pair[1]["bytes_per_token"]):
            cells = [
                str(kv_heads(levers, group) or "-"),
                origin(group),
                f"`{row['cache']}`",
                f"{row['bytes_per_token']:,.0f}",
                f"{row['perplexity']:.2f}",
                f"{row['perplexity'] / levers.exact:.3f}",
            ]
            lines.append(cells)
        blocks.append(table(lines, left=3))
    return "\n\n".join(blocks) or NOTHING
