"""Write the measured tables of README.md, docs/ and results/ from the rows of results/: `python scripts/tables.py [--check]`."""

import argparse
import math
from typing import Any

from table_engine import ROOT, Cell, Pivot, Row, Rows, Table, filled, grouped, merged, pages

from kv_hf.evaluation.needles import Rate
from kv_hf.formats import cache_names

MIB = 2**20
RANDOM = {"weights_precision": "random weights", "dtype": "float32"}
SIZES = {"weights_precision": "none, random keys and values of these sizes", "dtype": "bfloat16"}
FORMATS = [name for name in cache_names() if name != "paged_exact"]

# -- cells -----------------------------------------------------------------------------------------------------


def title(row: Row) -> str:
    """Return a row's cache for people: ours as code, others with their maker."""
    cache = row["cache"]
    makers = {
        "kivi_": "KIVI",
        "turboquant_package": "turboquant 0.2.0",
        "turboquant_": "TurboQuant",
    }
    maker = next(
        (name for start, name in makers.items() if cache.startswith(start)), "transformers"
    )
    if maker == "transformers" and cache.partition(":")[0].endswith("_channel"):
        maker += ", keys per channel"
    ours = cache.startswith("paged_") or cache in ("dynamic", "static")
    return f"`{cache}`" if ours else f"`{cache}` ({maker})"


def digits(kl: float) -> str:
    """Return a divergence with two digits that count, and never less than five places of none."""
    if kl < 5e-6:
        return "0.00000"
    return f"{kl:.5f}" if kl < 0.01 else f"{kl:.4f}" if kl < 0.1 else f"{kl:.2f}"


def finer(kl: float) -> str:
    """Return a divergence as `digits` does, but with two digits that count below a thousandth, down to a millionth."""
    return f"{kl:.{1 - math.floor(math.log10(kl))}f}" if 1e-6 <= kl < 1e-3 else digits(kl)


def kl(row: Row, form: Any = digits) -> str:
    """Return a mean divergence with its 95 % interval."""
    return f"{form(row['kl_mean'])} ({form(row['kl_low'])} to {form(row['kl_high'])})"


def of(name: str, form: Any = digits) -> Cell:
    """Return a cell that shows one field by a function."""
    return lambda row: "-" if row.get(name) is None else form(row[name])


def percent(name: str, places: int = 1) -> Cell:
    """Return a cell that shows a part of one."""
    return lambda row: "-" if row.get(name) is None else f"{100 * row[name]:.{places}f} %"


def worst(row: Row) -> str:
    """Return the KL of the text that a cache loses most on, and its name; a dash where one text was measured."""
    texts = row.get("texts", {})
    return f"{digits(texts[row['worst_text']]['kl_mean'])} ({row['worst_text']})" if texts else "-"


def scored(row: Row) -> str:
    """Return the texts and tokens of a row in words."""
    texts = list(row.get("texts") or [row["text"]])
    named = f"{len(texts)} texts" if len(texts) > 1 else f"one text ({texts[0]})"
    return f"{row['name']}, {named}, {row['windows']} windows, {row['tokens']:,} scored tokens"


def bits(row: Row) -> float:
    """Return what sorts caches by falling bits."""
    return -float(row.get("stored_bits", 0))


# -- rows ------------------------------------------------------------------------------------------------------


def accuracy(row: Row) -> bool:
    """Say whether a row belongs to the README's protocol: KL of decoding, 512 of 1,600 tokens as the prompt."""
    protocol = {"kind": "accuracy", "window": 1600, "prompt": 512, "dtype": "float32"}
    ours = not row.get("cache", "").startswith("recipe:") and row.get("conversion") is None
    return ours and all(row.get(name) == value for name, value in protocol.items())


def held_out(rows: Rows) -> Rows:
    """Return the rows of the held-out texts; where none was measured, those of the one text of before."""
    return [row for row in rows if row["text"] == "held_out"] or rows


def newest(rows: Rows) -> Rows:
    """Return the last row of each cache on the held-out texts, by falling bits."""
    return sorted({row["cache"]: row for row in held_out(rows)}.values(), key=bits)


