"""lm-eval's scores read the stored cache: equal to lm-eval's own where it is exact, changed where it is broken."""

import copy

import pytest
import torch
from tiny_encoder_decoders import shared_model as encoder_decoder
from tiny_harness import sentence, tiny_tokenizer
from tiny_models import make_model, shared_model
from transformers import DynamicCache

import kv_hf
from kv_hf.evaluation.cache_kinds import cache_kind, why_not
from kv_hf.evaluation.harness.caches import harness_cache, read_config
from kv_hf.evaluation.harness.task_plan import plan_prefixes
from kv_hf.pages.storage import PageStorage

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from kv_hf.evaluation.harness.model import KVCacheLM

MAX_LENGTH = 200
PAIRS = [
    (sentence(30 + 13 * number, number), " " + sentence(length, 100 * number + length))
    for number in range(4)
    for length in (1, 3, 25, 90)
]
PAIRS += [
    ("", sentence(40, 7)),
    (sentence(190, 8), " " + sentence(30, 9)),  # too long: loses tokens on the left
    (sentence(30, 0), " w4"),  # one token behind a context that others share
    (sentence(30, 0), " w5"),
]
TEXTS = [(sentence(70 + 60 * number, 50 + number),) for number in range(4)]
PROMPTS = [
    (sentence(30 + 13 * number, number), {"until": ["w9"], "max_gen_toks": 12})
    for number in range(4)
]


@pytest.fixture(scope="module", name="model")
def double_model():
    return make_model("llama", dtype=torch.float64)  # fp32 noise alone can flip a rounded code


def requests(kind, arguments):
    return [
        Instance(request_type=kind, doc={}, arguments=given, idx=number)
        for number, given in enumerate(arguments)
    ]


def lm_of(model, cache="paged_exact", batch_size=4, **options):
    return KVCacheLM(
        pretrained=model,
        tokenizer=tiny_tokenizer(),
        batch_size=batch_size,
        cache_implementation=cache,
        **{"max_length": MAX_LENGTH, **options},
    )


def scores(lm):
    pairs = lm.loglikelihood(requests("loglikelihood", PAIRS), disable_tqdm=True)
    texts = lm.loglikelihood_rolling(requests("loglikelihood_rolling", TEXTS), disable_tqdm=True)
    made = lm.generate_until(requests("generate_until", PROMPTS), disable_tqdm=True)
    sums = torch.tensor([total for total, _ in pairs], dtype=torch.float64)
    return sums, [greedy for _, greedy in pairs], torch.tensor(texts, dtype=torch.float64), made


