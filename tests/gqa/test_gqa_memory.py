"""Memory of calibrated merges: what is said beforehand is what a process takes, and too much of it is refused."""

import json
import subprocess
import sys

import pytest
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM, LlamaConfig

import kv_hf
from kv_hf.errors import ConversionError
from kv_hf.gqa import memory
from kv_hf.gqa.checkpoint import Checkpoint
from kv_hf.gqa.memory import calibration_bytes
from kv_hf.gqa.refit_factors import OutputFactors
from kv_hf.gqa.refit_outputs import (
    OutputMoments,
    fit_outputs,
    fit_values,
    mean_squares,
    output_loss,
)
from kv_hf.gqa.structure import build, find_structure
from kv_hf.gqa.tensor_file import StoredTensor

PEAK = """
import json, re, sys, torch, kv_hf
from kv_hf.gqa import calibrated, memory
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
source, target, heads, method, windows, tokens = sys.argv[1:]
memory.MEMORY = memory.Path("/dev/null")
ids = torch.randint(3, 60, (int(windows), int(tokens)), generator=torch.Generator().manual_seed(0))
AutoModelForCausalLM.from_pretrained(source)(ids[:1, :8])  # what torch and transformers take for themselves
torch.linalg.eigh(torch.eye(8))
# not ru_maxrss, which a process inherits from the one that started it
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
report = kv_hf.convert_to_gqa(source, target, int(heads), method=method, calibration=ids)
print(json.dumps([report.memory, peak() - before]))
"""


def save_tiny(folder, **options):
    config = LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 32,
           "num_key_value_heads": 32, "head_dim": 8, "initializer_range": 0.1, "max_position_embeddings": 512} | options
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("method", "groups", "windows", "tokens"),
    [
        ("svd", 1, 8, 256),
        pytest.param("align", 1, 8, 256, marks=pytest.mark.slow),
        pytest.param("svd", 16, 4, 256, marks=pytest.mark.slow),
    ],
)
def test_a_merge_takes_the_memory_that_was_said(method, groups, windows, tokens, tmp_path):
    """32 heads to one: sums of the contexts' products would be a matrix of 537 MB, several times over."""
    save_tiny(tmp_path / "source")
    command = [
        sys.executable,
        "-c",
        PEAK,
        tmp_path / "source",
        tmp_path / "new",
        groups,
        method,
        windows,
        tokens,
    ]
    run = subprocess.run(map(str, command), capture_output=True, text=True, check=True)
    said, taken = json.loads(run.stdout.splitlines()[-1])
    assert said / 2 < taken < 2 * said, (said, taken)
    assert taken < 400e6


def llama(folder, **options):
    """Return a checkpoint of a Llama of default size, which is Llama-2-7B's: its shapes, and no bytes."""
    config = LlamaConfig(**options)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shapes = {name: tuple(t.shape) for name, t in build(config).state_dict().items()}
    tensors = {n: StoredTensor("", shape, torch.float16) for n, shape in shapes.items()}
    return Checkpoint(folder, config.to_dict(), None, {}, tensors, "llama", {})


def test_llama_2_7b_takes_what_the_docs_say(tmp_path):
    checkpoint = llama(tmp_path)
    text = (ROOT / "docs" / "gqa_methods.md").read_text("utf-8")
    for method in ("svd", "align"):
        row = f"| Llama-2-7B, `{method}` |"
        for groups in (8, 1):
            needed = calibration_bytes(
                checkpoint, find_structure(checkpoint, groups), method, 16, 512
            )
            row += f" {needed / 1e9:.1f} GB |"
        assert row in text, row
    samples = calibration_bytes(
        checkpoint, find_structure(checkpoint, 8), "svd", 16, 512, samples=True
    )
    assert f"with `samples`: {samples / 1e9:.0f} GB" in text, samples


def test_too_little_memory_is_refused_with_the_figure(tmp_path, monkeypatch):
    save_tiny(tmp_path / "source")
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    60000 kB\n")
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
    text = torch.randint(3, 60, (8, 256))
    for dry_run in (False, True):
        with pytest.raises(
            ConversionError, match=r"needs about [\d.]+ .B of memory, and 61.4 MB are available"
        ):
            kv_hf.convert_to_gqa(
                tmp_path / "source",
                tmp_path / "new",
                1,
                method="svd",
                calibration=text,
                dry_run=dry_run,
            )
    kv_hf.convert_to_gqa(tmp_path / "source", tmp_path / "mean", 1)  # holds a tensor at a time
    (tmp_path / "meminfo").write_text("no figures\n")
    report = kv_hf.convert_to_gqa(
        tmp_path / "source", tmp_path / "new", 1, method="svd", calibration=text, dry_run=True
    )
    assert report.memory > 61e6


def test_the_formula_grows_with_what_takes_memory(tmp_path):
    save_tiny(tmp_path / "source")
    checkpoint = Checkpoint.open(tmp_path / "source")

    def needed(groups, windows, tokens, method="svd", **more):
        structure = find_structure(checkpoint, groups)
        return calibration_bytes(checkpoint, structure, method, windows, tokens, **more)

    assert needed(1, 16, 256) < 3e8  # bounded by probabilities, 32 x 4,096 x 256 x 4
    assert needed(1, 32, 256) > 1.5 * needed(1, 16, 256)
    assert needed(1, 16, 256, "align") <= needed(1, 16, 256)
    assert needed(1, 2, 16, samples=True) >= needed(1, 2, 16)


def test_factors_and_moments_are_the_same_sums():
    torch.manual_seed(0)
    heads, groups, merged, dim, out, tokens = 6, 2, 3, 4, 10, 30
    wide, group_of = merged * dim, torch.tensor([0, 0, 0, 1, 1, 1])
    factors, moments = OutputFactors(heads, wide), OutputMoments(heads, wide, out)
    for _ in range(3):
        weights = torch.rand(heads, tokens, tokens).double()
        values = torch.randn(groups, tokens, wide).double()
        target = torch.randn(tokens, out).double()
        factors.add(weights, values, target)
        moments.add((weights @ values[group_of]).transpose(0, 1), target)
    down = torch.randn(groups, dim, wide, dtype=torch.float64)
    output = torch.randn(out, heads * dim, dtype=torch.float64)
    gram = output.T @ output

    def all_of(sums):
        return [
            mean_squares(sums, group_of, groups),
            *sums.merged(down, group_of),
            sums.spread(down, gram, group_of),
            sums.goal(output, group_of, groups),
            fit_outputs(sums, down, output, group_of, 0.01),
            fit_values(sums, down, output, group_of, 0.01),
            torch.tensor(output_loss(sums, down, output, group_of)),
            torch.tensor(float(sums.count)),
        ]

    for one, other in zip(all_of(factors), all_of(moments), strict=True):
        assert one.shape == other.shape
        assert float((one - other).abs().max()) <= 1e-8 * float(other.abs().max())
