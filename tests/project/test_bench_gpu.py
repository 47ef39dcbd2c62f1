"""The one command for GPUs, without one: order, budget, rows, failures of a job and of its process, going on."""

import io
import json
import sys
import threading
from dataclasses import replace

import pytest
import torch
from kv_hf.evaluation.shapes import RANDOM_MODELS, SHAPES
from kv_hf.evaluation.timing import Budget
from measure.gpu import measure
from measure.gpu.crew import Worker, together
from measure.gpu.plan import TINY, Job, Part, Sizes, make_plan
from measure.gpu.run import Run
from measure.gpu.worker import work
from paths import ROOT

from kv_hf.doctor.kernels import paged_names
from kv_hf.evaluation import timing
from kv_hf.evaluation.rows import read_rows

SCRIPTS = ROOT / "scripts"
# a worker without torch: what a job does is what its settings say
FAKE = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    for row in job["settings"].get("rows", [{"ok": True}]):
        print(json.dumps({"row": {"job": job["name"], "pid": os.getpid(), **row}}), flush=True)
    time.sleep(job["settings"].get("sleep", 0))
    if job["settings"].get("die"):
        os._exit(3)
    error = job["settings"].get("error", "")
    print(json.dumps({"end": error, "unusable": bool(job["settings"].get("unusable"))}), flush=True)
