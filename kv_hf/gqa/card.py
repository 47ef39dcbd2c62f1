"""The model card of a converted checkpoint: what was done, and what it costs."""

from typing import TYPE_CHECKING

from .checkpoint import Checkpoint

if TYPE_CHECKING:
    from .convert import ConversionReport

WHAT = {
    "mean": "each group's heads were replaced by their mean (GQA, arXiv 2305.13245)",
    "first": "each group's first head was kept",
}
WARNING = {
    "mean": "Without further training such a model is of little use: on SmolLM2-135M, 3 to 1 kv heads, perplexity rises from about 30 to 12,000.",
    "first": "Without further training such a model is of no use.",
}


def model_card(checkpoint: Checkpoint, report: "ConversionReport") -> str:
    """Return README.md of a converted checkpoint; the source's own text follows."""
    source = checkpoint.folder / "README.md"
    head, own = "", ""
    if source.is_file():
        own = source.read_text("utf-8", errors="replace")
        if own.startswith("---\n") and "\n---" in own[4:]:
            end = own.index("\n---", 4) + 4
            head, own = own[:end] + "\n\n", own[end:]
    name = report.source.rstrip("/").rsplit("/", 1)[-1]
    text = (
        f"# {name}, {report.num_kv_heads} to {report.new_kv_heads} kv heads\n\n"
        f"Converted by kv_hf (method `{report.method}`): {WHAT[report.method]}. {WARNING[report.method]}\n\n"
        f"| | before | after |\n| --- | ---: | ---: |\n"
        f"| kv heads of a layer | {report.num_kv_heads} | {report.new_kv_heads} |\n"
        f"| bytes of a token's keys and values (bf16) | {report.kv_bytes_per_token:,} | {report.new_kv_bytes_per_token:,} |\n"
        f"| parameters | {report.parameters:,} | {report.new_parameters:,} |\n\n"
        "It is an ordinary checkpoint of its class: transformers loads it without any code of kv_hf.\n"
    )
    behind = f"\n---\n\nThe card of the original model:\n{own}" if own.strip() else ""
    return head + text + behind
