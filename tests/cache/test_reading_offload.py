"""Steps that read a part of a text whose pages live outside: what is chosen, what is fetched, and what lies on the device."""

import copy
import functools
import pickle

import pytest
import torch
from test_reading import MOST, PART, cache_of, steps
from tiny_models import left_padded, make_model, tokens
from token_states import place_outside
from wrapped_kernels import wrap_kernels

import kv_hf
from kv_hf.backends.reference import selection
from kv_hf.page_summary import part_bytes, summary_words
from kv_hf.pages import offload

LAYERS = 3


def sharp(layers):
    """A model whose attention is far from even, with heads of which every format reads a part."""
    made = make_model("llama", num_hidden_layers=layers, head_dim=64)
    for layer in made.model.layers:
        layer.self_attn.q_proj.weight.data *= 3
    return made


@pytest.fixture(scope="module")
def model():
    return sharp(LAYERS)


@pytest.fixture(params=["disk", "eager", "late"])
def place(request, monkeypatch):
    """Options that put pages outside."""
    return place_outside(request.param, monkeypatch)


@pytest.fixture
def same_words(monkeypatch):
    """Every choice reads the same words: an index fixes them once, a choice over whole pages anew for every row and step."""

    def words_to_read(fields, spec):
        count = summary_words(spec)
        return torch.arange(count, dtype=torch.int32).repeat(spec.num_kv_heads, 1)

    for module in (selection, offload):
        monkeypatch.setattr(module, "words_to_read", words_to_read)


@pytest.fixture
def choices(monkeypatch):
    """The pages that each choice among pages outside led to: a list for each row."""
    seen = []

    def recorded(choose_pages):
        def record(call):
            table, counts = choose_pages(call)
            rows = zip(table.tolist(), counts.tolist(), strict=True)
            seen.append([row[:count] for row, count in rows])
            return table, counts

        return record

    wrap_kernels(monkeypatch, choose_pages=recorded)
    return seen


@pytest.fixture
def fetched(monkeypatch):
    """What was copied from host memory: (layer, pages), and (layer, pages of keys) for an index."""
    whole, keys = [], []
    fetch, cover = offload.OffloadedStorage.fetch, offload.PageIndex.cover

    def fetching(self, runs, targets):
        whole.append((self, [page + at for _, page, count in runs for at in range(count)]))
        fetch(self, runs, targets)

    def covering(self, table, pages, capacity, take):
        def taking(some):
            keys.append((self, list(some)))
            return take(some)

        cover(self, table, pages, capacity, taking)

    monkeypatch.setattr(offload.OffloadedStorage, "fetch", fetching)
    monkeypatch.setattr(offload.PageIndex, "cover", covering)
    return whole, keys


def offloaded(model, keys="int4", kernel="reference", **options):
    values = "int4" if "mixed" in keys else keys
    return cache_of(model, keys, values=values, kernel=kernel, widen="never", **options)


@functools.cache
def plain_steps(model, keys, rows, **options):
    """Steps of a cache without offload behind 300 tokens, computed once; a page is sealed in one of them."""
    ids = torch.cat([tokens(1, 318, seed=seed) for seed in range(1, rows + 1)])
    return ids, steps(model, offloaded(model, keys, **options), ids, 300)


def pages_of(copies):
    return [page for _, pages in copies for page in pages]


# -- the same results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        "exact",
        "int4",
        "int4_mixed",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("int8", "int2")),
    ],
)
def test_steps_are_those_of_a_cache_without_offload(model, keys, place, same_words):
    ids, plain = plain_steps(model, keys, 2)
    assert torch.equal(steps(model, offloaded(model, keys, **place), ids, 300), plain)


@pytest.mark.parametrize(
    "options",
    [
        {"read_tokens": None, "read_share": 0.4},
        {"read_tokens": None, "read_top_p": 0.7},
        {"read_top_p": 0.7},
    ],
    ids=str,
)
def test_every_budget_is_followed(model, options, place, same_words):
    ids, plain = plain_steps(model, "int4", 2, **options)
    assert torch.equal(steps(model, offloaded(model, **options, **place), ids, 300), plain)


def test_a_padded_batch_and_beams(model, place, same_words):
    options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    options |= {"max_new_tokens": 24, "eos_token_id": None, "cache_implementation": "paged_int4"}
    config = {**PART, "kernel": "reference"}
    for batch, beams in ((left_padded([320, 300, 40]), 1), ({"input_ids": tokens(1, 320)}, 3)):
        given = {**batch, **options, "num_beams": beams}
        plain = model.generate(**given, cache_config=config)
        found = model.generate(**given, cache_config={**config, **place})
        assert torch.equal(plain.sequences, found.sequences)
        assert all(map(torch.equal, plain.logits, found.logits))


# -- operations ------------------------------------------------------------------------------------------------------


