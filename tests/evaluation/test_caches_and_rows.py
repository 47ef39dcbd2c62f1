"""Caches by name, their bytes, and the memory of one in a child; rows, what stands in each of them, and files that are damaged or full."""

import json
import mmap
import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from tiny_models import COMMON, make_config, make_model, tokens
from transformers import DynamicCache, LlamaConfig

from kv_hf.cache_names import all_cache_names
from kv_hf.errors import CacheOptionError
from kv_hf.evaluation import memory, register_peer, unregister_peer
from kv_hf.evaluation.caches import cache_kind, held_bytes, why_not
from kv_hf.evaluation.memory import MeasurementError, Meter, in_words, measure_footprint
from kv_hf.evaluation.models import revision_of
from kv_hf.evaluation.rows import WEIGHTS, append_rows, check_writable, make_row, read_rows

CPU = torch.device("cpu")


@torch.no_grad()
def filled(name, batch=2, length=150, steps=2):
    reason = why_not(name, CPU)
    if reason:
        pytest.skip(reason)
    model, kind = make_model("llama"), cache_kind(name)
    cache = kind.make(model.config, length + steps + 8)
    ids = tokens(batch, length)
    for piece in (ids, *([ids[:, :1]] * steps)):
        model(piece, past_key_values=cache)
    return cache


