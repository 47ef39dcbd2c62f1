"""Three cases of masks: none, a 2D mask that hides what pages hide, and all others, which go to the kernel; and those of long turns."""

from types import SimpleNamespace

import pytest
import rounding
import tiny_latent
import torch
import transformers
from measure.family_models import build_model
from tiny_models import left_padded, make_model, make_sliding, shared_model, tokens
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

import kv_hf
from kv_hf.bridge import masks
from kv_hf.bridge.masks import LazyMask
from kv_hf.hf import attention, dense
from kv_hf.hf import dispatch as wrappers
from kv_hf.pages import moved

GREEDY = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}
PAGED = {"cache_implementation": "paged_exact", "cache_config": {"page_size": 16}}
CACHES = {"growing": {}, "preallocated": {"max_length": 96}}
LENGTHS = [60, 33]


@pytest.fixture
def given(monkeypatch):
    """Note what kernels are given: queries, and whether there is a mask."""
    calls, original = [], attention.paged_attention

    def noted(call, kernel):
        calls.append((call.query.shape[2], call.mask is not None))
        return original(call, kernel)

    monkeypatch.setattr(attention, "paged_attention", noted)
    return calls


def whole_mask(columns, holes=(), lengths=LENGTHS):
    mask = torch.ones(2, columns, dtype=torch.long)
    mask[:, :60] = left_padded(lengths)["attention_mask"]
    for row, column in holes:
        mask[row, column] = 0
    return mask


def run(model, cache, steps, lengths=LENGTHS):
    """Return the logits of real columns: of a padded prompt, then of a forward for each (new columns, holes)."""
    inputs = left_padded(lengths)
    with torch.no_grad():
        out = model(**inputs, past_key_values=cache).logits
        logits, seen = [out[inputs["attention_mask"].bool()]], 60
        for new, holes in steps:
            mask = whole_mask(seen + new, holes, lengths)
            places = (mask.cumsum(-1) - 1)[:, seen:]
            out = model(
                tokens(2, new, seed=seen), attention_mask=mask, position_ids=places, past_key_values=cache
            )  # fmt: skip
            logits.append(out.logits)
            seen += new
    return logits


def compare(model, cache, steps, lengths=LENGTHS):
    expected = run(model, DynamicCache(config=model.config), steps, lengths)
    found = run(model, cache, steps, lengths)
    for one, other in zip(found, expected, strict=True):
        rounding.assert_close(one, other)
    cache.check_integrity()
    return expected


# one row alone hides columns, in a step, in a chunk, and the newest stored one
HIDING = [(1, ()), (1, [(1, 45)]), (1, ()), (5, [(0, 7), (0, 62)]), (3, ()), (1, [(1, 70)])]


# -- 2D masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize("lengths", [[60, 60], LENGTHS], ids=["even", "padded"])
def test_forwards_that_hide_columns_equal_dynamic_cache(family, kernel, lengths):
    model = make_model("llama") if family == "llama" else make_sliding(family, 24)
    cache = kv_hf.PagedCache(model.config, page_size=16, kernel=kernel)
    compare(model, cache, HIDING, lengths=lengths)


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_a_step_that_hides_a_column_reads_its_mask(options, given):
    """Trusting the mask away was wrong by 6.7 at logits of 7."""
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=16, **options)
    expected = compare(model, cache, HIDING)
    plain = run(model, DynamicCache(config=model.config), [(new, ()) for new, _ in HIDING])
    assert (expected[2] - plain[2])[1].abs().max() > 0.1
    # of two layers; equal masks are left out
    assert given == [(new, bool(holes)) for new, holes in HIDING for _ in range(2)]


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
def test_on_a_device_masks_are_compared_once_per_generate_and_in_every_direct_forward(
    options, monkeypatch, given
):
    monkeypatch.setattr(moved, "is_host", lambda device: False)
    compared, original = [], masks.hides_padding
    monkeypatch.setattr(
        masks, "hides_padding", lambda *asked: compared.append(1) or original(*asked)
    )
    model, inputs = make_model("llama"), left_padded(LENGTHS)
    paged = {**PAGED, "cache_config": {"page_size": 16, **options}}
    for calls, hidden in ((1, False), (2, False), (3, True)):
        if hidden:  # as generate() does where a prompt has padding tokens within
            inputs["attention_mask"][0, 20] = 0
        expected = model.generate(**inputs, **GREEDY, max_new_tokens=8)
        found = model.generate(**inputs, **GREEDY, **paged, max_new_tokens=8)
        assert torch.equal(found.sequences, expected.sequences) and len(compared) == calls
        assert given == [(1, hidden)] * 14
        given.clear()
    compared.clear()
    cache = kv_hf.PagedCache(model.config, page_size=16, **options)
    compare(model, cache, HIDING)
    assert len(compared) == len(HIDING)


