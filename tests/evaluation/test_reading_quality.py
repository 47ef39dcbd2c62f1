"""Simulated choosers read what a cache that chooses alike reads; choosers keep their promises; rows are measured once."""

import json
import sys

import pytest
import torch
from captions import CAPTION
from measure.reading.choosers import CHOOSERS, bound_mass, exact_mass, mean_mass
from measure.reading.contender import Contender, contenders
from measure.reading.measure import ReadingBench
from measure.reading.simulation import ATTENTION, Simulation, reads_by
from paths import ROOT
from tiny_models import make_model, tokens
from tiny_tokenizer import make_tokenizer
from transformers import AttentionInterface, DynamicCache

from kv_hf.backends import registry
from kv_hf.backends.cpu import library
from kv_hf.backends.reference import selection
from kv_hf.evaluation.cache_kinds import cache_kind
from kv_hf.evaluation.loaded_model import LoadedModel
from kv_hf.evaluation.teacher_forcing import forced_logits
from kv_hf.geometry import Geometry
from kv_hf.page_summary import Summary
from kv_hf.read_budget import ReadBudget

TOKENIZER = make_tokenizer()


def random_pages(seed=0, heads=2, group=3, queries=4, pages=5, size=8, dim=16):
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(heads, group, queries, dim, generator=draw, dtype=torch.float64)
    return query, torch.randn(heads, pages, size, dim, generator=draw, dtype=torch.float64)


def test_oracle_is_the_sum_of_weights_between_the_mean_and_the_bound():
    query, pages = random_pages()
    exact = exact_mass(query, pages)
    for head, page in ((0, 0), (1, 4)):
        weights = (pages[head, page] @ query[head, 2, 3]).exp()
        assert exact[head, 2, 3, page] == pytest.approx(float(weights.sum().log()), abs=1e-12)
    assert (mean_mass(query, pages) <= exact).all()  # Jensen
    assert (bound_mass(query, pages) >= exact).all()
    # a page of equal keys is its mean, and its own range
    equal = pages[:, :, :1].expand_as(pages)
    for own in (mean_mass, bound_mass):
        torch.testing.assert_close(own(query, equal), exact_mass(query, equal), rtol=0, atol=1e-12)


@pytest.mark.parametrize("amount", ["read_tokens=68", "read_share=0.4"])
@pytest.mark.parametrize("sizes", ["sink_tokens=4", "sink_tokens=0,recent_tokens=5"])
def test_simulated_oracle_reads_what_exact_pages_read_that_know_their_mass(
    monkeypatch, amount, sizes
):
    """A summary of all channels is the exact mass: then the cache and the simulation must agree on every token."""
    monkeypatch.setattr(selection, "summary_of", lambda keys: Summary.ALL_CHANNELS)
    model = make_model("llama", dtype=torch.float64)
    model.set_attn_implementation("kv_hf")
    ids = tokens(1, 200)[0]
    name = f"paged_exact:page_size=16,read_from=110,{sizes},{amount}"
    cache = cache_kind(name).make(model.config, 200)
    options = cache.options
    stored = torch.cat([out for _, out in forced_logits(model, ids, cache, 90)])
    dense = torch.cat([out for _, out in forced_logits(model, ids, DynamicCache(), 90)])
    assert (stored - dense)[:19].abs().max() < 1e-5 < 1e-3 < (stored - dense)[19:].abs().max()
    places = Geometry(options.page_size, options.sink_tokens, options.recent_tokens)
    budget = (
        ReadBudget(share=0.4, from_tokens=110)
        if "share" in amount
        else ReadBudget(Contender(name, None, 1).budget.pages, from_tokens=110)
    )
    found = {}
    for chooser in CHOOSERS:
        with reads_by(model, Simulation(CHOOSERS[chooser], budget, places)):
            parts = [out for _, out in forced_logits(model, ids, DynamicCache(), 90)]
        found[chooser] = torch.cat(parts)
    torch.testing.assert_close(found["oracle"], stored, rtol=0, atol=1e-5)
    assert all(
        (found[other] - stored).abs().max() > 1e-3 for other in CHOOSERS if other != "oracle"
    )
    assert model.config._attn_implementation == "kv_hf"
    assert ATTENTION not in AttentionInterface._global_mapping


def test_simulation_refuses_what_it_does_not_simulate():
    with pytest.raises(ValueError, match=r"top_p=0\.5"):
        Simulation(CHOOSERS["mean"], ReadBudget(top_p=0.5), Geometry(16, 0, 0))
    model = make_model("mistral", sliding_window=24)
    with (
        pytest.raises(ValueError, match="only plain attention of one row is simulated.*sliding"),
        reads_by(model, Simulation(CHOOSERS["mean"], ReadBudget(2), Geometry(16, 0, 0))),
    ):
        model(tokens(1, 40))
    assert model.config._attn_implementation == "sdpa"


def test_contenders_have_the_budget_of_the_cache():
    found = contenders(["oracle"], ["paged_int4:sink_tokens=0"], [1024, 2048], 4096)
    assert [(one.name, one.read_tokens) for one in found] == [
        ("oracle", 1024),
        ("oracle", 2048),
        ("paged_int4:sink_tokens=0", None),
        ("paged_int4:sink_tokens=0", 1024),
        ("paged_int4:sink_tokens=0", 2048),
    ]
    assert [one.budget and one.budget.pages for one in found] == [14, 30, None, 15, 31]
    assert found[3].cache == "paged_int4:sink_tokens=0,read_tokens=1024,read_from=4096"
    (small,) = contenders(["quest_16_each_head"], [], [1024], 4096)
    assert small.places.page_size == 16 and small.budget.pages == 62
    with pytest.raises(ValueError, match="read_tokens must be at least 132"):
        contenders(["oracle"], [], [100], 4096)
    with pytest.raises(ValueError, match="paged_int5"):
        contenders([], ["paged_int5"], [], 4096)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model("llama", vocab_size=len(TOKENIZER)).save_pretrained(path)
    TOKENIZER.save_pretrained(path)
    return str(path)