@pytest.fixture(scope="module")
def own(model):
    """lm-eval's own numbers."""
    return scores(
        HFLM(pretrained=model, tokenizer=tiny_tokenizer(), batch_size=4, max_length=MAX_LENGTH)
    )


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("cache", ["paged_exact:page_size=16", "dynamic", "static"])
def test_exact_caches_reproduce_hf(model, own, cache, batch_size):
    found = scores(lm_of(model, cache, batch_size))
    torch.testing.assert_close(found[0], own[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[2], own[2], rtol=0, atol=1e-10)
    assert (found[1], found[3]) == (own[1], own[3])


@pytest.mark.parametrize(
    "options", [{"reread_tokens": 0}, {"reread_tokens": 40, "rolling_prefill": 1}]
)
def test_split_of_a_text_does_not_matter_to_exact_pages(model, own, options):
    found = scores(lm_of(model, "paged_exact:page_size=16", **options))
    torch.testing.assert_close(found[0], own[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(found[2], own[2], rtol=0, atol=1e-10)


def token_by_token(model, kind, context, continuation, reread=1):
    """Return the log-likelihood by the slowest road: one row, an own prefill, one token per forward."""
    text = torch.tensor([*context, *continuation])
    cache = kind.make(model.config, len(text))
    done = max(1, len(context) - reread)
    total = 0.0
    with torch.no_grad():
        logits = model(text[None, :done], past_key_values=cache, use_cache=True).logits[0, -1]
        for position in range(done, len(text)):
            if position >= len(context):
                total += float(torch.log_softmax(logits, -1)[text[position]])
            step = text[None, position : position + 1]
            logits = model(step, past_key_values=cache, use_cache=True).logits[0, -1]
    return total


CACHES = (
    "paged_int4:page_size=16",
    "paged_int2:page_size=16,sink_tokens=0",
    "paged_int8:page_size=16,recent_tokens=10",
    "paged_int4:page_size=16,read_tokens=36,read_from=50",
    "hqq_int4:q_group_size=16,residual_length=20",
    "quanto_int4:q_group_size=16,residual_length=20",
    "quantized_fp8",
)


@pytest.mark.parametrize("cache", CACHES)
def test_scores_are_those_of_decoding_token_by_token(model, own, cache):
    """In batches and chunks, with shared prefills and padding: what a decode step would have seen all the same."""
    reason = why_not(cache, torch.device("cpu"))
    if reason:
        pytest.skip(reason)
    lm = lm_of(model, cache)
    found = lm.loglikelihood(requests("loglikelihood", PAIRS[:8]), disable_tqdm=True)
    expected = [token_by_token(model, lm.cache_kind, *lm._encode_pair(*pair)) for pair in PAIRS[:8]]
    assert [total for total, _ in found] == pytest.approx(expected, abs=1e-9)
    assert max(abs(a - b) for a, b in zip(expected, own[0][:8].tolist(), strict=True)) > 1e-3


@pytest.mark.parametrize("cache", ["paged_int4:page_size=16", "paged_int2:page_size=16"])
def test_rows_do_not_depend_on_their_batch(model, cache):
    alone, together = scores(lm_of(model, cache, 1)), scores(lm_of(model, cache, 7))
    torch.testing.assert_close(alone[0], together[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(alone[2], together[2], rtol=0, atol=1e-9)
    assert (alone[1], alone[3]) == (together[1], together[3])


def test_a_broken_format_changes_every_kind_of_request(model, own, monkeypatch):
    """The probe: pages that lose their contents. If anything did not read the store, it would not notice."""
    for name in ("write_pair", "seal_pair"):
        write = getattr(PageStorage, name)

        def emptied(self, *arguments, write=write):
            write(self, *arguments)
            for side in self.sides:
                side.fields["codes"].zero_()

        monkeypatch.setattr(PageStorage, name, emptied)
    found = scores(lm_of(model, "paged_exact:page_size=16"))
    assert ((found[0] - own[0]).abs() > 1e-3).all()  # each text is longer than a page and the sinks
    assert ((found[2] - own[2]).abs() > 1e-3).all()
    assert all(ours != theirs for ours, theirs in zip(found[3], own[3], strict=True))


def test_single_token_choices_read_the_store_by_default_only(model, own):
    """As generate() does it the first token behind a prompt comes from the exact prefill: nothing is measured."""

    def error(reread_tokens):
        lm = lm_of(model, "paged_int2:page_size=16", reread_tokens=reread_tokens)
        found = lm.loglikelihood(requests("loglikelihood", PAIRS[-2:]), disable_tqdm=True)
        return max(abs(a[0] - b) for a, b in zip(found, own[0][-2:].tolist(), strict=True))

    assert error(0) < 1e-10
    assert error(1) > 1e-3


def test_choices_of_a_question_share_its_prefill(monkeypatch):
    model = make_model("llama")
    lm = lm_of(model, "paged_int4:page_size=16", batch_size=2)
    fed, copies = [], []
    forward, duplicate = model.forward, copy.deepcopy

    def counting(tokens, **inputs):
        fed.append(tuple(tokens.shape))
        return forward(tokens, **inputs)

    def noting(cache, memo=None):
        copied = duplicate(cache, memo)
        if isinstance(cache, kv_hf.PagedCache):
            pages = [layer.storage.keys.fields["codes"].data_ptr() for layer in cache.layers]
            copies.append(
                pages == [layer.storage.keys.fields["codes"].data_ptr() for layer in copied.layers]
            )
        return copied

    # the scorer read the signature already
    monkeypatch.setattr(model, "forward", counting)
    monkeypatch.setattr(copy, "deepcopy", noting)
    question = sentence(80, 1)
    pairs = [(question, " " + sentence(length, length)) for length in (2, 3, 4)]
    pairs += [(question, f" {word}") for word in ("w4", "w5", "w6")]
    lm.loglikelihood(requests("loglikelihood", pairs), disable_tqdm=True)
    # one prefill of all tokens but the last; then that one and the continuations without their last tokens, of which
    # the choices of one token feed the same
    assert fed[0] == (1, 79)
    assert sorted(fed[1:]) == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert copies == [True] * 3


@pytest.mark.parametrize("family", ["gpt2", "bloom", "opt"])
def test_models_that_take_no_positions_are_padded_right(family):
    """bloom and opt count from the mask, and bloom's attention cannot tell the cache of the padding."""
    model = shared_model(family)
    alone = scores(lm_of(model, "paged_exact:page_size=16", 1))
    together = scores(lm_of(model, "paged_exact:page_size=16", 4))
    own = scores(HFLM(pretrained=model, tokenizer=tiny_tokenizer(), max_length=MAX_LENGTH))
    for found in (alone, together):
        torch.testing.assert_close(found[0], own[0], rtol=0, atol=1e-3)  # fp32 sums of 90 tokens
        torch.testing.assert_close(found[2], own[2], rtol=0, atol=1e-3)


def test_nan_raises_in_place_of_a_score(model):
    class Broken(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            keys, values = super().update(key_states, value_states, layer_idx)
            return keys, values * float("nan") if keys.shape[2] > 35 else values

    lm = lm_of(model, "dynamic")
    kind = type(lm.cache_kind)("broken", "sdpa", lambda config, _: Broken(config=config))
    lm.cache_kind = lm.scorer.kind = kind
    with pytest.raises(ValueError, match="broken gives logits that are nan for request"):
        lm.loglikelihood(requests("loglikelihood", PAIRS[:4]), disable_tqdm=True)
    with pytest.raises(ValueError, match="broken gives logits that are nan at token"):
        lm.generate_until(requests("generate_until", PROMPTS[:1]), disable_tqdm=True)


def test_bad_options_are_refused(model):
    with pytest.raises(ValueError, match="cache_implementation must name the cache"):
        lm_of(model, None)
    with pytest.raises(ValueError, match="did you mean 'paged_int4'"):
        lm_of(model, "pagedint4")
    with pytest.raises(ValueError, match="cache_config option must be one of"):
        lm_of(model, "paged_int4", cache_config="sinks=3")
    with pytest.raises(ValueError, match="reread_tokens must be an integer of at least 0, got -1"):
        lm_of(model, reread_tokens=-1)
    with pytest.raises(ValueError, match="rolling_prefill must be an integer of at least 1, got 0"):
        lm_of(model, rolling_prefill=0)
    prompts = [("w4 w5", {"until": ["w9"], "max_gen_toks": 2, "cache_implementation": "dynamic"})]
    with pytest.raises(ValueError, match="cache_implementation='dynamic' stands in the generation"):
        lm_of(model).generate_until(requests("generate_until", prompts), disable_tqdm=True)
    with pytest.raises(ValueError, match="must be a decoder-only model, got the seq2seq model"):
        lm_of(encoder_decoder("t5"))


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (None, {}),
        ("", {}),
        ({"keys": "int8"}, {"keys": "int8"}),
        ('{"keys": "int8", "layers": {"0": "int8"}}', {"keys": "int8", "layers": {"0": "int8"}}),
        ("keys=int8;recent_tokens=32", {"keys": "int8", "recent_tokens": 32}),
        ('layers={"0": "int8"}; max_pages=None', {"layers": {"0": "int8"}, "max_pages": None}),
    ],
)
def test_read_config_takes_every_form(given, options):
    assert read_config(given) == options


@pytest.mark.parametrize("given", ["keys", "keys=", 3, '{"keys"}'])
def test_read_config_refuses_other_things(given):
    with pytest.raises(kv_hf.CacheOptionError, match="cache_config"):
        read_config(given)


def test_options_reach_the_cache():
    config = shared_model("llama").config
    cache = harness_cache("paged_int4:sink_tokens=0", "keys=int8;page_size=32").make(config, 10)
    found = (cache.options.keys, cache.options.values, cache.options.page_size)
    assert (*found, cache.options.sink_tokens) == ("int8", "int4", 32, 0)
    assert harness_cache("hqq_int4", {"residual_length": 20}).name == "hqq_int4:residual_length=20"
    assert harness_cache("dynamic").name == cache_kind("dynamic").name
    with pytest.raises(ValueError, match="takes no options"):
        harness_cache("dynamic", "a=1")


def test_plan_shares_prefills_and_forwards():
    planned = plan_prefixes(
        [([1, 2, 3], [4], 1), ([1, 2, 3], [5], 1), ([1, 2, 3], [4, 5], 1), ([9], [8, 7, 6], 3)],
        max_length=10,
        reread_tokens=1,
    )
    assert [prefix.tokens for prefix in planned] == [(9, 8, 7), (1, 2)]
    rolling, shared = planned
    assert [(run.fed, run.start, run.answers) for run in rolling.runs] == [
        ((), -3, [(3, (8, 7, 6))])
    ]
    assert [(run.fed, run.start, run.answers) for run in shared.runs] == [
        ((3,), 0, [(0, (4,)), (1, (5,))]),
        ((3, 4), 0, [(2, (4, 5))]),
    ]
    with pytest.raises(ValueError, match="1 to 2 tokens to score, got 3 and 0"):
        plan_prefixes([([1, 2, 3], [], 1)], 2, 1)