@pytest.mark.parametrize(("named", "call"), [(None, "forward"), (None, "generate"), ("flex_attention", "generate")])  # fmt: skip
def test_a_cache_of_a_config_that_is_not_the_model_s_own_stores_no_padding(named, call):
    """Such as AutoConfig gives: it says nothing of the model's attention, and padding was quantized with the tokens beside it."""
    model = make_model("llama")
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = named
    cache = kv_hf.PagedCache(config, keys="int4", page_size=16)
    with torch.no_grad():
        if call == "forward":
            model(**left_padded(LENGTHS), past_key_values=cache)
        else:
            model.generate(**left_padded(LENGTHS), past_key_values=cache, max_new_tokens=1)
    assert cache._group.lengths().tolist() == LENGTHS


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("new", [1, 5])
def test_a_mask_that_shows_padding_is_refused_before_anything_changes(options, new):
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=16, **options)
    run(model, cache, [])
    before = cache.layers[0].keys
    wrong = whole_mask(60 + new)
    wrong[1, 26] = 1  # the last column of padding
    said = {"shows column 26 of row 1.*27 columns": wrong, "None, but.*\\[0, 27\\]": None}
    said["has 60 columns, and .* end at column 6.*with the . new tokens"] = whole_mask(60)
    for message, mask in said.items():
        with torch.no_grad(), pytest.raises(kv_hf.CacheMismatchError, match=message):
            model(tokens(2, new), attention_mask=mask, past_key_values=cache)
        assert torch.equal(cache.layers[0].keys, before)
    with torch.no_grad():
        model(tokens(2, new), attention_mask=whole_mask(60 + new), past_key_values=cache)
    cache.check_integrity()


def test_a_forward_behind_one_that_was_stopped_is_refused_for_that_whatever_its_mask(monkeypatch):
    """The mask of the call that was stopped seemed too short, and the message asked for a longer one."""
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config)
    run(model, cache, [])
    monkeypatch.setattr(model.model.layers[1], "forward", None)
    with torch.no_grad(), pytest.raises(TypeError):
        model(tokens(2, 3), attention_mask=whole_mask(63), past_key_values=cache)
    for mask in (whole_mask(63), whole_mask(61)):
        with torch.no_grad(), pytest.raises(kv_hf.InterruptedForwardError, match="half-way"):
            model(tokens(2, 1), attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("new", [1, 4])
def test_masks_with_a_function_of_the_model_are_read(options, new):
    """As models with images make them: what they hide or show beside causality, pages do not know."""
    model, masks = shared_model("llama"), []
    for cache in (
        DynamicCache(config=model.config),
        kv_hf.PagedCache(model.config, page_size=16, **options),
    ):
        run(model, cache, [])
        for changes in ({}, {"and_mask_function": lambda b, h, q, k: k % 7 != 3}):
            masks.append(
                create_causal_mask(
                    model.config, torch.empty(2, new, 64), whole_mask(60 + new), cache, **changes
                )
            )
    assert [type(mask) is LazyMask for mask in masks[2:]] == [True, False]
    for found, expected in zip(masks[2:], masks[:2], strict=True):
        found = found & True
        assert torch.equal(found[..., : 60 + new], expected)
        assert not found[..., 60 + new :].any()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("edit", [lambda mask: None, torch.ones_like], ids=["ignore", "show"])
def test_padding_is_what_the_mask_of_the_model_hides_not_that_of_generate(edit, attention):
    """Code around a model may change the mask: with the mask of generate() 29 of 60 tokens were others."""
    model, inputs = make_model("llama"), left_padded([60, 9, 33])
    model.set_attn_implementation(attention)
    options = {**GREEDY, "max_new_tokens": 8}
    found = model.generate(**inputs, **options, **PAGED)
    assert [row.padding for row in found.past_key_values._group.rows] == [0, 51, 27]
    forward = model.forward
    model.forward = lambda *args, attention_mask, **kwargs: forward(
        *args, attention_mask=edit(attention_mask), **kwargs
    )
    expected = model.generate(**inputs, **options)
    found = model.generate(**inputs, **options, **PAGED)
    assert torch.equal(expected.sequences, found.sequences)
    assert [row.padding for row in found.past_key_values._group.rows] == [0, 0, 0]


# -- 4D masks --------------------------------------------------------------------------------------------------------

SHOWN = {
    "bool": torch.ones(2, 1, 1, 61, dtype=torch.bool),
    "float": torch.zeros(2, 1, 1, 61),
    "one row": torch.zeros(1, 4, 1, 61),
    "chunk": torch.ones(2, 1, 5, 65, dtype=torch.bool).tril(60),
}


@pytest.mark.parametrize("options", CACHES.values(), ids=CACHES)
@pytest.mark.parametrize("shown", SHOWN)
def test_4d_masks_that_show_what_was_left_out_as_padding_are_refused(shown, options):
    """With DynamicCache they attend to the padding, which pages do not have: logits differed without a word."""
    model, mask = make_model("llama"), SHOWN[shown]
    cache = kv_hf.PagedCache(model.config, page_size=16, **options)
    run(model, cache, [])
    new = mask.shape[-1] - 60
    with torch.no_grad(), pytest.raises(kv_hf.CacheMismatchError, match="27 columns.*reset"):
        model(
            tokens(2, new),
            attention_mask=mask,
            past_key_values=cache,
            position_ids=torch.arange(60, 60 + new)[None],
        )


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("make", [shared_model, tiny_latent.make_model])
def test_4d_masks_of_the_columns_so_far_fit_a_cache_that_has_room_for_more(make, dtype):
    """They were refused behind the first layer, and with latents by an error of torch's own."""
    model, ids = make("llama" if make is shared_model else "deepseek_v3"), tokens(2, 30)
    caches = kv_hf.PagedCache(model.config, max_length=96), DynamicCache(config=model.config)
    for first, end in ((0, 20), (20, 29), (29, 30)):
        mask = torch.ones(end, end, dtype=torch.bool).tril()[None, None, first:]
        mask[..., 7] = end < 29
        if dtype != torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)
        given = {"input_ids": ids[:, first:end], "attention_mask": mask}
        with torch.no_grad():
            found, wanted = (model(**given, past_key_values=one).logits for one in caches)
        rounding.assert_close(found, wanted)


