"""Simulated choosers read what a cache that chooses alike reads, and keep their promises."""

import pytest
import torch
from measure.reading import ATTENTION, CHOOSERS, bound_mass, exact_mass, mean_mass, simulated
from tiny_models import make_model, tokens
from transformers import AttentionInterface, DynamicCache

from kv_hf.backends.reference import selection
from kv_hf.evaluation.accuracy import decoded
from kv_hf.evaluation.caches import cache_kind
from kv_hf.geometry import Geometry
from kv_hf.page_summary import Summary
from kv_hf.read_budget import ReadBudget


def test_oracle_is_the_sum_of_weights_between_the_mean_and_the_bound():
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(2, 3, 4, 16, generator=draw, dtype=torch.float64)
    pages = torch.randn(2, 5, 8, 16, generator=draw, dtype=torch.float64)
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
    cache = cache_kind(f"paged_exact:page_size=16,read_from=110,{sizes},{amount}")
    cache = cache.make(model.config, 200)
    stored = torch.cat([out for _, out in decoded(model, ids, cache, 90)])
    dense = torch.cat([out for _, out in decoded(model, ids, DynamicCache(), 90)])
    assert (stored - dense)[:19].abs().max() < 1e-5 < 1e-3 < (stored - dense)[19:].abs().max()
    own = cache.options
    places = Geometry(own.page_size, own.sink_tokens, own.recent_tokens)
    found = {}
    for name, chooser in CHOOSERS.items():
        with simulated(model, chooser, own.read_budget(), places):
            parts = [out for _, out in decoded(model, ids, DynamicCache(), 90)]
        found[name] = torch.cat(parts)
    # logits come in fp32, whose eps times logits of about ten is 1e-6
    torch.testing.assert_close(found["oracle"], stored, rtol=0, atol=1e-5)
    assert all((found[name] - stored).abs().max() > 1e-3 for name in found if name != "oracle")
    assert model.config._attn_implementation == "kv_hf"
    assert ATTENTION not in AttentionInterface._global_mapping


def test_simulation_refuses_what_it_does_not_simulate():
    places, model = Geometry(16, 0, 0), make_model("mistral", sliding_window=24)
    with (
        pytest.raises(ValueError, match="only plain attention of one row is simulated.*sliding"),
        simulated(model, CHOOSERS["mean"], ReadBudget(2), places),
    ):
        model(tokens(1, 40))
    assert model.config._attn_implementation == "sdpa"
