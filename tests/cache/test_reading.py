"""Steps that read a part of a long text: what is read and fetched, that nothing is lost, and every operation on such a cache."""

import copy
import logging
import pickle

import pytest
import rounding
import tiny_latent
import torch
from paged_inputs import needs_library
from tiny_models import COMMON, make_model, tokens
from token_states import offload_to
from transformers import MistralConfig
from wrapped_kernels import wrap_kernels

import kv_hf
from kv_hf.backends import dispatch
from kv_hf.backends.reference import selection
from kv_hf.cache.model_shape import CROP_TAKES_LENGTHS
from kv_hf.errors import CacheOptionError
from kv_hf.page_summary import summary_words
from kv_hf.pages import offload
from kv_hf.read_budget import pages_for

LAYERS, PAGE, SINKS = 2, 16, 4
BEGUN = 204  # tokens of a prompt: 12 pages, and the next one is sealed 8 steps later
PART = {"page_size": PAGE, "read": {"tokens": 100, "from": 64}}
MOST = pages_for(100, SINKS, PAGE)  # 5 pages


@pytest.fixture(scope="module")
def model():
    """A model whose attention is far from even, with heads of which every format reads a part."""
    made = make_model("llama", num_hidden_layers=LAYERS, head_dim=64)
    for layer in made.model.layers:
        layer.self_attn.q_proj.weight.data *= 3
    return made


@pytest.fixture
def reads(monkeypatch):
    """What each call of attention read: (queries, pages of each row, ids of each row)."""
    seen = []
    own = dispatch._of_chosen_pages

    def record(call, kernel):
        chosen = own(call, kernel)
        kv = chosen.kv
        counts = kv.num_pages.tolist()
        ids = [kv.block_table[row, :count].tolist() for row, count in enumerate(counts)]
        seen.append((call.query.shape[2], counts, ids, call.kv))
        return chosen

    monkeypatch.setattr(dispatch, "_of_chosen_pages", record)
    return seen


def cache_of(model, keys="exact", **options):
    return kv_hf.PagedCache(model.config, keys=keys, **{**PART, **options})


@torch.no_grad()
def steps(model, cache, ids, first=None):
    """Logits [rows, tokens behind the prompt, vocab] of ids[:, first:], token by token; the prompt at once where first is given."""
    if first is not None:
        model(ids[:, :first], past_key_values=cache)
    found = [
        model(ids[:, at : at + 1], past_key_values=cache).logits
        for at in range(first or 0, ids.shape[1])
    ]
    return torch.cat(found, 1)


def assert_alike(one, other):
    rounding.assert_close(one, other, 3**2 * rounding.TERMS)  # scores are three times as large


# -- what is read ----------------------------------------------------------------------------------------------------


def test_a_step_reads_the_budget_and_the_newest_page(model, reads):
    ids = tokens(1, 330)
    steps(model, cache_of(model), ids, 300)
    assert len(reads) == 30 * LAYERS
    for queries, counts, pages, kv in reads:
        assert queries == 1 and counts == [MOST]
        assert pages[0][-1] == int(kv.block_table[0, int(kv.num_pages[0]) - 1])
        assert counts[0] * PAGE + int(kv.exact_lens[0]) <= 100
    assert (
        len({tuple(pages[0]) for _, _, pages, _ in reads}) > 3
    )  # layers and steps choose for themselves


# -- operations ------------------------------------------------------------------------------------------------------


def test_beams_prefixes_and_assistance_read_parts(model, reads):
    ids = tokens(1, 320)
    options = {"max_new_tokens": 20, "cache_implementation": "paged_exact", "do_sample": False}
    beams = model.generate(ids, num_beams=3, cache_config=PART, **options)
    assert beams.shape[1] <= 340 and {len(counts) for _, counts, _, _ in reads} == {3}
    reads.clear()
    store = kv_hf.PrefixStore()
    first = model.generate(ids, cache_config={**PART, "prefix_store": store}, **options)
    assert torch.equal(first, model.generate(ids, cache_config=PART, **options))
    again = model.generate(ids, cache_config={**PART, "prefix_store": store}, **options)
    assert torch.equal(first, again) and reads
    assert {queries for queries, *_ in reads} == {
        1
    }  # a prompt, what a prefix leaves of it too, reads everything
    reads.clear()
    model.generate(ids, prompt_lookup_num_tokens=5, cache_config=PART, **options)
    assert {queries for queries, *_ in reads} - {1}  # candidates choose together