def speed_order(rows: Rows) -> tuple[int, float]:
    """Order machines: CPUs first, and of these the one with the smaller gain of pages at the longest context."""
    longest = max(row["context"] for row in rows)
    name = "cache" if "cache" in rows[0] else "contender"
    ours = [r for r in rows if r["context"] == longest and r[name].startswith("paged_")]
    return rows[0]["device"] != "cpu", max((r["ratio_to_dynamic"] for r in ours), default=0.0)


def longest(rows: Rows) -> Rows:
    """Return the rows of the longest context."""
    most = max(row["context"] for row in rows)
    return [row for row in rows if row["context"] == most]


def outside(rows: Rows) -> Rows:
    """Return a row for each kind of pages and context: no offload, offload, and offload that reads a part."""
    named = [
        {**r, "how": "part" if r["read_tokens"] else "whole" if r["offload"] else "none"}
        for r in rows
    ]
    fields = ("step_ms_p50", "ratio_to_none", "page_mib", "read_tokens")
    return merged(named, ("keys", "context"), "how", *fields)


def made(row: Row) -> str:
    """Return in words how a model came to have its kv heads."""
    tokens = row.get("uptrained_tokens")
    return (row.get("conversion") or "original") + (
        f", trained on {tokens:,} tokens" if tokens else ""
    )


def pooled(rows: Rows) -> Rows:
    """Return needle rows with the prompts of each (cache, task, length) together: its rate and nats."""
    found = []
    for own in grouped(rows, ("cache", "task", "length")).values():
        scores = Rate.of([score for row in own for score in row["scores"]])
        nlls = [nll for row in own for nll in row["nlls"]]
        low, high = scores.interval()
        said = f"{100 * scores.share:.0f} % ({100 * low:.0f} to {100 * high:.0f})"
        asked = (own[0]["length"], own[0]["task"])
        cell = {"asked": asked, "rate": said, "nats": sum(nlls) / len(nlls), "prompts": len(nlls)}
        found += [{**row, **cell, "hidden": row is not own[0]} for row in own]
    return found


def needles(rows: Rows) -> str:
    """Return the caption of a model's needles."""
    counts = sorted({row["prompts"] for row in rows})
    said = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    return f"{rows[0]['name']}, {said} prompts of a task and length"


SIMULATED = {
    "oracle": "the truth: each page's attention mass",
    "quest": "smallest and largest key per channel (Quest)",
    "quest_each_head": "the same, each kv head pages of its own",
    "quest_16_each_head": "the same, pages of 16 tokens",
    "mean": "mean key of a page",
}


def over_texts(rows: Rows) -> Rows:
    """Return rows of reading with the mean and the worst of the texts that all contenders have; caches first, then what is simulated."""
    cells = grouped(
        {
            (r["contender"], r["read_tokens"], r.get("read_top_p"), r["text"]): r for r in rows
        }.values(),
        ("contender", "read_tokens", "read_top_p"),
    )
    texts = set.intersection(*({row["text"] for row in own} for own in cells.values()))
    listed = [
        *dict.fromkeys(r["contender"] for r in rows if r["contender"] not in SIMULATED),
        *SIMULATED,
    ]
    found = []
    for own in cells.values():
        own = sorted((row for row in own if row["text"] in texts), key=lambda row: row["text"])
        means = {name: sum(r[name] for r in own) / len(own) for name in MEANS if name in own[0]}
        most = max(own, key=lambda row: row["kl_mean"])
        said = digits(means["kl_mean"])
        said += f" ({digits(most['kl_mean'])}, {most['text']})" if len(own) > 1 else ""
        same = {"shown_kl": said, "texts": sorted(texts), "budget": budget(own[0]["read_tokens"])}
        simulated = own[0]["contender"] in SIMULATED
        found += [
            {**row, **means, **same, "simulated": simulated, "hidden": row is not own[0]}
            for row in own
        ]
        if simulated:  # which reads everything loses nothing
            found.append({**own[0], "budget": budget(None), "shown_kl": "0"})
    return sorted(found, key=lambda row: (listed.index(row["contender"]), row["budget"]))


