"""What generate() does with a paged cache, each against the same call on DynamicCache, and what stands around generate()."""

import copy
import threading
from typing import Any

import pytest
import torch
import transformers
from beside_stock import compare, pages, run
from tiny_models import ONE_FORMAT, left_padded, make_model, shared_model, tokens
from tiny_tokenizer import make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

import kv_hf
from kv_hf.quant.codec import decode

PAGES = pages()
FORMATS = tuple(ONE_FORMAT)
GREEDY = {"max_new_tokens": 24, "do_sample": False}
EVEN, PADDED = {"input_ids": tokens(2, 60)}, left_padded([60, 3, 31])
REPEATING = {"input_ids": tokens(1, 9).repeat(1, 6)}


@pytest.fixture(scope="module")
def model():
    return shared_model("llama")


class StopsRows(StoppingCriteria):
    """End row i behind its token number 5 + 7 * i, as per-row criteria may since 4.39."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.tensor([self.calls >= 5 + 7 * row for row in range(input_ids.shape[0])])


class Shifts(LogitsProcessor):
    """Prefer the token behind the last one."""

    def __call__(self, input_ids, scores):
        return scores + 2 * torch.nn.functional.one_hot(
            (input_ids[:, -1] + 1) % scores.shape[-1], scores.shape[-1]
        )


def allowed(row, ids):
    return [5, 6, 7, 9 + len(ids) % 5, 20 + row]


# beams end at different lengths
ENDS = {"eos_token_id": [5, 11, 17, 23, 31, 41, 53, 67]}
SAMPLE = {"do_sample": True}
MARK = transformers.SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)
# options of generate(); functions make what has a state
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "beams that end early": {**ENDS, "num_beams": 3, "early_stopping": True, "length_penalty": 2.0},
    "beams that never do": {**ENDS, "num_beams": 3, "early_stopping": "never", "length_penalty": -0.5},
    "several beams": {"num_beams": 4, "num_return_sequences": 4},
    "sampled beams": {**SAMPLE, "num_beams": 3, "temperature": 0.7, "top_k": 12},
    "samples": {**SAMPLE, "num_return_sequences": 3, "top_p": 0.8},
    "chunks of 7": {"prefill_chunk_size": 7},
    "chunks of 19": {"prefill_chunk_size": 19},
    "penalties": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "bad_words_ids": [[5], [6, 7]]},
    "criteria": {"stopping_criteria": lambda: StoppingCriteriaList([StopsRows()])},
    "processors": {"logits_processor": lambda: LogitsProcessorList([Shifts()]), "num_beams": 3},
    "constrained": {"prefix_allowed_tokens_fn": lambda: allowed, "num_beams": 2},
    "watermark": {"watermarking_config": transformers.WatermarkingConfig()},
    "sampled watermark": {**SAMPLE, "watermarking_config": MARK},
}  # fmt: skip
# of one row
SINGLE: dict[str, dict[str, Any]] = {
    "guidance": {"guidance_scale": 1.5},
    "guidance, negative prompt": {"guidance_scale": 1.5, "negative_prompt_ids": tokens(1, 9)},
}


@pytest.mark.parametrize("inputs", [EVEN, PADDED], ids=["even", "padded"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_generate_equals_dynamic_cache(model, options, inputs):
    compare(model, inputs, **options)


@pytest.mark.parametrize("options", SINGLE.values(), ids=SINGLE)
def test_generate_of_one_row_equals_dynamic_cache(model, options):
    compare(model, REPEATING, **options)


def word_tokenizer(words):
    """Return a tokenizer of one token per word."""
    vocabulary = {word: number for number, word in enumerate(words)}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")


def two_vocabularies():
    """Return the keyword arguments of a draft whose vocabulary has another order and more words."""
    words = ["<pad>", "<bos>", "<eos>", *(f"w{n}" for n in range(3, 97))]
    others = [*words[:3], *reversed(words[3:]), *(f"x{n}" for n in range(8))]
    return {
        "assistant_model": make_model("llama", num_hidden_layers=1, vocab_size=len(others)),
        "tokenizer": word_tokenizer(words),
        "assistant_tokenizer": word_tokenizer(others),
    }


def drafts(kind, model):
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": 6}
    if kind == "early-exit":
        return {"assistant_early_exit": 1}
    if kind == "vocabulary":
        return two_vocabularies()
    # the model itself accepts nearly everything, a smaller one nearly nothing
    draft = model if kind == "itself" else make_model("llama", num_hidden_layers=1)
    # transformers drafts up to 20 tokens and adapts a threshold where scikit-learn is installed; more than a page of
    # doubtful tokens would be sealed, which is said once
    draft.generation_config.num_assistant_tokens = 12
    draft.generation_config.assistant_confidence_threshold = 0
    return {"assistant_model": draft}


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["draft", "itself", "lookup", "early-exit", "vocabulary"])
def test_drafted_decoding_equals_dynamic_cache(kind, sampled):
    if kind == "vocabulary" and sampled:
        pytest.skip("DynamicCache itself gives other tokens at each call here")
    model, found = make_model("llama"), []
    for cache in (None, PAGES):
        # a new draft each time: transformers remembers in it how many tokens it had better draft
        way = drafts(kind, make_model("llama"))
        found.append(run(model, REPEATING, cache, do_sample=sampled, **way).sequences)
    assert torch.equal(*found)
    if not sampled:
        assert torch.equal(found[1], run(model, REPEATING, PAGES).sequences)


class Recorded(kv_hf.PagedCache):
    """A cache that remembers the keys and values of the tokens that are still in it."""

    forwards = rejected = 0

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        kept = vars(self).setdefault("kept", {})
        old = kept.get(layer_idx)
        new = (key_states.clone(), value_states.clone())
        kept[layer_idx] = (
            new if old is None else tuple(torch.cat(pair, 2) for pair in zip(old, new, strict=True))
        )
        self.forwards += layer_idx == 0
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove):
        before = self.get_seq_length()
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self.rejected += before - length
        for index, sides in self.kept.items():
            self.kept[index] = tuple(side[:, :, :length] for side in sides)


def append_same(caches, rows=1, length=1, seed=0):
    """Append the same random tokens to every layer of several caches of the tiny llama."""
    numbers = torch.Generator().manual_seed(seed)
    for index in range(len(caches[0])):
        sides = torch.randn(2, rows, 2, length, 16, generator=numbers)
        for cache in caches:
            cache.update(*sides, index)


def assert_same_bytes(one, other):
    """All pages and all exact tokens of all rows of two caches are the same bytes."""
    for cache in (one, other):
        cache.check_integrity()
    for mine, theirs in zip(one.group.rows, other.group.rows, strict=True):
        assert (len(mine.pages), mine.exact, mine.padding) == (
            len(theirs.pages),
            theirs.exact,
            theirs.padding,
        )
    for a, b in zip(one.paged_layers, other.paged_layers, strict=True):
        for side in (0, 1):
            for index, row in enumerate(one.group.rows):
                ids = [torch.tensor(c.group.rows[index].pages).long() for c in (one, other)]
                fields = [layer.storage.sides[side].fields for layer in (a, b)]
                for name in fields[0]:
                    assert torch.equal(fields[0][name][ids[0]], fields[1][name][ids[1]])
                windows = [layer.residuals[side].tokens[index, :, : row.exact] for layer in (a, b)]
                assert torch.equal(*windows)


@pytest.mark.parametrize("kind", ["lookup", "draft", "early-exit"])
@pytest.mark.parametrize("implementation", FORMATS)
def test_rejected_candidates_leave_no_byte(implementation, kind):
    """The pages and windows are those of a cache that was given the accepted tokens alone."""
    model = make_model("llama")
    name = ONE_FORMAT[implementation]
    cache = Recorded(model.config, keys=name, page_size=16)
    model.generate(
        REPEATING["input_ids"],
        past_key_values=cache,
        max_new_tokens=60,
        do_sample=False,
        **drafts(kind, model),
    )
    assert cache.rejected > 0
    plain = kv_hf.PagedCache(model.config, keys=name, page_size=16)
    for index, sides in cache.kept.items():
        plain.update(*sides, index)
    assert plain.get_seq_length() == cache.get_seq_length()
    cache.group.end_recording()  # as the next generate() does; what is confirmed is sealed with the next token
    append_same([cache, plain])
    assert cache.group.pool.num_held > 5
    assert_same_bytes(cache, plain)


# -- loops of the user's own ------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [EVEN, PADDED], ids=["even", "padded"])
def test_custom_generate_equals_dynamic_cache(model, inputs):
    """As contrastive search does: rows are repeated, chosen among and cut back in every step."""

    def decode(model, input_ids, generation_config, **given):
        rows, cache, mask = len(input_ids), given["past_key_values"], given.get("attention_mask")
        mask = torch.ones_like(input_ids) if mask is None else mask
        logits, new = model(**forward(input_ids, mask, cache)).logits[:, -1], input_ids[:, -1:]
        for _ in range(generation_config.max_new_tokens):
            chances, best = logits.softmax(-1).topk(3)
            mask = torch.cat([mask, mask.new_ones(rows, 1)], 1)
            cache.batch_repeat_interleave(3)
            wide = mask.repeat_interleave(3, 0)
            tried = model(**forward(best.view(-1, 1), wide, cache)).logits[:, -1]
            score = chances - 0.5 * tried.softmax(-1).amax(-1).view(rows, 3)
            chosen = score.argmax(-1)
            cache.batch_select_indices(torch.arange(rows) * 3 + chosen)
            cache.crop(-1)  # and once more, with the chosen one alone
            new = best.gather(1, chosen[:, None])
            logits = model(**forward(new, mask, cache)).logits[:, -1]
            input_ids = torch.cat([input_ids, new], 1)
        return input_ids

    def forward(ids, mask, cache):
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        named = {"attention_mask": mask, "position_ids": places, "past_key_values": cache}
        return {"input_ids": ids, **named}

    options = {"max_new_tokens": 20, "custom_generate": decode}
    found = [model.generate(**inputs, **options, **cache) for cache in ({}, PAGES)]
    assert torch.equal(*found)


# -- chats ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("removed", [0, 1, 12, 30], ids=["on", "token", "into-page", "pages"])
def test_chat_that_goes_back_equals_dynamic_cache(model, removed, padded):
    """The user takes back the end of an answer and asks something else, three times."""
    inputs = left_padded([50, 20]) if padded else {"input_ids": tokens(2, 50)}
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    mask = torch.ones_like(ids) if mask is None else mask
    found = []
    for options in ({}, PAGES):
        sequence, cache = ids, None
        for turn in range(4):
            width = sequence.shape[1] - mask.shape[1]
            out = model.generate(
                sequence,
                attention_mask=torch.cat([mask, mask.new_ones(2, width)], 1),
                max_new_tokens=25,
                do_sample=False,
                return_dict_in_generate=True,
                **(options if cache is None else {"past_key_values": cache}),
            )
            cache = out.past_key_values
            if removed:
                cache.crop(-removed)
            kept = out.sequences[:, : cache.get_seq_length() if removed else None]
            sequence = torch.cat([kept, tokens(2, 15, seed=turn + 1)], -1)
        found.append(out.sequences)
        if options:
            cache.check_integrity()
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["lookup", "draft", "early-exit"])
def test_chat_goes_on_behind_drafted_decoding_like_dynamic_cache(kind):
    """Past recording of the first turn must not outlive it: the next ones seal every page that is full."""
    found = []
    for options in ({}, PAGES):
        model, sequence, cache = make_model("llama"), REPEATING["input_ids"], None
        for turn, way in enumerate((drafts(kind, model), {}, {"do_sample": True}, {})):
            torch.manual_seed(turn)
            out = model.generate(
                sequence,
                max_new_tokens=20,
                return_dict_in_generate=True,
                **{"do_sample": False, **way},
                **(options if cache is None else {"past_key_values": cache}),
            )
            cache = copy.deepcopy(out.past_key_values)
            assert cache.get_seq_length() == out.sequences.shape[1] - 1
            sequence = torch.cat([out.sequences, tokens(1, 10, seed=turn + 1)], -1)
        found.append(out.sequences)
    cache.check_integrity()
    assert cache.group.pool.num_held == (cache.get_seq_length() - 4) // 16
    assert torch.equal(*found)


@pytest.mark.parametrize("length", [1, 20, 168, 169])
def test_a_text_that_does_not_continue_the_cache_is_refused(length):
    """DynamicCache cuts such prompts in silence, or fails with an empty tensor."""
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config)
    options = {"past_key_values": cache, "do_sample": False, "eos_token_id": None}
    text = model.generate(tokens(1, 150), max_new_tokens=20, **options)
    assert cache.get_seq_length() == 169
    with pytest.raises(
        kv_hf.CacheMismatchError, match=f"{length} tokens do not continue.*seen 169"
    ):
        model.generate(text[:, :length], max_new_tokens=2, **options)
    longer = torch.cat([text, tokens(1, 5)], -1)
    found = model.generate(longer, max_new_tokens=9, **options)
    assert torch.equal(
        found, model.generate(longer, max_new_tokens=9, do_sample=False, eos_token_id=None)
    )


# -- formats ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", FORMATS)
def test_row_does_not_depend_on_its_batch(model, implementation):
    inputs = left_padded([90, 17, 45])
    options = {"cache_implementation": implementation, "cache_config": {"page_size": 16}}
    kept = {"max_new_tokens": 40, "do_sample": False, "return_dict_in_generate": True}
    together = model.generate(**inputs, **options, **kept)
    for row, length in enumerate([90, 17, 45]):
        alone = model.generate(inputs["input_ids"][row : row + 1, 90 - length :], **options, **kept)
        assert torch.equal(alone.sequences[0, length:], together.sequences[row, 90:])
        cache, only = together.past_key_values, alone.past_key_values
        pages = cache.group.rows[row].pages
        assert len(pages) == len(only.group.rows[0].pages) > 0
        for mine, theirs in zip(cache.paged_layers, only.paged_layers, strict=True):
            for side in (0, 1):
                held = ((mine, pages), (theirs, only.group.rows[0].pages))
                stored = [(layer.storage.sides[side], ids) for layer, ids in held]
                found = [decode(one.take(ids), one.spec, torch.float32) for one, ids in stored]
                torch.testing.assert_close(*found, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("implementation", FORMATS)
def test_cache_filled_in_inference_mode_goes_on_outside_of_it(model, implementation):
    """Tensors made in inference mode cannot be written to outside: the cache must not hold such tensors."""
    ids = tokens(1, 60)
    options = {"cache_implementation": implementation, "cache_config": {"page_size": 16}}
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=5, return_dict_in_generate=True, **options)
    cache = out.past_key_values
    more = torch.cat([out.sequences, tokens(1, 4)], -1)
    found = model.generate(more, past_key_values=cache, max_new_tokens=30, do_sample=False)
    cache.crop(-40)
    cache.check_integrity()
    assert found.shape == (1, 99)


# -- names and options ------------------------------------------------------------------------------------------


def test_names_and_options_outlive_calls_and_files(tmp_path):
    model, ids, kept = make_model("llama"), tokens(1, 40), {"return_dict_in_generate": True}
    options = {"page_size": 32, "sink_tokens": 2}
    given = {"cache_implementation": "paged_int4", "cache_config": options}
    for _ in range(2):
        found = [model.generate(ids, max_new_tokens=3, **given, **kept)]
    assert options == {"page_size": 32, "sink_tokens": 2}  # not consumed
    GenerationConfig(**given, pad_token_id=0).save_pretrained(tmp_path / "config")
    loaded = GenerationConfig.from_pretrained(tmp_path / "config")
    found.append(model.generate(ids, loaded, max_new_tokens=3, eos_token_id=None, **kept))
    model.generation_config.update(**given)
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model")
    found.append(loaded.generate(ids, max_new_tokens=3, **kept))
    for one in found:
        assert one.past_key_values.options == kv_hf.CacheConfig("int4", "int4", **options)


def test_layer_overrides_of_the_target_do_not_reach_its_assistant():
    model, assistant = make_model("llama"), make_model("llama", num_hidden_layers=1)
    options = {
        "max_new_tokens": 10,
        "do_sample": False,
        "cache_implementation": "paged_exact",
        "cache_config": {"layers": {"1": "int8"}},
    }
    out = model.generate(tokens(1, 30), assistant_model=assistant, **options)
    assert torch.equal(out, model.generate(tokens(1, 30), **options))


def test_a_model_that_prepares_its_cache_by_names_gets_pages():
    """As MusicGen and RAG do, where generate() ended in a TypeError."""
    model, given = make_model("llama"), {"attention_mask": torch.ones(1, 5)}
    config = GenerationConfig(cache_implementation="paged_int4", max_length=20)
    model._prepare_cache_for_generation(
        config, given, generation_mode=None, batch_size=1, max_cache_length=19
    )
    assert isinstance(given["past_key_values"], kv_hf.PagedCache)


# -- pipelines, streamers and tokenizers ------------------------------------------------------------------------

TEXTS = [
    "Four score and seven years ago our fathers brought forth on this continent a new nation. " * 3,
    "Now we are engaged in a great civil war",
    "The",
]


@pytest.fixture(scope="module")
def tokenizer():
    made = make_tokenizer(chat=True)
    made.padding_side = "left"
    return made


@pytest.fixture(scope="module")
def speaker():
    return make_model("llama", vocab_size=1000)


def encoded(tokenizer, texts):
    found = tokenizer(texts, return_tensors="pt", padding=True)
    return {name: found[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_pipeline_gives_the_texts_of_dynamic_cache(speaker, tokenizer, rows, chat):
    texts = [[{"role": "user", "content": text}] for text in TEXTS] if chat else TEXTS
    pipe = transformers.pipeline("text-generation", model=speaker, tokenizer=tokenizer)
    expected = pipe(texts, batch_size=rows, **GREEDY)
    assert pipe(texts, batch_size=rows, **GREEDY, **PAGES) == expected
    always = transformers.pipeline("text-generation", model=speaker, tokenizer=tokenizer, **PAGES)
    assert always(texts, batch_size=rows, **GREEDY) == expected


def test_streamers_get_the_texts_of_dynamic_cache(speaker, tokenizer):
    inputs, texts = encoded(tokenizer, TEXTS[:1]), []
    for cache in ({}, PAGES):
        streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
        options = {**inputs, **GREEDY, **cache, "streamer": streamer}
        thread = threading.Thread(target=speaker.generate, kwargs=options)
        thread.start()
        texts.append(list(streamer))
        thread.join()
    assert texts[0] == texts[1] and "".join(texts[0])


@pytest.mark.parametrize("rows", [1, 3])
def test_stop_strings_give_the_tokens_of_dynamic_cache(speaker, tokenizer, rows):
    inputs = encoded(tokenizer, TEXTS[:rows])
    text = tokenizer.decode(speaker.generate(**inputs, **GREEDY)[0, -12:-9])
    held = compare(speaker, inputs, **GREEDY, stop_strings=[text], tokenizer=tokenizer)
    assert held.get_seq_length() < inputs["input_ids"].shape[1] + 23 or rows > 1


# -- modes and dtypes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpoints"])
def test_training_flags_give_the_tokens_of_dynamic_cache(training, checkpoints):
    """With checkpoints in training transformers leaves the cache out: wrong texts, but the same ones."""
    model = make_model("llama").train(training)
    if checkpoints:
        model.gradient_checkpointing_enable()
    assert torch.equal(*(model.generate(**PADDED, **GREEDY, **cache) for cache in ({}, PAGES)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_model_of_another_dtype_after_its_first_use(dtype):
    """Halves round otherwise in the kernel: they are compared on the same dense attention."""
    model = make_model("llama")
    first = run(model, PADDED, PAGES)
    model.to(dtype)
    # eager masks of rows that see nothing are nan in float64, with any cache
    model.set_attn_implementation("sdpa" if dtype == torch.float64 else "eager")
    assert torch.equal(*(model.generate(**PADDED, **GREEDY, **cache) for cache in ({}, PAGES)))
    text = torch.cat([first.sequences, tokens(3, 5)], 1)
    with pytest.raises(kv_hf.CacheMismatchError, match="one cache per model, dtype and adapters"):
        model.generate(text, past_key_values=first.past_key_values, **GREEDY)


def torchao(model, kind):
    quantization = pytest.importorskip("torchao.quantization")
    quantization.quantize_(model, getattr(quantization, kind)())


def quanto(model, kind):
    library = pytest.importorskip("optimum.quanto")
    library.quantize(model, weights=getattr(library, kind), exclude="lm_head")
    library.freeze(model)


QUANTIZED = [
    (torchao, "Int8WeightOnlyConfig"),
    (torchao, "Int8DynamicActivationInt8WeightConfig"),
    (quanto, "qint8"),
    (quanto, "qint4"),
]


@pytest.mark.parametrize(("quantize", "kind"), QUANTIZED, ids=[kind for _, kind in QUANTIZED])
def test_quantized_weights_give_the_tokens_of_dynamic_cache(quantize, kind, tmp_path):
    """Their numbers lie in tensors within tensors: stores and saved caches read those."""
    from kv_hf.cache.identity import plain_parts

    model, store = make_model("llama"), kv_hf.PrefixStore()
    plain = compare(model, PADDED, **GREEDY)
    plain.save(tmp_path / "plain", model)
    quantize(model, kind)
    cache = compare(model, PADDED, **GREEDY)
    cache.save(tmp_path / "cache", model)
    kv_hf.PagedCache.load(tmp_path / "cache", model).check_integrity()
    with pytest.raises(kv_hf.CacheFileError):
        kv_hf.PagedCache.load(tmp_path / "plain", model)
    space = store.bind_model(model)
    assert store.bind_model(model) == space
    scale = list(plain_parts(model.model.layers[0].self_attn.k_proj.weight))[1]
    with torch.no_grad():
        scale.mul_(2)
    assert store.bind_model(model) != space
    with pytest.raises(kv_hf.CacheFileError, match="k_proj.weight differs"):
        kv_hf.PagedCache.load(tmp_path / "cache", model)
