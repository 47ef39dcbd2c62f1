"""scripts/bench.py: what the runner promises, a tiny run of every workload, and gates that refuse wrong results."""

import os
import threading
from dataclasses import replace

import pytest
import torch
from measure import attention, check_gpu, gpu, runner, serving, shapes, steps  # noqa: F401
from measure.runner import FAILED, WORKLOADS, Contender, Verdict, Workload, in_turns, run

import kv_hf
from kv_hf.backends.cpu import library
from kv_hf.evaluation.rows import read_rows
from kv_hf.serving.batch_manager import fits_transformers

CPU = torch.device("cpu")


def act(device, what):
    """A workload whose configurations say what happens."""
    if what == "dies":
        os._exit(3)
    if what == "hangs":
        threading.Event().wait()
    if what == "raises":
        raise RuntimeError("out of ideas")
    if what == "stops":
        raise KeyboardInterrupt
    if what == "wrong":
        never = Contender("c", pytest.fail, verdict=lambda: Verdict("c", float("nan"), 1.0))
        in_turns([never], 3, device)
    yield {"value": 1, "pid": os.getpid()}


ACT = Workload(
    "act", act, [{"what": ["fine"]}], limit=5.0
)  # a busy machine takes a second for nothing


def configured(*what):
    return [{"what": one} for one in what]


def ended(path):
    return [(row["what"], row.get("failed", "")) for row in read_rows(path)]


# -- the runner


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("dies", "its process died (exit code 3)"),
        ("hangs", "its time was over"),
    ],
)
def test_run_goes_on_behind_a_child_that_dies_or_hangs(what, says, tmp_path):
    out = tmp_path / "act.jsonl"
    found = run(ACT, configured(what, "last"), out=out)
    assert [row["what"] for row in found.rows] == ["last"]
    ended, last = read_rows(out)
    assert (last["kind"], ended["kind"], ended["workload"]) == ("act", FAILED, "act")
    assert ended["failed"] == says
    assert last["pid"] != os.getpid()
    assert {"date", "commit", "machine", "versions", "threads", "cell"} <= last.keys()
    assert len(found.failed) == 1 and not found.left_out


def test_run_times_nothing_that_is_wrong_and_goes_on(tmp_path):
    out = tmp_path / "act.jsonl"
    found = run(ACT, configured("wrong", "raises", "fine"), out=out, isolated=False, say=len)
    assert len(found.failed) == 2
    assert ended(out) == [
        ("wrong", "wrong results: c: error nan, allowed 1"),
        ("raises", "RuntimeError: out of ideas"),
        ("fine", ""),
    ]


def test_run_skips_what_is_finished_and_tries_again_what_failed(tmp_path, monkeypatch):
    out = tmp_path / "act.jsonl"
    both, of = configured("fine", "raises"), {"out": out, "isolated": False, "say": len}
    run(ACT, both, **of)
    with out.open("a") as file:
        file.write('{"half a ro')  # a run that was killed
    run(ACT, both, **of)
    assert [what for what, _ in ended(out)] == ["fine", "raises", "raises"]
    monkeypatch.setattr(runner, "commit", lambda: "another")
    assert len(run(ACT, both, **of).rows) == 1
    lasting = replace(ACT, state=lambda config: "revision of a model")
    assert len(run(lasting, both, **of).rows) == 1
    monkeypatch.setattr(runner, "commit", lambda: "a third")
    assert not run(lasting, both, **of).rows


