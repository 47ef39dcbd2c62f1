"""What beam search asks of a cache: rows move as references, and the benchmark of it. No time is ever judged."""

import json

import pytest
import torch
from measure.speed.beams import Beams, beam_steps, wrong_beams
from paths import ROOT

import kv_hf
from kv_hf.evaluation.cache_kinds import CacheKind, cache_kind
from kv_hf.evaluation.shapes import AttentionShape

SCRIPTS = ROOT / "scripts"
CPU = torch.device("cpu")
TINY = AttentionShape(4, 2, 32)
CACHES = ("dynamic", *kv_hf.IMPLEMENTATIONS)


def beams_of(name, context):
    return Beams(cache_kind(name), TINY, 2, 4, context, torch.bfloat16, CPU)


@pytest.mark.parametrize("name", kv_hf.IMPLEMENTATIONS)
def test_what_a_reorder_copies_does_not_depend_on_the_context(name):
    short, long = beams_of(name, 200), beams_of(name, 2000)
    assert short.copied_bytes == long.copied_bytes
    assert long.cache.memory().payload > 3 * short.cache.memory().payload
    dynamic = [beams_of("dynamic", context).copied_bytes for context in (200, 2000)]
    assert dynamic[1] > 9 * dynamic[0]


@pytest.mark.parametrize("name", kv_hf.IMPLEMENTATIONS)
def test_reorder_writes_no_sealed_page_and_only_the_rows_that_change(name):
    beams = beams_of(name, 300)
    layers = beams.cache.paged_layers
    sides = [side for layer in layers for side in layer.storage.sides]
    before = [{field: t.clone() for field, t in side.fields.items()} for side in sides]
    where = [t.data_ptr() for side in sides for t in side.fields.values()]
    windows = [w for layer in layers for w in layer.residuals]
    rows = [w.tokens.clone() for w in windows]
    places = [w.tokens.data_ptr() for w in windows]
    beams.cache.reorder_cache(torch.tensor([0, 0, 2, 1]))
    for side, old in zip(sides, before, strict=True):
        assert all(torch.equal(side.fields[field], t) for field, t in old.items())
    assert where == [t.data_ptr() for side in sides for t in side.fields.values()]
    assert places == [w.tokens.data_ptr() for w in windows]
    for window, old in zip(windows, rows, strict=True):
        assert torch.equal(window.tokens, old[[0, 0, 2, 1]])


def test_reorder_that_moves_no_row_shares_and_frees_nothing():
    beams = beams_of("paged_exact", 300)
    pool = beams.cache.group.pool
    counts = list(pool._counts)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [-4, 1, -2, 3]):
        beams.cache.reorder_cache(torch.tensor(order))
        assert pool._counts == counts
        beams.cache.check_integrity()


def test_all_caches_hold_the_right_numbers_after_many_steps():
    kinds = [cache_kind(name) for name in CACHES]
    assert wrong_beams(kinds, TINY, torch.bfloat16, CPU) == []


def test_gate_finds_rows_that_were_not_moved():
    class Broken(kv_hf.PagedCache):
        def reorder_cache(self, beam_idx):
            super().reorder_cache(beam_idx.clone().fill_(0))

    kind = CacheKind("broken", "sdpa", lambda config, _: Broken(config))
    kinds = [cache_kind("dynamic"), kind, cache_kind("paged_exact")]
    assert wrong_beams(kinds, TINY, torch.float32, CPU, steps=3) == ["broken"]


def test_beam_steps_times_each_cache():
    kinds = [cache_kind(name) for name in ("dynamic", "paged_int4")]
    results = beam_steps(kinds, TINY, 2, 200, steps=3, device=CPU)
    assert [found["cache"] for found in results] == ["dynamic", "paged_int4"]
    for found in results:
        assert found["reorder_ms_n"] == found["append_ms_n"] == 3
        assert found["step_ms_p50"] == found["reorder_ms_p50"] + found["append_ms_p50"] > 0
    assert results[0]["ratio_to_dynamic"] == 1


def test_script_writes_rows_only_when_the_gate_is_passed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_beams

    monkeypatch.setitem(bench_beams.SHAPES, "tiny", TINY)
    out = tmp_path / "beams.jsonl"
    command = ["--shape", "tiny", "--layers", "2", "--steps", "2", "--out", str(out)]
    command += ["--context", "100", "200", "--caches", "paged_int8", "--device", "cpu"]
    assert bench_beams.main(command) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["cache"], row["context"]) for row in rows] == [
        ("dynamic", 100),
        ("paged_int8", 100),
        ("dynamic", 200),
        ("paged_int8", 200),
    ]
    assert all(row["copied_bytes"] <= row["kv_bytes"] for row in rows)
    monkeypatch.setattr(bench_beams, "wrong_beams", lambda *a, **k: ["paged_int8"])
    assert bench_beams.main(command) == 1
    assert len(out.read_text().splitlines()) == 4