"""


def fake():
    return Worker([sys.executable, "-S", "-c", FAKE])


def job(name, limit=60.0, **settings):
    return Job(name, "fake", settings, limit)


def run_of(folder, seconds=100.0, **options):
    said = []
    return Run(folder, seconds, say=said.append, make=fake, **options), said


@pytest.fixture
def bench_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_gpu

    return bench_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_gpu_says_that_there_is_no_gpu(bench_gpu, capsys):
    assert bench_gpu.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().out


def test_bench_gpu_refuses_unknown_parts_and_folders_that_cannot_be_written(
    bench_gpu, capsys, tmp_path
):
    with pytest.raises(SystemExit):
        bench_gpu.main(["--tiny", "--parts", "kernels", "speed"])
    assert "correctness, kernels, models, latents, got 'speed'" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        bench_gpu.main(["--tiny", "--out", str(tmp_path / "file" / "rows")])
    assert "cannot be written" in capsys.readouterr().err


def test_plan_checks_before_it_times_and_compiles_what_it_times():
    parts = make_plan(Sizes())
    assert [part.name for part in parts] == ["correctness", "kernels", "models", "latents"]
    assert [part.parallel for part in parts] == [True, False, False, False]
    assert [part.until for part in parts] == sorted(part.until for part in parts)
    assert parts[-1].until == 1.0 and parts[0].until * 480 <= 160
    checked = parts[0].jobs
    for timed in parts[1].jobs:
        of = {name: timed.settings[name] for name in ("shape", "context", "batch", "dtype")}
        formats = [
            one.settings["format"]
            for one in checked
            if one.kind == "judge" and of.items() <= one.settings.items()
        ]
        assert formats == paged_names()
    warmed = [one.settings for one in checked if one.kind == "warm"]
    for timed in (*parts[2].jobs, *parts[3].jobs):
        paged = timed.settings["cache"].startswith("paged")
        assert (timed.settings in warmed) == (paged and timed.settings["mode"] != "compiled")
    assert [one.settings["model"] for one in checked if one.kind == "gate"] == ["small"]
    models = [(one.settings["context"], one.settings["batch"]) for one in parts[2].jobs]
    assert models == sorted(models) and set(models) == {(2048, 1), (32768, 16)}
    wanted = {
        ("dynamic", "eager"),
        ("paged_int4", "eager"),
        ("paged_int4", "graph"),
        ("static", "compiled"),
    }
    assert wanted <= {(one.settings["cache"], one.settings["mode"]) for one in parts[2].jobs}


@pytest.mark.parametrize("sizes", [Sizes(), TINY], ids=["gpu", "tiny"])
def test_plan_names_what_there_is(sizes):
    for part in make_plan(sizes):
        assert len({one.name for one in part.jobs}) == len(part.jobs)
        for one in part.jobs:
            assert one.kind in measure.KINDS
            assert one.settings.get("shape", "tiny") in SHAPES
            assert one.settings.get("model", "tiny") in RANDOM_MODELS
            json.dumps(one.as_dict())


def test_run_writes_each_row_and_how_each_job_ended(tmp_path):
    rows = [{"ok": True, "ms": 1.5}, {"ok": True, "ms": 2.5}]
    parts = [
        Part("first", 0.5, (job("a", rows=rows), job("b", rows=[{"ok": False}]))),
        Part("second", 1.0, (job("c", rows=[{"ok": True}], error="RuntimeError: no"), job("d"))),
    ]
    run, said = run_of(tmp_path)
    assert run.run(parts) == 1
    assert [row["ms"] for row in read_rows(tmp_path / "first.jsonl")[:2]] == [1.5, 2.5]
    second = read_rows(tmp_path / "second.jsonl")
    assert [(row["job"], row["ok"], row.get("error")) for row in second] == [
        ("c", True, None), ("c", False, "RuntimeError: no"), ("d", True, None),
    ]  # fmt: skip
    ended = [(row["part"], row["job"], row["status"]) for row in read_rows(tmp_path / "jobs.jsonl")]
    assert ended == [
        ("first", "a", "done"), ("first", "b", "wrong"), ("second", "c", "failed"), ("second", "d", "done"),
    ]  # fmt: skip
    assert (run.wrong, run.failed, run.left_out) == (["first: b"], ["second: c"], [])
    assert any("second: c: failed" in line and "no" in line for line in said)
    assert second[0]["pid"] == second[2]["pid"]  # what failed left the process usable


def test_run_is_right_only_where_nothing_failed(tmp_path):
    run, _ = run_of(tmp_path)
    assert run.run([Part("part", 1.0, (job("a"), job("b")))]) == 0


def test_run_goes_on_behind_a_process_that_died_or_took_too_long(tmp_path):
    jobs = (
        job("dies", die=True), job("hangs", limit=2.5, sleep=600), job("poisons", error="CUDA error", unusable=True),
        job("whole"),
    )  # fmt: skip
    run, _ = run_of(tmp_path)
    assert run.run([Part("part", 1.0, jobs)]) == 1
    rows = {row["job"]: row for row in read_rows(tmp_path / "jobs.jsonl")}
    assert "died (exit code 3)" in rows["dies"]["error"]
    assert "ended after 2 s" in rows["hangs"]["error"]
    assert rows["poisons"]["error"] == "CUDA error"
    assert rows["whole"]["status"] == "done"
    measured = [row for row in read_rows(tmp_path / "part.jsonl") if row["ok"]]
    assert [row["job"] for row in measured] == ["dies", "hangs", "poisons", "whole"]  # rows stay
    assert len({row["pid"] for row in measured}) == 4


def test_run_tries_once_more_where_jobs_before_left_no_memory(tmp_path):
    run, _ = run_of(tmp_path)
    jobs = (job("a"), job("b", rows=[], error="out of memory: 3 GiB"), job("c"))
    assert run.run([Part("part", 1.0, jobs)]) == 1
    pids = [row["pid"] for row in read_rows(tmp_path / "part.jsonl") if "pid" in row]
    assert len(set(pids)) == 2
    assert run.failed == ["part: b"]


def test_run_leaves_out_what_has_no_time_left(tmp_path):
    class Past(Budget):
        left = 30.0

    parts = [Part("early", 0.5, (job("a"),)), Part("late", 0.9, (job("b"),))]
    run, _ = run_of(tmp_path)
    run.budget = Past()
    assert run.run(parts) == 0
    rows = read_rows(tmp_path / "jobs.jsonl")
    assert [(row["job"], row["status"]) for row in rows] == [("a", "left out"), ("b", "done")]
    assert run.left_out == ["early: a"]


def test_run_goes_on_where_an_earlier_one_was_killed(tmp_path):
    parts = [Part("part", 1.0, (job("a"), job("b", error="no")))]
    run_of(tmp_path)[0].run(parts)
    with (tmp_path / "part.jsonl").open("a") as out:
        out.write('{"half a ro')
    run, said = run_of(tmp_path)
    assert run.run([replace(parts[0], jobs=(*parts[0].jobs, job("c")))]) == 1
    done = [(row["job"], row["status"]) for row in read_rows(tmp_path / "jobs.jsonl")]
    assert done == [("a", "done"), ("b", "failed"), ("b", "failed"), ("c", "done")]
    assert any("1 jobs were done by an earlier run" in line for line in said)
    assert [row["job"] for row in read_rows(tmp_path / "part.jsonl") if row["ok"]] == [
        "a",
        "b",
        "b",
        "c",
    ]


def test_together_runs_jobs_beside_each_other_each_once():
    begun, meet, done = [], threading.Barrier(3, timeout=60), []

    def do(worker, one):
        begun.append(one.name)
        if len(begun) <= 3:
            meet.wait()  # three at a time, or this never ends
        assert not worker.do(one, 60, done.append)

    together([job(str(number)) for number in range(7)], 3, do, fake)
    assert sorted(begun) == sorted(row["job"] for row in done) == [str(n) for n in range(7)]
    assert len({row["pid"] for row in done}) <= 3


def test_together_ends_when_rows_cannot_be_written():
    begun = []

    def do(worker, one):
        begun.append(one.name)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        together([job(str(number)) for number in range(9)], 2, do, fake)
    assert len(begun) <= 2


def test_closed_worker_leaves_no_process():
    worker = fake()
    assert not worker.do(job("a"), 60, lambda row: None)
    process = worker.process
    worker.close()
    assert process.poll() is not None and worker.process is None


def answers(lines, kinds):
    out = io.StringIO()
    work(io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), out, kinds)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_work_answers_a_row_at_a_time_and_survives_what_breaks(monkeypatch):
    def counts(to):
        for number in range(to):
            yield {"number": number, "ok": True}
        if to > 1:
            raise torch.OutOfMemoryError("3 GiB")

    def nan():
        yield {"ms": float("nan"), "ok": True}

    lines = [
        {"name": "a", "kind": "counts", "settings": {"to": 2}},
        {"name": "b", "kind": "counts", "settings": {"to": 1}},
        {"name": "c", "kind": "nan", "settings": {}},
        {"name": "d", "kind": "unknown", "settings": {}},
    ]
    found = answers(lines, {"counts": counts, "nan": nan})
    rows = [one["row"] for one in found if "row" in one]
    ends = [one for one in found if "end" in one]
    assert [(row["job"], row["number"], row["to"]) for row in rows] == [
        ("a", 0, 2),
        ("a", 1, 2),
        ("b", 0, 1),
    ]
    assert {"date", "commit", "machine", "versions"} <= rows[0].keys()
    assert [bool(one["end"]) for one in ends] == [True, False, True, True]
    assert ends[0]["end"].startswith("out of memory") and not ends[0]["unusable"]
    assert "KeyError" in ends[3]["end"]


def test_work_ends_where_the_gpu_answers_no_longer(monkeypatch):
    from measure.gpu import worker

    def breaks():
        yield from ()
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(worker, "_answers", lambda: False)
    line = {"name": "a", "kind": "breaks", "settings": {}}
    assert [one["unusable"] for one in answers([line, line], {"breaks": breaks})] == [True]


@pytest.fixture
def small_copies(monkeypatch):
    """Let nothing be large enough to leave the processor's cache."""
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(measure, "layers_for", lambda *of: 1)
    monkeypatch.setattr(measure, "ROUNDS", 3)


