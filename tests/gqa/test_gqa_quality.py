"""scripts/gqa_quality.py: what its rows say of a checkpoint is what its layers cache."""

import json
import runpy

import pytest
import tiny_mha
from paths import ROOT
from tiny_tokenizer import make_tokenizer

SCRIPT = ROOT / "scripts" / "gqa_quality.py"
WORDS = {"vocab_size": 1000}


@pytest.mark.parametrize(
    ("family", "changes", "kv_heads", "numbers_per_token"),
    [
        # no num_key_value_heads in these configs
        ("gpt_neox", {"num_key_value_heads": None}, 4, 2 * 2 * 4 * 8),
        ("gpt2", {}, 4, 2 * 2 * 4 * 8),
        # a layer of two is a convolution
        ("lfm2", {"num_key_value_heads": 2}, 2, 2 * 1 * 2 * 8),
        ("llama-wide", {"num_key_value_heads": 1}, 1, 2 * 2 * 1 * 16),
    ],
)
def test_kv_heads_and_bytes_are_those_that_are_cached(
    family, changes, kv_heads, numbers_per_token, tmp_path
):
    folder = tiny_mha.save(tiny_mha.make(family, **WORDS, **changes), tmp_path / "model")
    make_tokenizer(1000).save_pretrained(folder)
    options = [folder, "--windows", 1, "--window", 16, "--record", "--out", tmp_path / "rows.jsonl"]
    assert runpy.run_path(str(SCRIPT))["main"](list(map(str, options))) == 0
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert (row["kv_heads"], row["kv_bytes_per_token"]) == (kv_heads, 2 * numbers_per_token)
