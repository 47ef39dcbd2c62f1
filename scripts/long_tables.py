"""Tables about long contexts: KL by position, and how often hidden facts are found, from rows of results/."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from captions import caption
from eval_tables import MODELS, digits, table, title
from recall import LONG, rate_cell

from kv_hf.evaluation.distances import BLOCK, block_interval
from kv_hf.evaluation.retrieval.rate import Rate, newest_rows
from kv_hf.texts import HELD_OUT

POSITIONS = (
    512,
    1024,
    2048,
    4096,
    6144,
    LONG,
)  # ends of the stretches of a text whose KL is reported
NO_DRIFT = (
    "No run has been recorded yet: `scripts/accuracy_vs_memory.py --window 8192` writes this table."
)
NO_NEEDLES = "No run has been recorded yet: `scripts/long_context.py --record` writes this table."

Row = dict[str, Any]


def drift_table(rows: Sequence[Row]) -> str:
    """Return the mean KL of stretches of the held-out texts, all texts pooled: a row per cache, a table per model."""
    newest: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        whole = row["kind"] == "accuracy" and row.get("window") == LONG
        if whole and row["prompt"] == POSITIONS[0] and row["text"] in HELD_OUT:
            newest.setdefault(row["model"], {}).setdefault(row["cache"], {})[row["text"]] = row
    blocks = []
    for model, caches in newest.items():
        texts = list(next(iter(caches.values())))
        heads = [f"{low:,} to {high:,}" for low, high in itertools.pairwise(POSITIONS)]
        lines = [["cache", "bits", *heads]]
        shown: list[Row] = []
        for cache, found in caches.items():
            if list(found) != texts:
                continue  # of other texts: its stretches cannot stand beside the others'
            shown += found.values()
            bits = sum(row["stored_bits"] for row in found.values()) / len(found)
            lines.append([title(cache), f"{bits:.2f}", *stretches(list(found.values()))])
        name = MODELS.get(model, model)
        blocks.append(caption(shown, f"{name}, {', '.join(texts)}"))
        blocks.append(table(lines))
    return "\n\n".join(blocks) or NO_DRIFT


def stretches(rows: Sequence[Row]) -> list[str]:
    """Return the mean KL of each stretch of POSITIONS, with its 95 % interval, over the windows of all rows."""
    windows = [
        torch.tensor(window, dtype=torch.float64)
        for row in rows
        for found in row["kl_blocks"].values()
        for window in found
    ]
    cells = []
    for low, high in itertools.pairwise(POSITIONS):
        first, last = ((end - POSITIONS[0]) // BLOCK for end in (low, high))
        parts = [window[first:last] for window in windows]
        bottom, top = block_interval(parts, block=1)
        mean = torch.cat(parts).mean().item()
        cells.append(f"{digits(mean)} ({digits(bottom)} to {digits(top)})")
    return cells


def needle_table(rows: Sequence[Row]) -> str:
    """Return how often all was found, and nats per answer token: a row per cache, a column per task and length."""
    found: dict[str, dict[str, dict[tuple[str, int], list[Row]]]] = {}
    for row in newest_rows(rows):
        cells = found.setdefault(row["model"], {}).setdefault(row["cache"], {})
        cells.setdefault((row["task"], row["length"]), []).append(row)
    blocks = []
    for model, caches in found.items():
        asked = sorted(
            {which for cells in caches.values() for which in cells}, key=lambda x: x[::-1]
        )
        heads = [f"`{task}`, {length:,} tokens" for task, length in asked]
        lines = [["cache", *(part for head in heads for part in (head, "nats"))]]
        for cache, cells in caches.items():
            line = [title(cache)]
            for which in asked:
                line += answers(cells.get(which, []))
            lines.append(line)
        shown = [row for cells in caches.values() for cell in cells.values() for row in cell]
        said = f"{MODELS.get(model, model)}, {prompts(caches)} prompts of a task and length"
        blocks.append(caption(shown, said))
        blocks.append(table(lines))
    return "\n\n".join(blocks) or NO_NEEDLES


def answers(rows: Sequence[Row]) -> list[str]:
    """Return the cells of one cache, task and length: its rate, and the mean nats of the right answer."""
    if not rows:
        return ["-", "-"]
    scores = [score for row in rows for score in row["scores"]]
    nlls = [nll for row in rows for nll in row["nlls"]]
    return [rate_cell(Rate.of(scores)), f"{sum(nlls) / len(nlls):.3f}"]


def prompts(caches: dict[str, dict[tuple[str, int], list[Row]]]) -> str:
    """Return how many prompts each cell asked, in words."""
    counts = {
        sum(len(row["scores"]) for row in rows)
        for cells in caches.values()
        for rows in cells.values()
    }
    return f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
