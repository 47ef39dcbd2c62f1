"""The benchmarks' arithmetic, their gates, and one tiny run of each script. No time is ever judged."""

import json

import pytest
import torch
from kv_hf.evaluation.cache_kinds import cache_kind, held_bytes, why_not
from kv_hf.evaluation.shapes import SHAPES, AttentionShape, random_config
from kv_hf.evaluation.timing import Budget, copy_bandwidth, interleave, quantile, spread
from measure.speed.compare_steps import compare_steps, ms_per_1k_tokens
from measure.speed.decode_contenders import Workload, layers_for, paged, stock
from measure.speed.oracle import Verdict, decoded_tokens, judge, judge_pages, softmax_attention
from measure.speed.scaling import growth, left_padding, ragged_steps
from paged_inputs import make_kv
from paths import ROOT
from tiny_models import make_config, make_model
from transformers import DynamicCache, StaticCache

import kv_hf
from kv_hf.backends.cpu import library
from kv_hf.backends.registry import layout_for
from kv_hf.evaluation.rows import latest_run
from kv_hf.formats import FORMAT_NAMES
from kv_hf.spec import LANES

SCRIPTS = ROOT / "scripts"
CPU = torch.device("cpu")
TINY = AttentionShape(4, 2, 32)
TINY_MODEL = AttentionShape(4, 2, 16)  # of tests/tiny_models.py


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_decode
    import bench_generate

    monkeypatch.setitem(bench_decode.SHAPES, "tiny", TINY)
    return bench_decode, bench_generate


# -- arithmetic --------------------------------------------------------------------------------------------


def test_spread_is_median_and_quantiles():
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0, 100.0])
    assert (found.p50, found.p20, found.p80, found.max, found.n) == (3.5, 2.0, 5.0, 100.0, 6)
    assert found.mean == pytest.approx(115 / 6)
    assert found.row("ms")["ms_p50"] == 3.5
    assert quantile([7.0], 0.2) == 7.0
    with pytest.raises(ValueError, match="at least one sample"):
        spread([])


def test_interleave_takes_turns_and_reverses_every_other_round():
    calls, prepared = [], []
    contenders = {name: lambda n=name: calls.append(n) for name in "abc"}
    times = interleave(contenders, 3, CPU, warmup=1, before=prepared.append)
    assert "".join(calls) == "".join(prepared) == "cba" + "abc" + "cba" + "abc"
    assert {name: len(samples) for name, samples in times.items()} == {"a": 3, "b": 3, "c": 3}


def test_interleave_ends_after_a_whole_round_when_the_budget_is_spent():
    times = interleave({"a": lambda: 0, "b": lambda: 0}, 50, CPU, budget=Budget(0.0))
    assert [len(samples) for samples in times.values()] == [1, 1]
    assert Budget(None).left is None
    assert not Budget(None).spent
    assert Budget(0.0).spent


def test_slope_is_that_of_a_line():
    assert ms_per_1k_tokens([1000, 2000, 4000], [5.0, 8.0, 14.0]) == pytest.approx(3.0)
    with pytest.raises(ValueError, match="two contexts"):
        ms_per_1k_tokens([1000], [5.0])


def test_copy_bandwidth_is_positive():
    assert copy_bandwidth(CPU, rounds=2, nbytes=1 << 16) > 0


def test_latest_run_never_mixes_machines_or_commits():
    run = {"date": "2026-01-02", "commit": "b", "machine": "x", "threads": 2, "dtype": "bfloat16"}
    rows = [
        {**run, "commit": "a", "n": 1, "model": "m"},
        {**run, "n": 2, "model": "m"},
        {**run, "machine": "y", "n": 3, "model": "other"},
        {**run, "n": 4, "model": "m"},
    ]
    assert [row["n"] for row in latest_run(rows, model="m")] == [2, 4]
    assert latest_run(rows, model="none") == []


