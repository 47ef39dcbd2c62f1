"""Steps that read a part of a long text: what is read, that nothing is lost, and every operation on such a cache."""

import logging
import warnings

import pytest
import rounding
import tiny_latent
import torch
from tiny_models import COMMON, make_model, tokens
from transformers import DynamicCache, MistralConfig

import kv_hf
from kv_hf import notices
from kv_hf.backends import dispatch
from kv_hf.backends.cpu import library
from kv_hf.errors import CacheOptionError
from kv_hf.evaluation.accuracy import next_chunk
from kv_hf.read_budget import pages_for

PAGE, SINKS = 16, 4
PART = {"page_size": PAGE, "read_tokens": 100, "read_from": 64}
MOST = pages_for(100, SINKS, PAGE)  # 5 pages
needs_c = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))


@pytest.fixture(scope="module")
def model():
    """A model whose attention is far from even, so that a choice of pages matters."""
    made = make_model("llama", num_hidden_layers=3)
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
    assert len(reads) == 30 * 3
    for queries, counts, pages, kv in reads:
        assert queries == 1 and counts == [MOST]
        assert pages[0][-1] == int(kv.block_table[0, int(kv.num_pages[0]) - 1])
        assert counts[0] * PAGE + int(kv.exact_lens[0]) <= 100
    assert (
        len({tuple(pages[0]) for _, _, pages, _ in reads}) > 3
    )  # layers and steps choose for themselves


@pytest.mark.parametrize(
    "options", [{"read_tokens": 400}, {"read_top_p": 0.999999, "read_tokens": None}]
)
def test_a_budget_for_all_reads_all(model, options):
    ids = tokens(1, 330)
    exact = DynamicCache(config=model.config)
    assert_alike(steps(model, cache_of(model, **options), ids, 300), steps(model, exact, ids, 300))


def test_a_share_and_a_threshold(model, reads):
    ids = tokens(1, 310)
    steps(model, cache_of(model, read_tokens=None, read_share=0.5), ids, 300)
    assert {counts[0] for _, counts, _, _ in reads} == {18 // 2}
    reads.clear()
    steps(model, cache_of(model, read_tokens=None, read_top_p=0.8), ids, 300)
    found = {counts[0] for _, counts, _, _ in reads}
    assert len(found) > 1 and max(found) < 19  # as many as the text needs
    reads.clear()
    steps(model, cache_of(model, read_top_p=0.8), ids, 300)
    assert max(counts[0] for _, counts, _, _ in reads) <= MOST


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
    other = answer(model, text, {**part, "read_tokens": 120}).logits[0]
    assert_alike(other, found)  # a prompt, of which another call's answers are not taken
    computed = store.stats().tokens_computed
    answer(model, text, part)
    assert store.stats().tokens_computed - computed < 60


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


@pytest.mark.parametrize("kernel", ["reference", pytest.param("c", marks=needs_c)])
def test_a_preallocated_cache_reads_everything_where_the_mask_has_holes(model, reads, kernel):
    """Not only of long texts: a mask that the cache does not know is read as it is."""
    ids = tokens(1, 200)
    holes, padded = torch.ones_like(ids), torch.ones_like(ids)
    holes[0, 50:120] = padded[0, :40] = 0
    for part in (PART, {**PART, "read_from": 4096}):
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
def test_attention_that_reads_no_pages_says_so(family, options):
    """Eager attention gives the weights that output_attentions asks for."""
    ids = tokens(1, 150)
    for config, said in (({"page_size": PAGE}, False), (PART, True)):
        notices.forget()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model = make_model(family)
            if options:
                model.set_attn_implementation("eager")
            answer(model, ids, config, 3, **options)
        assert any("whatever read_tokens" in str(one.message) for one in found) == said


def test_a_forward_of_many_queries_reads_everything(model, reads):
    ids = tokens(1, 340)
    cache, exact = cache_of(model), DynamicCache(config=model.config)
    with torch.no_grad():
        for one in (cache, exact):
            model(ids[:, :300], past_key_values=one)
        found = [model(ids[:, 300:], past_key_values=one).logits for one in (cache, exact)]
    assert_alike(*found)
    assert not reads
    assert next_chunk(cache, 310) == 1  # what is scored is what steps read


# -- other caches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["reference", pytest.param("c", marks=needs_c)])
def test_a_preallocated_cache_reads_as_one_that_grows(model, kernel):
    ids = tokens(2, 320)
    grows = steps(model, cache_of(model, "int4", kernel=kernel), ids, 300)
    held = cache_of(model, "int4", kernel=kernel, max_length=400)
    assert torch.equal(steps(model, held, ids, 300), grows)


@needs_c
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
        match="read_tokens=100: no layer of 'mistral' attends to the whole text.* 80 tokens",
    ):
        kv_hf.PagedCache(config, **PART)
    latent = tiny_latent.shared_model("deepseek_v3")
    with pytest.raises(CacheOptionError, match="caches latents"):
        kv_hf.PagedCache(latent.config, **PART)
