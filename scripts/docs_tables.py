"""The measured tables of docs/, from the newest rows of results/; scripts/readme_table.py writes them."""

from typing import Any

from captions import caption

from kv_hf.evaluation.rows import latest_run
from kv_hf.evaluation.shapes import random_config

Rows = list[dict[str, Any]]
# what rows call a model -> what people do
MODELS = {
    "smollm2-135m": "SmolLM2-135M",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B",
    "gemma-3-270m": "Gemma-3-270M",
    "tinyllama-1.1b": "TinyLlama-1.1B",
}


def model_title(row: dict[str, Any]) -> str:
    """Return the name of a row's model for people."""
    return MODELS.get(row["model"], row["model"])


def table(lines: list[list[str]]) -> str:
    """Return a table of Markdown: the first line is its head, its first column text, the others numbers."""
    rule = ["---"] + ["---:"] * (len(lines[0]) - 1)
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])


def prefix_table(rows: Rows) -> str:
    """Return prefill time and pages of many requests over one system prompt."""
    found = latest_run(rows, metric="prefill")
    if not found:
        return "No run has been recorded yet."
    config = found[0]["config"]
    lines = [
        [
            "prefix store",
            "requests at a time",
            "prefill, s",
            "tokens computed",
            "skipped",
            "pages, MiB",
        ]
    ]
    for row in found:
        pages = row["pages"] * row["page_bytes"] / 2**20
        lines.append(
            [
                "yes" if row["config"]["prefix_store"] else "no",
                str(row["config"]["batch"]),
                f"{row['value']:.1f}",
                f"{row['tokens_computed']:,}",
                f"{100 * row['skipped']:.1f} %",
                f"{pages:.1f}",
            ]
        )
    title = (
        f"{config['requests']} requests of {config['system_tokens']:,} shared and {config['question_tokens']} own tokens, "
        f"`{config['implementation']}`, {model_title(found[0])}, all caches alive at the end"
    )
    return f"{caption(found, title)}\n\n{table(lines)}"


def serve_table(rows: Rows) -> str:
    """Return the turns of a chat with each server: tokens computed, seconds until text, and processor time."""
    found = latest_run(rows, kind="serve")
    if not found:
        return "No run has been recorded yet."
    first = found[0]
    lines = [["cache", "turn", "prompt, tokens", "computed", "first text, s", "answer, s", "processor, s"]]  # fmt: skip
    for row in found:
        name = row["config"]["implementation"]
        lines.append(
            [
                name if " " in name else f"kv-hf serve, `{name}`",
                str(row["turn"]),
                f"{row['prompt_tokens']:,}",
                f"{row['tokens_computed']:,}",
                *(f"{row[key]:.2f}" for key in ("first_token_s", "whole_s", "value")),
            ]
        )
    title = (
        f"Chats with a system prompt of {first['config']['system_tokens']:,} tokens and answers of at most "
        f"{first['config']['new_tokens']} tokens, {model_title(first)}, least times of {first['n']} chats"
    )
    return f"{caption(found, title)}\n\n{table(lines)}"


def batches_table(rows: Rows) -> str:
    """Return continuous batching on each cache beside transformers' own, for each load of requests."""
    found = latest_run(rows, kind="batches")
    if not found:
        return "No run has been recorded yet."
    head = ["load", "cache", "room, tokens", "seconds", "tokens/s", "of transformers'", "first token, s", "of transformers'"]  # fmt: skip
    parts = []
    for load in dict.fromkeys(row["load"] for row in found):
        own = [row for row in found if row["load"] == load]
        first = own[0]
        lines = [head] + [
            [
                load,
                "transformers' own" if row["cache"] == "transformers" else f"`{row['cache']}`",
                f"{row['capacity_tokens']:,}",
                f"{row['seconds']:.0f}",
                f"{row['tokens_per_s']:.1f}",
                f"{row['ratio_to_transformers']:.2f}",
                f"{row['first_token_s']:.1f}",
                f"{row['first_token_ratio']:.2f}",
            ]
            for row in own
        ]
        title = (
            f"{first['requests']} requests with {first['prompt_tokens']:,} tokens of prompts and {first['answer']} new tokens each, "
            f"{first['budget'] / 2**20:,.0f} MiB of cache, {first['batch_tokens']} tokens a forward, {model_title(first)}"
        )
        parts.append(f"{caption(own, title)}\n\n{table(lines)}")
    return "\n\n".join(parts)