def test_bench_measures_from_the_exact_cache(folder):
    bench = ReadingBench(LoadedModel(folder), "code", 600, 64)
    dense, part, oracle = (
        bench.measure(Contender(name, read, 300))
        for name, read in (("paged_exact", None), ("paged_exact", 200), ("oracle", 200))
    )
    assert dense["tokens"] == 64 and dense["kl_mean"] < 1e-7  # fp32
    assert dense["pages"] == dense["pages_read"] == 9
    assert part["pages_read"] == oracle["pages_read"] == 2
    assert oracle["kl_mean"] > 1e-6 and part["kl_mean"] > 1e-6
    assert part["kl_blocks"] == [pytest.approx(part["kl_mean"], rel=1e-6)]


@pytest.mark.skipif(library.missing() is not None, reason="the C kernel is not there")
def test_steps_up_to_a_mass_are_counted(folder):
    bench = ReadingBench(LoadedModel(folder), "code", 600, 64)
    half, most = (bench.measure(Contender("paged_exact", None, 300, mass)) for mass in (0.5, 0.999))
    assert half["kl_mean"] > most["kl_mean"]
    assert 64 + 4 <= half["tokens_read_p10"] <= half["tokens_read_mean"] <= half["tokens_read_p90"]
    assert half["tokens_read_mean"] < most["tokens_read_mean"] <= 600
    assert "tokens_read_mean" not in bench.measure(Contender("paged_exact", 200, 300))
    assert "c_counted" not in registry.backend_names()


def test_script_measures_what_has_no_row(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    sys.modules.pop("reading_quality", None)
    import reading_quality

    out = tmp_path / "r.jsonl"
    asked = ["--models", folder, "--texts", "code", "--length", "500", "--scored", "8"]
    asked += ["--read-from", "300", "--choosers", "oracle", "--caches", "paged_int4"]
    asked += ["--record", "--out", str(out)]
    assert reading_quality.main([*asked, "--read", "200"]) == 0
    first = out.read_text()
    assert reading_quality.main([*asked, "--read", "200", "150"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert out.read_text().startswith(first) and len(rows) == 5
    assert [(row["contender"], row["read_tokens"]) for row in rows] == [
        ("oracle", 200),
        ("paged_int4", None),
        ("paged_int4", 200),
        ("oracle", 150),
        ("paged_int4", 150),
    ]
    assert {"date", "commit", "machine", "threads", "dtype", "weights_precision"} <= set(rows[0])
    assert "oracle, simulated" in capsys.readouterr().out
    assert reading_quality.main([*asked, "--length", "5000"]) == 2
    assert "longer than the 1024" in capsys.readouterr().err


def row(contender, read, text, kl, model="smollm2-135m", **changed):
    return {
        **{
            "kind": "reading",
            "model": model,
            "text": text,
            "text_digest": text,
            "contender": contender,
            "window": 8192,
        },
        **{
            "read_tokens": read,
            "read_from": 4096,
            "simulated": contender in CHOOSERS,
            "tokens": 256,
        },
        **{"kl_mean": kl, "dtype": "float32", "date": "2026-11-23", "threads": 1, "device": "cpu"},
        **{"machine": "AMD EPYC, 2 cores", **changed},
    }


def test_table_has_the_mean_and_the_worst_text_of_each_budget(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from reading_tables import reading_table

    rows = [row("oracle", 1024, "code", 9.0)]  # measured anew below
    rows += [row("oracle", 1024, "code", 0.02), row("oracle", 1024, "novel", 0.04)]
    rows += [row("oracle", 2048, "code", 0.01), row("oracle", 2048, "novel", 0.01)]
    rows += [row("paged_int4", None, "code", 0.001), row("paged_int4", None, "novel", 0.003)]
    rows += [row("paged_int4", None, "german", 0.5)]  # the others have none of this text
    text = reading_table(rows)
    lines = text.splitlines()
    assert lines[0].startswith(
        "SmolLM2-135M, last 256 of 8,192 tokens of 2 texts (code, novel); weights: "
    )
    assert CAPTION.search(lines[0])
    assert lines[2] == "| pages chosen by | 1,024 tokens read | 2,048 | all |"
    assert lines[4] == "| `paged_int4` | - | - | 0.00200 (0.00300, novel) |"
    assert lines[5].endswith("| 0.0300 (0.0400, novel) | 0.0100 (0.0100, code) | 0 |")
    assert lines[5].startswith("| the truth")
    other = reading_table([*rows, row("mean", 1024, "code", 0.5, model="qwen2.5-coder-1.5b")])
    assert "Qwen2.5-Coder-1.5B, last 256 of 8,192 tokens of code; weights: " in other
    assert "| mean key of a page | 0.50 | 0 |" in other
    rows = [row("oracle", 1024, "code", 0.1), row("mean", 1024, "novel", 0.1)]
    assert reading_table(rows).startswith("No run has been recorded yet")
    assert reading_table([]).startswith("No run has been recorded yet")