# -- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_preset_bytes_equal_those_of_the_page_spec(shape, name):
    spec = shape.page_spec(name, torch.bfloat16)
    assert spec.page_bytes == sum(side.payload_bytes + side.scale_bytes for side in spec.sides)
    assert 8 * spec.page_bytes == spec.bits_per_element * shape.elements(64)
    if name == "exact":
        assert spec.page_bytes == shape.dense_bytes(64, torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("llama-3.1-8b", "llama-8b"),
        ("qwen2.5-7b", "qwen2.5-7b"),
        ("llama-70b-layer", "llama-70b-layer"),
    ],
)
def test_random_models_have_the_heads_of_their_presets(model, shape):
    config, heads = random_config(model), SHAPES[shape]
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    found = (config.num_attention_heads, config.num_key_value_heads, dim)
    assert found == (heads.num_heads, heads.num_kv_heads, heads.head_dim)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_bytes_read_by_a_step_are_pages_and_window(name):
    work = Workload(TINY, 2, 150, 2, torch.bfloat16, CPU)
    whole, bare = paged(work, "int2_v1" if name == "int2" else name)
    spec = TINY.page_spec(name, torch.bfloat16)
    expected = 2 * (2 * spec.page_bytes + spec.window_bytes(1, 150 - 128))
    assert whole.nbytes == bare.nbytes == expected


def test_layers_leave_the_processor_cache_and_stay_few():
    assert layers_for(SHAPES["smollm2"], 1, 64, CPU) == 32
    assert layers_for(SHAPES["llama-8b"], 1, 1 << 20, CPU) == 1


def test_held_bytes_equal_the_tensors():
    config = make_config("llama")
    states = torch.randn(1, 2, 100, 16).bfloat16()
    dense = 2 * 2 * states.nbytes
    for cache in (DynamicCache(config=config), StaticCache(config=config, max_cache_len=100)):
        for index in range(2):
            cache.update(states, states, index)
        assert (
            dense <= held_bytes(cache) <= dense + 64
        )  # a static layer keeps its length as a tensor
    cache = kv_hf.PagedCache(config, keys="int4")
    for index in range(2):
        cache.update(states, states, index)
    assert held_bytes(cache) == cache.memory().total


def test_quantized_cache_of_transformers_is_measured_or_left_out_with_a_reason():
    for name in ("quantized_fp8", "hqq_int4"):
        reason = why_not(name, CPU)
        if reason is not None:
            assert len(reason) > 10
            continue
        cache = cache_kind(name).make(make_config("llama"), 0)
        states = torch.randn(1, 2, 128, 16).bfloat16()
        for index in range(2):
            cache.update(states, states, index)
        assert held_bytes(cache) < 0.6 * 4 * states.nbytes
    assert "no GPU" in why_not("offloaded", CPU)


# -- gates -------------------------------------------------------------------------------------------------


def test_judge_accepts_torch_and_refuses_errors_and_nan():
    work = Workload(TINY, 1, 90, 1, torch.bfloat16, CPU)
    arguments = work.queries[0][0, :, 0], work.keys[0][0], work.values[0][0], work.scale
    out = stock(work)[0].run()[0][0].flatten(0, 1)
    assert judge(out, *arguments).ok
    assert not judge(out * 1.1, *arguments).ok
    assert not judge(out * float("nan"), *arguments).ok


def wrong_kernel(monkeypatch):
    """Let every kernel but the reference give results that are a tenth too large."""
    right = kv_hf.hf.attention.paged_attention

    def wrong(asked, kernel):
        out = right(asked, kernel)
        return out if kernel.name == "reference" else out * 1.1

    monkeypatch.setattr("kv_hf.hf.attention.paged_attention", wrong)


DECODE = [
    "--shapes",
    "tiny",
    "--context",
    "90",
    "--layers",
    "2",
    "--rounds",
    "2",
    "--device",
    "cpu",
]
GENERATE = ["--random", "tiny", "--context", "64", "128", "--steps", "2", "--device", "cpu"]
FEW = ["--caches", "static", "quantized_fp8", "paged_exact", "paged_int4", "--prefills", "2"]


def test_decode_gate_refuses_a_wrong_kernel_and_writes_nothing(scripts, monkeypatch, tmp_path):
    wrong_kernel(monkeypatch)
    out = tmp_path / "decode.jsonl"
    assert scripts[0].main([*DECODE, "--record", "--out", str(out)]) == 1
    assert not out.exists()


def test_generate_gate_refuses_a_wrong_kernel_and_writes_nothing(scripts, monkeypatch, tmp_path):
    wrong_kernel(monkeypatch)
    out = tmp_path / "generate.jsonl"
    assert scripts[1].main([*GENERATE, *FEW, "--record", "--out", str(out)]) == 1
    assert not out.exists()


