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
import reading_tables
from captions import caption

from kv_hf.evaluation.demo_command import CACHES
from kv_hf.evaluation.rows import latest_run, read_rows

ROOT = Path(__file__).parent.parent
MEASURED = "accuracy_vs_memory.jsonl"
BOTH = f"{MEASURED} long_context.jsonl"
# document, block, files of rows, table
FIRST = "smollm2-135m"  # the model of the README's table; formats.md and evaluation.md have all
DOCUMENTS = [
    ("prefix_sharing.md", "prefix", "prefix.jsonl", docs_tables.prefix_table),
    ("serving.md", "serve", "serving.jsonl", docs_tables.serve_table),
    ("batching.md", "batches", "serving.jsonl", docs_tables.batches_table),
    ("design.md", "beams", "beams.jsonl", docs_tables.beams_table),
    ("evaluation.md", "accuracy", BOTH, eval_tables.details_table),
    ("peers.md", "peers", "peers.jsonl", eval_tables.peers_table),
    ("recipes.md", "recipes", BOTH, eval_tables.recipes_table),
    ("gqa.md", "levers", MEASURED, gqa_tables.levers_table),
    ("gqa_methods.md", "conversions", "gqa.jsonl", gqa_tables.conversions_table),
    ("uptraining.md", "uptraining", "uptrain.jsonl", gqa_tables.uptraining_table),
    ("lm_eval.md", "tasks", MEASURED, eval_tables.tasks_table),
    ("formats.md", "accuracy", BOTH, eval_tables.formats_table),
    ("formats.md", "ablation", "ablation.jsonl accuracy.jsonl", eval_tables.ablation_table),
    ("evaluation.md", "drift", MEASURED, long_tables.drift_table),
    ("long_context.md", "needles", BOTH, long_tables.needle_table),
    ("long_context.md", "reading", "reading.jsonl", reading_tables.reading_table),
    ("long_context.md", "top_p", "reading.jsonl", reading_tables.top_p_table),
    ("long_context.md", "reading_speed", "reading_speed.jsonl", reading_tables.speed_table),
    ("memory.md", "memory", "memory.jsonl", docs_tables.memory_table),
    ("memory.md", "resident", "resident.jsonl", docs_tables.resident_table),
    ("mla.md", "mla", "mla.jsonl", docs_tables.latent_table),
    ("mla_accuracy.md", "mla_accuracy", "mla_accuracy.jsonl", eval_tables.latent_accuracy_table),
    ("model_families.md", "families", "model_families.jsonl", family_tables.families_table),
    ("kernels_gpu.md", "host", "host.jsonl", docs_tables.host_table),
    ("offload.md", "offload", "offload.jsonl", docs_tables.offload_table),
    ("offload.md", "offload_reading", "offload.jsonl", docs_tables.offload_reading_table),
    ("transformers_suites.md", "suites", "transformers_suites.jsonl", docs_tables.suites_table),
]


def newest(rows: list[dict[str, Any]], **wanted: Any) -> dict[str, Any] | None:
    """Return the last row whose fields have these values."""
    found = [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]
    return found[-1] if found else None


def demo_table(rows: list[dict[str, Any]]) -> str:
    """Return the memory and speed of the last recorded demo on the CPU."""
    found = latest_run(rows, kind="demo", model="smollm2-135m", device="cpu")
    if not found:
        return NO_RUN
    lines = [["cache", "KV MiB", "of DynamicCache", "prefill tokens/s", "decode tokens/s"]]
    for name in ("dynamic", *CACHES):
        row = newest(found, cache=name)
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
    first = found[0]
    said = (
        f"Memory and speed of {docs_tables.model_title(first)}, {first['prompt_tokens']:,} tokens of prompt and "
        f"{first['new_tokens']} new ones"
    )
    return f"{caption(found, said)}\n\n{docs_tables.table(lines)}"