def beams_table(rows: Rows) -> str:
    """Return the time of a beam step's cache work per length of the context."""
    found = latest_run(rows, kind="beams", device="cpu")
    if not found:
        return "No run has been recorded yet."
    contexts = sorted({row["context"] for row in found})
    lines = [["cache", *(f"{context:,} tokens" for context in contexts)]]
    for cache in dict.fromkeys(row["cache"] for row in found):
        of = {row["context"]: row for row in found if row["cache"] == cache}
        lines.append([f"`{cache}`", *(f"{of[context]['step_ms_p50']:.3g}" for context in contexts)])
    first = found[0]
    title = (
        f"Milliseconds of new order and append over {first['layers']} layers, {first['beams']} beams, sizes of "
        f"`{first['shape']}`"
    )
    return f"{caption(found, title)}\n\n{table(lines)}"


def offload_table(rows: Rows) -> str:
    """Return budgets, what is resident, and the time of a step for the longest context of the newest run."""
    found = latest_run(rows, kind="offload")
    if not found:
        return "No run has been recorded yet."
    longest = max(row["context"] for row in found)
    found = [row for row in found if row["context"] == longest]
    lines = [
        ["pages", "budget, MiB", "layers outside", "on the device by `memory()`, MiB", "resident growth, MiB",
         "its peak while stepping", "step, ms"]
    ]  # fmt: skip
    for row in found:
        budget = row["device_bytes"]
        sizes = ("total_bytes", "resident_bytes", "resident_peak_stepping")
        mib = {name: f"{row[name] / 2**20:.1f}" for name in sizes}
        least = "least" if row["offload"] else "no offload"
        lines.append(
            [
                row["keys"],
                least if budget is None else f"{budget / 2**20:.1f}",
                str(row["layers_outside"]),
                *mib.values(),
                f"{row['step_ms_p50']:.0f}",
            ]
        )
    title = f"{model_title(found[0])}, {longest:,} tokens, the file in the page cache"
    return f"{caption(found, title)}\n\n{table(lines)}"


def offload_reading_table(rows: Rows) -> str:
    """Return what a step and the device's memory cost outside, with all pages read and with a part of them."""
    found = latest_run(rows, kind="offload_reading")
    if not found:
        return "No run has been recorded yet."
    read = next(row["read_tokens"] for row in found if row["read_tokens"])
    part = f"`read_tokens={read}`"
    lines = [
        ["pages", "tokens", "no offload, ms", "offload", f"offload, {part}", "on the device: offload, MiB", f"with {part}"]
    ]  # fmt: skip
    for keys, context in dict.fromkeys((row["keys"], row["context"]) for row in found):
        rows_of = [row for row in found if (row["keys"], row["context"]) == (keys, context)]
        plain = next(row for row in rows_of if row["offload"] is None)
        whole = next(row for row in rows_of if row["offload"] and not row["read_tokens"])
        some = next(row for row in rows_of if row["read_tokens"])
        lines.append(
            [
                keys,
                f"{context:,}",
                f"{plain['step_ms_p50']:.0f}",
                *(f"{row['step_ms_p50']:.0f} ({row['ratio_to_none']:.2f})" for row in (whole, some)),
                *(f"{row['page_bytes'] / 2**20:.1f}" for row in (whole, some)),
            ]
        )  # fmt: skip
    title = f"{model_title(found[0])}, steps of one run, the file in the page cache"
    return f"{caption(found, title)}\n\n{table(lines)}"


