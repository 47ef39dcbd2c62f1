"""kv-hf doctor: the kernel of every format with reasons, what it calls broken or merely absent, its exit codes, and its self-test."""

import itertools
import json
import logging
import os
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import pytest
import torch
import transformers
from beside_stock import pages, run
from tiny_latent import make_model

import kv_hf
import kv_hf_cli
from kv_hf import doctor
from kv_hf.backends import triton
from kv_hf.backends.cpu import library, write
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.reference import pages as reference_pages
from kv_hf.doctor import Subject, paged_names, report_formats, self_test
from kv_hf.doctor import doctor_command as command
from kv_hf.formats import cache_names, format_names

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def wide_and_plain(monkeypatch):
    """Lines are as long as they are, and no variable of the machine has a say."""
    monkeypatch.setenv("COLUMNS", "400")
    for name in list(os.environ):
        if name.startswith(command.VARIABLES):
            monkeypatch.delenv(name)
    # the C library is looked for anew: a variable may have turned it off
    monkeypatch.setattr(library, "_loaded", library._loaded.__wrapped__)
    monkeypatch.setattr(library, "isa", library.isa.__wrapped__)


def quick(capsys, *more):
    """Return (exit code, what is printed) without the self-test."""
    code = kv_hf_cli.main(["doctor", "--device", "cpu", "--quick", *more])
    return code, capsys.readouterr().out


# the kernels and the reasons


def test_report_gives_reasons_where_the_c_kernel_is_turned_off(monkeypatch, capsys):
    monkeypatch.setenv(library.ISA_VARIABLE, "none")
    reports = doctor.report_formats(doctor.Subject(CPU, torch.bfloat16, 128, 64))
    assert [report.format for report in reports] == doctor.paged_names()
    for report in reports:
        others = dict(report.others)
        assert report.kernel == "reference" and "reference" not in others
        assert "KV_HF_ISA=none" in others["c"] and "GPU" in others["triton"]
    code, printed = quick(capsys)
    assert code == 0 and "[--] C kernel" in printed and "[ok] KV_HF_ISA      none" in printed


@pytest.mark.parametrize("compiled", [False, True])
def test_a_library_that_was_not_compiled_is_a_warning_and_one_that_cannot_be_loaded_is_broken(
    monkeypatch, capsys, tmp_path, compiled
):
    if compiled:
        (tmp_path / "_native.abi3.so").write_bytes(b"no library at all")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "_is_checkout", lambda: False)
    code, printed = quick(capsys)
    assert code == int(compiled)
    assert ("[XX] C kernel" if compiled else "[!!] C kernel") in printed
    assert ("cannot be loaded" if compiled else "was not compiled") in printed
    assert ("1 broken:" if compiled else "Nothing is broken.") in printed


def test_a_gpu_without_triton_is_broken(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(triton, "installed_version", lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device: torch.ones(*sizes))  # sees a GPU
    reports = doctor.report_formats(doctor.Subject(cuda, torch.bfloat16, 128, 64))
    assert all("triton is not installed" in dict(one.others)["triton"] for one in reports)
    assert not {one.kernel for one in reports} & {"c", "triton"}
    assert command.check_device(cuda, reports).status == "broken"
    right = doctor.FormatReport("int4", "triton", (("reference", None),))
    assert command.check_device(cuda, [*reports, right]).status == "ok"


# models


def test_doctor_says_how_each_layer_of_a_model_would_be_cached(capsys, tmp_path):
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "linear_attention"] * 2
    config = transformers.LlamaConfig(
        num_hidden_layers=8, layer_types=kinds, sliding_window=512, head_dim=20, dtype="float32"
    )
    config.save_pretrained(tmp_path)
    code, printed = quick(capsys, "--model", str(tmp_path))
    said = [" ".join(line.split()) for line in printed.splitlines()]
    assert code == 0 and "Pages on cpu: float32, head_dim 20, page_size 64" in said
    assert "0-1, 4-5 paged, sliding window of 512" in said and "2, 6 paged" in said
    kept = next(line for line in said if line.startswith("3, 7"))
    assert "LinearAttentionLayer" in kept and "kept for this layer" in kept
    given = ["--head-dim", "64", "--dtype", "float16"]
    assert "float16, head_dim 64" in quick(capsys, "--model", str(tmp_path), *given)[1]


