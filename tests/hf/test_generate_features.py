"""More of generate() on pages against DynamicCache: scores, beams, assistants, custom loops, chats that go back."""

import copy
from types import FunctionType

import pytest
import rounding
import torch
from tiny_models import ONE_FORMAT, left_padded, make_model, shared_model, tokens
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

import kv_hf

PAGES = {"cache_implementation": "paged_exact", "cache_config": {"page_size": 16}}
FORMATS = tuple(ONE_FORMAT)
SCORES = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.fixture(scope="module")
def model():
    return shared_model("llama")


def both(model, inputs, **options):
    """Run the same generate() on DynamicCache and on exact pages."""
    found = []
    for cache in ({}, PAGES):
        torch.manual_seed(7)
        more = {
            name: make() if isinstance(make, FunctionType) else make
            for name, make in options.items()
        }
        found.append(model.generate(**inputs, **cache, **more))
    return found


def inputs_of(padded):
    return left_padded([60, 3, 31]) if padded else {"input_ids": tokens(2, 60)}


def assert_same_output(expected, found, steps):
    """Equal tokens; numbers as close as two fp32 runs are."""
    assert torch.equal(expected.sequences, found.sequences)
    for name in ("logits", "scores"):
        for mine, theirs in zip(found[name], expected[name], strict=True):
            rounding.assert_close(mine, theirs)
    if "sequences_scores" in expected:
        assert torch.equal(expected.beam_indices, found.beam_indices)
        terms = steps**2 * rounding.TERMS  # every step's score errs
        rounding.assert_close(found.sequences_scores, expected.sequences_scores, terms)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False, "num_beams": 4},
        {"do_sample": False, "num_beams": 3, "early_stopping": True, "length_penalty": 2.0},
        {"do_sample": False, "num_beams": 3, "early_stopping": "never", "length_penalty": -0.5},
        {"do_sample": False, "num_beams": 4, "num_return_sequences": 4},
        {"do_sample": True, "num_beams": 3, "temperature": 0.7, "top_k": 12},
        {"do_sample": True, "num_return_sequences": 3, "top_p": 0.8},
        {"do_sample": False, "prefill_chunk_size": 19},
        {"do_sample": False, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    ],
    ids=["beams", "early", "never", "returns", "beam-sample", "sample", "chunks", "penalties"],
)
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_tokens_and_scores_equal_dynamic_cache(model, options, padded):
    if "early_stopping" in options:  # beams end at different lengths
        options = {**options, "eos_token_id": [5, 11, 17, 23, 31, 41, 53, 67]}
    expected, found = both(model, inputs_of(padded), max_new_tokens=40, **SCORES, **options)
    assert_same_output(expected, found, 40)
    assert isinstance(found.past_key_values, kv_hf.PagedCache)
    found.past_key_values.check_integrity()
    assert found.past_key_values.group.pool.num_held > 0
    assert found.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_returned_cache_holds_what_dynamic_cache_holds(model, options):
    options = {"do_sample": False, "return_dict_in_generate": True, **options}
    expected, found = both(model, inputs_of(False), max_new_tokens=30, **options)
    for mine, theirs in zip(found.past_key_values, expected.past_key_values, strict=True):
        for side in (0, 1):
            rounding.assert_close(mine[side], theirs[side])


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


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize(
    "options",
    [
        {"stopping_criteria": lambda: StoppingCriteriaList([StopsRows()])},
        {"logits_processor": lambda: LogitsProcessorList([Shifts()])},
        {"logits_processor": lambda: LogitsProcessorList([Shifts()]), "num_beams": 3},
        {"prefix_allowed_tokens_fn": lambda: lambda row, ids: list(range(3, 60)), "num_beams": 2},
    ],
    ids=["stopping", "processor", "processor-beams", "allowed"],
)
def test_users_own_criteria_and_processors(model, options, padded):
    inputs = inputs_of(padded)
    expected, found = both(model, inputs, max_new_tokens=40, do_sample=False, **SCORES, **options)
    assert_same_output(expected, found, 40)


# -- candidates that are taken back -------------------------------------------------------------------------


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
    model = make_model("llama")
    ids = tokens(1, 9).repeat(1, 6)
    options = {"max_new_tokens": 40, "do_sample": sampled}
    found = []
    for cache in ({}, PAGES):
        torch.manual_seed(7)
        # a new draft each time: transformers remembers in it how many tokens it had better draft
        found.append(model.generate(ids, **cache, **options, **drafts(kind, make_model("llama"))))
    if kind == "vocabulary" and sampled:
        assert found[1].shape == (1, 94)  # DynamicCache itself gives other tokens at each call here
        return
    assert torch.equal(*found)
    if not sampled:
        assert torch.equal(found[1], model.generate(ids, **PAGES, **options))


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
        tokens(1, 9).repeat(1, 6),
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


# -- loops of the user's own ----------------------------------------------------------------------------------


