"""The C library: its choice, its threads, and the processes and threads that call it or share a model."""

import ctypes
import itertools
import os
import pickle
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import rounding
import tiny_models
import torch
from harness import at_once
from paged_inputs import LATENTS, latent_spec, make_kv, make_query, needs_library, page_spec

import kv_hf
from kv_hf.backends import dispatch
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu import decode, library
from kv_hf.backends.reference import attention as reference
from kv_hf.errors import CacheOptionError
from kv_hf.spec import LANES


@pytest.fixture(params=["torch", "own"])
def threads_of(request):
    """The kernels run on torch's OpenMP threads, or on a pool of their own where there is none."""
    if library.missing():
        pytest.skip(str(library.missing()))
    openmp = library._torch_openmp()
    if request.param == "own":
        library.library().kv_hf_use_openmp(None)
    elif openmp is None:
        pytest.skip("torch has no OpenMP here")
    yield request.param
    library.library().kv_hf_use_openmp(openmp and openmp.GOMP_parallel)


@needs_library
def test_decode_serves_several_threads_of_python_at_once(threads_of):
    kv = make_kv("int4", rows=[(200, 9)], layout=LANES)
    queries = [make_query(kv, 1, 3, torch.float32, seed=i) for i in range(4)]
    expected = [decode.paged_attention(AttentionCall(q, kv, 0.1)) for q in queries]

    def work(index):
        torch.set_num_threads(2)
        call = AttentionCall(queries[index], kv, 0.1)
        return all(torch.equal(decode.paged_attention(call), expected[index]) for _ in range(50))

    assert at_once(work, 4) == [True] * 4


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads in /proc")
def test_idle_threads_end_and_come_back():
    """libgomp counts the threads of all sets, those of the thread that started a server too."""
    if not hasattr(library._torch_openmp(), "omp_pause_resource_all"):
        pytest.skip("torch has no OpenMP here whose threads can be ended")
    numbers = torch.randn(1000, 1000)

    def threads():
        return len(os.listdir("/proc/self/task"))

    def work(_):
        torch.set_num_threads(3)
        before = threads()
        torch.relu(numbers)
        kept = threads() - before
        library.end_idle_threads()
        until = time.monotonic() + 60
        while threads() > before and time.monotonic() < until:
            pass  # threads that have ended may be listed for a moment
        left = threads() - before
        torch.relu(numbers)
        return kept, left, threads() - before

    assert at_once(work, 1) == [(2, 0, 2)]


@needs_library
@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_decode_works_in_forked_processes():
    """Threads do not survive a fork, and a child that waited for its parent's would wait without end.

    The first child loads the library itself, behind a parent that used torch's OpenMP threads; the parent of the second
    ran the kernel with threads too. Both children must start their own.
    """
    code = """
import os, signal, torch, sys
sys.path[:0] = ["tests", "tests/tools"]
from paged_inputs import make_kv, make_query
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu.decode import paged_attention
from kv_hf.spec import LANES
torch.set_num_threads(2)
kv = make_kv("int4", rows=[(200, 9)], layout=LANES)
query = make_query(kv, 1, 3, torch.float32)
def attend():
    return paged_attention(AttentionCall(query, kv, 0.1))
def forked(right):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if right(attend()) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
torch.relu(torch.randn(1000, 1000))
late = forked(lambda out: bool(out.isfinite().all()))
expected = attend().tolist()
print(late, forked(lambda out: out.tolist() == expected))
"""
    # passive: more threads than cores that spin for each other take long on a busy machine
    own = {"env": {**os.environ, "OMP_WAIT_POLICY": "passive"}, "timeout": 240}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **own)
    assert done.stdout.split() == ["0", "0"], done.stdout + done.stderr


spec_of = partial(page_spec, "int4", page_size=32, layout=LANES)


@needs_library
def test_choose_takes_the_c_kernel_on_a_cpu():
    latents = [latent_spec(*names, rank=128) for names in LATENTS]
    for spec in (spec_of(), *latents):
        assert dispatch.choose("auto", torch.device("cpu"), spec).name == "c"


def test_choose_says_once_why_it_takes_a_slower_one(monkeypatch, said):
    kv_hf.uninstall()
    kv_hf.install()
    monkeypatch.setattr(library, "_loaded", lambda: (None, "no compiler was there"))
    for _ in range(2):
        assert dispatch.choose("auto", torch.device("cpu"), spec_of()).name == "reference"
    with pytest.raises(CacheOptionError, match="kernel='c' cannot run here: no compiler was there"):
        dispatch.choose("c", torch.device("cpu"), spec_of())
    (text,) = said()
    assert "'reference'" in text and "no compiler was there" in text