def budget(tokens: int | None) -> tuple[float, str]:
    """Return what orders and heads a column of tokens read."""
    return (tokens, f"{tokens:,} tokens read") if tokens else (math.inf, "all")


MEANS = ("kl_mean", "tokens_read_mean", "tokens_read_p10", "tokens_read_p90")


def read_texts(row: Row) -> str:
    texts = row["texts"]
    return texts[0] if len(texts) == 1 else f"{len(texts)} texts ({', '.join(texts)})"


def parts(rows: Rows) -> Rows:
    """Return a row for each step that reads a part beside one that reads everything; other programs do not add to processor time."""
    ms = "thread_ms_min" if rows[0]["threads"] == 1 else "ms_min"
    named = [{**row, "ms": row[ms]} for row in rows]
    found = merged(named, ("kind", "cache", "context"), "contender", "ms")
    caches = list(dict.fromkeys(row["cache"] for row in rows))
    return sorted(found, key=lambda r: (r["kind"], caches.index(r["cache"]), r["context"]))


def suites(rows: Rows) -> Rows:
    """Return the rows of files of tests, and one with their sums."""
    names = (
        "skipped",
        "passed",
        "only_ours_failed",
        "both_failed",
        "passed_with_pages",
        "pages_sealed",
    )
    total = {name: sum(row[name] for row in rows) for name in names}
    return [*rows, {**rows[0], **total, "suite": "**all**"}]


READERS = {
    1: "kernels read the pages",
    0: "layers are written out for attention",
    None: "no step reads the pages",
}


def how(row: Row) -> str:
    """Return a family's verdict, and of equal ones what reads the pages."""
    if row["verdict"] != "equal":
        return str(row["verdict"])
    readers = READERS.get(
        row["reads"], "kernels read the pages, and layers are written out as well"
    )
    return f"equal, {readers}"


def families(rows: Rows) -> Rows:
    """Return a row for each verdict, with its families."""
    found = []
    for own in grouped([{**row, "how": how(row)} for row in rows], ("how",)).values():
        names = ", ".join(dict.fromkeys(row["family"] for row in own))
        found += [
            {**row, "number": len(own), "names": names, "hidden": row is not own[0]} for row in own
        ]
    return sorted(found, key=lambda row: -row["number"])


def why(row: Row) -> str:
    """Return the operations that decided a family's verdict, and the message of the first."""
    decided = {name: one for name, one in row["others"].items() if one["verdict"] == row["verdict"]}
    first: Row = next(iter(decided.values()), {})
    names = "every operation" if decided and not row["equal"] else ", ".join(decided)
    message = first.get("message") or row["message"]
    if not message and "stock_to_plain" in first:
        message = "DynamicCache lies {stock_to_plain:.2g} of the largest logit from the model without a cache, pages {ours_to_plain:.2g}"
        message = message.format_map(first)
    text = f"{names}: {message}" if names else message
    return str(text.replace("|", "\\|").replace("<", "&lt;"))


# -- tables ----------------------------------------------------------------------------------------------------

