"""scripts/uptrain.py: its loss, what it writes, and that it goes on where it was stopped."""

import json
import os
import subprocess
import sys
import time

import pytest
import tiny_mha
import torch
import torch.nn.functional as F
import uptrain
from harness import ROOT, run_python
from tiny_models import make_model
from tiny_tokenizer import sentence, tiny_tokenizer
from transformers import AutoModelForCausalLM

import kv_hf

SHORT = {
    "max_steps": 8, "learning_rate": 3e-3, "warmup_steps": 0, "per_device_train_batch_size": 2, "length": 16, "save_steps": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """`teacher`, a random model with 4 kv heads, `student`, its conversion to 1, and texts to train and to evaluate on."""
    folder = tmp_path_factory.mktemp("pair")
    teacher = make_model("llama", num_key_value_heads=4, max_position_embeddings=64)
    teacher.save_pretrained(folder / "teacher")
    tiny_tokenizer().save_pretrained(folder / "teacher")
    kv_hf.convert_to_gqa(folder / "teacher", folder / "student", 1)
    texts = {
        "data": (sentence(700, 0), sentence(300, 1)),
        "held": (sentence(40, 2), sentence(20, 3)),
    }
    for name, documents in texts.items():
        (folder / f"{name}.txt").write_text("\n<|endoftext|>\n".join(documents))
    return folder


def command(pair, out, *flags, **changes):
    """Return the arguments of a run."""
    given = {"student": pair / "student", "teacher": pair / "teacher", "data": pair / "data.txt", "eval_text": pair / "held.txt"}  # fmt: skip
    options = {**given, "out": out, **SHORT, **changes}
    kept = [(f"--{name}", str(value)) for name, value in options.items() if value is not None]
    return [*(part for option in kept for part in option), *flags]


@pytest.fixture(scope="module")
def whole(pair):
    """A run that nobody interrupted."""
    assert uptrain.main(command(pair, pair / "whole")) == 0
    return tiny_mha.stored(pair / "whole")


@pytest.mark.parametrize("alpha", [0.0, 0.7, 1.0])
def test_distillation_and_its_gradient_equal_those_of_torch(alpha):
    generator = torch.Generator().manual_seed(0)
    own, other = (torch.randn(2, 13, 31, generator=generator) for _ in range(2))
    wide = torch.cat([other, torch.full((2, 13, 3), 50.0)], -1)  # padding behind the vocabulary
    ids = torch.randint(31, (2, 13), generator=generator)
    own.requires_grad_()
    parts = uptrain.distillation(own, wide, ids)
    found = torch.stack([alpha * parts[0] + (1 - alpha) * parts[1], *parts])
    gradient = torch.autograd.grad(found[0], own)[0]
    log, wanted = own[:, :-1].double().log_softmax(-1), other[:, :-1].double().softmax(-1)
    kl = (wanted * (wanted.log() - log)).sum(-1).mean()
    entropy = F.nll_loss(log.flatten(0, 1), ids[:, 1:].flatten())
    loss = alpha * kl + (1 - alpha) * entropy
    exact = torch.autograd.grad(loss, own)[0]
    eps = torch.finfo(torch.float32).eps
    # sums of 31 terms in float32, of numbers up to the largest logit
    for one, two in zip(found.tolist(), torch.stack([loss, kl, entropy]).tolist(), strict=True):
        assert abs(one - two) <= 31 * eps * float(own.detach().abs().max())
    assert (gradient - exact).abs().max() <= 31 * eps * exact.abs().max()


def test_a_run_brings_a_student_closer_and_says_what_it_did(pair, capsys, tmp_path):
    assert uptrain.main(command(pair, tmp_path / "new", max_steps=40)) == 0
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    last = config["kv_hf_uptraining"]
    first = last["before"]
    said = capsys.readouterr().out
    assert all(f"'kl': '{row['kl']:.4g}'" in said for row in (first, last))
    assert (first["step"], last["step"], last["tokens"]) == (0, 40, 40 * 2 * 16)
    assert last["kl"] < 0.8 * first["kl"]
    assert config["kv_hf_conversion"]["num_key_value_heads"] == [4, 1]
    assert "## Training" in (tmp_path / "new" / "README.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    # the figures are those of the models as plain transformers loads them
    teacher = AutoModelForCausalLM.from_pretrained(pair / "teacher")
    model, kl, count = tiny_mha.load(tmp_path / "new"), 0.0, 0
    for document in (pair / "held.txt").read_text().split("<|endoftext|>"):
        ids = torch.tensor([tiny_tokenizer()(document).input_ids[:16]])
        with torch.no_grad():
            p, q = (m(ids).logits[:, :-1].double().log_softmax(-1) for m in (teacher, model))
        kl, count = kl + float((p.exp() * (p - q)).sum()), count + ids.shape[1] - 1
    assert last["scored"] == count and last["kl"] == pytest.approx(kl / count, rel=1e-4)


@pytest.mark.slow
def test_a_run_repeats_and_a_killed_one_goes_on_bit_for_bit(pair, whole, tmp_path):
    script = [sys.executable, str(ROOT / "scripts" / "uptrain.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}  # fmt: skip
    environment["CUDA_VISIBLE_DEVICES"] = ""
    states = tmp_path / "new.uptraining"
    run = [*script, *command(pair, tmp_path / "new", **{"save_steps": 1})]
    process = subprocess.Popen(run, env=environment, stderr=subprocess.DEVNULL)
    while not list(states.glob("checkpoint-2/trainer_state.json")) and process.poll() is None:
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert not (tmp_path / "new").exists()
    # a state that was being written is passed over
    (states / "checkpoint-99").mkdir()
    assert uptrain.main(run[2:]) == 2  # without --resume it is left alone
    done = subprocess.run([*run, "--resume"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    after = tiny_mha.stored(tmp_path / "new")
    assert all(torch.equal(after[name], tensor) for name, tensor in whole.items())
    assert not states.exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"length": 64, "tokens": 60}, "shorter than a window of 64 tokens"),
        ({"data": "no-such-text"}, "no-such-text"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(changes, says, pair, tmp_path, capsys):
    assert uptrain.main(command(pair, tmp_path / "new", **changes)) == 2
    errors = capsys.readouterr().err
    assert says in errors and "Traceback" not in errors and not list(tmp_path.iterdir())


def test_an_out_that_cannot_be_is_refused_before_models_are_loaded(pair, capsys, monkeypatch):
    monkeypatch.setattr(uptrain, "AutoModelForCausalLM", None)
    assert uptrain.main(command(pair, pair / "data.txt")) == 2
    assert "is a file" in capsys.readouterr().err
    assert uptrain.main(command(pair, pair / "data.txt" / "new")) == 2
    assert "Not a directory" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_share_a_run(pair, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")
    run_python(
        *launch, ROOT / "scripts" / "uptrain.py", *command(pair, tmp_path / "new", max_steps=4)
    )
    record = json.loads((tmp_path / "new" / "config.json").read_text())["kv_hf_uptraining"]
    assert record["tokens"] == 2 * 4 * 2 * 16
    assert isinstance(kv_hf.PagedCache(tiny_mha.load(tmp_path / "new").config), kv_hf.PagedCache)
