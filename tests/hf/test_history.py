"""A cache knows the text that went through generate(): an edited one, and another model, are errors with a way out."""

import copy
import pickle
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tiny_models import left_padded, make_model, shared_model, tokens

import kv_hf
from kv_hf.cache import identity
from kv_hf.cache.model_shape import CROP_TAKES_LENGTHS
from kv_hf.cache.origin import Origin
from kv_hf.hf import history

GREEDY = {"max_new_tokens": 12, "do_sample": False}
PAGES = {"page_size": 16, "keys": "int4"}


def first_turn(model=None, ids=None, **options):
    """A cache behind one turn, and the text of that turn."""
    model = model or shared_model("llama")
    cache = kv_hf.PagedCache(model.config, **{**PAGES, **options})
    ids = tokens(1, 40) if ids is None else ids
    return cache, model.generate(ids, past_key_values=cache, **GREEDY)


def next_turn(text, seed=5):
    return torch.cat([text, tokens(len(text), 6, seed)], dim=1)


def go_on(cache, ids, model=None, **options):
    return (model or shared_model("llama")).generate(
        ids, past_key_values=cache, **{**GREEDY, **options}
    )


def edited(ids, row=0, column=20):
    changed = ids.clone()
    changed[row, column] = (changed[row, column] - 3 + 1) % 94 + 3
    return changed


def refused(cache, ids, column=20, row=0, **options):
    """The message of the error about another text."""
    with pytest.raises(kv_hf.CacheMismatchError, match=f"token {column} of row {row} is") as error:
        go_on(cache, ids, **options)
    return str(error.value)


# -- text that goes on, and text that was edited -----------------------------------------------------------


def test_generate_refuses_an_edited_text_and_leaves_the_cache_as_it_was():
    cache, text = first_turn()
    other, same = first_turn()
    assert torch.equal(text, same)
    message = refused(cache, edited(next_turn(text)))
    refused(cache, edited(next_turn(text), column=45), 45)  # among the tokens that it made
    assert "the 51 tokens that this cache holds" in message
    for remedy in ("cache.crop(-31)", "cache.reset()", "on_edit='crop'"):
        assert remedy in message
    assert torch.equal(go_on(cache, next_turn(text)), go_on(other, next_turn(text)))


CHANGED = {
    "edited": lambda text: {"input_ids": edited(next_turn(text))},
    "from-the-start": lambda text: {"input_ids": edited(next_turn(text), column=0)},
    "shorter": lambda text: {"input_ids": text[:, :40]},
    "the-same": lambda text: {"input_ids": text},
    "another-batch": lambda text: left_padded([40, 25]),
    "padded": lambda text: padded(next_turn(text), 3),
    "with-a-hole": lambda text: padded(next_turn(text), 3, 10),
}


def padded(ids, columns, first=0):
    """A text of which some columns are hidden that a cache held as tokens."""
    mask = torch.ones_like(ids)
    mask[:, first : first + columns] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("before", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_cache_that_may_go_back_keeps_the_common_beginning(change, before):
    """It answers as a new one does, also where it has to begin anew or does not know what it holds."""
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, **PAGES | {"keys": "exact", "on_edit": "crop"})
    text = go_on(cache, tokens(1, 40), **before)
    for _ in range(2):
        inputs = change(text)
        expected = model.generate(**inputs, **GREEDY)
        assert torch.equal(model.generate(**inputs, past_key_values=cache, **GREEDY), expected)
        cache.check_integrity()


def test_a_cache_that_may_go_back_computes_no_more_than_it_must():
    cache, text = first_turn(keys="exact", on_edit="crop")
    computed = []
    hook = shared_model("llama").register_forward_pre_hook(
        lambda module, args, given: computed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    ids = edited(next_turn(text))
    go_on(cache, ids)
    hook.remove()
    assert computed[0] == ids.shape[1] - 20


def test_a_text_that_is_asked_again_or_edited_goes_on_behind_the_crop_that_is_named():
    cache, text = first_turn(keys="exact")
    for length, crop in ((40, 12), (51, 1)):
        says = rf"do not continue .* cache.crop\(-{crop}\)"
        with pytest.raises(kv_hf.CacheMismatchError, match=says):
            go_on(cache, text[:, :length])
    refused(cache, edited(tokens(1, 40)))
    cache.crop(-12)
    assert torch.equal(go_on(cache, tokens(1, 40)), text)


def test_rows_of_a_batch_are_compared_without_their_padding():
    model, inputs = shared_model("llama"), left_padded([30, 12])
    cache = kv_hf.PagedCache(model.config, **PAGES)
    text = model.generate(**inputs, past_key_values=cache, **GREEDY)
    ids = next_turn(text)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 18, dtype=torch.long)], dim=1)
    message = refused(cache, edited(ids, 1, 25), 25, 1, attention_mask=mask)
    assert "row 1" in message
    ids[1, :18] = 7  # padding may hold anything
    go_on(cache, ids, attention_mask=mask)


# -- every other way to fill a cache -----------------------------------------------------------------------


def by_embeddings(model, cache):
    embeds = model.get_input_embeddings()(tokens(1, 30))
    model.generate(inputs_embeds=embeds, past_key_values=cache, **GREEDY)


def directly(model, cache):
    model(tokens(1, 30), past_key_values=cache)


@pytest.mark.parametrize("fill", [by_embeddings, directly])
def test_text_that_is_not_known_is_said_and_then_what_the_user_says(fill):
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, **PAGES)
    fill(model, cache)
    assert cache.token_ids is None
    with pytest.warns(kv_hf.KVCacheWarning, match=r"does not know the token ids.*cache.note"):
        text = go_on(cache, tokens(1, 60, seed=3))
    assert torch.equal(cache.token_ids, text)
    refused(cache, edited(next_turn(text)))