@needs_library
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("9", r"KV_HF_ISA must be one of portable \(0\)"),
        ("x", "got 'x'"),
        ("none", "turns the C kernel off"),
    ],
)
def test_isa_variable_is_checked_before_a_kernel_is_chosen(monkeypatch, value, says):
    monkeypatch.setenv(library.ISA_VARIABLE, value)
    library._loaded.cache_clear()
    try:
        with pytest.raises(CacheOptionError, match=f"kernel='c' cannot run here: .*{says}"):
            dispatch.choose("c", torch.device("cpu"), spec_of())
        with pytest.warns(kv_hf.KVCacheWarning, match=says):
            assert dispatch.choose("auto", torch.device("cpu"), spec_of()).name == "reference"
    finally:
        library._loaded.cache_clear()


@needs_library
def test_library_older_than_its_sources_is_refused(monkeypatch, tmp_path):
    built = min(library.FOLDER.glob("_native*.so"))
    folder = tmp_path / "kv_hf" / "backends" / "cpu"
    (folder / "native").mkdir(parents=True)
    source = folder / "native" / "seal.c"
    source.write_text("")
    (folder / built.name).write_bytes(built.read_bytes())
    monkeypatch.setattr(library, "FOLDER", folder)
    for changed, checkout, refused in ((0, True, False), (4e9, False, False), (4e9, True, True)):
        os.utime(source, (changed, changed))
        if checkout:
            (tmp_path / "pyproject.toml").write_text("")
        else:
            (tmp_path / "pyproject.toml").unlink(missing_ok=True)
        library._loaded.cache_clear()
        try:
            assert ("older than its sources" in str(library.missing())) == refused
        finally:
            library._loaded.cache_clear()


@needs_library
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs /proc")
def test_threads_that_end_give_their_memory_back():
    """generate() in a thread per request is how streaming servers work."""
    kv = make_kv("int8", rows=[(500, 9)], heads=8, key_dim=128, layout=LANES)
    call = AttentionCall(make_query(kv, 16, 8, torch.float32), kv, 0.1)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)

    def work(_):
        torch.set_num_threads(1)
        decode.paged_attention(call)

    def resident_behind(count):
        for _ in range(count):
            at_once(work, 1)
        trim(0)  # what was freed, glibc may keep in an arena per thread
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    # what else happens in this process grows once, what threads leave every time
    rounds = [resident_behind(count) for count in (5, 20, 20)]
    grown = min(later - earlier for earlier, later in itertools.pairwise(rounds))
    partials = 32 * 8 * 128 * (128 + 2) * 4  # splits, kv heads, queries, floats: what a call keeps
    assert grown < 5 * partials, f"20 threads left {grown} bytes"


def test_pickled_cache_chooses_its_kernel_where_it_is_read(monkeypatch):
    model = tiny_models.make_model("llama", num_hidden_layers=1)
    cache = kv_hf.PagedCache(model.config, keys="int4", page_size=16)
    ids = tiny_models.tokens(1, 50)
    model(ids, past_key_values=cache)
    pickled = pickle.dumps(cache)
    with torch.no_grad():
        expected = model(ids[:, :1], past_key_values=cache).logits
        monkeypatch.setattr(library, "_loaded", lambda: (None, "no compiler was there"))
        again = pickle.loads(pickled)
        assert again.layers[0].store.kernel.name == "reference"
        got = model(ids[:, :1], past_key_values=again).logits
    rounding.assert_close(got, expected)


@needs_library
@pytest.mark.parametrize("learns", [False, True])
def test_ops_say_why_they_take_the_reference(learns):
    """fp64 is for checking: no kernel keeps that many digits."""
    spec = spec_of(dtype=torch.float64)
    assert dispatch.choose("auto", torch.device("cpu"), spec).name == "reference"
    kv = make_kv("int8", layout=LANES)
    query = make_query(kv, 1, 2, torch.float32 if learns else torch.float64).requires_grad_(learns)
    call = AttentionCall(query, kv, 0.1)
    with pytest.warns(kv_hf.KVCacheWarning, match="backward" if learns else "float64"):
        out = dispatch.paged_attention(call, kernel="c")
    assert torch.equal(out, reference.paged_attention(call))
