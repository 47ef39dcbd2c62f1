"""Continuous batching on pages beside transformers' own: the same answers from exact pages, whatever comes in between or goes wrong."""

import contextlib
import gc
import random
import re
import time
import weakref

import pytest
import tiny_latent
import torch
from harness import slow_but
from measure.family_models import build_model, families
from tiny_models import make_model, make_sliding, stressed, value_channel
from tiny_server import check_batch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import kv_hf
from kv_hf.backends import dispatch
from kv_hf.cache.model_shape import CACHE
from kv_hf.errors import CacheOptionError, UnsupportedModelError
from kv_hf.serving import batch_manager
from kv_hf.serving.batch_cache import BatchCache

if not batch_manager.fits_transformers():
    pytest.skip("transformers before 5.18", allow_module_level=True)

LENGTHS = (5, 150, 70, 300, 1, 64, 68, 69, 33)


def prompts(lengths=LENGTHS, seed=3):
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]
    longest = max(found, key=len)
    return [*found, [*longest[:250], 7, 8, 9]]  # the last begins as the longest does


def config(name=None, new=40, options=None, **changes):
    made = GenerationConfig(
        max_new_tokens=new, eos_token_id=-1, pad_token_id=0, **{"do_sample": False, **changes}
    )
    made.cache_implementation, made.cache_config = name, options
    return made


def batching(blocks=64, **changes):
    sizes = {"num_blocks": blocks, "page_size": 64, "max_batch_tokens": 128}
    return ContinuousBatchingConfig(**{**sizes, **changes})


def answers(model, texts, generation, batch):
    found = model.generate_batch(
        texts, generation_config=generation, continuous_batching_config=batch
    )
    assert all(one.error is None for one in found.values()), [one.error for one in found.values()]
    return [one.generated_tokens for one in found.values()]


def alone(model, texts, generation):
    """Return the answers of generate() to one text after the other."""
    found = []
    for text in texts:
        ids = torch.tensor([text])
        mask = torch.ones_like(ids)
        out = model.generate(ids, generation_config=generation, attention_mask=mask)
        found.append(out[0, len(text) :].tolist())
    return found


@pytest.fixture(scope="module")
def own_answers():
    """Answers of transformers' own continuous batching."""
    return answers(make_model("llama"), prompts(), config(), batching())


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (None, {}),
        (None, {"blocks": 9}),  # requests leave, and are computed anew
        (None, {"blocks": 9, "cpu_offload_space": 1.0}),  # as well: no pages are moved to the host
        (None, {"allow_block_sharing": False}),
        (None, {"scheduler_type": "prefill_first"}),
        (None, {"max_batch_tokens": 16}),
        (None, {"max_requests_per_batch": 3}),
        ({"recent_tokens": 32, "page_size": 32}, {}),
        ({"sink_tokens": 0, "page_size": 16}, {}),
        ({"kernel": "reference"}, {}),
    ],
    ids=str,
)
def test_generate_batch_on_exact_pages_answers_as_transformers_own(own_answers, options, changes):
    generation = config("paged_exact", options=options)
    assert answers(make_model("llama"), prompts(), generation, batching(**changes)) == own_answers


def test_idle_threads_end_where_a_manager_of_pages_starts(monkeypatch):
    ended = []
    monkeypatch.setattr(batch_manager, "end_idle_threads", lambda: ended.append(1))
    for generation in (config(new=1), config("paged_exact", 1)):  # transformers' own stays as it is
        answers(make_model("llama"), [[5, 6]], generation, batching())
    assert ended == [1]


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])  # all layers slide, and some
def test_generate_batch_gives_back_pages_behind_a_sliding_window(kind):
    model = make_sliding(kind, 80)
    own = answers(model, prompts(), config(), batching(256))
    assert answers(model, prompts(), config("paged_exact"), batching(9)) == own
    assert own == alone(model, prompts(), config())


