"""What a cache takes: parts against independent counts, children that fail, rows, tables. No time is ever judged."""

import dataclasses
import json
import os
import sys

import pytest
import torch
import transformers
from paths import ROOT
from tiny_models import COMMON, make_model, tokens
from transformers import DynamicCache

import kv_hf
from kv_hf.evaluation import child, footprint, footprint_child
from kv_hf.evaluation.cache_kinds import cache_kind, held_bytes, why_not
from kv_hf.evaluation.cache_parts import (
    HELD,
    cache_parts,
    check_prediction,
    kept_bytes,
    predicted_memory,
)
from kv_hf.evaluation.memory_meter import ResidentMeter, meter_for

CPU = torch.device("cpu")
STOCK = ("dynamic", "static", "quanto_int4", "quanto_int2", "hqq_int8", "hqq_int4", "quantized_fp8")
OURS = (
    "paged_exact",
    "paged_int4",
    "paged_int4:keys=int8,recent_tokens=32,page_size=16",
    "paged_fp8:reserve_tokens=400",
    "paged_int8:max_length=300",
)


@pytest.fixture(scope="module")
def model():
    return make_model("llama")


@torch.no_grad()
def filled(model, name, batch=2, length=150, steps=2):
    reason = why_not(name, CPU)
    if reason:
        pytest.skip(reason)
    kind = cache_kind(name)
    model.set_attn_implementation(kind.attention)
    cache = kind.make(model.config, length + steps + 8)
    ids = tokens(batch, length)
    for piece in (ids, *([ids[:, :1]] * steps)):
        model(piece, past_key_values=cache)
    return cache


