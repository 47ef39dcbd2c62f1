"""Uptraining: runs that repeat and go on bit for bit, rates that change, figures that are not finite, full disks."""

import json
import math
import os
import resource
import runpy
import shutil
import signal
from dataclasses import replace

import pytest
import tiny_mha
import torch
from paths import ROOT
from tiny_uptrain import SHORT, make_pair, make_tokenizer, run, text
from transformers import AutoModelForCausalLM

from kv_hf.errors import ConversionError
from kv_hf.gqa.uptrain import models, progress, result, sampling, train
from kv_hf.gqa.uptrain import run as run_module


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """The report of an uninterrupted run of SHORT."""
    return run(folders, tmp_path_factory.mktemp("whole") / "out")


def saved(out):
    return [path.name for path in progress.states(progress.work_folder(out))]


def stop_at(step):
    def stop(state):
        if state.step == step:
            os.kill(os.getpid(), signal.SIGINT)

    return stop


# -- dropout, experts --------------------------------------------------------------------------------------

FAMILIES = {
    "llama": {"attention_dropout": 0.5, "vocab_size": 97, "max_position_embeddings": 64},
    "gpt2": {"vocab_size": 97, "n_positions": 64},  # 0.1 in three places, as GPT-2 itself
    # its experts are one tensor in the class and many on disk: states in the names of checkpoints would lose them
    "mixtral": {"vocab_size": 97, "max_position_embeddings": 64},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_repeat_and_go_on_bit_for_bit(family, tmp_path):
    teacher = tiny_mha.save(tiny_mha.make(family, **FAMILIES[family]), tmp_path / "teacher")
    make_tokenizer().save_pretrained(teacher)
    # a student that is its teacher: whatever makes it differ is noise
    pair, settings = (teacher, teacher), replace(SHORT, steps=4, evaluations=0)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    report = run(pair, tmp_path / "a", settings)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert not run(pair, tmp_path / "b", settings, progress=stop_at(2)).finished
    rest = run(pair, tmp_path / "b", settings, resume=True)
    assert rest.finished and rest.losses == report.losses
    assert abs(report.losses[0][1]) < 1e-6


# -- rates, and what is not finite -------------------------------------------------------------------------


def test_another_rate_may_go_on_with_a_run(folders, whole, tmp_path, monkeypatch):
    """The cosine goes on where it was, below the new peak; the record tells both."""
    rates = []

    def set_rate(self, real=train.Run._set_rate):
        real(self)
        rates.append(self.optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(train.Run, "_set_rate", set_rate)
    run(folders, tmp_path / "out", progress=stop_at(3))
    report = run(folders, tmp_path / "out", replace(SHORT, lr=1e-3), resume=True)
    peaks = [3e-3] * 3 + [1e-3] * 3
    wanted = [peak * (1 + math.cos(math.pi * i / 6)) / 2 for i, peak in enumerate(peaks)]
    assert rates == pytest.approx(wanted, rel=1e-12)
    # the loss of a step is that of the weights before it
    assert report.losses[:4] == whole.losses[:4] and report.losses[4] != whole.losses[4]
    record = json.loads((tmp_path / "out" / "config.json").read_text())["kv_hf_uptraining"]
    assert record["lr"] == 1e-3 and record["lr_from_step"] == [[0, 3e-3], [3, 1e-3]]
    assert report.rates == ((0, 3e-3), (3, 1e-3)) and whole.rates == ((0, 3e-3),)


@pytest.mark.parametrize("save_every", [1, 2])
def test_a_gradient_that_is_not_finite_spoils_no_state(
    save_every, folders, whole, tmp_path, monkeypatch
):
    """The loss of step 3 is finite, its gradient is not: the run ends with what was saved before, and can go on from there."""
    settings, out = replace(SHORT, save_every=save_every), tmp_path / "out"
    steps = []

    def load_student(*options, real=models.load_student):
        model = real(*options)

        def spoil(gradient):
            steps.append(len(steps))
            return gradient * math.nan if len(steps) == 4 else gradient

        model.lm_head.weight.register_hook(spoil)
        return model

    monkeypatch.setattr(run_module, "load_student", load_student)
    good = 4 - save_every
    says = "gradient's norm is nan in step 3; "
    says += (
        "its state does not help: delete"
        if good == 3
        else "go on from step 2 .resume. with an lr below 0.003"
    )
    with pytest.raises(ConversionError, match=says):
        run(folders, out, settings)
    monkeypatch.undo()
    assert saved(out) == [f"state-{good:08}"]
    assert run(folders, out, settings, resume=True).losses == whole.losses


def test_weights_that_are_not_finite_replace_no_state(folders, whole, tmp_path, monkeypatch):
    """The last update overflows: no loss or gradient after it would tell."""
    kept, out, settings = [], tmp_path / "out", replace(SHORT, steps=5)

    def load_student(*options, real=models.load_student):
        kept.append(real(*options))
        return kept[0]

    def overflow(state):
        if state.step == 5:
            with torch.no_grad():
                kept[0].lm_head.weight[0, 0] = math.inf

    monkeypatch.setattr(run_module, "load_student", load_student)
    says = "lm_head.weight is not finite behind step 5; go on from step 4"
    with pytest.raises(ConversionError, match=says):
        run(folders, out, settings, progress=overflow)
    assert saved(out) == ["state-00000004"]


def test_a_loss_that_is_not_finite_at_once_is_not_blamed_on_the_rate(folders, tmp_path):
    student = tmp_path / "student"
    shutil.copytree(folders[0], student)
    model = AutoModelForCausalLM.from_pretrained(student)
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    model.save_pretrained(student)
    with pytest.raises(ConversionError, match="step 0; nothing was trained before it"):
        run((student, folders[1]), tmp_path / "out")


# -- disks -------------------------------------------------------------------------------------------------


@pytest.fixture
def full_disk():
    """A function that limits the bytes of every file that is written from then on; lifted at the end."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("torn", ["model.safetensors", "optimizer.bin"])
def test_a_full_disk_keeps_the_state_before(torn, folders, whole, tmp_path, full_disk):
    out = tmp_path / "out"

    def fill(state):
        if state.step == 3:
            (state,) = progress.states(progress.work_folder(out))
            full_disk((state / torn).stat().st_size * 9 // 10)

    with pytest.raises(
        ConversionError,
        match="state of step 4 in .* cannot be written, with [0-9,]+ bytes free there .*resume",
    ):
        run(folders, out, progress=fill)
    full_disk(resource.RLIM_INFINITY)
    assert saved(out) == ["state-00000002"]
    assert not (progress.work_folder(out) / "unfinished").exists()
    assert run(folders, out, resume=True).losses == whole.losses


def test_a_disk_that_is_full_for_the_result_keeps_the_training(
    folders, whole, tmp_path, full_disk, monkeypatch
):
    def write(*options, real=result.write_checkpoint):
        full_disk(1000)
        real(*options)

    monkeypatch.setattr(run_module, "write_checkpoint", write)
    with pytest.raises(ConversionError, match="destination .* cannot be written, with .*resume"):
        run(folders, tmp_path / "out")
    full_disk(resource.RLIM_INFINITY)
    monkeypatch.undo()
    assert saved(tmp_path / "out") == ["state-00000006"]
    assert not (tmp_path / "out").exists()
    report = run(folders, tmp_path / "out", resume=True)
    assert report.losses == whole.losses and report.curve[-1]["kl"] == whole.curve[-1]["kl"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_disk_is_asked_for_two_states_and_the_result(dtype, folders, tmp_path, monkeypatch):
    student, out = tmp_path / "student", tmp_path / "out"
    AutoModelForCausalLM.from_pretrained(folders[0], dtype=dtype).save_pretrained(student)
    make_tokenizer().save_pretrained(student)
    pair, asked = (student, folders[1]), []
    monkeypatch.setattr(run_module, "check_destination", lambda *options: asked.append(options[2]))
    run(pair, out, progress=stop_at(1))
    (state,) = progress.states(progress.work_folder(out))
    state_bytes = sum(file.stat().st_size for file in state.iterdir())
    run(pair, out, resume=True)
    result_bytes = (out / "model.safetensors").stat().st_size
    first, again = asked[0], asked[-1]
    assert 0 <= first - (2 * state_bytes + result_bytes) < 2 * result.BESIDE_WEIGHTS
    assert again == first - state_bytes


# -- Ctrl-C ------------------------------------------------------------------------------------------------


def test_ctrl_c_while_sampling_ends_in_a_sentence(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path / "home"))
    (tmp_path / "held.txt").write_text(text(60, 2))
    main = runpy.run_path(str(ROOT / "scripts" / "uptrain.py"))["main"]
    options = ["--student", folders[0], "--teacher", folders[1], "--out", tmp_path / "out"]
    options += ["--data", "self", "--sample-tokens", 300, "--eval-text", tmp_path / "held.txt"]
    options += ["--steps", 1, "--batch", 2, "--length", 16, "--evaluations", 0]
    options = list(map(str, options))

    def interrupted(*options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sampling, "sample_block", interrupted)
    assert main(options) == 1
    assert "kept; --resume goes on." in " ".join(capsys.readouterr().out.split())
    monkeypatch.undo()
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path / "home"))
    assert main([*options, "--resume"]) == 0
    monkeypatch.setattr(run_module, "make_accelerator", interrupted)
    assert main([*options[:5], str(tmp_path / "other"), *options[6:]]) == 1
    assert "nothing is left of it" in capsys.readouterr().out