# (role, family) -> what its refusal says, "" where its batches answer as generate() does
LATENTS = [
    "axk1",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "longcat_flash",
    "minicpm3",
    "youtu",
]
STATES = ["qwen3_next", "falcon_h1", "lfm2", "nemotron_h"]
OF_STATES = "" if CACHE == "cache" else "needs transformers 5.24"
FAMILIES = {
    **{("causal", name): "" for name in ("gpt-sw3", "mixtral", "gemma", "gemma4_text", *LATENTS)},
    **{("conditional", name): "" for name in ("mistral4", "kimi_k25")},
    ("causal", "deepseek_v32"): "layer 0 of this model has an indexer",
    **{("causal", name): OF_STATES for name in STATES},
    ("causal", "zamba2"): OF_STATES or "Zamba2Attention attends as layer -1",
    ("causal", "llama4_text"): "attend within chunks of a text",
    ("causal", "diffllama"): "DiffLlamaAttention attends twice in layer 0",
}
# answers of moshi are those of transformers' own batches: its prompts in generate() do not see the window that its config has
WALK = [
    (role, name) for role in ("causal", "conditional") for name in families(role) if name != "moshi"
]


# most families of latents are slow, too
QUICK = [one for one in FAMILIES if one[1] not in LATENTS or one[1] == "deepseek_v3"]


@pytest.mark.parametrize(("role", "family"), slow_but(QUICK, dict.fromkeys((*FAMILIES, *WALK))))
def test_generate_batch_answers_as_generate_does_or_refuses_the_family(role, family):
    """The last text begins with pages of another; without room for all, requests leave and come back."""
    if family not in families(role):
        pytest.skip(f"this transformers has no {family}")
    said, texts = FAMILIES.get((role, family)), prompts((5, 300, 70, 1, 140))
    try:
        model = build_model(family, role)
        expected = None if said else alone(model, texts, config(new=12))
    except Exception as error:
        if said is not None:
            raise
        pytest.skip(f"it does not answer texts: {error}")
    refusal = contextlib.suppress(*[UnsupportedModelError] * (said is None))  # of the walk
    with pytest.raises(UnsupportedModelError, match=said) if said else refusal:
        for blocks, options in ((64, None), (9, {"page_size": 16, "recent_tokens": 24})):
            paged = config("paged_exact", new=12, options=options)
            assert answers(model, texts, paged, batching(blocks)) == expected


def test_an_empty_prompt_is_refused_and_gets_no_other_request_s_token():
    with running(make_model("llama"), new=4) as manager:
        manager.add_request([5, 6, 7], request_id="a")
        manager.add_request([], request_id="b")
        found = collected(manager, 2)
    assert len(found["a"].generated_tokens) == 4
    assert "must have a token" in found["b"].error and not found["b"].generated_tokens


@pytest.mark.parametrize("family", ["llama", "qwen3_next"][: 1 + (not OF_STATES)])
def test_forked_requests_go_on_from_one_prompt(family):
    model, texts = build_model(family, "causal"), prompts((5, 150, 70, 1, 68))
    sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    expected = [answer for answer in alone(model, texts, config()) for _ in range(3)]
    for blocks in (64, 14):
        found = answers(model, texts, config("paged_exact", **sampled), batching(blocks))
        assert sorted(found) == sorted(expected)


def test_forwards_of_requests_leave_the_config_of_the_model_as_it_is(monkeypatch):
    """transformers writes is_causal into it for the length of a forward: one of generate() beside it attended without a mask."""
    model, attend, found = make_model("llama"), BatchCache.attend, []
    before = model.config.to_dict()

    def watched(*args, **kwargs):
        found.append(model.config.to_dict())
        return attend(*args, **kwargs)

    monkeypatch.setattr(BatchCache, "attend", watched)
    answers(model, prompts((5,)), config("paged_exact", new=2), batching())
    assert found
    assert all(one == before for one in found)


@contextlib.contextmanager
def running(model, name="paged_int8", new=40, options=None, sampled=(), **changes):
    """A manager on pages, which is stopped when the block ends."""
    generation = config(name, new, options, **dict(sampled))
    manager = model.init_continuous_batching(generation, batching(**changes))
    manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(hard_stop=True)


def collected(manager, count, timeout=60):
    """Return the finished outputs by request id."""
    found, end = {}, time.monotonic() + timeout
    while len(found) < count and time.monotonic() < end:
        output = manager.get_result(timeout=0.5)
        if output is not None and output.is_finished():
            found[output.request_id] = output
    return found


@pytest.fixture
def manager():
    """A manager on int8 pages of a small model."""
    with running(make_model("llama")) as made:
        yield made


def pages_in_use(manager):
    cache = manager.batch_processor.cache
    check_batch(cache)
    return len(cache.requests), set().union(*cache.groups[None].batch.pages, ())


