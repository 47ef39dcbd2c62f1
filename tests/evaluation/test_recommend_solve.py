"""The solver against brute force, and bytes against the allocator."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_model, tokens
from transformers import Gemma3TextConfig

import kv_hf
from kv_hf.config import CacheConfig
from kv_hf.evaluation.recommend.cost import (
    Budget,
    Serving,
    choices_of,
    layer_shapes,
    predict_layers,
    side_bytes,
    stored_numbers,
)
from kv_hf.evaluation.recommend.solve import solve

CHOICES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 1000).map(lambda n: n / 64)),
    min_size=1,
    max_size=4,
)


def every_selection(items):
    for chosen in itertools.product(*(range(len(choices)) for choices in items)):
        picked = [choices[one] for choices, one in zip(items, chosen, strict=True)]
        yield sum(size for size, _ in picked), sum(loss for _, loss in picked)


@settings(max_examples=150, deadline=None)
@given(items=st.lists(CHOICES, min_size=1, max_size=5), limit=st.integers(0, 160))
def test_best_selection_equals_brute_force(items, limit):
    frontier = solve(items)
    fitting = [loss for size, loss in every_selection(items) if size <= limit]
    point = frontier.best(limit)
    assert (point is None) == (not fitting)
    if point is None:
        return
    assert frontier.losses[point] == min(fitting)
    chosen = frontier.selection(point)
    picked = [choices[one] for choices, one in zip(items, chosen, strict=True)]
    assert sum(size for size, _ in picked) == frontier.sizes[point] <= limit
    assert sum(loss for _, loss in picked) == frontier.losses[point]


@settings(max_examples=50, deadline=None)
@given(items=st.lists(CHOICES, min_size=1, max_size=4))
def test_frontier_is_every_undominated_selection(items):
    frontier = solve(items)
    totals = list(every_selection(items))
    best = {
        (size, loss)
        for size, loss in totals
        if not any((s < size and o <= loss) or (s <= size and o < loss) for s, o in totals)
    }
    assert set(zip(frontier.sizes.tolist(), frontier.losses.tolist(), strict=True)) == best


def test_many_odd_sizes_are_rounded_up_never_down():
    """Where sizes have no common measure the frontier is thinned: what it promises still fits."""
    items = [[(1000 + 17 * i * j + j, 1.0 / (j + 1)) for j in range(4)] for i in range(40)]
    exact, thin = solve(items), solve(items, most_points=200)
    assert len(thin.sizes) <= 202 < len(exact.sizes)
    for limit in range(42_000, 70_000, 3_000):
        point = thin.best(limit)
        chosen = thin.selection(point)
        size = sum(items[i][one][0] for i, one in enumerate(chosen))
        loss = sum(items[i][one][1] for i, one in enumerate(chosen))
        assert size <= thin.sizes[point] <= limit
        assert loss == pytest.approx(thin.losses[point])
        best = exact.losses[exact.best(limit)]
        span = (exact.sizes[-1] - exact.sizes[0]) / 200 * len(items)
        assert best <= loss + 1e-12
        tighter = exact.best(limit - int(span) - len(items))
        assert tighter is None or loss <= exact.losses[tighter] + 1e-12


def test_an_item_without_choices_is_refused():
    with pytest.raises(ValueError, match="at least one choice"):
        solve([[(1, 0.5)], []])


# -- bytes -------------------------------------------------------------------------------------------------


def gemma(window):
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=window,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=1024,
    )
    from transformers import Gemma3ForCausalLM

    return Gemma3ForCausalLM(config).eval()


RECIPE = {
    "format": "kv_hf recipe",
    "version": 1,
    "keys": ["int8", "int4", "exact", "int2"],
    "values": ["int2", "int4", "int8", "exact"],
}


def shapes_of(model):
    cache = kv_hf.PagedCache(model.config)
    with torch.no_grad():
        model(tokens(1, 1), past_key_values=cache)
    return layer_shapes(cache)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize(("context", "batch"), [(15, 1), (150, 3), (300, 2)])
@pytest.mark.parametrize("options", [{}, {"page_size": 16, "sink_tokens": 1, "recent_tokens": 7}])
def test_predicted_bytes_equal_those_of_a_cache(name, context, batch, options):
    model = gemma(40) if name == "gemma3" else make_model("llama", num_hidden_layers=4)
    recipe = {**RECIPE, **options}
    cache = kv_hf.PagedCache(model.config, recipe=recipe)
    with torch.no_grad():
        model(tokens(batch, context), past_key_values=cache)
    serving = Serving(context, batch, torch.float32)
    predicted = predict_layers(shapes_of(model), CacheConfig(recipe=recipe), 4, serving)
    measured = cache.memory()
    assert predicted.total == measured.total
    assert (predicted.payload, predicted.scales, predicted.tail, predicted.tables) == (
        measured.payload,
        measured.scales,
        measured.tail,
        measured.tables,
    )
    assert predicted.per_token == pytest.approx(measured.per_token)


def test_the_solver_counts_the_same_bytes():
    model = gemma(40)
    options, serving = CacheConfig(recipe=RECIPE), Serving(300, 2, torch.bfloat16)
    shapes = shapes_of(model)
    report = predict_layers(shapes, options, 4, serving)
    pages = sum(
        side_bytes(shape, side, RECIPE[side][shape.layer], options, serving)
        for shape in shapes
        for side in ("keys", "values")
    )
    assert pages == report.payload + report.scales
    for budget in (f"bytes={report.total}", f"bytes_per_token={report.total / 600}"):
        assert Budget.parse(budget).page_bytes(shapes, options, 4, serving) == pages
    bits = 8 * pages / stored_numbers(shapes, options, serving)
    allowed = Budget.parse(bits).page_bytes(shapes, options, 4, serving)
    assert pages <= allowed < 1.002 * pages


def test_a_budget_in_bits_holds_what_has_that_many_to_two_decimals():
    model = make_model("llama", num_hidden_layers=4, head_dim=64)
    options, serving = CacheConfig(), Serving(4096)
    shapes = shapes_of(model)
    for bits, name in ((4.5, "int4"), (8.25, "int8"), (16, "exact")):
        given, named, more = (
            Budget.parse(budget).page_bytes(shapes, options, 4, serving)
            for budget in (f"bits={bits - 0.005}", f"paged_{name}", bits)
        )
        assert given <= named <= more < 1.002 * named


def test_a_sliding_layer_costs_no_more_at_a_longer_context():
    options = CacheConfig(page_size=16)
    sliding, full = shapes_of(gemma(40))[:2]
    sizes = [
        [side_bytes(one, "keys", "int8", options, Serving(length)) for length in (200, 2000)]
        for one in (sliding, full)
    ]
    assert 2 / 3 <= sizes[0][1] / sizes[0][0] <= 1.5  # two pages or three
    assert sizes[1][1] > 9 * sizes[1][0]


def test_noise_never_makes_more_bytes_look_worse():
    shape = shapes_of(make_model("llama"))[0]
    kl = {(0, side, "exact"): 0.0 for side in ("keys", "values")}
    kl |= {(0, "keys", "int8"): 0.02, (0, "keys", "int4"): 0.01}
    kl |= {(0, "values", "int8"): 0.001, (0, "values", "int4"): 0.01}
    names = ("int4", "exact", "int8")
    sides = {"keys": names, "values": names}
    rows = choices_of([shape], kl, sides, CacheConfig(), Serving())
    assert [(name, loss) for name, _, loss in rows[0][1]] == [
        ("exact", 0.0),
        ("int8", 0.02),
        ("int4", 0.02),
    ]
    sizes = [size for _, size, _ in rows[0][1]]
    assert sizes == sorted(sizes, reverse=True)
    assert [loss for _, _, loss in rows[1][1]] == [0.0, 0.001, 0.01]


@pytest.mark.parametrize(
    "budget",
    [
        "",
        "4.5",
        "bits=",
        "bits=-1",
        "bits=nan",
        "bytes=x",
        "int4",
        "paged_int7",
        None,
        True,
        0,
        -2.5,
    ],
)
def test_bad_budgets_are_named(budget):
    with pytest.raises(ValueError, match="budget must be"):
        Budget.parse(budget)