def test_contenders_take_turns_and_ratios_are_of_the_same_round(monkeypatch):
    calls = []

    def contender(name):
        return Contender(name, lambda: calls.append(name), lambda: calls.append(name.upper()))

    contenders = [contender(name) for name in "ab"]
    rows = in_turns(contenders, 2, CPU)
    assert "".join(calls) == "AaBb" + "BbAa" + "AaBb" + "BbAa"  # of which two are not counted
    assert [row["ms_n"] for row in rows] == [2, 2]
    walls = {"a": [0, 0, 2.0, 4.0, 100.0], "b": [0, 0, 1.0, 4.0, 10.0]}

    def timed(call, device):
        call()
        return walls[calls[-1]].pop(0)

    monkeypatch.setattr(runner, "timed", timed)
    first, second = in_turns(contenders, 3, CPU, scale=10.0)
    assert (first["ratio_to_a"], second["ratio_to_a"]) == (1.0, 2.0)
    assert (second["ms_p50"], second["ms_min"], second["ms_max"]) == (40.0, 10.0, 100.0)
    assert second["ms_mean"] == 50.0 and second["ms_p20"] == pytest.approx(22.0)


def test_only_chooses_values_and_takes_others_that_the_grid_lacks():
    work = Workload("some", act, [{"n": [1, 2], "cache": ["a"]}, {"n": [3], "cache": ["b", "c"]}])
    assert len(work.configurations({})) == 4
    assert work.configurations({"n": [2, 3], "cache": ["c"]}) == [{"n": 3, "cache": "c"}]
    assert [one["n"] for one in work.configurations({"n": [9], "cache": ["a"]})] == [9]
    with pytest.raises(ValueError, match="must name a field of some, got 'm'; it has n, cache"):
        work.configurations({"m": [1]})
    found = runner.parsed(["n=1", "n=[2]", "cache=x:k=v,w=2"])
    assert found == {"n": [1, [2]], "cache": ["x:k=v,w=2"]}


# -- the workloads

STEP = "step_ms_p50 step_ms_p20 step_ms_p80 kv_bytes ratio_to_dynamic cache model context batch dtype fill"
LEAST = "contender context dtype ms_min thread_ms_min"
BOTH, FORMS = ["dynamic", "paged_int4"], ["torch", "int4"]
GPU_STEP = {"model": "tiny", "context": 64, "batch": 1, "cache": BOTH, "mode": "eager"}
READ = {"context": 4300, "read_tokens": 512}
REQUESTS = {"requests": 2, "least": 20, "most": 60, "answer": 3, "budget_bytes": 4 << 20}
# sizes that take a second
TINY = {
    "decode": {"shape": "tiny", "context": 90, "batch": 2, "dtype": "float32"},
    "reading/attention": {"format": "int4"} | READ,
    "reading/model": {"model": "tiny"} | READ,
    "generate": {"model": "tiny", "context": 64},
    "latents": {"model": "tiny-latent", "context": 64},
    "offload": {"model": "tiny", "keys": "int4", "context": 600, "read_tokens": [None, 512]},
    "memory": {"model": "tiny", "context": 80, "cache": "paged_int4", "steps": 2},
    "prefix": {"model": "tiny", "requests": 2, "batch": 1, "prefix_store": ["none", "memory"]},
    "restart": {"model": "tiny", "system_tokens": 200},
    "serving/batches": {"model": "tiny", "load": ["mixed", "shared"]} | REQUESTS,
    "first": {
        "what": ["compiled", "generate", "paged_int4", "choice"],
        "model": "tiny",
        "shape": "tiny",
        "context": 600,
        "read_tokens": 256,
    },
    "tuning": gpu.PAGES | {"shape": "tiny", "context": 80, "dtype": "float32", "format": "int4"},
    "gpu/pages": gpu.PAGES | {"shape": "tiny", "context": 80},
    "gpu/logits": {"model": ["tiny", "tiny-latent"], "dtype": "float32"},
    "gpu/warm": GPU_STEP,
    "gpu/steps": GPU_STEP,
    "gpu/compiled": GPU_STEP,
    "gpu/latents": GPU_STEP | {"model": "tiny-latent"},
    "gpu/kernels": gpu.KERNELS | {"shape": "tiny", "context": 70, "batch": 1, "format": FORMS},
}
MODULES = {f"measure.{name}" for name in ("attention", "check_gpu", "gpu", "serving", "steps")}