LOOKUP = {"prompt_lookup_num_tokens": 3}


def test_drafts_behind_a_filled_cache_take_new_tokens_alone():
    """transformers computes a whole text behind what is there, whatever the cache: wrong tokens, without a word."""
    cache, text = first_turn(keys="exact")
    text = next_turn(text)
    expected = shared_model("llama").generate(text, **GREEDY)
    with pytest.raises(kv_hf.CacheMismatchError, match="behind the 51 tokens .* new tokens alone"):
        go_on(cache, text, **LOOKUP)
    if not CROP_TAKES_LENGTHS:  # 5.17 cuts the mask, which is refused as well
        new = go_on(cache, text[:, 51:], attention_mask=torch.ones_like(text), **LOOKUP)
        assert torch.equal(torch.cat([text[:, :51], new], 1), expected)
    cache, _ = first_turn(keys="exact", on_edit="crop")
    assert torch.equal(go_on(cache, text, **LOOKUP), expected)
    assert torch.equal(cache.token_ids, expected)


@pytest.mark.parametrize("drafts", [{}, LOOKUP], ids=str)
@pytest.mark.parametrize("kept", [False, True], ids=["behind the prefill", "in its store"])
def test_a_stopped_generate_leaves_the_prompt_known(kept, drafts, monkeypatch):
    model, ids = shared_model("llama"), tokens(1, 40)
    store = kv_hf.PrefixStore() if kept else None
    cache = kv_hf.PagedCache(model.config, prefix_store=store, **PAGES)

    def stop(*args):
        raise KeyboardInterrupt

    streamer = SimpleNamespace(
        put=Mock(side_effect=[None, KeyboardInterrupt])
    )  # the prompt, tokens
    with monkeypatch.context() as patch:
        patch.setattr(kv_hf.PrefixStore, "add", stop)
        with pytest.raises(KeyboardInterrupt):
            go_on(cache, ids, streamer=streamer, **drafts)
    assert torch.equal(cache.token_ids, ids)
    refused(cache, edited(next_turn(ids)))
    go_on(cache, next_turn(ids))


# -- changes of the cache ----------------------------------------------------------------------------------


def test_rows_move_with_their_text():
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config, **PAGES)
    text = model.generate(tokens(3, 30), past_key_values=cache, **GREEDY)
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert torch.equal(cache.token_ids, text[[2, 0, 1]])
    cache.batch_select_indices(torch.tensor([True, False, True]))
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.token_ids, text[[2, 2, 1, 1]])
    go_on(cache, next_turn(text[[2, 2, 1, 1]]))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_know_the_text(copied):
    cache, text = first_turn()
    made = copied(cache)
    refused(made, edited(next_turn(text)))
    go_on(made, next_turn(text))
    cache.crop(-20)
    assert made.token_ids.shape[1] > cache.token_ids.shape[1]


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_saved_cache_knows_its_text(with_ids, tmp_path):
    model = shared_model("llama")
    cache, text = first_turn()
    cache.save(tmp_path / "cache", model, text if with_ids else None)
    loaded = kv_hf.PagedCache.load(tmp_path / "cache", model)
    assert torch.equal(loaded.token_ids, text)
    refused(loaded, edited(next_turn(text)))
    later = go_on(loaded, next_turn(text))
    refused(loaded, edited(next_turn(later), column=55), 55)


# -- models ------------------------------------------------------------------------------------------------


def test_generate_refuses_a_cache_that_another_model_filled():
    cache, text = first_turn()
    other = make_model("llama")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(
        kv_hf.CacheMismatchError,
        match="other weights: model.layers.1.mlp.up_proj.weight differs .*reset",
    ):
        go_on(cache, next_turn(text), other)
    cache.reset()
    go_on(cache, next_turn(text), other)


# -- cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_tokens", [2, 30])
def test_ids_and_weights_are_looked_at_once_per_call(monkeypatch, new_tokens):
    cache, text = first_turn()
    calls = []
    for owner, name in (
        (history, "first_difference"),
        (identity, "_weights"),
        (Origin, "note_text"),
    ):
        original = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *a, of=original, called=name: calls.append(called) or of(*a)
        )
    go_on(cache, next_turn(text), max_new_tokens=new_tokens)
    # noted: the prompt, and the text at the end
    assert sorted(calls) == ["_weights", "first_difference", "note_text", "note_text"]


# -- what the cache does not hold is not compared ------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_length": 80}], ids=str)
def test_text_of_direct_calls_can_be_noted(options):
    """A cache that the model filled without generate() knows its text once it is told."""
    model, ids = shared_model("llama"), tokens(1, 40)
    cache = kv_hf.PagedCache(model.config, **PAGES, **options)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for wrong in (ids[:, :39], ids.repeat(2, 1), ids.float()):
        with pytest.raises(
            kv_hf.CacheMismatchError, match=r"token_ids must be .* \[1, at least 40\]"
        ):
            cache.note(wrong)
    cache.note(next_turn(ids))  # what is not held yet is not compared
    assert torch.equal(cache.token_ids, ids) and cache.origin.known_columns == 40
    refused(cache, edited(next_turn(ids)))
    expected = model.generate(next_turn(ids), past_key_values=first_prefill(model, ids), **GREEDY)
    assert torch.equal(go_on(cache, next_turn(ids)), expected)


def first_prefill(model, ids):
    """A cache of which nobody said what it holds."""
    cache = kv_hf.PagedCache(model.config, **PAGES)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return cache