def allocated(manager):
    counts = kv_hf.BatchCounts.of(manager)
    return counts.bytes_pages + counts.bytes_exact


@pytest.mark.parametrize("family", ["gemma4_text", "qwen3_next"][: 1 + (not OF_STATES)])
def test_requests_that_join_and_leave_keep_states_and_lent_keys_their_own(family):
    """Rows change places while windows move under the layers that read another layer's keys."""
    model, texts = build_model(family, "causal"), prompts((5, 90, 33, 61, 1, 140, 17))
    fine, lengths = {"page_size": 16, "recent_tokens": 24}, [9 + 11 * (i % 5) for i in range(8)]
    expected = alone(model, texts, config(new=max(lengths)))
    with running(model, "paged_exact", options=fine, max_requests_per_batch=3) as manager:
        for number, (text, new) in enumerate(zip(texts, lengths, strict=True)):
            manager.add_request(text, request_id=f"{number}", max_new_tokens=new)
        found = collected(manager, len(texts))
    got = [found[f"{number}"].generated_tokens for number in range(len(texts))]
    assert got == [answer[:new] for answer, new in zip(expected, lengths, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma4_text", "qwen3_next"][: 2 + (not OF_STATES)])
def test_a_thousand_requests_on_a_saturated_pool_answer_as_each_alone(family):
    """Most wait, many leave and are computed anew, some are cancelled; those that ask the same share pages, where layers can."""
    draw = random.Random(5)
    model = make_model(family) if family == "llama" else build_model(family, "causal")
    texts = prompts(draw.choices(range(1, 200), k=60))
    expected = alone(model, texts, config(new=12))
    asked = draw.choices(range(len(texts)), k=1000)
    gone = set(draw.sample(range(1000), 50))
    with running(model, "paged_exact", new=12, blocks=9) as manager:
        for number, text in enumerate(asked):
            manager.add_request(texts[text], request_id=f"{number}")
            if number in gone:
                manager.cancel_request(f"{number}")
        found = collected(manager, 1000 - len(gone), timeout=600)
        for number in set(range(1000)) - gone:
            assert found[f"{number}"].generated_tokens == expected[asked[number]]
        counts = kv_hf.BatchCounts.of(manager)
        assert counts.requests_evicted > 20  # 48
        assert family != "llama" or counts.prefixes.evictions > 500  # 1,090
        assert pages_in_use(manager)[0] == 0


def test_formats_too_narrow_are_wider_from_the_start_within_the_same_budget():
    plain = make_model("llama", torch.bfloat16, head_dim=64)
    model = stressed(plain, value_channel(300.0))
    with contextlib.ExitStack() as stack:
        with pytest.warns(kv_hf.KVCacheWarning, match="wider than asked"):
            manager = stack.enter_context(
                running(model, "paged_int4", options={"max_bytes": "32MiB"})
            )
        manager.add_request(prompts()[3], request_id="r", max_new_tokens=70)
        assert collected(manager, 1)["r"].error is None
        cache = manager.batch_processor.cache
        names = {store.pages.spec.values.scheme.name for store in cache.stores.values()}
        assert "int4" not in names
        assert allocated(manager) == cache.room.nbytes <= 32 << 20


@pytest.mark.parametrize("answers", [1, 3])
def test_a_prompt_that_never_fits_fails_alone(answers):
    """So do all of its answers, for which generate_batch waits."""
    sampled = {"do_sample": True, "num_return_sequences": answers}
    with running(make_model("llama"), blocks=4, sampled=sampled) as manager:
        manager.add_request([5] * 400, request_id="long")
        manager.add_request(prompts()[1], request_id="short", max_new_tokens=5)
        found = collected(manager, 2 * answers)
        for name in ("", *(f"__child#{number}" for number in range(answers - 1))):
            assert "room for" in (said := found[f"long{name}"].error) and "max_bytes" in said
            assert len(found[f"short{name}"].generated_tokens) == 5
        assert pages_in_use(manager)[0] == 0


def test_an_answer_ends_where_the_cache_has_no_room_for_more():
    with running(make_model("llama"), blocks=2) as manager:
        manager.add_request([5] * 100, request_id="r", max_new_tokens=1000)
        with pytest.warns(kv_hf.KVCacheWarning, match="its answer ends there"):
            found = collected(manager, 1)["r"]
        most = manager.batch_processor.cache.most_tokens
        assert found.error is None
        assert len(found.generated_tokens) == most - 100


def test_salted_requests_share_pages_with_requests_of_their_salt_alone(manager):
    store, text = manager.batch_processor.cache.prefix_store, prompts()[3]
    computed = []
    for number, salt in enumerate(["a", "b", "a", None, "a"]):
        before = store.stats().tokens_computed
        manager.add_request(text, request_id=str(number), max_new_tokens=1, cache_salt=salt)
        collected(manager, 1)
        computed.append(store.stats().tokens_computed - before)
    assert computed == [300, 300, 300 - 260, 300, 300 - 260]


def test_a_request_that_runs_while_the_model_changes_keeps_no_pages_of_both():
    """They would be found where the model is as it was."""
    model, text = make_model("llama"), TEXT[:100]
    with running(model, "paged_exact", new=300, options={"page_size": 16}) as manager:
        begun(manager, "a", text)
        with manager.pause():
            hook = model.model.layers[0].mlp.register_forward_hook(lambda *given: given[2] * 3)
        while len(manager.get_result(timeout=10).generated_tokens) < 100:
            pass
        with manager.pause():
            hook.remove()
        (found,) = collected(manager, 1).values()
        again = [*text, *found.generated_tokens[:200]]
        manager.add_request(again, request_id="b", max_new_tokens=8)
        answer = collected(manager, 1)["b"].generated_tokens
        assert manager.batch_processor.cache.prefix_store.stats().rows_hit == 1
    assert [answer] == alone(model, [again], config(new=8))


@contextlib.contextmanager
def between_sessions(manager):
    manager.stop(keep_for_next_session=True)
    yield
    manager.start()


@pytest.mark.parametrize("stopped", [batch_manager.BatchManager.pause, between_sessions])
def test_weights_that_change_find_no_pages_of_before(stopped, manager):
    store, text = manager.batch_processor.cache.prefix_store, prompts()[3]
    found = []
    for change in (False, False, True):
        if change:
            with stopped(manager), torch.no_grad():
                for parameter in manager.model.parameters():
                    parameter.mul_(1.1)
        before = store.stats().tokens_computed
        manager.add_request(text, request_id="r", max_new_tokens=3)
        found.append(collected(manager, 1)["r"].generated_tokens)
        found.append(store.stats().tokens_computed - before)
    assert found[1::2] == [300, 40, 300]
    fresh = make_model("llama")
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.mul_(1.1)
    assert answers(fresh, [text], config("paged_int8", 3), batching()) == [found[4]]


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_generate_and_batches_share_one_prefix_store(family):
    store = kv_hf.PrefixStore()
    model = tiny_latent.make_model(family) if family in LATENTS else make_model(family)
    text, options = prompts()[3], {"prefix_store": store}
    generation = config("paged_exact", 8, options)
    (alone_first,) = alone(model, [text], generation)
    assert answers(model, [text], generation, batching()) == [alone_first]
    stats = store.stats()
    assert (stats.rows, stats.rows_hit, stats.tokens_computed) == (2, 1, 300 + 40)
    assert alone(model, [text], generation) == [alone_first]


@pytest.mark.parametrize("name", ["paged_exact", "paged_int4"])
def test_batches_find_in_a_folder_what_generate_kept(name, tmp_path):
    """One prompt is kept by generate(), one by a batch; a manager that starts anew finds both."""

    def options():
        return {"prefix_store": kv_hf.PrefixStore(folder=tmp_path)}

    texts = [prompts()[3], prompts()[3][::-1]]
    alone(make_model("llama"), texts[:1], config(name, 8, first := options()))
    first["prefix_store"].flush()
    for turn, known in enumerate((1, 2)):
        model, of = make_model("llama"), options()
        found = answers(model, texts, config(name, 8, of), batching())
        of["prefix_store"].flush()
        stats = of["prefix_store"].stats()
        assert (stats.rows, stats.rows_hit, stats.pages_damaged) == (2, known, 0)
        assert stats.pages_read > 0 and (stats.pages_written > 0) == (turn == 0)
        if name == "paged_exact":
            assert found == alone(model, texts, config(name, 8, {}))


@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_many_requests_at_random_leave_counts_balanced_and_memory_constant(count):
    generator = torch.Generator().manual_seed(1)
    with running(make_model("llama"), blocks=12, max_requests_per_batch=5) as manager:
        cache = manager.batch_processor.cache
        nbytes = allocated(manager)
        kept = []
        for number in range(count):
            length = int(torch.randint(1, 300, (1,), generator=generator))
            text = torch.randint(3, 97, (length,), generator=generator).tolist()
            if number % 3 == 0:
                text = [*prompts()[3][: length - 1], 3]
            manager.add_request(text, request_id=str(number), max_new_tokens=1 + number % 50)
            if number % 7 == 6:
                manager.cancel_request(str(number))
            else:
                kept.append(str(number))
        found, end = {}, time.monotonic() + 100 + count / 5
        while not set(kept) <= set(found) and time.monotonic() < end:
            output = manager.get_result(timeout=1)
            if output is not None:
                found[output.request_id] = output
        assert set(kept) <= set(found)
        assert not [one.error for one in found.values() if one.error]
        assert allocated(manager) == nbytes
        while cache.requests:
            time.sleep(0.01)
        assert pages_in_use(manager) == (0, set())
        assert cache.groups[None].pool.num_held == cache.prefix_store.stats().pages


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "options", "changes", "match"),
    [
        ("llama", {"offload": "cpu"}, {}, "offload='cpu' is for one call"),
        ("llama", {"max_length": 512}, {}, "max_length=512 is for one call"),
        ("llama", {"cuda_graph": "always"}, {}, "makes no CUDA graphs"),
        ("llama", {"max_bytes": 1000}, {}, "one request of this model takes at least"),
        ("llama", {"page_sise": 16}, {}, "page_sise"),
        ("llama", {}, {"use_cuda_graph": True}, "use_cuda_graph"),
        ("llama", {}, {"use_async_batching": True}, "use_async_batching"),
        ("llama", {}, {"default_compile_level": 1}, "default_compile_level"),
        ("bloom", {}, {}, "which BloomForCausalLM has not"),
        (
            "qwen3_next",
            {"prefix_store": kv_hf.PrefixStore()},
            {},
            "layers with states|5.24 or newer",
        ),
    ],
    ids=str,
)
def test_batches_that_cannot_be_are_refused_before_the_model_is_touched(
    family, options, changes, match
):
    model, batch = build_model(family), batching(**changes)
    before = model.config._attn_implementation
    with pytest.raises((CacheOptionError, UnsupportedModelError), match=match):
        model.generate_batch([[5, 6]], config("paged_int8", options=options), batch)
    assert model.config._attn_implementation == before