def suites_table(rows: Rows) -> str:
    """Return, per file of transformers' tests, how many pass with pages and with DynamicCache."""
    head = [
        "passed with both",
        "only with DynamicCache",
        "with neither",
        "with pages",
        "pages sealed",
    ]
    names = ["passed", "only_ours_failed", "both_failed", "passed_with_pages", "pages_sealed"]
    runs = [latest_run(rows, kind="transformers_suites", seq_length=n) for n in (0, 40)]
    runs = [run for run in runs if run]
    if not runs:
        return "No run has been recorded yet."
    lines = [["tests", "skipped", *head, *(f"longer: {title}" for title in head if len(runs) > 1)]]
    total = [0] * (1 + len(names) * len(runs))
    for suite in dict.fromkeys(row["suite"] for row in runs[0]):
        of = [next((row for row in run if row["suite"] == suite), None) for run in runs]
        numbers = [of[0]["skipped"] if of[0] else 0]
        for row in of:
            numbers += [row[name] if row else 0 for name in names]
        total = [a + b for a, b in zip(total, numbers, strict=True)]
        short = suite.removeprefix("tests/").removeprefix("models/").split("/test_modeling")[0]
        lines.append([short, *(f"{number:,}" for number in numbers)])
    lines.append(["**all**", *(f"**{number:,}**" for number in total)])
    version = " and ".join({row["versions"]["transformers"]: None for run in runs for row in run})
    said = caption(
        [row for run in runs for row in run],
        f"transformers {version}, its tests of tiny models with `{runs[0][0]['cache']}` and with `DynamicCache`",
        computed="the dtype that each test sets",
    )
    return f"{said}\n\n{table(lines)}"


def memory_table(rows: Rows) -> str:
    """Return, for each model, batch and device, the caches side by side at the longest context of the newest run."""
    rows = [row for row in rows if row["kind"] == "memory"]
    blocks = []
    for model, batch, device in dict.fromkeys(
        (row["model"], row["batch"], row["device"]) for row in rows
    ):
        found = latest_run(rows, model=model, batch=batch, device=device)
        longest = max(row["context"] for row in found)
        newest = {row["cache"]: row for row in found if row["context"] == longest}
        blocks.append(_memory_block(list(newest.values())))
    return "\n\n".join(blocks) if blocks else "No run has been recorded yet."


def _memory_block(rows: Rows) -> str:
    lines = [["cache", "held, MiB", "of dynamic", "bytes per token", "prefill, tokens/s", "decode, tokens/s"]]  # fmt: skip
    exact = next((row["held_bytes"] for row in rows if row["cache"] == "dynamic"), None)
    for row in rows:
        rates = [row.get(f"{name}_tokens_per_s") for name in ("prefill", "decode")]
        lines.append(
            [
                f"`{row['cache']}`",
                f"{row['held_bytes'] / 2**20:.1f}",
                f"{100 * row['held_bytes'] / exact:.1f} %" if exact else "-",
                f"{row['bytes_per_token']:,.0f}",
                *("-" if rate is None else f"{rate:,.{1 if rate < 100 else 0}f}" for rate in rates),
            ]
        )
    first = rows[0]
    title = f"{model_title(first)}, {first['context']:,} tokens of prompt and {first['steps']} more, batch {first['batch']}"
    return f"{caption(rows, title)}\n\n{table(lines)}"


def resident_table(rows: Rows) -> str:
    """Return by how much processes of their own grew with each cache: a table per model, machine, threads and context."""
    rows = [row for row in rows if row["kind"] == "memory" and row["measured_by"] == "resident"]
    names = ("model", "batch", "machine", "threads", "context", "steps", "dtype")
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    blocks = [_resident_block(groups[which]) for which in sorted(groups)]
    return "\n\n".join(blocks) if blocks else "No run has been recorded yet."