def tiny(name):
    return replace(WORKLOADS[name], grid=[TINY[name]]).configurations({})


# file of rows -> what the tables and plots of docs/ read
FIELDS = {
    "decode": "kind path shape batch context contender dtype ms_p50 ms_p20 ms_p80 ratio_to_dynamic",
    "generate": STEP,
    "mla": f"{STEP} bytes_per_token transient_bytes weights",
    "reading_speed": f"{LEAST} kind cache read_tokens",
    "offload": "kind context device_bytes keys offload layers_outside total_bytes resident_bytes stepping_bytes "
    "step_ms_p50 ratio_to_none page_bytes read_tokens model dtype",
    "prefix": "metric requests system_tokens question_tokens batch prefix_store value tokens_computed skipped pages_bytes model dtype",
    "restart": "prefix_store system_tokens question_tokens cache value tokens_computed folder_bytes model dtype",
    "serving": "load cache capacity_tokens seconds tokens_per_s ratio_to_transformers first_token_s first_token_ratio "
    "requests prompt_tokens answer budget_bytes batch_tokens model dtype",
    "resident": "model device context cache steps held_bytes",
    "correctness": "dtype",
    "first": "what contender",
    "tuning": "num_warps num_stages times ms_p50 best kernel",
    "models": "kernel step_ms_p50 tokens_per_s kv_bytes",
    "latents": "kernel step_ms_p50 tokens_per_s kv_bytes",
    "kernels": "ms_p50 part_of_copy timing dtype",
}


@pytest.mark.parametrize("name", TINY)
def test_workload_gives_the_fields_that_tables_read(name, monkeypatch, tmp_path):
    if name.startswith("serving/") and not fits_transformers():
        pytest.skip("transformers before 5.18")
    monkeypatch.setattr(attention, "ROUNDS", 2)
    monkeypatch.setattr(steps, "ROUNDS", 2)
    monkeypatch.setattr(steps, "SHARES", (0.9,))
    monkeypatch.setattr(torch, "compile", lambda call, **options: call)
    monkeypatch.setitem(shapes.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(attention.COLD_BYTES, "cpu", 1 << 10)
    monkeypatch.setattr(steps, "all_cache_names", lambda: ("dynamic", "static", "paged_int4"))
    monkeypatch.setattr(steps, "measure_footprint", lambda *of, **options: {"held_bytes": 1})
    work = WORKLOADS[name]
    found = run(work, tiny(name), out=tmp_path / "rows", isolated=False)
    assert not found.failed and found.rows
    wanted = set(FIELDS[work.file or name].split())
    for row in found.rows:
        assert wanted <= row.keys(), wanted - row.keys()
        assert row["kind"].startswith(work.kind or name)
        assert row.get("ms_p50", 1.0) > 0 and row.get("step_ms_p50", 1.0) > 0
    assert runner.table(found.rows, work.columns.split())


def test_every_workload_has_a_tiny_run():
    assert set(TINY) == {
        name for name, work in WORKLOADS.items() if work.measure.__module__ in MODULES
    }


# -- gates


@pytest.mark.skipif(library.missing() is not None, reason="no C kernel here")
@pytest.mark.parametrize(
    ("name", "factor"), [("decode", 1.1), ("decode", float("nan")), ("generate", 1.1)]
)
def test_a_wrong_kernel_is_not_timed(monkeypatch, name, factor):
    right = kv_hf.hf.attention.paged_attention

    def wrong(asked, kernel):
        out = right(asked, kernel)
        return out if kernel.name == "reference" else out * factor

    monkeypatch.setattr("kv_hf.hf.attention.paged_attention", wrong)
    monkeypatch.setattr(runner, "timed", lambda call, device: pytest.fail("timed"))
    steps.judged.cache_clear()
    found = run(WORKLOADS[name], tiny(name)[:1], isolated=False, say=len)
    assert "wrong results: " in found.failed[0] and "paged_int4: error" in found.failed[0]
    steps.judged.cache_clear()