# -- whole runs --------------------------------------------------------------------------------------------


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_scripts_record_rows_that_tables_and_plots_take(scripts, tmp_path, monkeypatch):
    """One tiny run from the measurement to README's table and the pictures."""
    decode, generate = scripts
    copy = decode.copy_bandwidth
    monkeypatch.setattr(decode, "copy_bandwidth", lambda device: copy(device, 2, 1 << 16))
    out = ["--record", "--out", str(tmp_path / "decode.jsonl")]
    assert decode.main([*DECODE, "--context", "70", "130", *out]) == 0
    rows = read(tmp_path / "decode.jsonl")
    names = ["dynamic", "sdpa", "sdpa-packed"]
    names += [f"{path}_{name}" for name in FORMAT_NAMES for path in ("paged", "kernel")]
    assert [row["contender"] for row in rows] == names * 2
    for row in rows:
        assert row["error"] <= row["error_allowed"]
        assert row["ms_n"] == 2
        assert row["ratio_to_dynamic"] > 0
        assert row["versions"]["torch"] == torch.__version__
    assert decode.main([*DECODE, "--gate-only"]) == 0

    out = ["--record", "--out", str(tmp_path / "generate.jsonl")]
    assert generate.main([*GENERATE, *FEW, *out]) == 0
    rows = read(tmp_path / "generate.jsonl")
    assert {row["cache"] for row in rows} >= {"dynamic", "static", "paged_exact", "paged_int4"}
    for row in rows:
        assert row["fill"] == "prompt"
        assert row["prefill_ms_n"] == 2
        assert row["context"] < row["tokens"] <= row["context"] + 8
        if row["cache"].startswith("paged"):
            assert row["predicted_bytes"] == row["kv_bytes"]

    import readme_table

    monkeypatch.setattr(readme_table, "STEPS", [("tiny", "cpu", "Tiny")])
    monkeypatch.setattr(readme_table, "LAYERS", [("tiny", "cpu", "tiny heads")])
    table = readme_table.speed_table(rows, read(tmp_path / "decode.jsonl"))
    assert "| cache | 64 tokens | 128 tokens |" in table
    assert "| `paged_int4` | " in table
    assert "kernel_" not in table
    assert readme_table.speed_table([], []) == readme_table.NOTHING
    assert readme_table.replace_block("<!-- speed -->\n<!-- /speed -->", "speed", table).count(
        "Tiny"
    )

    pytest.importorskip("matplotlib")
    import plots

    drawn = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        assert plots.main(["--results", str(tmp_path), "--out", str(folder)]) == 0
        drawn.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == {
        "step-tiny-cpu-batch1.svg",
        "bytes-tiny-cpu-batch1.svg",
        "decode-tiny-cpu-batch1.svg",
    }
    assert b"ms per step</text>" in drawn[0]["step-tiny-cpu-batch1.svg"]


def test_random_fill_gives_every_cache_the_same_tokens():
    model = make_model("llama")
    kinds = [cache_kind(name) for name in ("dynamic", "paged_exact")]
    results = compare_steps(model, kinds, 100, fill="random", steps=2)
    assert [result["tokens"] for result in results] == [106, 106]
    assert "prefill_ms_p50" not in results[0]
    with pytest.raises(ValueError, match="steps must be between 1 and 60, got 90"):
        compare_steps(model, kinds, 100, steps=90)


def test_ragged_rows_hold_their_own_tokens_only():
    model = make_model("llama")
    kinds = [cache_kind(name) for name in ("dynamic", "paged_int4")]
    found = {
        (row["cache"], row["rows"]): row for row in ragged_steps(model, kinds, 512, rows=3, steps=1)
    }
    assert found["paged_int4", "ragged"]["tokens_held"] == 512 + 2 * 128
    assert found["dynamic", "ragged"]["kv_bytes"] == found["dynamic", "equal"]["kv_bytes"]
    # (512 - 4) // 64 pages in each of three rows, against one such row and two of (128 - 4) // 64
    page = TINY_MODEL.page_spec("int4", torch.float32, layout=layout_for(CPU)).page_bytes
    saved = found["paged_int4", "equal"]["kv_bytes"] - found["paged_int4", "ragged"]["kv_bytes"]
    assert saved == (3 * 7 - (7 + 1 + 1)) * page * 2
    assert left_padding([3, 1], CPU).tolist() == [[1, 1, 1], [0, 0, 1]]