def tensors_in(value, seen):
    """Find every plain tensor behind an object, by its attributes: another way than that of the library."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, torch.nn.Parameter):
        yield value
    elif isinstance(value, torch.Tensor):  # a wrapper: what it is made of are its attributes
        for item in vars(value).values():
            yield from tensors_in(item, seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, seen)


@pytest.mark.parametrize("name", STOCK)
def test_parts_of_stock_caches_are_their_tensors(model, name):
    cache = filled(model, name)
    parts = cache_parts(cache, CPU)
    plain = list(tensors_in([vars(layer) for layer in cache.layers], {}))
    total = sum(parts[part] for part in HELD)
    assert total == sum(tensor.nbytes for tensor in plain) == held_bytes(cache)
    assert kept_bytes(cache) == total
    assert parts["offloaded"] == parts["tables"] == parts["staging"] == 0
    assert check_prediction(cache) is None


@pytest.mark.parametrize(
    ("name", "bits", "scale", "tail"),
    [
        ("dynamic", 32, 0, 0),
        ("quanto_int4", 4, 8, 2),
        ("quanto_int2", 2, 8, 2),
        ("hqq_int8", 8, 8, 2),
        ("hqq_int4", 4, 8, 2),
    ],
)
def test_parts_of_stock_caches_by_hand(model, name, bits, scale, tail):
    """160 tokens are encoded in groups of 64 with a scale and an offset each; the two behind them are exact."""
    parts = cache_parts(filled(model, name, length=160), CPU)
    numbers = 2 * 2 * 2 * 2 * 16  # keys and values, layers, rows, kv heads, head_dim
    behind = 160 if tail else 162
    assert parts["payload"] == numbers * behind * bits // 8
    assert parts["scales"] == numbers * behind // 64 * scale
    assert parts["tail"] == numbers * tail * 4


def test_parts_of_fp8_by_hand(model):
    parts = cache_parts(filled(model, "quantized_fp8"), CPU)
    assert parts["payload"] == 2 * 2 * 2 * 2 * 16 * 152
    assert parts["scales"] == 4 * 2 * 2  # one fp32 number per tensor
    assert parts["tail"] == 0


@pytest.mark.parametrize("name", OURS)
def test_parts_of_pages_are_what_memory_and_the_prediction_say(model, name):
    cache = filled(model, name)
    memory = cache.memory()
    parts = cache_parts(cache, CPU)
    assert sum(parts[part] for part in HELD) == memory.total == held_bytes(cache)
    assert parts["payload"] == memory.payload > 0
    assert predicted_memory(cache) == memory
    assert check_prediction(cache) == memory.total


def test_a_prediction_that_differs_is_an_error(model, monkeypatch):
    cache = filled(model, "paged_int4")
    memory = cache.memory()
    monkeypatch.setattr(cache, "memory", lambda: dataclasses.replace(memory, scales=7))
    with pytest.raises(RuntimeError, match="scales 7 B.*but predict_memory says.*scales 5.00 KiB"):
        check_prediction(cache)


def test_sliding_windows_are_predicted_where_the_prompt_is_known():
    config = transformers.Gemma3TextConfig(
        **{**COMMON, "head_dim": 16, "sliding_window": 20},
        layer_types=["sliding_attention", "full_attention"],
    )
    cache = kv_hf.PagedCache(config, keys="int8", page_size=16)
    for columns in (90, *[1] * 30):
        for layer in range(2):
            cache.update(*torch.zeros(2, 3, 2, columns, 16), layer)
    assert predicted_memory(cache) is None
    assert predicted_memory(cache, 90) == cache.memory()
    assert check_prediction(cache, 90) == cache.memory().total


def test_caches_that_predict_memory_does_not_cover_have_no_prediction(tmp_path):
    model = make_model("llama")
    cache = filled(model, "paged_int4:offload=disk")
    assert predicted_memory(cache) is None
    assert cache_parts(cache, CPU)["offloaded"] > 0


def test_kept_bytes_see_the_tensor_behind_a_view():
    cache = DynamicCache()
    whole = torch.zeros(1, 2, 100, 16)
    cache.update(whole, whole.clone(), 0)
    cache.layers[0].keys = cache.layers[0].keys[:, :, -10:]
    parts = cache_parts(cache, CPU)
    assert parts["payload"] == (100 + 10) * 2 * 16 * 4
    assert kept_bytes(cache) == (100 + 100) * 2 * 16 * 4


# -- the measurement itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dynamic", "paged_int4"])
def test_memory_reads_the_cache_behind_prompt_and_steps(model, name):
    found = footprint_child.memory(model, cache_kind(name), tokens(2, 150), steps=3)
    assert found["tokens"] == 153
    parts = sum(found[f"{part}_bytes"] for part in HELD)
    assert found["held_bytes"] == parts == found["bytes_per_token"] * 2 * 153
    assert found["predicted_bytes"] == (parts if name == "paged_int4" else None)
    assert found["measured_by"] == "resident"
    if found["base_bytes"] is not None:
        assert found["peak_bytes"] == max(found["prefill_peak_bytes"], found["steps_peak_bytes"])
        assert found["rss_bytes"] == found["steps_grown_bytes"]
    json.dumps(found)


def test_speed_gives_rates_of_its_times(model):
    found = footprint_child.speed(model, cache_kind("dynamic"), tokens(2, 30), steps=3)
    assert found["step_ms_n"] == 3
    assert found["prefill_tokens_per_s"] == pytest.approx(60_000 / found["prefill_ms"])
    assert found["decode_tokens_per_s"] == pytest.approx(2000 / found["step_ms_p50"])


def test_logits_that_are_not_finite_give_no_figures():
    broken = make_model("llama")
    with torch.no_grad():
        broken.lm_head.weight[5] = float("nan")
    with pytest.raises(ValueError, match="dynamic gives logits that are not finite"):
        footprint_child.memory(broken, cache_kind("dynamic"), tokens(1, 20), steps=1)


def test_resident_meter_sees_memory_come_and_go():
    meter = ResidentMeter()
    if meter.base is None:
        pytest.skip("this system does not tell what is resident")
    taken = torch.ones(64 << 20, dtype=torch.uint8)
    assert meter.grown() > 60 << 20
    del taken
    assert meter.grown() < 10 << 20
    peak = meter.peak()
    meter.restart()
    if peak is not None:
        assert peak > 60 << 20 > meter.peak()
    with pytest.raises(ValueError, match="device must be a CPU or CUDA.*'meta'"):
        meter_for(torch.device("meta"))


def test_text_prompt_repeats_the_text_and_shifts_rows():
    class Tokenizer:
        def __call__(self, text):
            return type("Found", (), {"input_ids": list(range(len(text)))})

    prompt = footprint_child.text_prompt(Tokenizer(), "abcdef", 2, 8, CPU)
    assert prompt.tolist() == [[0, 1, 2, 3, 4, 5, 0, 1], [3, 4, 5, 0, 1, 2, 3, 4]]


# -- children ------------------------------------------------------------------------------------------------


def run(code, **options):
    return child.run_command([sys.executable, "-c", code], {"some": 1}, **options)


def test_child_that_is_killed_says_so():
    with pytest.raises(child.MeasurementError, match=r"killed by SIGKILL \(out of memory, most"):
        run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(child.MeasurementError, match=r"killed by SIGABRT; its last words: oh no"):
        run("import os, sys; print('oh no', file=sys.stderr, flush=True); os.abort()")


def test_child_that_answers_nothing_or_too_late_says_so():
    with pytest.raises(child.MeasurementError, match="ended with exit code 3 and no result"):
        run("raise SystemExit(3)")
    with pytest.raises(child.MeasurementError, match="exit code 1.*last words: ZeroDivisionError"):
        run("1 / 0")
    with pytest.raises(child.MeasurementError, match="exit code 0 and no result"):
        run("print('[1, 2]')")
    with pytest.raises(child.MeasurementError, match="more than 0.2 seconds"):
        run("import time; time.sleep(60)", timeout=0.2)


def test_a_result_counts_only_with_a_good_end():
    assert run("import sys; sys.stdout.write(sys.stdin.read().replace('some', 'result'))") == 1
    with pytest.raises(child.MeasurementError, match="exit code 4"):
        run("print('{\"result\": 1}', flush=True); raise SystemExit(4)")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (ValueError("context=5 is wrong"), ValueError, "^context=5 is wrong$"),
        (MemoryError(), child.MeasurementError, "^out of memory: MemoryError$"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\nmore"),
            child.MeasurementError,
            "^out of memory: DefaultCPU.*9 bytes$",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), child.MeasurementError, "^out of memory"),
        (RuntimeError("other"), child.MeasurementError, "^RuntimeError: other$"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_of_a_child_reach_its_parent(error, kind, says, monkeypatch, capfd):
    """`answer` in this process, its answer given to the parent's side by a child that only repeats it."""

    def fail(request):
        raise error

    monkeypatch.setattr(child, "expendable", lambda: None)
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr(child.json, "load", lambda stream: {})
    saved = os.dup(1)
    try:
        assert child.answer(fail) == 1
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    answer = capfd.readouterr().out
    with pytest.raises(kind, match=says):
        run(f"import sys; sys.stdout.write({answer!r}); sys.exit(1)")


