"""Write the measured tables of README.md and docs/ from the newest rows of results/."""

import argparse
import re
from pathlib import Path
from typing import Any

import docs_tables
import eval_tables
import family_tables
import gqa_tables
import long_tables

from kv_hf.evaluation.demo_command import CACHES
from kv_hf.evaluation.rows import latest_run, read_rows

ROOT = Path(__file__).parent.parent
MEASURED = "accuracy_vs_memory.jsonl"
BOTH = f"{MEASURED} long_context.jsonl"
# document, block, files of rows, table
DOCUMENTS = [
    ("prefix_sharing.md", "prefix", "prefix.jsonl", docs_tables.prefix_table),
    ("serving.md", "serve", "serving.jsonl", docs_tables.serve_table),
    ("design.md", "beams", "beams.jsonl", docs_tables.beams_table),
    ("evaluation.md", "accuracy", BOTH, eval_tables.details_table),
    ("peers.md", "peers", "peers.jsonl", eval_tables.peers_table),
    ("recipes.md", "recipes", BOTH, eval_tables.recipes_table),
    ("gqa.md", "levers", MEASURED, gqa_tables.levers_table),
    ("gqa_methods.md", "conversions", "gqa.jsonl", gqa_tables.conversions_table),
    ("uptraining.md", "uptraining", "uptrain.jsonl", gqa_tables.uptraining_table),
    ("lm_eval.md", "tasks", MEASURED, eval_tables.tasks_table),
    ("formats.md", "accuracy", BOTH, eval_tables.formats_table),
    ("evaluation.md", "drift", MEASURED, long_tables.drift_table),
    ("long_context.md", "needles", BOTH, long_tables.needle_table),
    ("memory.md", "memory", "memory.jsonl", docs_tables.memory_table),
    ("memory.md", "resident", "resident.jsonl", docs_tables.resident_table),
    ("mla.md", "mla", "mla.jsonl", docs_tables.latent_table),
    ("mla_accuracy.md", "mla_accuracy", "mla_accuracy.jsonl", eval_tables.latent_accuracy_table),
    ("model_families.md", "families", "model_families.jsonl", family_tables.families_table),
    ("kernels_gpu.md", "host", "host.jsonl", docs_tables.host_table),
    ("offload.md", "offload", "offload.jsonl", docs_tables.offload_table),
    ("transformers_suites.md", "suites", "transformers_suites.jsonl", docs_tables.suites_table),
]


def newest(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """Return the last row whose fields have these values."""
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    return found[-1] if found else None


def demo_table(rows: list[dict[str, Any]]) -> str:
    """Return the memory and speed of the last recorded demo on the CPU."""
    head = ["cache", "KV MiB", "of DynamicCache", "prefill tokens/s", "decode tokens/s"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name in ("dynamic", *CACHES):
        row = newest(rows, cache=name, model="smollm2-135m", device="cpu")
        if row is not None:
            lines.append(
                [
                    f"`{name}`",
                    f"{row['kv_bytes'] / 2**20:.1f}",
                    f"{100 * row['kv_ratio']:.1f} %",
                    f"{row['prefill_tokens_per_s']:.0f}",
                    f"{row['decode_tokens_per_s']:.1f}",
                ]
            )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# docs/speed.md's order of devices and models; what has no rows is left out
STEPS = [
    ("smollm2-135m", "cpu", "SmolLM2-135M"),
    ("llama-3.1-8b", "cuda", "Llama-3.1-8B (random weights)"),
    ("qwen2.5-7b", "cuda", "Qwen2.5-7B (random weights)"),
]
LAYERS = [
    ("llama-8b", "cpu", "32 query and 8 kv heads of 128"),
    ("llama-8b", "cuda", "32 query and 8 kv heads of 128"),
]
NO_RUN = "No run has been recorded yet"
NOTHING = "No run has been recorded yet: `make bench` and `make bench-gpu` write this table."


def times_table(rows: list[dict[str, Any]], name: str, milliseconds: str) -> str:
    """Return the times of one run: a row per value of field `name`, a column per context, "ms (x dynamic)"."""
    contexts = sorted({row["context"] for row in rows})
    head = [name, *(f"{context:,} tokens" for context in contexts)]
    lines = [head, ["---"] + ["---:"] * len(contexts)]
    for which in dict.fromkeys(row[name] for row in rows):
        line = [f"`{which}`"]
        for context in contexts:
            row = newest(rows, **{name: which, "context": context})
            line.append(f"{row[milliseconds]:.3g} ({row['ratio_to_dynamic']:.2f}x)" if row else "-")
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def where(row: dict[str, Any]) -> str:
    """Return the machine of a run in words: the GPU, or the processor and its threads."""
    parts = [part.strip() for part in row["machine"].split(",")]
    if row["device"] != "cpu":
        return parts[-1]
    threads = row["threads"]
    return f"{parts[0]}, {threads} thread{'s' if threads > 1 else ''}"


def speed_table(generate: list[dict[str, Any]], decode: list[dict[str, Any]]) -> str:
    """Return the tables of whole decode steps and of one layer's attention, newest run of each device."""
    blocks = []
    for model, device, title in STEPS:
        rows = latest_run(generate, kind="generate", model=model, device=device, batch=1)
        if rows:
            blocks.append(f"Milliseconds of a decode step, {title}, {where(rows[0])}:")
            blocks.append(times_table(rows, "cache", "step_ms_p50"))
    for shape, device, title in LAYERS:
        rows = latest_run(decode, kind="decode", shape=shape, device=device, batch=1)
        rows = [row for row in rows if row["path"] != "kernel"]
        if rows:
            blocks.append(
                f"Milliseconds of one layer's attention and append, {title}, {where(rows[0])}:"
            )
            blocks.append(times_table(rows, "contender", "ms_p50"))
    return "\n\n".join(blocks) if blocks else NOTHING


def replace_block(text: str, name: str, block: str) -> str:
    """Put `block` between the markers `<!-- name -->` and `<!-- /name -->`; a table stays where there are no rows."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    if block.startswith(NO_RUN) and re.search(rf"<!-- {name} -->\n\|", text):
        return text
    return re.sub(pattern, lambda m: m[1] + block + "\n" + m[2], text, flags=re.DOTALL)


def rows_of(files: str) -> list[dict[str, Any]]:
    """Return the rows of some files of results/, with spaces between their names."""
    return [row for file in files.split() for row in read_rows(ROOT / "results" / file)]


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text("utf-8")
    text = replace_block(
        text,
        "accuracy",
        eval_tables.formats_table(rows_of(BOTH)),
    )
    text = replace_block(text, "demo", demo_table(read_rows(ROOT / "results" / "demo.jsonl")))
    readme.write_text(text, "utf-8")
    speed = ROOT / "docs" / "speed.md"
    found = speed_table(
        read_rows(ROOT / "results" / "generate.jsonl"), read_rows(ROOT / "results" / "decode.jsonl")
    )
    speed.write_text(replace_block(speed.read_text("utf-8"), "speed", found), "utf-8")
    for document, name, files, make in DOCUMENTS:
        path = ROOT / "docs" / document
        found = make(rows_of(files))
        path.write_text(replace_block(path.read_text("utf-8"), name, found), "utf-8")


if __name__ == "__main__":
    main()
