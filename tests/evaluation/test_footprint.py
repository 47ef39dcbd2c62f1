"""Memory of one cache: what is read behind prompt and steps, and a child that fails, is killed or refuses."""

import json
import mmap
import multiprocessing
import os
import signal

import pytest
import torch
from tiny_models import COMMON, make_config, make_model, tokens
from transformers import LlamaConfig

from kv_hf.evaluation import memory
from kv_hf.evaluation.caches import cache_kind, held_bytes
from kv_hf.evaluation.memory import MeasurementError, Meter, in_words, measure_footprint
from kv_hf.evaluation.models import revision_of

TINY = {"steps": 2, "dtype": "float32"}


def behind(name, ids):
    """Return a model, and what the cache holds behind a prefill and single tokens."""
    model, kind = make_model("llama"), cache_kind(name)
    cache = kind.make(model.config, 200)
    with torch.no_grad():
        for piece in (ids[:, :-3], *ids[:, -3:, None].unbind(1)):
            model(piece, past_key_values=cache)
    return model, held_bytes(cache)


@pytest.mark.parametrize("name", ["dynamic", "paged_int4", "paged_int2"])
def test_memory_reads_the_cache_behind_prompt_and_steps(name):
    ids = tokens(2, 153)
    model, held = behind(name, ids)
    found = memory.memory(model, cache_kind(name), ids[:, :150], steps=3)
    assert found["tokens"] == 153
    assert found["held_bytes"] == held == found["bytes_per_token"] * 2 * 153
    assert (found["kernel"] is None) == (name == "dynamic")
    assert found["measured_by"] == "resident" and found["offloaded_bytes"] == 0
    if found["peak_bytes"] is not None:
        assert found["peak_bytes"] == max(found["prefill_peak_bytes"], found["steps_peak_bytes"])
    json.dumps(found)
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.raises(ValueError, match="gives logits that are not finite behind 150 tokens"):
        memory.memory(model, cache_kind(name), ids[:, :150], steps=1)


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
        ({"context": 1 << 20}, "context=1048576 and .* but the model supports 1024 tokens"),
        ({"dtype": "int8"}, "dtype must be one of.*int8"),
        ({"device": "mps"}, "device must be a CPU or CUDA"),
        ({"model": "/no/such"}, "model '/no/such': there is no such folder"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_a_process_starts(changes, says, monkeypatch):
    monkeypatch.setattr(memory, "ProcessPoolExecutor", lambda *args: pytest.fail("started"))
    config = LlamaConfig(**COMMON)
    arguments = {"model": config, "cache": "dynamic", "context": 10, **TINY, **changes}
    with pytest.raises(ValueError, match=says):
        measure_footprint(**arguments)