TINY = {"weights": "random", "steps": 2, "threads": 1, "dtype": "float32"}


def test_footprint_of_a_random_model_in_a_child():
    """The one whole way through a real child."""
    found = footprint.measure_footprint("tiny", "paged_int4", 150, speed=False, **TINY)
    assert found["model"] == "tiny" and found["cache"] == "paged_int4" and found["text"] is None
    assert found["tokens"] == 152 and found["threads"] == 1
    assert found["predicted_bytes"] == found["held_bytes"]
    assert "step_ms_p50" not in found


def test_times_and_memory_come_from_processes_of_their_own(monkeypatch):
    asked = []

    def note(module, request, *, timeout):
        asked.append((request["passes"], timeout))
        return {request["passes"][0]: 1}

    monkeypatch.setattr(footprint, "run_child", note)
    found = footprint.measure_footprint("tiny", "dynamic", 150, 2, timeout=9.0, **TINY)
    assert asked == [(("speed",), 9.0), (("memory",), 9.0)]
    assert found["speed"] == found["memory"] == 1 and found["batch"] == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cache": "paged_int5"}, "cache must be one of.*paged_int5"),
        ({"cache": "paged_int4:keys=int9"}, "keys must be one of.*int9"),
        ({"context": 0}, "context must be an integer of at least 1, got 0"),
        ({"batch": True}, "batch must be an integer"),
        ({"steps": -1}, "steps must be .*-1"),
        ({"context": 1 << 20}, "context=1048576 and .* but tiny supports 1048576 tokens"),
        ({"dtype": "int8"}, "dtype must be one of.*int8"),
        ({"weights": "none"}, "weights must be"),
        ({"device": "mps"}, "device must be a CPU or CUDA"),
        ({"model": "tinier"}, "model must be one of.*tinier"),
        ({"model": "/no/such", "weights": "real"}, "model '/no/such': there is no such folder"),
        ({"text": "/no/such", "weights": "real"}, "text must be a file"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_a_process_starts(changes, says, monkeypatch):
    def never(*args, **options):
        pytest.fail("a process was started")

    monkeypatch.setattr(footprint, "run_child", never)
    arguments = {"model": "tiny", "cache": "dynamic", "context": 10, "weights": "random", **changes}
    with pytest.raises(ValueError, match=says):
        footprint.measure_footprint(**arguments)


# -- script, table, picture ------------------------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import measure_memory

    return measure_memory


SOME = ["--random", "tiny", "--device", "cpu", "--steps", "2", "--caches", "paged_int4", "static"]


def pretend(script, monkeypatch, fails=()):
    """Measure in this process; caches in `fails` end as a child out of memory does."""
    model = make_model("llama")

    def measure(name, cache, context, batch, **options):
        if cache in fails:
            raise child.MeasurementError("its process was killed by SIGKILL")
        kind = cache_kind(cache)
        ids = tokens(batch, context)
        asked = {"model": name, "cache": cache, "context": context, "batch": batch, "threads": 1}
        asked |= {field: options[field] for field in ("dtype", "device", "steps", "weights")}
        return {
            **asked,
            **footprint_child.speed(model, kind, ids, 2),
            **footprint_child.memory(model, kind, ids, 2),
        }

    monkeypatch.setattr(script, "measure_footprint", measure)


def test_script_records_rows_that_table_and_picture_take(script, monkeypatch, tmp_path, capsys):
    pretend(script, monkeypatch)
    out = tmp_path / "memory.jsonl"
    arguments = [*SOME, "--context", "70", "150", "--record", "--out", str(out)]
    assert script.main(arguments) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["context"], row["cache"]) for row in rows] == [
        (context, cache) for context in (70, 150) for cache in ("dynamic", "paged_int4", "static")
    ]
    assert rows[0]["ratio_to_dynamic"] == 1.0
    assert {row["weights_precision"] for row in rows} == {"random weights"}
    assert rows[1]["ratio_to_dynamic"] == rows[1]["held_bytes"] / rows[0]["held_bytes"]
    assert all(row["kind"] == "memory" and row["date"] and row["versions"] for row in rows)
    assert "tiny, 150 tokens, batch 1" in capsys.readouterr().out

    import docs_tables

    text = docs_tables.memory_table(rows)
    assert text.count("\n| `") == 3
    assert "150 tokens of prompt and 2 more, batch 1; weights: random; computed in bfloat16" in text
    assert f"| `dynamic` | {rows[3]['held_bytes'] / 2**20:.1f} | 100.0 % |" in text
    assert docs_tables.memory_table([]) == "No run has been recorded yet."
    for row in rows:  # as measured with --no-speed, where /proc does not tell
        for field in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            del row[field]
    assert docs_tables.memory_table(rows).count(" - |") == 6
    for row in rows:
        row["measured_by"], row["weights_precision"] = "resident", "Q4_1"
        row |= {"prefill_grown_bytes": 3 << 20, "steps_grown_bytes": 1 << 20, "peak_bytes": None}
    text = docs_tables.resident_table(rows)
    assert text.count(" | 3.0 | 1.0 | - |") == 6 and "; weights: Q4_1; computed in bfloat16" in text
    assert "\n\n70 tokens" not in text and text.startswith("70 tokens of prompt and 2 more")
    assert "\n\n150 tokens of prompt" in text and rows[0]["date"] in text
    assert docs_tables.resident_table([]) == "No run has been recorded yet."

    pytest.importorskip("matplotlib")
    import plot_memory

    drawn = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert plot_memory.main(["--rows", str(out), "--out", str(folder)]) == 0
        drawn.append((folder / "memory-tiny-cpu-batch1.svg").read_bytes())
    assert drawn[0] == drawn[1]
    assert b"held by the cache</text>" in drawn[0]