def without_cache(module, args, kwargs):
    return args, {name: one for name, one in kwargs.items() if type(one) is not BatchCache}


def test_a_model_that_keeps_the_cache_from_its_attention_is_refused():
    model = make_model("llama")
    model.model.layers[1].self_attn.register_forward_pre_hook(without_cache, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=r"hand .* cache down .* \(layers \[1\] did"):
        model.generate_batch([[5, 6]], config("paged_int8"), batching())


def mixed(module, args, out):
    return out + out.mean(1, keepdim=True)


def stopped(module, args, out):
    if out.shape[1] == 9:  # both requests of the trial
        raise RuntimeError("a row is one text")
    return out


@pytest.mark.parametrize(
    ("hook", "match"),
    [
        (mixed, "computes other numbers for two requests in one row"),
        (stopped, "cannot take the tokens of several requests .* RuntimeError: a row is one text"),
    ],
)
def test_models_that_take_a_row_for_one_text_are_refused(hook, match):
    model = make_model("llama")
    model.model.norm.register_forward_hook(hook)
    with pytest.raises(UnsupportedModelError, match=match):
        model.generate_batch([[5, 6], [7]], config("paged_int8"), batching())


def test_a_kept_manager_of_another_cache_is_refused():
    model = make_model("llama")
    try:
        model.generate_batch([[5, 6]], config("paged_int8", 2), batching(), persistent_manager=True)
        again = model.generate_batch(
            [[5, 6]], config("paged_int8", 2), batching(), persistent_manager=True
        )
        assert all(one.error is None for one in again.values())
        with pytest.raises(CacheOptionError, match="16-bit pages"):
            model.generate_batch([[5, 6]], config(new=2), batching())
    finally:
        model.destroy_cached_continuous_batching_manager()
    assert model.config._attn_implementation == "sdpa"