def test_ids_that_are_used_again_are_read_anew(model, place, same_words):
    """A crop gives pages back, and other tokens are sealed into them: the index must not tell of the former."""
    caches = [offloaded(model), offloaded(model, **place)]
    ids = tokens(1, 330)
    for seed in (3, 4):
        found = [steps(model, cache, ids, 300 if seed == 3 else None)[:, -20:] for cache in caches]
        assert torch.equal(*found)
        for cache in caches:
            cache.crop(-200)
        ids = tokens(1, 200, seed=seed)
        with torch.no_grad():
            more = [model(ids, past_key_values=cache).logits for cache in caches]
        assert torch.equal(*more)
        ids = tokens(1, 25, seed=seed + 10)
    caches[1].check_integrity()


@pytest.mark.parametrize("keys", [pytest.param("exact", marks=pytest.mark.slow), "int4"])
def test_copies_reordered_rows_states_and_resets_go_on_alike(
    model, keys, place, same_words, tmp_path
):
    ids = torch.cat([tokens(1, 322, seed=1), tokens(1, 322, seed=2)])
    cache, plain = offloaded(model, keys, **place), offloaded(model, keys)
    for one in (cache, plain):
        steps(model, one, ids[:, :310], 300)
    copied, turned = copy.deepcopy(cache), copy.deepcopy(cache)
    unpickled = pickle.loads(pickle.dumps(cache))
    cache.save(tmp_path / "held.safetensors", model)
    loaded = kv_hf.PagedCache.load(tmp_path / "held.safetensors", model)
    turned.reorder_cache(torch.tensor([1, 0]))
    rest = ids[:, 310:]
    expected = steps(model, plain, rest)
    assert torch.equal(steps(model, cache, rest), expected)
    assert torch.equal(steps(model, copied, rest), expected)
    assert torch.equal(steps(model, turned, rest.flip(0)).flip(0), expected)
    assert torch.equal(steps(model, unpickled, rest), expected)
    assert torch.equal(steps(model, loaded, rest), expected)
    cache.reset()
    plain.reset()
    del copied, turned
    ids = tokens(3, 330, seed=9)
    assert torch.equal(steps(model, cache, ids, 300), steps(model, plain, ids, 300))


# -- fetching --------------------------------------------------------------------------------------------------------


def test_a_step_fetches_the_pages_that_it_chose_and_no_others(model, choices, fetched):
    ids = tokens(1, 330)
    cache = offloaded(model, offload="disk")
    steps(model, cache, ids[:, :301], 300)
    whole, keys = fetched
    for (
        layer
    ) in cache.paged_layers:  # each page once, and those twice that say which words are read
        own = [page for index, pages in keys if index is layer.storage.index for page in pages]
        assert set(own) == set(range(18)) and len(own) == 18 + 8
    for at in range(301, 329):
        sealed = len(cache.group.rows[0].pages)
        for seen in (choices, whole, keys):
            seen.clear()
        steps(model, cache, ids[:, at : at + 1])
        assert len(choices) == LAYERS
        # one buffer for all layers: each fetches all that it chose
        assert pages_of(whole) == [page for choice in choices for page in choice[0]]
        assert all(len(choice[0]) == MOST for choice in choices)
        # a page that was sealed behind the last step
        assert pages_of(keys) in ([], [sealed - 1] * LAYERS)


# -- memory ----------------------------------------------------------------------------------------------------------


def test_the_device_holds_the_index_and_room_for_what_is_chosen(model):
    whole, part = (
        offloaded(model, offload="disk", **options)
        for options in ({"read_tokens": None, "read_from": 4096}, {})
    )
    for cache in (whole, part):
        steps(model, cache, tokens(1, 302), 300)
    spec = part.paged_layers[0].spec
    assert whole.memory().staging == 18 * spec.page_bytes
    assert part.memory().staging == MOST * spec.page_bytes + LAYERS * 18 * part_bytes(spec.keys)
    with torch.no_grad():  # more queries than a step has read everything
        model(tokens(1, 30), past_key_values=part)
    assert part.memory().staging == 20 * spec.page_bytes + LAYERS * 18 * part_bytes(spec.keys)


def test_the_budget_holds_at_every_step(model):
    budget = 20 * 2 * 2 * 16 * 64 * 4  # pages of one layer: sides, heads, tokens, head_dim, fp32
    cache = offloaded(model, "exact", offload="disk", device_bytes=budget)
    ids = tokens(1, 330)
    with torch.no_grad():
        model(ids[:, :200], past_key_values=cache)
        for at in range(200, 330):
            model(ids[:, at : at + 1], past_key_values=cache)
            memory = cache.memory()
            assert memory.payload + memory.scales + memory.staging <= budget
    with pytest.raises(
        kv_hf.DeviceBudgetError, match="index of all pages that a step chooses from"
    ):
        model(tokens(1, 600), past_key_values=cache)
    assert cache.get_seq_length() == 330
    cache.check_integrity()