def answer(model, ids, config, new=1, **options):
    """What generate() gives, its logits included; nothing is padding."""
    options = {"attention_mask": torch.ones_like(ids), **options}
    return model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, cache_implementation="paged_exact", cache_config=config,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip


def test_a_prefix_that_a_batch_shares_is_read_as_a_whole(model, reads):
    """It goes through the model as a row of its own, in forwards of few queries."""
    ids = tokens(1, 230)
    two = torch.cat([ids, ids])
    two[1, -9:] = 5
    whole = {"page_size": PAGE}
    expected = answer(model, two, whole).logits[0]
    for first, chunk in ((200, None), (30, 8)):
        store = kv_hf.PrefixStore()
        answer(model, ids[:, :first], {**PART, "prefix_store": store})
        found = answer(model, two, {**PART, "prefix_store": store}, prefill_chunk_size=chunk)
        assert_alike(found.logits[0], expected)
        assert not reads
        again = answer(model, two[:1], {**whole, "prefix_store": store})
        assert_alike(again.logits[0], expected[:1])  # the store holds what a prompt computes


def test_answers_read_in_part_are_found_by_calls_that_read_alike(model):
    ids, more = tokens(1, 200), tokens(1, 20, seed=9)
    store = kv_hf.PrefixStore(keep_answers=True)
    part, whole = {**PART, "prefix_store": store}, {"page_size": PAGE, "prefix_store": store}
    text = torch.cat([answer(model, ids, part, 60).sequences, more], 1)
    found = answer(model, text, whole).logits[0]
    assert_alike(found, answer(model, text, {"page_size": PAGE}).logits[0])
    other = answer(model, text, {**part, "read": {"tokens": 120, "from": 64}}).logits[0]
    assert_alike(other, found)  # a prompt, of which another call's answers are not taken
    computed = store.stats().tokens_computed
    answer(model, text, part)
    assert store.stats().tokens_computed - computed < 60