def sliding_step(make_mask):
    """The logits of a step behind padded rows on sliding layers whose first columns are gone, by a mask of what they offer."""
    model, lengths = make_sliding("mistral", 24), [100, 33]
    cache, inputs = kv_hf.PagedCache(model.config, page_size=16), left_padded(lengths)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 1).long()], 1)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        columns, offset = cache.get_mask_sizes(1, 0)
        assert offset == 64 and columns == 37
        return model(
            tokens(2, 1),
            attention_mask=make_mask(mask, offset),
            position_ids=mask.sum(-1, keepdim=True) - 1,
            past_key_values=cache,
        ).logits


def test_4d_masks_over_sliding_layers_begin_at_the_first_column_that_is_left():
    """The padding of a row is counted from there too: 3 of its 67 columns are left."""
    expected = sliding_step(lambda mask, gone: mask)
    found = sliding_step(lambda mask, gone: mask[:, None, None, gone:].bool())
    rounding.assert_close(found, expected)
    with pytest.raises(kv_hf.CacheMismatchError, match="shows column 0 of row 1.* 3 columns"):
        sliding_step(lambda mask, gone: torch.ones(2, 1, 1, 37, dtype=torch.bool))
    with pytest.raises(kv_hf.CacheMismatchError, match="has 101 columns, .* layer offers 37"):
        sliding_step(
            lambda mask, gone: torch.nn.functional.pad(mask[:, None, None, gone:].bool(), (0, gone))
        )


# -- masks that are left out come back where a model computes with its keys, or with the mask, before attention --------

# these repeat or join the cached keys before they call the attention function, or hand latents over
CHANGING = ("deepseek_v3", "minicpm3", "jetmoe", "diffllama")


@pytest.mark.filterwarnings("ignore::kv_hf.KVCacheWarning")
@pytest.mark.parametrize("lengths", [[50, 50], [50, 33]], ids=str)
@pytest.mark.parametrize("name", CHANGING)
def test_models_that_change_cached_keys_equal_dynamic_cache(name, lengths):
    """In steps, in a chunk of a second turn, and in the chunks of a prompt."""
    model, inputs = build_model(name), left_padded(lengths)
    whole = {
        "input_ids": torch.cat([inputs["input_ids"], tokens(2, 20, 5)], 1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(2, 20).long()], 1),
    }
    options = {**GREEDY, "max_new_tokens": 8, "eos_token_id": None}
    found = []
    for make_cache in (DynamicCache, kv_hf.PagedCache):
        cache, chunked = make_cache(config=model.config), make_cache(config=model.config)
        model.generate(**inputs, **{**options, "max_new_tokens": 1}, past_key_values=cache)
        logits = model.generate(**whole, **options, past_key_values=cache).logits
        options_of_chunks = {**options, "prefill_chunk_size": 16, "past_key_values": chunked}
        found.append([*logits, *model.generate(**whole, **options_of_chunks).logits])
    for expected, other in zip(*found, strict=True):
        rounding.assert_close(other, expected)


def every_seventh(mask):
    return torch.arange(mask.shape[-1]) % 7 == 3