def test_answers_of_whole_prompts_are_those_of_generate_in_any_format():
    texts = prompts((90, 70, 150))
    llama, latent = make_model("llama"), tiny_latent.make_model("deepseek_v3")
    whole = batching(max_batch_tokens=1024, allow_block_sharing=False)
    asked = [
        *((llama, f"paged_{name}", None) for name in ("int8", "int4", "int3", "int2", "fp8")),
        *((latent, f"paged_{name}", None) for name in ("int8", "int4", "int2", "fp8")),
        (latent, "paged_int8", {"latent": {"k_rope": "exact", "decode": "absorb"}}),
        (latent, "paged_int8", {"latent": {"decode": "expand"}, "page_size": 16}),
    ]
    for model, name, options in asked:
        generation = config(name, new=12, options=options)
        assert answers(model, texts, generation, whole) == alone(model, texts, generation)


def test_latents_of_a_thread_that_generates_beside_batches_are_expanded():
    model, texts = tiny_latent.make_model("deepseek_v3"), prompts((150, 300))
    expected = [alone(model, texts, config(one, 30)) for one in (None, "paged_exact")]
    with running(model, "paged_exact", new=600) as manager:
        begun(manager, "a")
        found = [alone(model, texts, config(one, 30)) for one in (None, "paged_exact")]
        assert manager.batch_processor.cache.requests  # it still runs
    assert found == expected