def test_doctor_knows_presets_and_latents(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    _, printed = quick(capsys, "--model", "gemma-3-4b")
    assert "\nPages on cpu: bfloat16, head_dim 256, page_size 64\n" in printed
    assert "  0-4, 6-10, 12-16, 18-22, 24-28, 30-33 paged, sliding window of 1024" in printed
    part = {"model_type": "llama", "head_dim": 20}  # which need not say the dtype again
    tower = {"model_type": "llava", "dtype": "float16", "text_config": part}
    (tmp_path / "config.json").write_text(json.dumps(tower))
    assert " float16, head_dim 20" in quick(capsys, "--model", str(tmp_path))[1]
    make_model("deepseek_v3").config.save_pretrained(tmp_path)
    _, printed = quick(capsys, "--model", str(tmp_path))
    assert "latents of 32 and RoPE keys of 8" in printed
    # its record wants a rank of whole groups of 128, which this tiny one is not
    assert "  fp8_ds_mla    none" in printed and "must divide kv_lora_rank 32" in printed


# versions and variables


@pytest.mark.parametrize(
    ("found", "status", "says"),
    [
        ("5.20.1", "ok", "5.20.1"),
        ("99.0", "warning", "99.0 is newer than kv_hf was tested with"),
        (None, "note", "not installed"),
    ],
)
def test_a_newer_transformers_is_a_warning(monkeypatch, found, status, says):
    def version(name):
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(command, "version", version)
    told = command.check_package("transformers")
    assert (told.name, told.status) == ("transformers", status) and told.detail.startswith(says)


def test_json_holds_everything(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, printed = quick(capsys, "--json", "--page-size", "32")
    told = json.loads(printed)
    assert (code == 0) is told["healthy"] is (told["broken"] == [])
    found = {one["name"]: one["detail"] for one in told["environment"]}
    assert found["torch"] == version("torch") and found["KV_HF_HOME"] == str(tmp_path)
    assert found["kv_hf"].startswith(kv_hf.__version__) and found["CUDA_VISIBLE_DEVICES"] == ""
    assert {"python", "system", "cpu", "gpu", "C kernel", "device cpu"} <= set(found)
    assert told["subject"]["page_size"] == 32 and told["subject"]["dtype"] == "bfloat16"
    assert [f"paged_{one['format']}" for one in told["formats"]] == list(kv_hf.cache_names())
    assert all("triton" in one["others"] for one in told["formats"])
    assert told["self_test"] is None


# the command


def test_doctor_fits_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    _, printed = quick(capsys)
    assert [line for line in printed.splitlines() if len(line) > 80 and " " in line.strip()] == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--head-dim", "0"], "head_dim must be at least 1, got 0"),
        (["--device", "gpu"], "device 'gpu' cannot be used here"),
        (["--device", "meta"], "device 'meta' cannot be used here"),
        (["--seconds", "nan"], "--seconds must be more than 0, got nan"),
        (["--model", "./absent"], "absent"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_doctor_refuses_what_cannot_be_in_one_sentence(capsys, arguments, says):
    assert kv_hf_cli.main(["doctor", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("kv-hf doctor: error: ")
    assert says in printed.err and printed.err.count("\n") == 1


# -- the self-test -------------------------------------------------------------------------------------------

HAS_C = library.missing() is None
own = sys.modules["kv_hf.doctor.self_test"]


def self_tested(dtype=torch.bfloat16, seconds=1e9):
    return self_test(Subject(CPU, dtype, head_dim=32, page_size=32), seconds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_format_is_tried_with_its_kernel_and_right(dtype):
    trials = self_tested(dtype).trials
    assert {trial.status for trial in trials} == {"ok"}
    names = [f"paged_{name}" for name in paged_names()]
    latents = [f"latents in {name}" for name in format_names("latent") if name != "fp8_ds_mla"]
    tried = {trial.format: trial.kernel for trial in trials if trial.what == "attend"}
    assert [*names, *latents] == [name for name in tried if "ds_mla" not in name]
    reports = report_formats(Subject(CPU, dtype, 32, 32))
    assert [tried[f"paged_{one.format}"] for one in reports] == [one.kernel for one in reports]
    sealed = [trial.format for trial in trials if trial.what == "seal"]
    assert not HAS_C or {*names, *latents} <= set(sealed)
    assert [trial.what for trial in trials].count("generate") == 1


def shifted_page(asked):
    """Read another page in the last row."""
    table = asked.kv.block_table.clone()
    table[-1] = table[0, 1]
    return reference.paged_attention(replace(asked, kv=replace(asked.kv, block_table=table)))


def nan(asked):
    return reference.paged_attention(asked) * float("nan")


def flat(asked):
    return reference.paged_attention(asked).flatten(1, 2)


def raises(asked):
    raise RuntimeError("no such instruction\nand more")


@pytest.mark.parametrize(
    ("attend", "says"),
    [
        (shifted_page, "differs from the reference by"),
        (nan, "differs from the reference by nan"),
        (flat, "its result has the shape [3, 16, 32], not [3, 8, 2, 32]"),
        (raises, "failed with RuntimeError: no such instruction"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_kernel_is_found(monkeypatch, attend, says):
    monkeypatch.setattr(own, "paged_attention", lambda asked, kernel: attend(asked))
    failed = self_tested().failed
    paged = [trial for trial in failed if trial.format.startswith("paged_")]
    assert [trial.format for trial in paged] == list(cache_names())
    assert {trial.what for trial in failed} == {"attend"}
    assert all(trial.detail.startswith(says) for trial in paged)
    assert not any("\n" in trial.detail for trial in failed)


@pytest.mark.skipif(not HAS_C, reason="no C kernel here")
@pytest.mark.parametrize("wrong", ["byte", "page", "damaged"])
def test_a_wrong_seal_is_found(monkeypatch, wrong):
    def seal(call):
        jobs = call.jobs
        if wrong == "page":
            jobs = torch.cat([jobs[:1], jobs[:-1]])  # a page is written to twice, another never
        reference_pages.write(replace(call, jobs=jobs))
        if wrong == "byte":
            call.fields[1]["codes"][int(jobs[0, 2])].view(torch.uint8).flatten()[0] ^= 1
        elif wrong == "damaged":
            call.damaged.fill_(1)

    monkeypatch.setattr(write, "write", seal)
    failed = [trial for trial in self_tested().failed if trial.what == "seal"]
    assert len(failed) == len([trial for trial in self_tested().trials if trial.what == "seal"]) > 9
    says = {
        "byte": "1 of ",
        "page": "bytes differ",
        "damaged": "it calls finite keys or values not",
    }
    assert all(trial.kernel == "c" for trial in failed) and says[wrong] in failed[0].detail


def test_other_tokens_of_a_generation_are_found(monkeypatch):
    made = own.tiny_model

    def tiny_model(device):
        model, ids = made(device)
        generate = model.generate

        def wrong(*args, **options):
            tokens = generate(*args, **options)
            if "cache_implementation" in options:
                tokens[1, own.PROMPT + 3] += 1
            return tokens

        model.generate = wrong
        return model, ids

    monkeypatch.setattr(own, "tiny_model", tiny_model)
    details = [trial.detail for trial in self_tested().failed]
    assert details == ["new token 3 of row 1 is not that of DynamicCache"]


def test_generations_read_pages_and_no_token_is_close_to_another():
    """Else rounding could change a token, and a right kernel would be called broken."""
    model, ids = own.tiny_model(CPU)
    made = run(model, {"input_ids": ids}, pages(page_size=own.PAGE), max_new_tokens=own.NEW_TOKENS)
    best, second = torch.stack(made.logits).topk(2, -1).values.unbind(-1)
    assert float((best - second).min()) > 0.05
    assert made.past_key_values.memory().pages_held > 0


def test_time_that_is_over_leaves_trials_out(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(own, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    result = self_tested(seconds=10)
    left = [trial for trial in result.trials if trial.status == "note"]
    # a tick before each trial, the first one for the start
    assert len(result.trials) - len(left) == 9 and result.failed == []
    assert result.trials[0].what == "generate"
    assert {trial.detail for trial in left} == {"the 10 seconds were over"}
    with pytest.raises(kv_hf.CacheOptionError, match="seconds must be more than 0, got -1"):
        self_tested(seconds=-1)


def test_self_test_leaves_nothing_behind(caplog, said):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        self_tested()
    assert torch.equal(torch.get_rng_state(), before)
    assert not caplog.records and not said()


def test_a_wrong_kernel_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(own, "paged_attention", lambda asked, kernel: shifted_page(asked))
    arguments = ["doctor", "--device", "cpu", "--head-dim", "32", "--seconds", "1000"]
    assert kv_hf_cli.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "[XX] paged_int4" in printed
    assert " broken:\n   self-test: paged_exact, attend, " in printed
