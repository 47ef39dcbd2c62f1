"""The one command for GPUs: what it does without one, with a broken part, and with a failed gate."""

import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture
def bench_gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_gpu

    return bench_gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_gpu_says_that_there_is_no_gpu(bench_gpu, capsys):
    assert bench_gpu.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().out


def test_bench_gpu_goes_on_after_a_broken_part_but_not_after_a_failed_gate(bench_gpu):
    called = []

    def part(code):
        def main(argv):
            called.append(argv)
            if code is None:
                raise RuntimeError("broken")
            return code

        return main

    parts = [(0.2, "gate", part(0), ["a"]), (0.5, "b", part(None), []), (1.0, "c", part(0), [])]
    assert bench_gpu.run(parts, 60, ["--record"]) == 1
    assert len(called) == 3
    assert called[0][:3] == ["a", "--record", "--budget-s"]
    assert 0 < float(called[0][3]) <= 12
    called.clear()
    assert bench_gpu.run([(0.2, "gate", part(1), []), *parts[1:]], 60, []) == 1
    assert len(called) == 1
    called.clear()
    assert bench_gpu.run(parts, 0, []) == 0
    assert called == []


def test_bench_gpu_arguments_are_understood(bench_gpu):
    for _, _, main, arguments in bench_gpu.PARTS:
        parse = sys.modules[main.__module__].arguments
        assert parse([*arguments, "--device", "cuda", "--kernel", "auto", "--record"]).record
