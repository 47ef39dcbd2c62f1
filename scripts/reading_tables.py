"""The table of what reading a part of a long text loses, from rows of results/reading.jsonl."""

from collections.abc import Sequence
from typing import Any

from captions import caption
from eval_tables import MODELS, digits, table

Row = dict[str, Any]
NOTHING = "No run has been recorded yet: `scripts/reading_quality.py --record` writes this table."
RUN = ("model", "window", "tokens", "read_from", "dtype")
# choosers that are simulated over exact keys, in words
SIMULATED = {
    "oracle": "the truth: each page's attention mass",
    "quest": "smallest and largest key per channel (Quest)",
    "quest_each_head": "the same, each kv head pages of its own",
    "quest_16_each_head": "the same, pages of 16 tokens",
    "mean": "mean key of a page",
}


def reading_table(rows: Sequence[Row]) -> str:
    """Return the KL of each contender and budget, mean and worst text: a table per model, caches first."""
    newest: dict[tuple[Any, ...], dict[tuple[str, int | None], dict[str, Row]]] = {}
    for row in rows:
        if row.get("read_top_p") is not None:
            continue
        run = tuple(row[name] for name in RUN)
        which = row["contender"], row["read_tokens"]
        newest.setdefault(run, {}).setdefault(which, {})[row["text"]] = row
    return "\n\n".join(filter(None, map(_block, newest.values()))) or NOTHING


def top_p_table(rows: Sequence[Row]) -> str:
    """Return what steps lose that read up to a part of the attention mass, and how much they read: a line per part."""
    newest: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row.get("read_top_p") is not None:
            run = (*(row[name] for name in RUN), row["contender"], row["read_top_p"])
            newest.setdefault(run, {})[row["text"]] = row
    if not newest:
        return NOTHING
    lines = [["pages chosen by", "`read_top_p`", "tokens read, mean", "a tenth of the steps less than", "a tenth more than", "KL"]]  # fmt: skip
    shown = []
    for run in sorted(newest):
        of = [newest[run][text] for text in sorted(newest[run])]
        shown += of
        means = [
            sum(row[name] for row in of) / len(of)
            for name in ("tokens_read_mean", "tokens_read_p10", "tokens_read_p90")
        ]
        cells = (f"{mean:,.0f}" for mean in means)
        lines.append([f"`{run[-2]}`", f"{run[-1]:g}", *cells, _cell(of)])
    first = shown[0]
    said = (
        f"{MODELS.get(first['model'], first['model'])}, last {first['tokens']} of {first['window']:,} tokens of "
        f"{len({row['text'] for row in shown})} texts, steps counted layer by layer"
    )
    return f"{caption(shown, said)}\n\n{table(lines)}"


def speed_table(rows: Sequence[Row]) -> str:
    """Return steps that read a part beside steps that read everything, of the newest run: a line per cache and context."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        newest[row["kind"], row["cache"], row["context"], row["contender"], row["threads"]] = row
    if not newest:
        return (
            "No run has been recorded yet: `scripts/bench_reading.py --record` writes this table."
        )
    parts = []
    for threads in sorted({key[-1] for key in newest}):
        own = [row for key, row in newest.items() if key[-1] == threads]
        ms = (
            "thread_ms_min" if threads == 1 else "ms_min"
        )  # other programs do not add to processor time
        parts.append(_speed(own, ms))
    return "\n\n".join(parts)


def _speed(rows: list[Row], ms: str) -> str:
    lines = [["what", "cache", "tokens", "everything", "a part", "ratio", "the choice alone"]]
    for kind, title in (("attention", "attention of 30 layers"), ("model", "whole step")):
        for cache in dict.fromkeys(row["cache"] for row in rows):
            of = [row for row in rows if (row["kind"], row["cache"]) == (kind, cache)]
            for context in sorted({row["context"] for row in of}):
                by = {row["contender"]: row[ms] for row in of if row["context"] == context}
                choice = digits(by["choice"]) if "choice" in by else "-"
                cells = [
                    digits(by["everything"]),
                    digits(by["part"]),
                    f"{by['part'] / by['everything']:.2f}",
                    choice,
                ]
                lines.append([title, f"`{cache}`", f"{context:,}", *cells])
    said = f"Steps of SmolLM2-135M that read {rows[0]['read_tokens']:,} tokens, least times"
    return f"{caption(rows, said)}\n\n{table(lines)}"


def _block(found: dict[tuple[str, int | None], dict[str, Row]]) -> str:
    # those that all have, so that means are of the same texts
    texts = sorted(set.intersection(*(set(of) for of in found.values())))
    if not texts:
        return ""
    whole = {which: [of[text] for text in texts] for which, of in found.items()}
    budgets = sorted({read for _, read in whole if read is not None})
    names = sorted({name for name, _ in whole}, key=lambda name: _place(name, found))
    heads = [f"{read:,}{'' if place else ' tokens read'}" for place, read in enumerate(budgets)]
    lines = [["pages chosen by", *heads, "all"]]
    for name in names:
        cells = [_cell(whole.get((name, read))) for read in (*budgets, None)]
        if name in SIMULATED:
            cells[-1] = "0"
        lines.append([SIMULATED.get(name, f"`{name}`"), *cells])
    shown = [row for of in whole.values() for row in of]
    first = shown[0]
    of_texts = texts[0] if len(texts) == 1 else f"{len(texts)} texts ({', '.join(texts)})"
    said = (
        f"{MODELS.get(first['model'], first['model'])}, last {first['tokens']} of {first['window']:,} tokens of "
        f"{of_texts}"
    )
    return f"{caption(shown, said)}\n\n{table(lines)}"


def _place(name: str, found: dict[tuple[str, int | None], dict[str, Row]]) -> tuple[bool, int]:
    """Return where a contender stands: caches first, in the order of their rows, then what is simulated."""
    listed = list(SIMULATED) if name in SIMULATED else [one for one, _ in found]
    return name in SIMULATED, listed.index(name)


def _cell(rows: list[Row] | None) -> str:
    if not rows:
        return "-"
    mean = sum(row["kl_mean"] for row in rows) / len(rows)
    worst = max(rows, key=lambda row: row["kl_mean"])
    if len(rows) == 1:
        return digits(mean)
    return f"{digits(mean)} ({digits(worst['kl_mean'])}, {worst['text']})"