# docs/speed.md's order of devices and models; what has no rows is left out
STEPS = [
    ("smollm2-135m", "cpu", "SmolLM2-135M"),
    ("llama-3.1-8b", "cuda", "Llama-3.1-8B's sizes"),
    ("qwen2.5-7b", "cuda", "Qwen2.5-7B's sizes"),
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
    lines = [[name, *(f"{context:,} tokens" for context in contexts)]]
    for which in dict.fromkeys(row[name] for row in rows):
        line = [f"`{which}`"]
        for context in contexts:
            row = newest(rows, **{name: which, "context": context})
            line.append(f"{row[milliseconds]:.3g} ({row['ratio_to_dynamic']:.2f}x)" if row else "-")
        lines.append(line)
    return docs_tables.table(lines)


def runs_by_machine(
    rows: list[dict[str, Any]], name: str, **wanted: Any
) -> list[list[dict[str, Any]]]:
    """Return the newest run of each machine, that with the least gain of the paged caches first.

    Args:
        name: field that names the cache of a row.
        wanted: values of fields that all rows have.
    """
    machines = dict.fromkeys(row["machine"] for row in rows)
    runs = [latest_run(rows, machine=machine, **wanted) for machine in machines]
    return sorted(filter(None, runs), key=lambda run: gain(run, name))


def gain(run: list[dict[str, Any]], name: str) -> float:
    """Return how many times as fast as DynamicCache the fastest paged cache is at the longest context of a run."""
    longest = max(row["context"] for row in run)
    ours = [
        row["ratio_to_dynamic"]
        for row in run
        if row["context"] == longest and row[name].startswith("paged_")
    ]
    return max(ours, default=0.0)


def speed_table(generate: list[dict[str, Any]], decode: list[dict[str, Any]]) -> str:
    """Return the tables of whole decode steps and of one layer's attention, newest run of each device and machine."""
    blocks = []
    for model, device, title in STEPS:
        wanted = {"kind": "generate", "model": model, "device": device, "batch": 1}
        for rows in runs_by_machine(generate, "cache", **wanted):
            blocks.append(caption(rows, f"Milliseconds of a decode step, {title}"))
            blocks.append(times_table(rows, "cache", "step_ms_p50"))
    layers = [row for row in decode if row["path"] != "kernel"]
    for shape, device, title in LAYERS:
        wanted = {"kind": "decode", "shape": shape, "device": device, "batch": 1}
        for rows in runs_by_machine(layers, "contender", **wanted):
            blocks.append(
                caption(rows, f"Milliseconds of one layer's attention and append, {title}")
            )
            blocks.append(times_table(rows, "contender", "ms_p50"))
    return "\n\n".join(blocks) if blocks else NOTHING


def replace_block(text: str, name: str, block: str) -> str:
    """Put `block` between the markers `<!-- name -->` and `<!-- /name -->`; a table stays where there are no rows.

    Raises: ValueError for a text without these markers.
    """
    found = re.search(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the text must have the markers <!-- {name} --> and <!-- /{name} -->")
    if block.startswith(NO_RUN) and re.search(r"^\|", found[0], re.MULTILINE):
        return text
    return f"{text[: found.start()]}{block}\n{text[found.end() :]}"


def rows_of(files: str) -> list[dict[str, Any]]:
    """Return the rows of some files of results/, with spaces between their names."""
    return [row for file in files.split() for row in read_rows(ROOT / "results" / file)]


def pages() -> dict[Path, str]:
    """Return README.md and the pages of docs/ that have tables, as the rows of results/ make them."""
    readme, speed = ROOT / "README.md", ROOT / "docs" / "speed.md"
    first = [row for row in rows_of(BOTH) if row.get("model") == FIRST]
    blocks = [
        (readme, "accuracy", eval_tables.formats_table(first)),
        (readme, "demo", demo_table(rows_of("demo.jsonl"))),
        (speed, "speed", speed_table(rows_of("generate.jsonl"), rows_of("decode.jsonl"))),
    ]
    blocks += [
        (ROOT / "docs" / page, name, make(rows_of(files))) for page, name, files, make in DOCUMENTS
    ]
    texts: dict[Path, str] = {}
    for path, name, block in blocks:
        text = texts.get(path) or path.read_text("utf-8")
        texts[path] = replace_block(text, name, block)
    return texts


def main() -> int:
    """Write the tables; with --check 1 where a page is not what the rows say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    stale = {path: text for path, text in pages().items() if path.read_text("utf-8") != text}
    for path, text in stale.items():
        if args.check:
            print(f"{path} is not what results/ says: run scripts/readme_table.py")
        else:
            path.write_text(text, "utf-8")
    return int(args.check and bool(stale))


if __name__ == "__main__":
    raise SystemExit(main())
