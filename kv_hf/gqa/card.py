"""The model card of a converted checkpoint: what was done, and what it costs."""

from pathlib import Path

from huggingface_hub.repocard import REGEX_YAML_BLOCK

from .beside import read_card_text
from .checkpoint import Checkpoint
from .report import ConversionReport

WHAT = {
    "mean": "the key and value projections of each group of heads were replaced by their mean (GQA, arXiv 2305.13245)",
    "first": "the key and value projections of each group's first head were kept",
    "align": "the heads of each group were rotated onto each other on calibration text, then replaced by their mean",
    "svd": "the heads of each group were replaced by their principal components on calibration text, and queries, keys and "
    "outputs fitted to what the original computes there",
    "exact": "no heads were merged",
}
# no figures: those of another model would read as if they were this one's
WARNING = {
    "mean": "Without further training such a model is of little use.",
    "first": "Without further training such a model is of no use.",
    "align": "It needs further training to come near the original.",
    "svd": "It needs further training to come near the original.",
    "exact": "It computes what the original computes, up to rounding.",
}
NOT_MEASURED = " How far it is from the original was not measured when it was converted."


def model_card(checkpoint: Checkpoint, report: ConversionReport) -> str:
    """Return README.md of a converted checkpoint: the source's own front matter first, its own text last."""
    head, own = read_card(checkpoint.folder)
    name = report.source
    name = name.rstrip("/").rsplit("/", 1)[-1] or checkpoint.folder.resolve().name
    measured = "" if report.method == "exact" else NOT_MEASURED
    of_class = f" It is a `{report.new_class}` now." if report.new_class else ""
    title = (
        f"as {report.new_class}"
        if report.method == "exact"
        else f"{report.num_kv_heads} to {report.new_kv_heads} kv heads"
    )
    text = (
        f"# {name}, {title}\n\n"
        f"Converted by kv_hf (method `{report.method}`): {WHAT[report.method]}.{of_class} {WARNING[report.method]}{measured}\n\n"
        f"| | before | after |\n| --- | ---: | ---: |\n"
        f"| kv heads of a layer | {report.num_kv_heads} | {report.new_kv_heads} |\n"
        f"| bytes of a token's keys and values (bf16) | {report.kv_bytes_per_token:,} | {report.new_kv_bytes_per_token:,} |\n"
        f"| parameters | {report.parameters:,} | {report.new_parameters:,} |\n\n"
        "It is an ordinary checkpoint of its class: transformers loads it without any code of kv_hf.\n"
    )
    behind = f"\n---\n\nThe card of the original model:\n\n{own.strip()}\n" if own.strip() else ""
    return head + text + behind


def read_card(folder: Path) -> tuple[str, str]:
    """Return (front matter with an empty line behind it, the rest) of a folder's card; both empty where there is none.

    The hub's own pattern says what front matter is. It is not parsed: what is no YAML, comments and numbers as they are
    spelt stay.
    """
    text = read_card_text(folder)
    found = REGEX_YAML_BLOCK.search(text)
    return (f"{text[: found.end()].rstrip()}\n\n", text[found.end() :]) if found else ("", text)
