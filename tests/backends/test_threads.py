"""Several Python threads: one model, a cache each, and the same tokens as alone."""

import contextlib
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from paged_inputs import needs_library
from paths import TESTS
from tiny_models import left_padded, make_model

import kv_hf
from kv_hf import notices

NAMES = ("paged_exact", "paged_int4", "paged_int8", "paged_int2", "paged_fp8")


def at_once(work: Callable[[int], object], count: int) -> list[object]:
    """Run work(0) .. work(count - 1), each in a thread, from the same moment on; return what each gave or raised."""
    results: list[object] = [None] * count
    barrier = threading.Barrier(count)

    def run(index: int) -> None:
        barrier.wait(60)
        try:
            results[index] = work(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    return results


def generate(model, index: int) -> torch.Tensor:
    name = NAMES[index % len(NAMES)]
    batch = left_padded([75 + 7 * index, 30 + 5 * index], seed=index)
    pages = {"cache_implementation": name, "cache_config": {"page_size": 16}}
    return model.generate(**batch, **pages, max_new_tokens=20, do_sample=False)


def check(threads: int, rounds: int) -> None:
    """Generate in `threads` threads, `rounds` times each; raise where a thread gets other tokens than alone."""
    alone = make_model("llama")
    want = [generate(alone, index) for index in range(threads)]
    model = make_model("llama")  # whose attention is switched by the threads, not before

    def work(index: int) -> bool:
        return all(torch.equal(generate(model, index), want[index]) for _ in range(rounds))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        results = at_once(work, threads)
    finally:
        sys.setswitchinterval(before)
    if results != [True] * threads:
        raise AssertionError(results)


def test_threads_that_share_a_model_get_the_tokens_they_get_alone():
    check(threads=5, rounds=1)


KERNEL_THREADS = """
import sys, warnings
import torch
torch.set_num_threads(2)
import test_threads
from kv_hf.backends.cpu.library import library
warnings.simplefilter("ignore")
for pool in ("openmp", "own"):
    if pool == "own":
        library().kv_hf_use_openmp(None)
    test_threads.check(threads=3, rounds=int(sys.argv[1]))
"""


@needs_library
@pytest.mark.parametrize("rounds", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_python_threads_call_a_kernel_that_has_threads_itself(rounds):
    """Both with torch's OpenMP threads, a team per caller, and with threads made for each call."""
    path = os.pathsep.join(
        [
            str(TESTS.parent),
            str(TESTS),
            str(TESTS / "tools"),
            str(TESTS / "backends"),
            os.environ.get("PYTHONPATH", ""),
        ]
    )
    # passive: more threads than cores that spin for each other would take minutes on a busy machine
    threads = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_THREADS, str(rounds)],
        env={**os.environ, **threads, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_notice_is_said_once_whatever_the_threads(monkeypatch):
    class Slow(set):
        """Two threads that look a key up at the same time meet here."""

        meeting = threading.Barrier(2)

        def __contains__(self, key):
            found = super().__contains__(key)
            self._meet()
            return found

        def __len__(self):
            found = super().__len__()
            self._meet()
            return found

        def _meet(self):
            with contextlib.suppress(threading.BrokenBarrierError):
                self.meeting.wait(0.2)

    monkeypatch.setattr(notices, "_said", Slow())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        at_once(lambda index: notices.warn_once("key", "message"), 2)
    assert [str(warning.message) for warning in said] == ["message"]


def test_a_second_forward_on_one_cache_is_refused_and_harms_nothing():
    """A cache belongs to one thread: here another one comes between layer 0 and layer 1."""
    cache, alone = (kv_hf.PagedCache(make_model("llama").config, keys="int4") for _ in range(2))
    keys = torch.randn(1, 2, 70, 16)
    for layer in (0, 1, 0):
        cache.update(keys, keys, layer)
    [error] = at_once(lambda index: cache.update(keys, keys, 0), 1)
    assert isinstance(error, kv_hf.InterruptedForwardError)
    cache.update(keys, keys, 1)
    for layer in (0, 1, 0, 1):
        alone.update(keys, keys, layer)
    cache.check_integrity()
    for mine, other in zip(cache.layers, alone.layers, strict=True):
        assert torch.equal(mine.keys, other.keys) and torch.equal(mine.values, other.values)
