"""The self-test of kv-hf doctor: everything is tried, what is wrong is found, and it ends in time."""

import itertools
import json
import logging
from dataclasses import replace

import pytest
import torch

import kv_hf
import kv_hf_cli
from kv_hf.backends.cpu import library
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.reference import pairs
from kv_hf.backends.sdpa import attention as sdpa
from kv_hf.doctor import Subject, generation, self_test
from kv_hf.doctor.self_test import run_self_test
from kv_hf.formats import cache_names, format_names
from kv_hf.notices import silenced

CPU = torch.device("cpu")
HAS_C = library.missing() is None


def run(dtype=torch.bfloat16, **options):
    given = {"device": CPU, "dtype": dtype, "head_dim": 32, "page_size": 32, "seconds": 1e9}
    return run_self_test(**{**given, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_format_and_kernel_is_tried_and_right(dtype):
    result = run(dtype)
    assert result.failed == []
    assert all(trial.status == "ok" for trial in result.trials)
    tried = {(trial.format, trial.kernel) for trial in result.trials if trial.what == "attend"}
    names = cache_names()
    latents = [f"latents in {name}" for name in format_names("latent")]
    kernels = {"c", "reference"} if HAS_C else {"reference"}
    assert tried == {*itertools.product(names, {*kernels, "sdpa"})} | {
        *itertools.product(latents, kernels)
    }
    sealed = {trial.format for trial in result.trials if trial.what == "seal"}
    assert sealed == ({*names, *latents} if HAS_C else set())
    assert [trial.format for trial in result.trials if trial.what == "generate"] == [
        "tiny model, paged_exact",
        "tiny model, paged_int4",
        "tiny model, paged_exact, latents",
        "tiny model, paged_int4, latents",
    ]


def shifted_page(asked):
    """Read the page behind the right one in the last row."""
    table = asked.kv.block_table.clone()
    table[-1] = table[0, 1]
    return reference.paged_attention(replace(asked, kv=replace(asked.kv, block_table=table)))


def lost_token(asked):
    """Leave out the last exact token of each row."""
    lens = asked.kv.exact_lens - 1
    return reference.paged_attention(replace(asked, kv=replace(asked.kv, exact_lens=lens)))


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
        (lost_token, "differs from the reference by"),
        (nan, "differs from the reference by nan"),
        (flat, "its result has the shape [3, 16, 32], not [3, 8, 2, 32]"),
        (raises, "failed with RuntimeError: no such instruction"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_kernel_is_found(monkeypatch, attend, says):
    monkeypatch.setattr(sdpa, "paged_attention", attend)
    failed = [trial for trial in run().failed if trial.what == "attend"]
    assert {(trial.format, trial.kernel) for trial in failed} == {
        (name, "sdpa") for name in cache_names()
    }
    assert all(trial.detail.startswith(says) for trial in failed)
    for trial in failed:
        if trial.error is not None:
            assert not trial.error <= trial.bound
        json.dumps(trial.as_dict(), allow_nan=False)


def test_a_wrong_kernel_fails_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sdpa, "paged_attention", shifted_page)
    arguments = ["doctor", "--device", "cpu", "--head-dim", "32", "--seconds", "1000"]
    assert kv_hf_cli.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "[XX] paged_int4" in printed
    assert " broken:\n  self-test: paged_exact, attend, sdpa: differs from" in printed
    assert kv_hf_cli.main([*arguments, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    wrong = [said for said in told["broken"] if "attend, sdpa: differs" in said]
    assert not told["healthy"] and len(wrong) == len(cache_names())
    assert all(trial["bound"] is not None for trial in told["self_test"]["trials"][:5])


@pytest.mark.skipif(not HAS_C, reason="no C kernel here")
def test_other_bytes_of_a_seal_are_found(monkeypatch):
    from kv_hf.backends.cpu import write

    def wrong(tokens, jobs, fields, spec, damaged, launches):
        pairs.seal_pair(tokens, jobs, fields, spec, damaged, launches)
        fields[1]["codes"][int(jobs[0, 2])].view(torch.uint8).flatten()[0] ^= 1

    monkeypatch.setattr(write, "seal_pair", wrong)
    failed = [trial for trial in run().failed if trial.what == "seal"]
    assert len(failed) == len(cache_names()) + len(format_names("latent"))
    assert all(trial.error == 1 and trial.kernel == "c" for trial in failed)
    assert failed[0].detail.startswith("1 of ") and failed[0].detail.endswith("the reference's")


def test_other_tokens_of_a_generation_are_found(monkeypatch):
    paged = generation._Models.tokens

    def tokens(self, model, **options):
        rows = paged(self, model, **options)
        if options.get("cache_config", {}).get("kernel") == "auto":
            rows[1][3] += 1
        return rows

    monkeypatch.setattr(generation._Models, "tokens", tokens)
    failed = run().failed
    assert [trial.detail for trial in failed] == [
        "new token 3 of row 1 is not that of DynamicCache",
        "new token 3 of row 1 is not that of kernel='reference'",
    ] * 2


def test_generations_read_pages_and_no_token_is_close_to_another():
    """Else rounding could change a token, and a right kernel would be called broken."""
    models = generation._Models(CPU)
    for latent in (False, True):
        model = models.make(latent)
        for options in (
            {},
            {"cache_implementation": "paged_int4", "cache_config": generation.OPTIONS},
        ):
            made = model.generate(
                **models.prompt(),
                max_new_tokens=generation.NEW_TOKENS,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
                **options,
            )
            best, second = torch.stack(made.logits).topk(2, -1).values.unbind(-1)
            assert float((best - second).min()) > 0.05
        assert all(row.pages for row in made.past_key_values.group.rows)


def test_time_that_is_over_leaves_trials_out(capsys):
    ticks = itertools.count()
    result = run(seconds=10, clock=lambda: float(next(ticks)))
    left = [trial for trial in result.trials if trial.status == "note"]
    assert (
        len(result.trials) - len(left) == 9
    )  # a tick before each of them, the first for the start
    assert all(trial.detail == "the 10 seconds were over" for trial in left)
    assert result.failed == []
    assert kv_hf_cli.main(["doctor", "--device", "cpu", "--seconds", "1e-9"]) == 0
    assert "trials left out: the 1e-09 seconds were over" in capsys.readouterr().out


def test_self_test_leaves_nothing_behind(caplog, recwarn):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING):
        self_test(Subject(CPU, head_dim=32, page_size=16))
    assert torch.equal(torch.get_rng_state(), before)
    assert not caplog.records
    assert not [one for one in recwarn if issubclass(one.category, kv_hf.KVCacheWarning)]
    with pytest.raises(kv_hf.CacheOptionError, match="seconds must be more than 0, got -1"):
        self_test(Subject(CPU), seconds=-1)


def test_what_is_said_in_silence_is_said_again():
    from kv_hf.notices import warn_once

    with silenced():
        warn_once("key", "a thing")
    with pytest.warns(kv_hf.KVCacheWarning, match="a thing"):
        warn_once("key", "a thing")


def test_examination_takes_the_sizes_of_a_model_with_latents(tmp_path):
    from tiny_latent import make_model

    make_model("deepseek_v3").config.save_pretrained(tmp_path)
    subject = Subject.of(CPU, model=str(tmp_path))
    assert subject.latent == (32, 8)
    result = self_test(subject, 1e9)
    assert result.failed == []
    assert "latents in fp8_ds_mla" not in {trial.format for trial in result.trials}
    assert "latents in int4" in {trial.format for trial in result.trials}