@pytest.mark.parametrize(
    ("change", "options", "match"),
    [
        ("expand_kv", {}, "DeepseekV3ForCausalLM expands them before: its expand_kv was replaced"),
        (
            "kv_b_proj",
            {"latent": {"decode": "absorb"}},
            "self_attn cannot be absorbed: kv_b_proj has",
        ),
    ],
)
def test_latents_that_batches_cannot_read_are_refused_before_the_model_is_touched(
    change, options, match
):
    model = tiny_latent.make_model("deepseek_v3")
    module = tiny_latent.latent_modules(model)[1]
    if change == "expand_kv":
        module.expand_kv = module.expand_kv.__get__(module)
    else:
        module.kv_b_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match=match):
        model.init_continuous_batching(config("paged_int8", options=options), batching())


@pytest.mark.parametrize("length", [257, 258, 384])
def test_the_last_tokens_of_a_chunked_prompt_read_everything(length, monkeypatch):
    """Also a single one: the first token of an answer comes from the whole text."""
    model = make_model("llama")
    part = {"page_size": 16, "read": {"tokens": 100, "from": 64}}
    batch = batching(blocks=200, page_size=16, max_batch_tokens=128)
    choices, own = [], dispatch._of_chosen_pages

    def record(call, kernel):
        choices.append(call.kv.rows)
        return own(call, kernel)

    monkeypatch.setattr(dispatch, "_of_chosen_pages", record)
    texts = prompts((length, 70))
    answers(model, texts, config("paged_exact", new=1, options=part), batch)
    assert not choices
    answers(model, texts, config("paged_exact", new=3, options=part), batch)
    assert choices


def test_requests_read_parts_of_long_texts_as_generate_does():
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 3
    part = {"page_size": 16, "read": {"tokens": 100, "from": 64}}
    texts = prompts((300, 40, 280, 150))
    batch = batching(blocks=200, page_size=16, max_batch_tokens=600)  # prompts are not chunked
    found = answers(model, texts, config("paged_exact", options=part), batch)
    whole = answers(model, texts, config("paged_exact", options={"page_size": 16}), batch)
    assert found == alone(model, texts, config("paged_exact", options=part)) != whole


# -- where things go wrong -----------------------------------------------------------------------------------

TEXT = prompts()[3]


def wait_for(true, seconds=30):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.005)
    assert true()


def begun(manager, request_id, text=TEXT, **options):
    """Add a streaming request, and wait for its first token."""
    manager.add_request(text, request_id=request_id, streaming=True, **options)
    while manager.get_result(timeout=10) is None:
        pass


