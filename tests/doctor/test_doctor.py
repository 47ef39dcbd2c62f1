"""kv-hf doctor: the kernel of every format on this machine, with the reasons against the others."""

import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch

import kv_hf
import kv_hf_cli
from kv_hf import doctor
from kv_hf.backends.cpu import library

CPU = torch.device("cpu")


def test_report_names_the_kernel_that_a_cache_then_takes():
    for report in doctor.report_formats(CPU, torch.float32, 16, 64):
        model = tiny_models.make_model("llama", num_hidden_layers=1)
        cache = kv_hf.PagedCache.from_implementation(model.config, f"paged_{report.format}")
        model(tiny_models.tokens(1, 5), past_key_values=cache)
        assert cache.layers[0].store.kernel.name == report.kernel


def test_report_gives_a_reason_where_the_library_is_missing(monkeypatch):
    monkeypatch.setattr(library, "_loaded", lambda: (None, "no compiler was there"))
    reports = doctor.report_formats(CPU, torch.bfloat16, 128, 64)
    assert [f"paged_{report.format}" for report in reports] == list(kv_hf.cache_names())
    for report in reports:
        assert report.kernel == "sdpa"
        assert dict(report.others)["c"] == "no compiler was there"
        assert dict(report.others)["reference"] is None
        assert "GPU" in str(dict(report.others)["triton"])
    assert dict(doctor.environment())["C kernel"] == "no compiler was there"


def test_doctor_prints_every_format_and_the_reasons(capsys):
    assert kv_hf_cli.main(["doctor", "--device", "cpu", "--quick"]) == 0
    printed = capsys.readouterr().out
    for name in kv_hf.cache_names():
        assert f"{name} " in printed
    assert torch.__version__ in printed
    assert "triton" in printed.partition("Why not")[2]


def test_doctor_fits_80_columns(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    kv_hf_cli.main(["doctor", "--device", "cpu", "--quick", "--verbose"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 60
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--head-dim", "0"], "head_dim must be at least 1, got 0"),
        (["--page-size", "24"], "page_size must be a power of two of at least 16, got 24"),
        (["--device", "gpu"], "gpu"),
        (["--device", "meta"], "device 'meta' cannot be used here"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--seconds", "0"], "--seconds must be more than 0, got 0"),
        (["--seconds", "nan"], "--seconds must be more than 0, got nan"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_doctor_refuses_what_cannot_be(capsys, arguments, says):
    with pytest.raises(SystemExit) as stop:
        kv_hf_cli.main(["doctor", *arguments])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_doctor_gives_the_reason_for_a_format_that_cannot_store_such_heads(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")
    assert kv_hf_cli.main(["doctor", "--device", "cpu", "--head-dim", "6", "--quick"]) == 0
    printed = capsys.readouterr().out
    assert "paged_int2    none" in printed
    assert "head_dim must be a multiple of 4, got 6" in printed
    if library.missing() is None:
        assert "keys of head_dim 6 as 'int4' do not fill whole words" in printed


def test_doctor_is_installed_as_a_command():
    command = Path(sys.executable).with_name("kv-hf")
    done = subprocess.run([command, "doctor"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "paged_int4" in done.stdout
    assert "Nothing is broken" in done.stdout


def test_generate_refuses_a_kernel_that_cannot_run_before_its_first_forward(monkeypatch):
    model = tiny_models.make_model("llama", num_hidden_layers=1)
    monkeypatch.setattr(
        model.model, "embed_tokens", None
    )  # a forward would fail with another error
    with pytest.raises(kv_hf.CacheOptionError, match="kernel='triton' cannot run here: .*GPU"):
        model.generate(
            tiny_models.tokens(1, 5),
            cache_implementation="paged_int4",
            cache_config={"kernel": "triton"},
        )


def test_update_refuses_a_kernel_that_cannot_run_and_changes_nothing():
    model = tiny_models.make_model("llama", num_hidden_layers=1)
    cache = kv_hf.PagedCache(model.config, keys="int4", kernel="triton")
    with pytest.raises(kv_hf.CacheOptionError, match="kernel='triton' cannot run here"):
        cache.update(*torch.randn(2, 1, 2, 5, 16), 0)
    assert cache.get_seq_length() == 0
    assert not cache.layers[0].is_initialized


def test_doctor_says_how_each_layer_of_a_model_would_be_cached(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COLUMNS", "400")
    from transformers import LlamaConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention", "linear_attention"] * 2
    config = LlamaConfig(num_hidden_layers=8, layer_types=kinds, sliding_window=512)
    config.save_pretrained(tmp_path)
    assert kv_hf_cli.main(["doctor", "--quick", "--model", str(tmp_path)]) == 0
    said = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "0-1, 4-5 paged, sliding window of 512" in said
    assert "2, 6 paged" in said
    kept = next(line for line in said if line.startswith("3, 7"))
    assert "LinearAttentionLayer" in kept and "kept for this layer" in kept
    with pytest.raises(SystemExit):
        kv_hf_cli.main(["doctor", "--model", str(tmp_path / "absent")])
    assert "absent" in capsys.readouterr().err


def test_doctor_knows_presets_and_keeps_columns_apart(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert kv_hf_cli.main(["doctor", "--quick", "--device", "cpu", "--model", "gemma-3-4b"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Pages on cpu: bfloat16, head_dim 256, page_size 64" in lines
    assert "  0-4, 6-10, 12-16, 18-22, 24-28, 30-33 paged, sliding window of 1024" in lines
    assert "CUDA_VISIBLE_DEVICES " in lines


def test_doctor_takes_the_sizes_of_the_model(capsys, tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(head_dim=20, dtype="float32").save_pretrained(tmp_path)
    kv_hf_cli.main(["doctor", "--quick", "--model", str(tmp_path)])
    assert "float32, head_dim 20, page_size 64" in capsys.readouterr().out
    kv_hf_cli.main(
        ["doctor", "--quick", "--model", str(tmp_path), "--head-dim", "64", "--dtype", "float16"]
    )
    assert "float16, head_dim 64" in capsys.readouterr().out


def test_doctor_names_the_kernels_of_latents(capsys, tmp_path):
    """A model with latent attention gets the formats of latents, DeepSeek's record among them."""
    from tiny_latent import make_model as make_latent

    make_latent("deepseek_v3").config.save_pretrained(tmp_path)
    assert kv_hf_cli.main(["doctor", "--device", "cpu", "--quick", "--model", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "latents of 32 and RoPE keys of 8" in shown
    # its record wants a rank of whole groups of 128, which this tiny one is not
    assert "  fp8_ds_mla    none" in shown and "must divide kv_lora_rank 32" in shown
    assert "SDPA cannot read one latent as key and value" in shown