def search(model, input_ids, generation_config, road, **model_kwargs):
    """Decode like contrastive search: try three tokens per row, keep the one that repeats the context least.

    `road` says how the cache follows: "select" repeats and selects rows, "reorder" lets all candidates follow the
    chosen one and selects, "crop" tries one candidate after the other and takes it back.
    """
    cache, mask = model_kwargs["past_key_values"], model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask
    rows, tried = input_ids.shape[0], 3

    def forward(ids, mask):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            output_hidden_states=True,
        )
        return out.logits[:, -1], out.hidden_states[-1]

    logits, context = forward(input_ids, mask)
    for _ in range(generation_config.max_new_tokens):
        candidates = logits.softmax(-1).topk(tried)
        mask = torch.cat([mask, mask.new_ones(rows, 1)], -1)
        if road == "crop":
            found = []
            for number in range(tried):
                found.append(forward(candidates.indices[:, number, None], mask))
                cache.crop(-1)
            logits, hidden = (
                torch.stack(part, 1).flatten(0, 1) for part in zip(*found, strict=True)
            )
        else:
            cache.batch_repeat_interleave(tried)
            wide = mask.repeat_interleave(tried, 0)
            logits, hidden = forward(candidates.indices.reshape(-1, 1), wide)
        like = torch.cosine_similarity(hidden, context.repeat_interleave(tried, 0), dim=-1)
        score = candidates.values - 0.6 * like.amax(-1).view(rows, tried)
        best = score.argmax(-1)
        index = torch.arange(rows) * tried + best
        chosen = candidates.indices[torch.arange(rows), best, None]
        if road == "crop":
            forward(chosen, mask)
        elif road == "reorder":
            cache.reorder_cache(index.repeat_interleave(tried))
            cache.batch_select_indices(torch.arange(rows * tried) % tried == 0)
        else:
            cache.batch_select_indices(index)
        logits = logits[index]
        context = torch.cat([context, hidden[index]], 1)
        input_ids = torch.cat([input_ids, chosen], -1)
    return input_ids


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("road", ["select", "reorder", "crop"])
def test_custom_generate_equals_dynamic_cache(model, road, padded):
    def decode(model, input_ids, generation_config, road, **model_kwargs):
        for name in ("logits_processor", "stopping_criteria", "use_cache"):
            model_kwargs.pop(name, None)
        return search(model, input_ids, generation_config, road, **model_kwargs)

    inputs = left_padded([44, 3, 31]) if padded else {"input_ids": tokens(2, 44)}
    expected, found = both(
        model, inputs, max_new_tokens=24, custom_generate=lambda: decode, road=road
    )
    assert torch.equal(expected, found)


# -- chats ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("removed", [1, 12, 30], ids=["token", "into-page", "pages"])
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
            cache.crop(-removed)
            kept = out.sequences[:, : cache.get_seq_length()]
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
        model, sequence, cache = make_model("llama"), tokens(1, 9).repeat(1, 6), None
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


@pytest.mark.parametrize("keys", ["exact", "int4"])
def test_crop_to_nothing_leaves_empty_tensors_and_a_usable_cache(model, keys):
    cache = kv_hf.PagedCache(model.config, keys=keys, page_size=16)
    dynamic = DynamicCache(config=model.config)
    for each in (cache, dynamic):
        with torch.no_grad():
            model(tokens(2, 50), past_key_values=each)
        each.crop(-50)
    for mine, theirs in zip(cache, dynamic, strict=True):
        assert mine[0].shape == theirs[0].shape == (2, 2, 0, 16)
        assert mine[1].dtype == theirs[1].dtype
    assert cache.group.pool.num_held == 0
    append_same([cache], rows=2, length=20)
    assert cache.layers[0].keys.shape == (2, 2, 20, 16)


# -- copies -------------------------------------------------------------------------------------------------------


def dense(cache):
    return [tuple(side.clone() for side in (layer.keys, layer.values)) for layer in cache.layers]


def assert_dense(cache, expected):
    cache.check_integrity()
    for layer, (keys, values) in zip(cache.layers, expected, strict=True):
        assert torch.equal(layer.keys, keys)
        assert torch.equal(layer.values, values)


CHANGES = {
    "append": lambda cache: append_same([cache], rows=2, length=40, seed=9),
    "crop": lambda cache: cache.crop(-30),
    "crop, then fill its pages": lambda cache: (
        cache.crop(-45),
        append_same([cache], rows=2, length=64, seed=3),
    ),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(3),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "reset, then fill": lambda cache: (
        cache.reset(),
        append_same([cache], rows=2, length=70, seed=4),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("implementation", FORMATS)
def test_copies_are_independent(model, implementation, change):
    """Whatever one does, the other keeps its bytes and goes on as if it were alone; both ways, and for copies of copies."""
    name = ONE_FORMAT[implementation]
    cache = kv_hf.PagedCache(model.config, keys=name, page_size=16)
    with torch.no_grad():
        model(tokens(2, 60), past_key_values=cache)
    before = dense(cache)
    alone = copy.deepcopy(cache)  # never met again before the end
    for changed, kept in ((0, 1), (1, 0)):
        pair = [cache, copy.deepcopy(copy.deepcopy(cache))]
        CHANGES[change](pair[changed])
        assert_dense(pair[kept], before)
        append_same([pair[kept]], rows=2, length=50, seed=5)
        fresh = copy.deepcopy(alone)
        append_same([fresh], rows=2, length=50, seed=5)
        assert_dense(pair[kept], dense(fresh))
        pair[changed].check_integrity()
        cache = copy.deepcopy(alone)


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


def test_new_tokens_alone_continue_with_a_mask_of_the_whole_text():
    model = shared_model("llama")
    cache = kv_hf.PagedCache(model.config)
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 9}
    text = model.generate(tokens(1, 50), past_key_values=cache, **options)
    whole = torch.cat([text, tokens(1, 5)], -1)
    new = whole[:, cache.get_seq_length() :]
    mask = torch.ones_like(whole)
    found = model.generate(new, attention_mask=mask, past_key_values=cache, **options)
    assert torch.equal(
        found[:, new.shape[1] :], model.generate(whole, **options)[:, whole.shape[1] :]
    )