@pytest.mark.parametrize("lost", ["paged_int4", "dynamic"])
def test_script_goes_on_without_what_failed(script, monkeypatch, tmp_path, capsys, lost):
    pretend(script, monkeypatch, fails=[lost])
    out = tmp_path / "memory.jsonl"
    assert script.main([*SOME, "--context", "70", "--record", "--out", str(out)]) == 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert lost not in {row["cache"] for row in rows} and len(rows) == 2
    assert all(("ratio_to_dynamic" in row) == (lost != "dynamic") for row in rows)
    said = capsys.readouterr().out
    assert f"{lost} gives no row at 70 tokens, batch 1: its process was killed by SIGKILL" in said


def test_script_refuses_bad_input_with_no_row(script, tmp_path, capsys):
    out = tmp_path / "memory.jsonl"
    for wrong in (["--context", "2000000"], ["--context", "5", "--batch", "0"]):
        with pytest.raises(SystemExit):
            script.main([*SOME, *wrong, "--record", "--out", str(out)])
    assert "batch must be an integer of at least 1, got 0" in capsys.readouterr().err
    assert not out.exists()


def test_a_preallocated_cache_is_measured_too(model):
    """Its store wraps the plain one, and had no kernel to name."""
    kind = cache_kind("paged_int4:keys=int8,max_length=400")
    found = footprint_child.memory(model, kind, tokens(1, 150), steps=2)
    assert found["kernel"] in ("c", "sdpa", "reference")
    assert found["predicted_bytes"] == found["held_bytes"]
