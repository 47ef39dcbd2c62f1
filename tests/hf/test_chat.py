"""Conversations: answers of a model without a cache, whatever happened between the turns."""

import copy

import pytest
import torch
import transformers
from tiny_models import COMMON, make_layers, make_model
from tiny_tokenizer import TURNS, make_tokenizer

import kv_hf
from kv_hf.errors import CacheOptionError

TINY_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 50}
SHORT = {"max_new_tokens": 12, "do_sample": False}


def make_chat(model=None, cache="paged_exact", **options):
    tokenizer = make_tokenizer(1000, chat=True)
    tokenizer.chat_template = TURNS
    model = make_model("llama", vocab_size=1000) if model is None else model
    return kv_hf.Chat(model, tokenizer, cache, page_size=16, **options)


def without_cache(chat, messages, **arguments):
    """What the model answers to messages, computed anew."""
    inputs = chat.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    found = chat.model.generate(**inputs, **SHORT | arguments)
    return chat.tokenizer.decode(found[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def say(chat, text):
    """Say a text; the answer must be that of the model without a cache."""
    expected = without_cache(chat, [*chat.messages, {"role": "user", "content": text}])
    assert chat(text, **SHORT) == expected
    assert chat.messages[-1] == {"role": "assistant", "content": expected}


def of_kind(kind):
    """A model of full attention, or with layers of another kind."""
    if kind == "full":
        return make_model("llama", vocab_size=1000)
    if kind == "sliding":
        config = make_layers("gemma3_text", vocab_size=1000)
    else:
        layers = ["conv", "full_attention"]
        config = transformers.Lfm2Config(**COMMON | {"vocab_size": 1000, "layer_types": layers})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    return model


def edit(chat):
    chat.messages[1]["content"] = "another question than the one before"


def drop(chat):
    del chat.messages[1:3]


def leave(chat):
    pass


@pytest.mark.parametrize("change", [leave, edit, drop])
@pytest.mark.parametrize("kind", ["full", "sliding", "linear"])
def test_every_turn_answers_as_without_a_cache(kind, change):
    """Linear layers cannot go back, and sliding ones have given pages back: all is computed anew there."""
    chat = make_chat(of_kind(kind), system="one sentence")
    for text in ("Four score and seven years ago", "our fathers brought forth", "a nation"):
        say(chat, text)
        change(chat)
    assert chat.messages[0] == {"role": "system", "content": "one sentence"}


def test_a_turn_computes_the_new_tokens_alone():
    chat = make_chat()
    chat("Four score and seven years ago", **SHORT)
    held, computed = chat.cache.get_seq_length(), []
    chat.model.register_forward_pre_hook(
        lambda module, args, given: computed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    chat("our fathers", **SHORT)
    assert computed[0] + held < chat.cache.get_seq_length()
    assert set(computed[1:]) == {1}


def test_a_stream_gives_the_answer_in_pieces_and_ends_where_its_reader_stops():
    chat = make_chat()
    expected = without_cache(chat, [{"role": "user", "content": "Four score"}])
    assert "".join(chat.stream("Four score", **SHORT)) == expected
    pieces = chat.stream("and seven", max_new_tokens=400, min_new_tokens=400, do_sample=False)
    first = next(pieces)
    pieces.close()
    assert chat.messages[-1]["content"].startswith(first)
    assert chat.cache.get_seq_length() < 300
    say(chat, "years ago")


def test_a_stream_computes_under_its_caller_s_autocast():
    chat, found = make_chat(), set()
    linear = chat.model.model.layers[0].mlp.up_proj
    with torch.autocast("cpu", torch.bfloat16):
        hook = linear.register_forward_hook(lambda *given: found.add(given[2].dtype))
        assert "".join(chat.stream("Four score", **SHORT))
    hook.remove()
    assert found == {torch.bfloat16}


def test_a_turn_that_fails_leaves_the_messages_and_the_next_one_is_right():
    def interrupt(*args):
        raise KeyboardInterrupt

    chat = make_chat()
    say(chat, "Four score")
    before = list(chat.messages)
    with pytest.raises(KeyboardInterrupt):
        chat("and", **SHORT, stopping_criteria=[interrupt])
    hook = chat.model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        chat("and seven", **SHORT)
    with pytest.raises(KeyboardInterrupt):
        list(chat.stream("and seven", **SHORT))
    hook.remove()
    with pytest.raises(ValueError, match="temperatur"):
        list(chat.stream("and seven", temperatur=1))
    assert chat.messages == before
    say(chat, "and seven years")


def test_a_turn_while_another_computes_is_refused():
    chat = make_chat()
    pieces = chat.stream("Four score", max_new_tokens=400, min_new_tokens=400, do_sample=False)
    next(pieces)
    with pytest.raises(kv_hf.KVCacheError, match="another turn of this Chat still computes"):
        chat("and seven")
    with pytest.raises(KeyboardInterrupt):  # where it is read
        pieces.throw(KeyboardInterrupt)
    assert chat.messages == []
    say(chat, "years ago")


def test_a_deep_copy_goes_on_by_itself():
    store = kv_hf.PrefixStore(max_bytes=2**24)
    chat = make_chat(store=store)
    say(chat, "Four score")
    other = copy.deepcopy(chat)
    assert other.model is chat.model
    say(other, "and seven")
    say(chat, "years ago")
    assert len(other.messages) == len(chat.messages) == 4


def test_assisted_turns_beams_scores_and_configs_of_other_caches():
    """transformers gives a filled cache wrong positions in assisted decoding: it begins anew."""
    chat = make_chat()
    chat.model.generation_config.cache_implementation = "static"
    chat.model.generation_config.use_cache = False
    for arguments in (
        {},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": make_model("llama", vocab_size=1000)},
        {"num_beams": 3},
        {"return_dict_in_generate": True},
        {},
    ):
        messages = [*chat.messages, {"role": "user", "content": "Four score"}]
        how = {"num_beams": arguments.get("num_beams", 1), "use_cache": True}
        expected = without_cache(chat, messages, cache_implementation=None, **how)
        assert chat("Four score", **SHORT, **arguments) == expected


def test_conversations_share_a_system_message():
    store = kv_hf.PrefixStore(max_bytes=2**24)
    model = make_model("llama", vocab_size=1000)
    system = (
        "Four score and seven years ago our fathers brought forth on this continent, a new nation "
        * 3
    )
    for text in ("Who speaks?", "When was it?"):
        say(make_chat(model, system=system, store=store), text)
    assert store.stats().rows_hit == 1


def test_bad_arguments_are_named():
    model = make_model("llama")
    with pytest.raises(CacheOptionError, match="tokenizer must have a chat template"):
        kv_hf.Chat(model, make_tokenizer(1000))
    with pytest.raises(CacheOptionError, match="got 'org/name'; load it with"):
        kv_hf.Chat("org/name", make_tokenizer(1000, chat=True))
    with pytest.raises(CacheOptionError, match="paged_int4"):
        make_chat(model, "paged_int44")
    with pytest.raises(CacheOptionError, match="page_sizes"):
        make_chat(model, page_sizes=3)
    with pytest.raises(CacheOptionError, match="T5ForConditionalGeneration is an encoder-decoder"):
        make_chat(transformers.T5ForConditionalGeneration(transformers.T5Config(**TINY_T5)))
    chat = make_chat(make_model("llama", vocab_size=1000))
    for name in ("past_key_values", "attention_mask", "inputs_embeds", "use_cache"):
        with pytest.raises(CacheOptionError, match=f"{name} is given by the Chat itself"):
            chat("Four score", **{name: None})
    with pytest.raises(CacheOptionError, match="leave streamer out"):
        next(chat.stream("Four score", streamer=None))
    config = transformers.GenerationConfig(max_new_tokens=3, do_sample=False)
    assert chat("Four score", generation_config=config) == without_cache(
        chat, [{"role": "user", "content": "Four score"}], max_new_tokens=3
    )


def test_a_quantized_conversation_goes_on_over_its_pages():
    """As a loop of one's own with one cache does, which reads the turns before from pages."""
    chat = make_chat(cache="paged_int4", recent_tokens=0)
    options = {"keys": "int4", "page_size": 16, "on_edit": "crop"}
    cache, messages = kv_hf.PagedCache(chat.model.config, **options), []
    for text in ("Four score and seven years ago", "our fathers brought forth"):
        messages.append({"role": "user", "content": text})
        expected = without_cache(chat, messages, past_key_values=cache)
        messages.append({"role": "assistant", "content": expected})
        assert chat(text, **SHORT) == expected
    assert cache.get_seq_length() == chat.cache.get_seq_length() > 2 * 16