@pytest.mark.skipif(CROP_TAKES_LENGTHS, reason="5.17 cuts the mask of a text behind a filled cache")
@pytest.mark.parametrize("drafts", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": None}])
def test_a_later_turn_of_assisted_decoding_reads_everything(model, reads, drafts):
    ids = tokens(1, 300)
    if "assistant_model" in drafts:
        drafts = {"assistant_model": make_model("llama", num_hidden_layers=1)}
    caches = [cache_of(model), kv_hf.PagedCache(model.config, page_size=PAGE)]
    found = []
    for cache in caches:
        options = {"past_key_values": cache, "do_sample": False, **drafts}
        mask = torch.ones_like(ids)
        first = model.generate(
            ids, attention_mask=mask, max_new_tokens=1, min_new_tokens=1, **options
        )
        held = cache.get_seq_length()
        text = torch.cat([first[:, held:], tokens(1, 6, seed=7)], 1)  # what is new
        reads.clear()
        mask = torch.ones(1, held + text.shape[1], dtype=torch.long)
        out = model.generate(
            text, attention_mask=mask, max_new_tokens=4, return_dict_in_generate=True, output_logits=True, **options
        )  # fmt: skip
        found.append((out.logits[0], list(reads)))
    assert_alike(found[0][0], found[1][0])  # of the forward that has the new prompt
    assert found[0][1] and not found[1][1]  # steps behind it read a part
    assert max(queries for queries, *_ in found[0][1]) < 7


@pytest.mark.parametrize("kernel", ["reference", pytest.param("c", marks=needs_library)])
def test_a_preallocated_cache_reads_everything_where_the_mask_has_holes(model, reads, kernel):
    """Not only of long texts: a mask that the cache does not know is read as it is."""
    ids = tokens(1, 200)
    holes, padded = torch.ones_like(ids), torch.ones_like(ids)
    holes[0, 50:120] = padded[0, :40] = 0
    for part in (PART, {**PART, "read": 100}):
        found, expected = (
            answer(model, ids, {**config, "kernel": kernel}, 4, attention_mask=holes).logits
            for config in ({**part, "max_length": 300}, {"page_size": PAGE, "max_length": 300})
        )
        assert_alike(torch.stack(found), torch.stack(expected))
    reads.clear()
    found, expected = (
        answer(model, ids, {**config, "kernel": kernel}, 4, attention_mask=padded).logits
        for config in ({**PART, "max_length": 300}, PART)
    )
    assert_alike(torch.stack(found), torch.stack(expected))
    assert {counts[0] for _, counts, *_ in reads} == {MOST}


@pytest.mark.parametrize(
    ("family", "options"),
    [("bloom", {}), ("llama", {"output_attentions": True})],
)
def test_attention_that_reads_no_pages_says_so(family, options, said):
    """Eager attention gives the weights that output_attentions asks for."""
    ids = tokens(1, 150)
    for config, count in (({"page_size": PAGE}, 0), (PART, 1)):
        model = make_model(family)
        if options:
            model.set_attn_implementation("eager")
        answer(model, ids, config, 3, **options)
        assert len(said("whatever the option 'read'")) == count


# -- other caches ----------------------------------------------------------------------------------------------------


@needs_library
def test_a_compiled_step_reads_as_an_eager_one(model, monkeypatch):
    # pytest listens to all loggers; torch writes out every guard for whoever listens to this one
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch._dynamo.reset()
    ids = tokens(1, 312)
    caches = [cache_of(model, "int4", max_length=400) for _ in range(2)]
    eager = steps(model, caches[0], ids, 304)
    with torch.no_grad():
        model(ids[:, :304], past_key_values=caches[1])
        compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
        found = [
            compiled(ids[:, at : at + 1], past_key_values=caches[1]).logits
            for at in range(304, 312)
        ]
        holes = torch.ones(1, 400, dtype=torch.long)
        holes[:, 100] = holes[:, 313:] = 0
        hidden = [
            run(ids[:, :1], attention_mask=holes, past_key_values=cache).logits
            for run, cache in ((compiled, caches[1]), (model, caches[0]))
        ]
        assert_alike(*hidden)
    assert_alike(torch.cat(found, 1), eager)
    torch._dynamo.reset()


# -- bad input -------------------------------------------------------------------------------------------------------


def test_models_without_layers_to_choose_for_are_errors():
    config = MistralConfig(**COMMON, sliding_window=80)
    with pytest.raises(
        CacheOptionError,
        match="read={'tokens': 100, 'from': 64}: no layer of 'mistral' attends to the whole text.* 80 tokens",
    ):
        kv_hf.PagedCache(config, **PART)
    latent = tiny_latent.shared_model("deepseek_v3")
    with pytest.raises(CacheOptionError, match="caches latents"):
        kv_hf.PagedCache(latent.config, **PART)


# -- pages outside of the device ----------------------------------------------------------------------------


@pytest.fixture(params=["disk", "late", pytest.param("eager", marks=pytest.mark.slow)])
def place(request, monkeypatch):
    """Options that offload pages."""
    return offload_to(request.param, monkeypatch)


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
    """The pages that each choice among offloaded pages led to: a list for each row."""
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

    def covering(self, *args):
        take, note = self.keys.take, lambda some: keys.append((self, list(some)))
        with monkeypatch.context() as patch:
            patch.setattr(self.keys, "take", lambda some: note(some) or take(some))
            cover(self, *args)

    monkeypatch.setattr(offload.OffloadedStorage, "fetch", fetching)
    monkeypatch.setattr(offload.PageIndex, "cover", covering)
    return whole, keys


def offloaded(model, keys="int4", kernel="reference", **options):
    values = "int4" if "mixed" in keys else keys
    return cache_of(model, keys, values=values, kernel=kernel, widen="never", **options)


def plain_steps(model, keys, **options):
    """Steps of two rows without offload; a page is sealed in one of them."""
    ids = torch.cat([tokens(1, BEGUN + 10, seed=seed) for seed in (1, 2)])
    return ids, steps(model, offloaded(model, keys, **options), ids, BEGUN)


def pages_of(copies):
    return [page for _, pages in copies for page in pages]


# -- the same results ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "options"),
    [
        ("exact", {}),
        ("int4", {}),
        ("int4", {"read": {"share": 0.4, "from": 64}}),
    ],
    ids=str,
)
def test_steps_are_those_of_a_cache_without_offload(model, keys, options, place, same_words):
    ids, plain = plain_steps(model, keys, **options)
    found = steps(model, offloaded(model, keys, **options, **place), ids, BEGUN)
    assert torch.equal(found, plain)