@pytest.mark.parametrize("rows", [1, 4], ids=["waiting for a row", "forked at once"])
def test_children_keep_the_salt(rows):
    sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": 3}
    room = {"max_requests_per_batch": rows}
    with running(make_model("llama"), new=4, sampled=sampled, **room) as manager:
        manager.add_request(TEXT, request_id="a", cache_salt="x")
        assert len(collected(manager, 3)) == 3
        manager.num_return_sequences = 1
        store = manager.batch_processor.cache.prefix_store
        before = store.stats().tokens_computed
        manager.add_request(TEXT, request_id="b")
        collected(manager, 1)
        assert store.stats().tokens_computed - before == len(TEXT)


def _active(manager):
    processor = manager.batch_processor
    return 0 if processor is None else len(processor.scheduler.active_requests)


def test_requests_that_wait_to_be_forked_end_no_others():
    """They come without a token behind a longer forward, whose indices of logits transformers leaves there."""
    sampled = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    with running(make_model("llama"), new=400, sampled=sampled) as manager:
        for number, request_id in enumerate("abcd"):
            manager.add_request([5, 6, 7, number + 8], request_id=request_id)
        while manager.is_running() and _active(manager) < 8:
            time.sleep(0.01)
        with manager.pause():
            for gone in ("a", "a__child#0", "b", "b__child#0"):
                manager.cancel_request(gone)
            for late in "xy":
                manager.add_request([9], request_id=late, max_new_tokens=3)
        assert {"x", "y"} <= {one[0] for one in collected(manager, 4)}


def test_an_id_that_is_in_use_is_refused_and_the_others_go_on():
    with running(make_model("llama"), new=60) as manager:
        begun(manager, "a")
        manager.add_request([5, 6, 7], request_id="a")
        manager.add_request([5, 6, 7], request_id="b")
        done = []
        while len(done) < 3:
            output = manager.get_result(timeout=10)
            assert output is not None
            done += [output] if output.is_finished() else []
        found = {(one.request_id, one.error is None) for one in done}
        assert found == {("a", False), ("a", True), ("b", True)}


def test_waiting_requests_go_on_when_all_others_are_cancelled_and_free_their_pages():
    with running(make_model("llama"), new=600, blocks=12, max_requests_per_batch=8) as manager:
        scheduler = manager.batch_processor.scheduler
        for index, text in enumerate(prompts((100,) * 6)[:6]):
            manager.add_request(text, request_id=str(index))
        wait_for(lambda: scheduler.block_new_requests)
        with manager.pause():
            waiting = list(scheduler.waiting_requests)
            for request_id in scheduler.active_requests:
                manager.cancel_request(request_id)
        wait_for(lambda: not set(waiting) & set(scheduler.waiting_requests))
        for request_id in waiting:
            manager.cancel_request(request_id)
        cache = manager.batch_processor.cache
        wait_for(lambda: not cache.known and not cache.requests)
        assert pages_in_use(manager) == (0, set())


def test_managers_leave_a_model_its_eager_attention():
    """One stops, another goes on, and transformers' own pages are read as if there had been none."""
    model = make_sliding("gemma2", 400)
    with running(model, new=60) as second:
        with running(model, new=60):
            begun(second, "a")
        assert collected(second, 1)["a"].error is None
    own, ours = (
        answers(model, [TEXT], config(one, 4), batching()) for one in (None, "paged_exact")
    )
    assert own == ours
    assert model.config._attn_implementation == "eager"


def test_an_attention_that_is_changed_under_a_manager_is_named():
    model = make_model("llama")
    with running(model, new=500) as manager:
        begun(manager, "a")
        model.set_attn_implementation("eager")
        said = (
            "was changed, .* its attention is 'eager', which does not read pages; stop the manager"
        )
        assert re.search(said, collected(manager, 1)["a"].error)


def test_stop_frees_the_cache_of_a_manager_that_is_still_named():
    with running(make_model("llama"), new=6) as manager:
        cache = weakref.ref(manager.batch_processor.cache)
    gc.collect()
    assert cache() is None


def test_pages_of_generate_in_a_shared_store_leave_a_manager_its_room():
    model, store = make_model("llama"), kv_hf.PrefixStore()
    options = {"max_bytes": "1MiB", "prefix_store": store}
    with running(model, new=6, options=options) as manager:
        cache = kv_hf.PagedCache(model.config, keys="int8", values="int8", prefix_store=store)
        ids = torch.randint(3, 97, (6, 900), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        manager.add_request(TEXT * 2, request_id="a")
        assert collected(manager, 1)["a"].error is None