WRITES = {
    "slice": lambda mask: mask.__setitem__((..., slice(3, None, 7)), False),
    "view": lambda mask: mask[:, :, :].transpose(2, 3)[:, :, 3::7].zero_(),
    "and": lambda mask: mask.__iand__(~every_seventh(mask)),
    "out": lambda mask: torch.mul(mask.clone(), ~every_seventh(mask), out=mask),
}


def without_mask(model, cache):
    """Return the logits of a chunk of two rows, which share one mask."""
    with torch.no_grad():
        model(tokens(2, 60), past_key_values=cache)
        return [model(tokens(2, 9, seed=1), past_key_values=cache).logits]


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("write", WRITES)
def test_models_that_write_to_their_mask_equal_dynamic_cache(write, padded):
    """Such writes went to a temporary mask, and attention left out the mask that it was given."""

    def hide(module, args, kwargs):
        mask = kwargs["attention_mask"]
        if mask is not None:
            mask = mask if type(mask) is LazyMask else mask.clone()  # its rows share memory
            WRITES[write](mask)
        return args, {**kwargs, "attention_mask": mask}

    found = []
    for make_cache in (DynamicCache, kv_hf.PagedCache):
        model = make_model("llama")
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True)
        cache = make_cache(config=model.config)
        steps = [(9, ()), (1, ())]
        found.append(run(model, cache, steps) if padded else without_mask(model, cache))
    for a, b in zip(*found, strict=True):
        rounding.assert_close(b, a)


# -- masks of chunks of many queries, which are written out ----------------------------------------------------------


def pretend_fused(monkeypatch, flash=True):
    """Let the CPU pass for a GPU whose fused kernels begin causality at the last key; count what they are given."""
    taken = []
    attend = dense.scaled_dot_product_attention

    def noted(query, key, value, **options):
        taken.append((query.shape[1] // key.shape[1], options["enable_gqa"]))
        return attend(query, key, value, **options)

    monkeypatch.setattr(dense, "takes_bias", lambda *tensors: True)
    monkeypatch.setattr(dense, "can_use_flash_attention", lambda params: flash)
    monkeypatch.setattr(dense, "scaled_dot_product_attention", noted)
    return taken


def count_masks(monkeypatch):
    """Count the masks that are made."""
    made = []
    make = wrappers.sdpa_mask
    monkeypatch.setattr(wrappers, "sdpa_mask", lambda *a, **k: made.append(1) or make(*a, **k))
    return made


def test_tensors_take_a_causal_bias_on_one_kind_of_device_and_outside_of_dispatch_modes():
    """torch cannot make its bias while a mode such as a counter of operations is active."""
    x = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert dense.takes_bias(x, x, x)
    assert not dense.takes_bias(*(SimpleNamespace(device=torch.device("cpu")),) * 3)
    with FlopCounterMode(display=False):
        assert not dense.takes_bias(x, x, x)


def long_turn(lengths):
    """Compare a long turn behind a prompt."""
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=16, kernel="reference")
    compare(model, cache, [(90, ())], lengths=lengths)


@pytest.mark.parametrize(("flash", "given"), [(True, (2, True)), (False, (1, False))])
def test_long_turns_need_no_mask_where_nothing_but_later_tokens_is_hidden(
    monkeypatch, flash, given
):
    taken, made = pretend_fused(monkeypatch, flash), count_masks(monkeypatch)
    long_turn([60, 60])
    assert taken == [given] * 2 and not made  # layers


@pytest.mark.parametrize("lengths", [[60, 60], LENGTHS], ids=str)
def test_long_turns_make_their_mask_once(monkeypatch, lengths):
    """Without fused kernels, and where rows are padded, all layers share one mask."""
    taken = pretend_fused(monkeypatch) if lengths == LENGTHS else []
    made = count_masks(monkeypatch)
    long_turn(lengths)
    assert len(made) == 1 and not taken  # the second forward's


def test_long_turns_with_a_position_bias_keep_their_mask(monkeypatch):
    """What bends scores is no business of fused kernels."""
    taken, made = pretend_fused(monkeypatch), count_masks(monkeypatch)
    model = make_model("llama")
    cache = kv_hf.PagedCache(model.config, page_size=16, kernel="reference")
    cache.update(*torch.randn(2, 1, 2, 100, 16), 0)
    length, _ = cache.get_mask_sizes(70, 0)
    mask = transformers.AttentionMaskInterface()["sdpa"](
        batch_size=1, q_length=70, kv_length=length, q_offset=100, attention_mask=None
    )
    keys, values = cache.update(*torch.randn(2, 1, 2, 70, 16), 0)
    bias = torch.randn(1, 4, 70, 170)
    module = model.model.layers[0].self_attn
    query = torch.randn(1, 4, 70, 16)
    attention.kv_hf_attention(module, query, keys, values, mask, position_bias=bias)
    assert not taken and len(made) == 1
    attention.kv_hf_attention(module, query, keys, values, mask)
    assert len(taken) == 1