GRID = "accuracy_vs_memory.jsonl"
METHODS = ("original", "first", "mean", "align", "svd")
STEPS = ("smollm2-135m", "llama-3.1-8b", "qwen2.5-7b")
KL_COLUMNS: dict[str, Cell] = {
    "cache": title,
    "bits": "{stored_bits:.2f}",
    "KL (95 % interval)": kl,
    "worst text": worst,
}
TABLES = [
    Table(
        "README.md", "accuracy", GRID, lambda rows: scored(rows[0]), KL_COLUMNS,
        where=lambda r: accuracy(r) and r["model"] == "smollm2-135m" and r["cache"] in FORMATS, prepare=newest,
    ),
    Table(
        "README.md", "demo", "demo.jsonl",
        "Memory and speed of {name}, {prompt_tokens:,} tokens of prompt and {new_tokens} new ones",
        {
            "cache": "`{cache}`", "KV MiB": "{kv_mib:.1f}", "of DynamicCache": percent("kv_ratio"),
            "prefill tokens/s": "{prefill_tokens_per_s:.0f}", "decode tokens/s": "{decode_tokens_per_s:.1f}",
        },
        where=lambda r: (r["kind"], r["model"], r["device"]) == ("demo", "smollm2-135m", "cpu"),
        one_run=True, key=("cache",),
    ),
    Table(
        "docs/speed_and_memory.md", "speed", "generate.jsonl", "Milliseconds of a decode step, {name}",
        {"cache": "`{cache}`"},
        Pivot(("cache",), "context", {"{at:,} tokens": "{step_ms_p50:.3g} ({ratio_to_dynamic:.2f}x)"}),
        where=lambda r: r["kind"] == "generate" and r["model"] in STEPS and r["batch"] == 1,
        split=("model", "device", "machine"), order=speed_order, one_run=True,
    ),
    Table(
        "docs/speed_and_memory.md", "speed", "decode.jsonl", "Milliseconds of one layer's attention and append, 32 query and 8 kv heads of 128",
        {"contender": "`{contender}`"},
        Pivot(("contender",), "context", {"{at:,} tokens": "{ms_p50:.3g} ({ratio_to_dynamic:.2f}x)"}),
        where=lambda r: r["kind"] == "decode" and r["shape"] == "llama-8b" and r["batch"] == 1 and r["path"] != "kernel",
        split=("device",), one_run=True, given=SIZES,
    ),
    Table(
        "docs/serving.md", "prefix", "prefix.jsonl",
        "{config_requests} requests of {config_system_tokens:,} shared and {config_question_tokens} own tokens, "
        "`{config_implementation}`, {name}, all caches alive at the end",
        {
            "prefix store": lambda r: "yes" if r["config_prefix_store"] else "no", "requests at a time": "{config_batch}",
            "prefill, s": "{value:.1f}", "tokens computed": "{tokens_computed:,}", "skipped": percent("skipped"),
            "pages, MiB": lambda r: f"{r['pages'] * r['page_bytes'] / MIB:.1f}",
        },
        where=lambda r: r["metric"] == "prefill", one_run=True,
    ),
    Table(
        "docs/serving.md", "serve", "serving.jsonl",
        "Chats with a system prompt of {config_system_tokens:,} tokens and answers of at most {config_new_tokens} tokens, {name}, "
        "least times of {n} chats",
        {
            "cache": lambda r: r["config_implementation"] if " " in r["config_implementation"] else f"kv-hf serve, `{r['config_implementation']}`",
            "turn": "{turn}", "prompt, tokens": "{prompt_tokens:,}", "computed": "{tokens_computed:,}",
            "first text, s": "{first_token_s:.2f}", "answer, s": "{whole_s:.2f}", "processor, s": "{value:.2f}",
        },
        where=lambda r: r["kind"] == "serve", one_run=True,
    ),
    Table(
        "docs/serving.md", "batches", "serving.jsonl",
        lambda rows: filled(
            "{requests} requests with {prompt_tokens:,} tokens of prompts and {answer} new tokens each, ", rows[0]
        ) + f"{rows[0]['budget'] / MIB:,.0f} MiB of cache, " + filled("{batch_tokens} tokens a forward, {name}", rows[0]),
        {
            "load": "{load}", "cache": lambda r: "transformers' own" if r["cache"] == "transformers" else f"`{r['cache']}`",
            "room, tokens": "{capacity_tokens:,}", "seconds": "{seconds:.0f}", "tokens/s": "{tokens_per_s:.1f}",
            "of transformers'": "{ratio_to_transformers:.2f}", "first token, s": "{first_token_s:.1f}",
            "of that of transformers": "{first_token_ratio:.2f}",
        },
        where=lambda r: r["kind"] == "batches", split=("load",), one_run=True,
    ),
    Table(
        "docs/design.md", "beams", "beams.jsonl", "Milliseconds of new order and append over {layers} layers, {beams} beams, sizes of `{shape}`",
        {"cache": "`{cache}`"}, Pivot(("cache",), "context", {"{at:,} tokens": "{step_ms_p50:.3g}"}),
        where=lambda r: r["kind"] == "beams" and r["device"] == "cpu", one_run=True, given=SIZES,
    ),
    Table(
        "docs/accuracy.md", "accuracy", GRID, lambda rows: f"{scored(rows[0])}, exact perplexity {rows[0]['perplexity_exact']:.2f}",
        {
            "cache": title, "bits": "{stored_bits:.2f}", "bytes/token": "{bytes_per_token:,.0f}", "KL": kl, "worst text": worst,
            "median": of("kl_median"), "same top token": percent("top1"),
            "perplexity": "{perplexity_delta:+.2f} % ({perplexity_delta_low:+.2f} to {perplexity_delta_high:+.2f})",
        },
        where=accuracy, split=("model",), prepare=newest,
    ),
    Table(
        "docs/accuracy.md", "peers", "peers.jsonl",
        lambda rows: filled("{name}, {text}: {windows} window", rows[0]) + "s" * (rows[0]["windows"] > 1)
        + filled(" of {window:,} tokens, {tokens:,} of them scored", rows[0]),
        {
            "cache": title, "bits": "{stored_bits:.2f}",
            "bytes/token": "{bytes_per_token:,.0f}", "KL (95 % interval)": kl, "same top token": percent("top1"),
        },
        where=lambda r: r["window"] > 768,
        split=("model", "model_revision", "text_digest", "window", "prompt", "dtype"), key=("cache",), sort=bits,
    ),
    Table(
        "docs/gqa.md", "levers", GRID,
        "{model}, {windows} windows of {window:,} tokens, {prompt} of each not scored; exact perplexity of the original: {perplexity_exact:.2f}",
        {
            "kv heads": "{kv_heads}", "how": made, "cache": "`{cache}`", "bytes/token": "{bytes_per_token:,.0f}",
            "perplexity": "{perplexity:.2f}",
        },
        where=lambda r: r["kind"] == "accuracy" and r["text"] != "held_out" and r.get("kv_heads") and r["cache"] in ("paged_exact", "paged_int4"),
        split=("text_digest", "windows"), sort=lambda r: -r["bytes_per_token"], left=3,
    ),
    Table(
        "docs/gqa.md", "conversions", "gqa.jsonl",
        "{model}, perplexity without training: {windows} windows of at most {window} tokens, {tokens:,} scored ({text}); {note}",
        {"kv heads": "{kv_heads}", "kv bytes per token": "{kv_bytes_per_token:,}"},
        Pivot(("kv_heads",), "method", {"`{at}`": "{perplexity:,.2f}"}, sort=METHODS.index),
        split=("model",), key=("kv_heads", "method"), sort=lambda r: -r["kv_heads"],
    ),
    Table(
        "docs/gqa.md", "uptraining", "uptrain.jsonl", "Training towards the original: each student before and after",
        {
            "student": "{teacher}, `{method}`", "kv heads": "{num_key_value_heads[0]} to {num_key_value_heads[1]}",
            "largest lr": "{settings[lr]:g}", "step": "{step:,}", "tokens": "{tokens:,}", "seconds": "{seconds:,.0f}",
            "of the processor": "{cpu_seconds:,.0f}", "perplexity": "{perplexity:,.2f}", "KL to the original": "{kl:.3f}",
        },
    ),
    Table(
        "docs/long_context.md", "needles", f"{GRID} long_context.jsonl", needles, {"cache": title},
        Pivot(("cache",), "asked", {"`{at[1]}`, {at[0]:,} tokens": "{rate}", "nats": "{nats:.3f}"}),
        where=lambda r: r["kind"] == "needle", split=("model",), prepare=pooled,
        key=("model_revision", "task", "cache", "length", "depth", "seed", "haystack", "chat", "first_sample", "samples"),
    ),
    Table(
        "docs/long_context.md", "reading", "reading.jsonl",
        lambda rows: filled("{name}, last {tokens} of {window:,} tokens of ", rows[0]) + read_texts(rows[0]),
        {"pages chosen by": lambda r: SIMULATED.get(r["contender"], f"`{r['contender']}`")},
        Pivot(("contender",), "budget", {"{at[1]}": "{shown_kl}"}),
        where=lambda r: r.get("read_top_p") is None, split=("model", "window", "tokens", "read_from", "dtype"), prepare=over_texts,
    ),
    Table(
        "docs/long_context.md", "top_p", "reading.jsonl",
        lambda rows: filled("{name}, last {tokens} of {window:,} tokens of ", rows[0])
        + f"{len(rows[0]['texts'])} texts, steps counted layer by layer",
        {
            "pages chosen by": "`{contender}`", "`read_top_p`": "{read_top_p:g}", "tokens read, mean": "{tokens_read_mean:,.0f}",
            "a tenth of the steps less than": "{tokens_read_p10:,.0f}", "a tenth more than": "{tokens_read_p90:,.0f}", "KL": "{shown_kl}",
        },
        where=lambda r: r.get("read_top_p") is not None, sort=lambda r: (r["contender"], r["read_top_p"]), prepare=over_texts,
    ),
    Table(
        "docs/long_context.md", "reading_speed", "reading_speed.jsonl", "Steps of SmolLM2-135M that read {read_tokens:,} tokens, least times",
        {
            "what": lambda r: {"attention": "attention of 30 layers", "model": "whole step"}[r["kind"]], "cache": "`{cache}`",
            "tokens": "{context:,}", "everything": of("ms_everything"), "a part": of("ms_part"),
            "ratio": lambda r: f"{r['ms_part'] / r['ms_everything']:.2f}", "the choice alone": of("ms_choice"),
        },
        split=("threads",), key=("kind", "cache", "context", "contender"), prepare=parts,
    ),
    Table(
        "docs/speed_and_memory.md", "resident", "resident.jsonl",
        "{context:,} tokens of prompt and {steps} more, batch {batch}, {name}, torch {versions[torch]}",
        {
            "cache": "`{cache}`", "held, MiB": "{held_mib:.1f}", "behind the prefill, MiB": "{prefill_grown_mib:.1f}",
            "at the last step": "{steps_grown_mib:.1f}", "peak": "{peak_mib:.1f}",
        },
        where=lambda r: r["kind"] == "memory" and r["measured_by"] == "resident",
        split=("model", "batch", "machine", "threads", "context", "steps"), sort=lambda r: -r["held_mib"],
    ),
    Table(
        "docs/mla.md", "mla", "mla.jsonl",
        "A decode step of {model}; in brackets how many times as fast as `dynamic`",
        {"cache": "`{cache}`"},
        Pivot(("cache",), "context", {"{at:,} tokens, ms": "{step_ms_p50:.3g} ({ratio_to_dynamic:.3g}x)"}),
        {
            "bytes per token at {context:,}": "{bytes_per_token:,.0f}",
            "transient at {context:,}, MiB": of("transient_mib", lambda mib: f"{max(0, mib):,.1f}"),
        },
        where=lambda r: r["kind"] == "generate", split=("model", "device"), one_run=True,
    ),
    Table(
        "docs/mla.md", "mla_accuracy", "mla_accuracy.jsonl",
        "{name} as MLA, latents of {kv_lora_rank}, mixing: {mixing}; RoPE keys of {qk_rope_head_dim}. {windows} windows of {window:,} tokens, "
        "{tokens:,} of them scored; stock `DynamicCache`: perplexity {perplexity_exact:.3f}",
        {
            "latents": lambda r: f"`{r['cache']}`" if r["cache"].startswith("paged_") else r["cache"], "read": "{reads}",
            "bits": "{stored_bits:.2f}", "bytes/token": "{bytes_per_token:,.0f}", "KL (95 % interval)": lambda r: kl(r, finer),
            "same top token": percent("top1"), "perplexity": lambda r: f"{r['perplexity']:,.{2 if r['perplexity'] < 1000 else 0}f}",
        },
        where=lambda r: r["mixing"] != "principal",
        split=("model", "model_revision", "mixing", "kv_lora_rank", "qk_rope_head_dim", "dtype", "text_digest", "window", "prompt"),
        key=("cache",), sort=bits, left=2,
    ),
    Table(
        "docs/kernels.md", "host", "host.jsonl",
        "Microseconds of a decode step per layer, {layers} layers of 32 query and 8 kv heads of 128, the GPU's work left out",
        {
            "step": "{setting}", "format": "`{format}`", "plain, us": "{paged_us_per_layer:.0f}", "sealing, us": "{sealing_us_per_layer:.0f}",
            "DynamicCache, us": "{dynamic_us_per_layer:.0f}", "launches, plain": "{launches_plain}", "sealing": "{launches_sealing}",
            "waits": "{synchronisations}",
        },
        where=lambda r: r["kind"] == "host_step", key=("format", "setting"), given=SIZES,
    ),
    Table(
        "docs/long_context.md", "offload", "offload.jsonl", "{name}, {context:,} tokens, the file in the page cache",
        {
            "pages": "{keys}", "budget, MiB": lambda r: filled("{device_mib:.1f}", r) if r["device_bytes"] else "least" if r["offload"] else "no offload",
            "layers outside": "{layers_outside}", "on the device by `memory()`, MiB": "{total_mib:.1f}",
            "resident growth, MiB": "{resident_mib:.1f}", "its peak while stepping": of("resident_peak_stepping", lambda size: f"{size / MIB:.1f}"), "step, ms": "{step_ms_p50:.0f}",
        },
        where=lambda r: r["kind"] == "offload", one_run=True,
        prepare=longest,
    ),
    Table(
        "docs/long_context.md", "offload_reading", "offload.jsonl", "{name}, steps of one run, the file in the page cache",
        {
            "pages": "{keys}", "tokens": "{context:,}", "no offload, ms": "{step_ms_p50_none:.0f}",
            "offload": "{step_ms_p50_whole:.0f} ({ratio_to_none_whole:.2f})",
            "offload, `read_tokens={read_tokens_part}`": "{step_ms_p50_part:.0f} ({ratio_to_none_part:.2f})",
            "on the device: offload, MiB": "{page_mib_whole:.1f}", "with `read_tokens={read_tokens_part}`": "{page_mib_part:.1f}",
        },
        where=lambda r: r["kind"] == "offload_reading", one_run=True, prepare=outside,
    ),
    Table(
        "results/model_families.md", "families", "model_families.jsonl", "transformers {transformers}: a tiny model of each family, built from a config",
        {"verdict": "{how}", "number": "{number}", "families": "{names}"}, split=("transformers",), key=("role", "family"),
        sort=lambda r: (r["role"], r["family"]), given=RANDOM, prepare=families,
    ),
    Table(
        "results/model_families.md", "families", "model_families.jsonl", "transformers {transformers}: the families that are not equal",
        {"family": "{family}", "kind": "{role}", "verdict": "{verdict}", "why": why}, where=lambda r: r["verdict"] != "equal",
        split=("transformers",), key=("role", "family"), sort=lambda r: (r["role"], r["family"]), given=RANDOM, left=4,
    ),
    Table(
        "results/transformers_suites.md", "suites", "transformers_suites.jsonl",
        lambda rows: filled("transformers {transformers}, its tests of tiny models with `{cache}` and with `DynamicCache`, ", rows[0])
        + (filled("prompts of {seq_length} tokens", rows[0]) if rows[0]["seq_length"] else "their own prompts"),
        {
            "tests": lambda r: r["suite"].removeprefix("tests/").removeprefix("models/").split("/test_modeling")[0],
            "passed with both": "{passed:,}", "only with DynamicCache": "{only_ours_failed:,}", "with neither": "{both_failed:,}",
            "skipped": "{skipped:,}", "with pages": "{passed_with_pages:,}", "pages sealed": "{pages_sealed:,}",
        },
        split=("seq_length",), one_run=True, key=("suite",), given={**RANDOM, "dtype": "the dtype that each test sets"}, prepare=suites,
    ),
]  # fmt: skip


def main() -> int:
    """Write the tables; with --check 1 where a page is not what the rows say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, name the pages that would change"
    )
    check = parser.parse_args().check
    stale = {path: text for path, text in pages(TABLES).items() if path.read_text("utf-8") != text}
    for path, text in stale.items():
        print(
            f"{path.relative_to(ROOT)} is not what results/ says"
            if check
            else path.relative_to(ROOT)
        )
        if not check:
            path.write_text(text, "utf-8")
    return int(check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