@pytest.mark.parametrize("kind", ["judge", "gate", "trials", "kernels", "steps", "warm"])
def test_measurements_are_right_on_tiny_sizes(small_copies, kind):
    jobs = [one for part in make_plan(TINY) for one in part.jobs if one.kind == kind]
    able = [one for one in jobs if one.settings.get("mode") != "graph"]
    if kind in ("judge", "trials"):
        able = able[::3]
    if kind == "kernels":
        able = able[:1]
    for one in able:
        rows = list(measure.KINDS[kind](**one.settings))
        assert rows and all(row["ok"] for row in rows), (one.name, rows)
        json.dumps(rows, allow_nan=False)
        if kind == "kernels":
            timed = [row for row in rows if "part_of_copy" in row]
            assert {row["contender"] for row in timed} >= {"sdpa", "kernel_exact", "kernel_int4"}
        if kind == "steps":
            assert rows[0]["step_ms_n"] == TINY.steps and rows[0]["kv_bytes"] > 0
    for one in set(map(id, jobs)) - set(map(id, able)) if kind == "steps" else ():
        refused = next(each for each in jobs if id(each) == one)
        with pytest.raises(ValueError, match="a graph needs a CUDA device, got cpu"):
            list(measure.KINDS[kind](**refused.settings))


@pytest.mark.parametrize("cache", ["static", "paged_int4"])
def test_compiled_steps_take_preallocated_caches(monkeypatch, cache):
    modes = []
    monkeypatch.setattr(torch, "compile", lambda call, mode: modes.append(mode) or call)
    of = {"device": "cpu", "dtype": "bfloat16", "model": "tiny", "context": 40, "batch": 2}
    row = next(measure.steps(**of, cache=cache, mode="compiled", steps=2))
    assert modes == ["reduce-overhead"] and row["ok"]
    assert row["kernel"] is None or cache != "static"


def test_wrong_kernel_is_not_timed(small_copies, monkeypatch):
    from measure.speed.oracle import Verdict

    made = measure.paged

    def wrong(work, name):
        whole, bare = made(work, name)
        if name == "int8":
            bare.verdict = lambda: Verdict(2.0, 1.0)
        return whole, bare

    monkeypatch.setattr(measure, "paged", wrong)
    rows = list(measure.kernels("cpu", "bfloat16", "tiny", 70, 1))
    bad = [row for row in rows if not row["ok"]]
    assert [row["contender"] for row in bad] == ["kernel_int8"] and "ms_p50" not in bad[0]
    assert any(row["contender"] == "kernel_int4" and row["part_of_copy"] > 0 for row in rows)


def test_a_step_that_reads_a_part_is_judged_by_what_it_reads(monkeypatch):
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "layers_for", lambda *of: 1)
    rows = list(measure.reading("cpu", "bfloat16", "tiny", 4300, 1, 512))
    assert [row["contender"] for row in rows] == [
        f"{kind}_{name}"
        for name in measure.READ_FORMATS
        for kind, name in (
            ("kernel", name),
            *((k, f"{name} read_tokens=512") for k in ("kernel", "choose")),
        )
    ]
    assert all(row["ok"] and row["ms_p50"] > 0 for row in rows)