# -- operations ------------------------------------------------------------------------------------------------------


def test_ids_that_are_used_again_are_read_anew(model, place, same_words):
    """A crop gives pages back, and other tokens are sealed into them: the index must not tell of the former."""
    caches = [offloaded(model), offloaded(model, **place)]
    ids = tokens(1, BEGUN + 10)
    for seed in (3, 4):
        found = [steps(model, cache, ids, BEGUN if seed == 3 else None) for cache in caches]
        assert torch.equal(*found)
        for cache in caches:
            cache.crop(-150)
        ids = tokens(1, 150, seed=seed)
        with torch.no_grad():
            more = [model(ids, past_key_values=cache).logits for cache in caches]
        assert torch.equal(*more)
        ids = tokens(1, 10, seed=seed + 10)
    caches[1].check_integrity()


def test_copies_reordered_rows_states_and_resets_go_on_alike(model, place, same_words, tmp_path):
    ids = torch.cat([tokens(1, BEGUN + 10, seed=1), tokens(1, BEGUN + 10, seed=2)])
    cache, plain = offloaded(model, **place), offloaded(model)
    for one in (cache, plain):
        steps(model, one, ids[:, : BEGUN + 3], BEGUN)
    copied, turned = copy.deepcopy(cache), copy.deepcopy(cache)
    unpickled = pickle.loads(pickle.dumps(cache))
    cache.save(tmp_path / "held.safetensors", model)
    loaded = kv_hf.PagedCache.load(tmp_path / "held.safetensors", model)
    turned.reorder_cache(torch.tensor([1, 0]))
    rest = ids[:, BEGUN + 3 :]
    expected = steps(model, plain, rest)
    for one in (cache, copied, unpickled, loaded):
        assert torch.equal(steps(model, one, rest), expected)
    assert torch.equal(steps(model, turned, rest.flip(0)).flip(0), expected)
    cache.reset()
    plain.reset()
    del copied, turned
    ids = tokens(3, BEGUN + 2, seed=9)
    assert torch.equal(steps(model, cache, ids, BEGUN), steps(model, plain, ids, BEGUN))


# -- fetching --------------------------------------------------------------------------------------------------------


def test_a_step_fetches_the_pages_that_it_chose_and_no_others(model, choices, fetched):
    ids = tokens(1, BEGUN + 26)
    cache = offloaded(model, offload="disk")
    steps(model, cache, ids[:, : BEGUN + 1], BEGUN)
    whole, keys = fetched
    for layer in cache.paged_layers:
        # each page once, and those twice that say which words are read
        own = [page for index, pages in keys if index is layer.storage.index for page in pages]
        assert set(own) == set(range(12)) and len(own) == 12 + 8
    for at in range(BEGUN + 1, BEGUN + 26):
        sealed = len(cache._group.rows[0].pages)
        for seen in (choices, whole, keys):
            seen.clear()
        steps(model, cache, ids[:, at : at + 1])
        assert len(choices) == LAYERS
        # one buffer for all layers: each fetches all that it chose
        assert pages_of(whole) == [page for choice in choices for page in choice[0]]
        assert all(len(choice[0]) == MOST for choice in choices)
        # a page that was sealed behind the last step
        assert pages_of(keys) in ([], [sealed - 1] * LAYERS)