@pytest.mark.parametrize(
    ("name", "bits", "scale", "tail"),
    [("dynamic", 32, 0, 0), ("quanto_int4", 4, 8, 2), ("hqq_int8", 8, 8, 2)],
)
def test_bytes_of_stock_caches_by_hand(name, bits, scale, tail):
    """160 tokens are encoded in groups of 64 with a scale and an offset each; the two behind them are exact."""
    cache = filled(name, length=160)
    numbers = 2 * 2 * 2 * 2 * 16  # keys and values, layers, rows, kv heads, head_dim
    behind = 160 if tail else 162
    by_hand = numbers * (behind * bits // 8 + behind * scale / 64 + 4 * tail)
    # other counters of a layer are a few numbers
    assert 0 <= held_bytes(cache) - by_hand < 200


def test_register_peer_makes_a_cache_like_the_others():
    given = []

    def make(config, options):
        given.append(options)
        return DynamicCache(config=config)

    register_peer("rounded", make)
    try:
        assert "rounded" in all_cache_names() and why_not("rounded", CPU) is None
        made = cache_kind("rounded:steps=64").make(make_config("llama"), 90)
        assert type(made) is DynamicCache and given[-1] == {"steps": 64}
        with pytest.raises(CacheOptionError, match="'rounded' is there already"):
            register_peer("rounded", make)
    finally:
        unregister_peer("rounded")
    assert "rounded" not in all_cache_names()
    for name in ("paged_mine", "Mine", "dynamic"):
        with pytest.raises(CacheOptionError):
            register_peer(name, make)


# -- rows


def test_rows_are_appended_whole_and_an_unfinished_line_is_dropped(tmp_path):
    out = tmp_path / "folder" / "rows.jsonl"
    check_writable(out)
    assert not out.exists() and read_rows(out) == []
    append_rows(out, [{"a": 1}])
    with out.open("a") as file:
        file.write('{"b": 2, "c"')
    assert read_rows(out) == [{"a": 1}]
    append_rows(out, [{"d": 4}, {"e": 5}])
    assert out.read_text() == '{"a": 1}\n{"d": 4}\n{"e": 5}\n'
    with pytest.raises(ValueError, match="Out of range float"):
        append_rows(out, [{"f": 6}, {"g": float("nan")}])
    assert len(read_rows(out)) == 3
    out.write_text('{"a": 1}\nnonsense\n{"d": 4}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: not a row"):
        read_rows(out)
    with pytest.raises(ValueError, match="cannot be written"):
        check_writable(tmp_path)


def test_a_full_disk_leaves_whole_rows(tmp_path):
    """The file system refuses in the middle of a line: what was there stays."""
    out = tmp_path / "rows.jsonl"
    append_rows(out, [{"first": 1}])
    before = out.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            append_rows(out, [{"much": "x" * 5000}])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert out.read_bytes() == before


def test_make_row_says_which_weights_and_which_machine(monkeypatch):
    monkeypatch.setitem(WEIGHTS, "small", {"model_file": "a.gguf", "weights_precision": "Q4_1"})
    row = make_row(kind="x", model="small")
    assert (row["model_file"], row["weights_precision"]) == ("a.gguf", "Q4_1")
    assert {"date", "commit", "machine", "versions", "threads"} <= set(row)
    assert make_row(model="small", weights="random")["weights_precision"] == "random weights"
    assert "weights_precision" not in make_row(kind="sizes")
    assert make_row(date="then")["date"] == "then"
    json.dumps(row)


# -- memory of one cache, in a child -------------------------------------------------------------------------

TINY = {"steps": 2, "dtype": "float32"}


@pytest.mark.parametrize("name", ["dynamic", "paged_int4", "paged_int2"])
def test_memory_reads_the_cache_behind_prompt_and_steps(name):
    model, held = make_model("llama"), held_bytes(filled(name, length=150, steps=3))
    found = memory.memory(model, cache_kind(name), tokens(2, 150), steps=3)
    assert found["tokens"] == 153
    assert found["held_bytes"] == held == found["bytes_per_token"] * 2 * 153
    assert (found["kernel"] is None) == (name == "dynamic")
    assert found["measured_by"] == "resident" and found["offloaded_bytes"] == 0
    if found["peak_bytes"] is not None:
        assert found["peak_bytes"] == max(found["prefill_peak_bytes"], found["steps_peak_bytes"])
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(ValueError, match="gives logits that are not finite after 150 tokens"):
        memory.memory(model, cache_kind(name), tokens(2, 150), steps=1)


def test_resident_meter_sees_memory_come_and_go():
    meter = Meter(torch.device("cpu"))
    if meter.base is None:
        pytest.skip("this system does not tell what is resident")
    # a mapping of its own: what a heap gave, it may keep
    taken = mmap.mmap(-1, 64 << 20)
    for _ in range(64):
        taken.write(bytes(1 << 20))
    assert meter.grown() > 60 << 20
    taken.close()
    assert meter.grown() < 10 << 20
    peak = meter.peak()
    meter.restart()
    if peak is not None:
        assert peak > 60 << 20 > meter.peak()


# -- children


@pytest.mark.slow
def test_footprint_of_a_folder_in_a_child(folder):
    """The one whole way through a real child; a refusal and a failure in it come back in its words."""
    found = measure_footprint(str(folder), "paged_int4", 150, threads=1, **TINY)
    asked = {"model": str(folder), "model_revision": revision_of(str(folder)), "weights": "real"}
    assert asked.items() <= found.items() and found["cache"] == "paged_int4"
    assert found["tokens"] == 152 and found["threads"] == 1
    assert found["held_bytes"] > 0
    with pytest.raises(ValueError, match="^cache 'offloaded' cannot run here: .* there is no GPU$"):
        measure_footprint(make_config("llama"), "offloaded", 150, **TINY)


class Killed(LlamaConfig):
    """A config that ends the process which makes a model of it, as the system does where memory runs out."""

    def __setstate__(self, state):
        if multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        self.__dict__.update(state)


@pytest.mark.slow
def test_a_child_that_is_killed_says_so():
    with pytest.raises(MeasurementError, match="of dynamic ended without an answer: memory"):
        measure_footprint(Killed(**COMMON), "dynamic", 10, **TINY)


def test_errors_in_words():
    assert in_words(ValueError("context\n is wrong")) == "context is wrong"
    assert in_words(MemoryError()) == "out of memory: MemoryError"
    said = "DefaultCPUAllocator: can't allocate memory: 9 bytes"
    assert in_words(RuntimeError(said)) == f"out of memory: {said}"
    assert in_words(torch.OutOfMemoryError("CUDA")) == "out of memory: CUDA"
    assert in_words(RuntimeError("other")) == "RuntimeError: other"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cache": "paged_int5"}, "cache must be one of.*paged_int5"),
        ({"context": 0}, "context must be an integer of at least 1, got 0"),
        ({"batch": True}, "batch must be an integer"),
        ({"threads": 0}, "threads must be an integer of at least 1, got 0"),
        ({"context": 1 << 20}, "context=1048576 and .* but the model supports 1024 tokens"),
        ({"dtype": "int8"}, "dtype must be one of.*int8"),
        ({"device": "mps"}, "device must be a CPU or CUDA"),
        ({"model": "/no/such"}, "model '/no/such': there is no such folder"),
        ({"model": Path("/no/such")}, "model '/no/such': there is no such folder"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_a_process_starts(changes, says, monkeypatch):
    monkeypatch.setattr(memory, "ProcessPoolExecutor", lambda *args: pytest.fail("started"))
    config = LlamaConfig(**COMMON)
    arguments = {"model": config, "cache": "dynamic", "context": 10, **TINY, **changes}
    with pytest.raises(ValueError, match=says):
        measure_footprint(**arguments)