def _resident_block(rows: Rows) -> str:
    lines = [["cache", "runs", "held, MiB", "behind the prefill, MiB", "at the last step", "peak"]]
    parts = ("held", "prefill_grown", "steps_grown", "peak")
    for cache in dict.fromkeys(row["cache"] for row in rows):
        runs = [row for row in rows if row["cache"] == cache]
        cells = [_mib_range([run[f"{part}_bytes"] for run in runs]) for part in parts]
        lines.append([f"`{cache}`", str(len(runs)), *cells])
    first = rows[0]
    torch = " and ".join(dict.fromkeys(row["versions"]["torch"] for row in rows))
    title = (
        f"{first['context']:,} tokens of prompt and {first['steps']} more, batch {first['batch']}, {model_title(first)}, "
        f"torch {torch}"
    )
    return f"{caption(rows, title)}\n\n{table(lines)}"


def _mib_range(sizes: list[int | None]) -> str:
    """Return the least and the most of some sizes in MiB, once where they are equal; a dash where one is not known."""
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return "-"
    return " to ".join(dict.fromkeys(f"{size / 2**20:.1f}" for size in (min(known), max(known))))


LATENT_MODELS = {
    "deepseek-v2-lite-layer": "one attention layer of DeepSeek-V2-Lite's sizes (16 heads)",
    "deepseek-v3-2-layers": "the first two layers of DeepSeek-V3's sizes, MLP included (128 heads)",
}


def latent_table(rows: Rows) -> str:
    """Return decode steps of models with latent attention, with bytes per token and transient memory."""
    blocks = []
    for model, device in dict.fromkeys((row["model"], row["device"]) for row in rows):
        found = latest_run(rows, kind="generate", model=model, device=device)
        blocks.append(
            _latent_block(found, LATENT_MODELS.get(model, str(model)), random_config(model))
        )
    return "\n\n".join(blocks) if blocks else "No run has been recorded yet."


def _latent_block(rows: Rows, title: str, config: Any) -> str:
    contexts = sorted({row["context"] for row in rows})
    longest = f"{contexts[-1]:,}"
    lines = [
        ["cache", *(f"{context:,} tokens, ms" for context in contexts), f"bytes per token at {longest}",
         f"transient at {longest}, MiB"]
    ]  # fmt: skip
    for cache in dict.fromkeys(row["cache"] for row in rows):
        of = {row["context"]: row for row in rows if row["cache"] == cache}
        last = of[contexts[-1]]
        times = [
            f"{of[at]['step_ms_p50']:.3g} ({of[at]['ratio_to_dynamic']:.3g}x)" for at in contexts
        ]
        transient = last["transient_bytes"]
        lines.append(
            [
                f"`{cache}`",
                *times,
                f"{last['bytes_per_token']:,.0f}",
                "-" if transient is None else f"{max(0, transient) / 2**20:,.1f}",
            ]
        )
    dims = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    expanded = 2 * config.num_hidden_layers * config.num_attention_heads * dims
    head = (
        f"A decode step of {title}; in brackets how many times as fast as `dynamic`. Expanded keys and values, as transformers "
        f"before 5.15 cached them, would take {expanded:,} bytes per token"
    )
    return f"{caption(rows, head)}\n\n{table(lines)}"


def host_table(rows: Rows) -> str:
    """Return what a decode step costs the host, beside DynamicCache, of the newest row of each setting."""
    found = {(row["format"], row["setting"]): row for row in rows if row["kind"] == "host_step"}
    if not found:
        return "No run has been recorded yet."
    lines = [
        [
            "step",
            "format",
            "plain, us",
            "sealing, us",
            "DynamicCache, us",
            "launches, plain",
            "sealing",
            "waits",
        ]
    ]
    for (name, setting), row in found.items():
        times = [row[f"{which}_us_per_layer"] for which in ("paged", "sealing", "dynamic")]
        lines.append(
            [
                setting,
                f"`{name}`",
                *("" if time is None else f"{time:.0f}" for time in times),
                str(row["launches_plain"]),
                str(row["launches_sealing"]),
                str(row["synchronisations"]),
            ]
        )
    layers = next(iter(found.values()))["layers"]
    title = f"Microseconds of a decode step per layer, {layers} layers of 32 query and 8 kv heads of 128, the GPU's work left out"
    return f"{caption(found.values(), title, computed='bfloat16')}\n\n{table(lines)}"
