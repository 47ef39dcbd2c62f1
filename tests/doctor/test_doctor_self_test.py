"""The self-test of kv-hf doctor: everything is tried, what is wrong is found, and it ends in time."""

import itertools
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import kv_hf
import kv_hf_cli
from kv_hf.backends.cpu import library, write
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.reference import pages
from kv_hf.doctor import Subject, paged_names, report_formats, self_test
from kv_hf.formats import cache_names, format_names

CPU = torch.device("cpu")
HAS_C = library.missing() is None
own = sys.modules["kv_hf.doctor.self_test"]


def run(dtype=torch.bfloat16, seconds=1e9):
    return self_test(Subject(CPU, dtype, head_dim=32, page_size=32), seconds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_format_is_tried_with_its_kernel_and_right(dtype):
    trials = run(dtype).trials
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
    failed = run().failed
    paged = [trial for trial in failed if trial.format.startswith("paged_")]
    assert [trial.format for trial in paged] == list(cache_names())
    assert {trial.what for trial in failed} == {"attend"}
    assert all(trial.detail.startswith(says) for trial in paged)
    assert not any("\n" in trial.detail for trial in failed)


@pytest.mark.skipif(not HAS_C, reason="no C kernel here")
@pytest.mark.parametrize("wrong", ["byte", "page", "damaged"])
def test_a_wrong_seal_is_found(monkeypatch, wrong):
    def seal_pair(tokens, jobs, fields, spec, damaged, launches):
        if wrong == "page":
            jobs = torch.cat([jobs[:1], jobs[:-1]])  # a page is written to twice, another never
        pages.seal_pair(tokens, jobs, fields, spec, damaged, launches)
        if wrong == "byte":
            fields[1]["codes"][int(jobs[0, 2])].view(torch.uint8).flatten()[0] ^= 1
        elif wrong == "damaged":
            damaged.fill_(1)

    monkeypatch.setattr(write, "seal_pair", seal_pair)
    failed = [trial for trial in run().failed if trial.what == "seal"]
    assert len(failed) == len([trial for trial in run().trials if trial.what == "seal"]) > 9
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
    details = [trial.detail for trial in run().failed]
    assert details == ["new token 3 of row 1 is not that of DynamicCache"]


@pytest.mark.parametrize("name", [None, "paged_exact"])
def test_generations_read_pages_and_no_token_is_close_to_another(name):
    """Else rounding could change a token, and a right kernel would be called broken."""
    model, ids = own.tiny_model(CPU)
    paged = {"cache_implementation": name, "cache_config": {"page_size": own.PAGE}} if name else {}
    more = {"return_dict_in_generate": True, "output_logits": True}
    made = model.generate(ids, max_new_tokens=own.NEW_TOKENS, do_sample=False, **more, **paged)
    best, second = torch.stack(made.logits).topk(2, -1).values.unbind(-1)
    assert float((best - second).min()) > 0.05
    assert not name or made.past_key_values.memory().pages_held > 0


def test_time_that_is_over_leaves_trials_out(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(own, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    result = run(seconds=10)
    left = [trial for trial in result.trials if trial.status == "note"]
    # a tick before each trial, the first one for the start
    assert len(result.trials) - len(left) == 9 and result.failed == []
    assert result.trials[0].what == "generate"
    assert {trial.detail for trial in left} == {"the 10 seconds were over"}
    with pytest.raises(kv_hf.CacheOptionError, match="seconds must be more than 0, got -1"):
        run(seconds=-1)


def test_self_test_leaves_nothing_behind(caplog, recwarn):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        run()
    assert torch.equal(torch.get_rng_state(), before)
    assert not caplog.records
    assert not [one for one in recwarn if issubclass(one.category, kv_hf.KVCacheWarning)]


def test_latents_of_a_model_are_tried_in_its_sizes(tmp_path):
    from tiny_latent import make_model

    make_model("deepseek_v3").config.save_pretrained(tmp_path)
    subject = Subject.of(CPU, model=str(tmp_path))
    assert subject.latent == (32, 8)
    result = self_test(subject, 1e9)
    assert result.failed == []
    tried = {trial.format for trial in result.trials}
    # a record of DeepSeek wants a rank of whole groups of 128
    assert "latents in int4" in tried and "latents in fp8_ds_mla" not in tried


def test_a_wrong_kernel_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(own, "paged_attention", lambda asked, kernel: shifted_page(asked))
    arguments = ["doctor", "--device", "cpu", "--head-dim", "32", "--seconds", "1000"]
    assert kv_hf_cli.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "[XX] paged_int4" in printed
    assert " broken:\n   self-test: paged_exact, attend, " in printed