def test_growth_holds_what_was_predicted():
    model = make_model("llama")
    (row,) = growth(model, [cache_kind("paged_int4")], 100, 70)
    assert row["kv_bytes"] == row["predicted_bytes"]
    assert row["step_ms_n"] == 70
    assert 0 <= row["slowest_step"] < 70


STEP = [
    "--shapes",
    "tiny",
    "--context",
    "16",
    "70",
    "--batch",
    "2",
    "--dtype",
    "float32",
    "--rounds",
    "1",
]


def bench_step(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_step

    monkeypatch.setitem(bench_step.SHAPES, "tiny", TINY)
    monkeypatch.setitem(bench_step.LAYERS, "tiny", 2)
    return bench_step


def test_step_script_records_a_row_for_each_contender(monkeypatch, tmp_path):
    out = tmp_path / "steps.jsonl"
    args = [*STEP, "--formats", "exact", "int4", "--record", "--out", str(out)]
    assert bench_step(monkeypatch).main(args) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    names = ["dynamic", "paged_exact", "paged_int4"]
    if not library.missing():
        names += ["calls_exact", "calls_int4"]
    assert sorted(row["contender"] for row in rows) == sorted(2 * names)
    assert {row["context"] for row in rows} == {16, 70}
    for row in rows:
        assert row["ratio_to_dynamic"] > 0 and row["thread_ms_min"] > 0


def test_step_script_refuses_a_wrong_kernel_and_writes_nothing(monkeypatch, tmp_path):
    script = bench_step(monkeypatch)
    right = script.paged

    def wrong(*args, **options):
        whole, bare = right(*args, **options)
        whole.verdict = lambda: Verdict(1.0, 0.5)
        return whole, bare

    monkeypatch.setattr(script, "paged", wrong)
    out = tmp_path / "steps.jsonl"
    assert script.main([*STEP, "--formats", "int4", "--record", "--out", str(out)]) == 1
    assert not out.exists()


def test_oracle_takes_errors_that_sums_of_offsets_explain_and_no_others():
    kv = make_kv("int4", layout=LANES, rows=[(5, 11)])
    query = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(0))
    scale = 64**-0.5
    tokens = [decoded_tokens(kv, side, 0) for side in ("keys", "values")]
    right = softmax_attention(query[0], *tokens, scale)
    beyond = 1.5 * judge(right, query[0], *tokens, scale).budget  # of plain torch
    assert not judge(right + beyond, query[0], *tokens, scale).ok
    assert judge_pages((right + beyond)[None], query, kv, scale).ok
    assert not judge_pages((right + 100 * beyond)[None], query, kv, scale).ok
    right[0, 0] = float("nan")
    assert not judge_pages(right[None], query, kv, scale).ok


def test_scaling_mode_records_both_kinds(scripts, tmp_path):
    out = tmp_path / "generate.jsonl"
    arguments = ["--scaling", "--growth-steps", "3", "--caches", "paged_int4"]
    assert scripts[1].main([*GENERATE[:4], *arguments, "--record", "--out", str(out)]) == 0
    assert {row["kind"] for row in read(out)} == {"ragged", "growth"}


def test_offload_script_records_what_is_on_the_device(scripts, monkeypatch, tmp_path):
    import bench_offload

    out = tmp_path / "offload.jsonl"
    some = [
        "--random",
        "tiny",
        "--context",
        "600",
        "--keys",
        "int4",
        "--steps",
        "2",
        "--device",
        "cpu",
    ]
    arguments = [*some, "--share", "0", "0.9", "--record", "--out", str(out)]
    assert bench_offload.main(arguments) == 0
    rows = read(out)
    assert [row["layers_outside"] for row in rows] == [0, 2, 2]
    assert all(row["page_bytes"] <= row["device_bytes"] for row in rows if row["device_bytes"])
    assert rows[1]["offloaded_bytes"] >= rows[0]["page_bytes"] > rows[1]["page_bytes"]
    out.unlink()
    monkeypatch.setattr(bench_offload, "differing", lambda *args: ["some"])
    assert bench_offload.main(arguments) == 1
    assert not out.exists()
