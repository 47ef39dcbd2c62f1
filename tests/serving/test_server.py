"""transformers' server with pages, over HTTP with OpenAI's client: chat, streams, stops, cancelled and lost clients, budgets, batches."""

import contextlib
import gc
import http.client
import json
import socket
import struct
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_server import WAIT_S, check_batch, running, save_model, wait_until
from transformers import AutoTokenizer, GenerationConfig

from kv_hf.cache.model_shape import CACHE
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.serving.batch_cache import BatchCache
from kv_hf.serving.batch_manager import fits_transformers
from kv_hf.texts import load_text

openai = pytest.importorskip("openai", reason="the extra `serving` is not installed")

TEXT = load_text("lincoln_1863")
SYSTEM = {"role": "system", "content": TEXT[:900]}


def user(text):
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def server(folder):
    with running(folder, "paged_int8") as found:
        yield found


@pytest.fixture
def caches(server):
    """The types of the caches that forwards of the server's model get while a test runs."""
    seen = []
    model = server.model()
    hook = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(type(kwargs[CACHE])), with_kwargs=True
    )
    yield seen
    hook.remove()


def text_of(stream):
    chunks = list(stream)
    text = "".join(one.choices[0].delta.content or "" for one in chunks)
    return whole_signs(text), chunks


def whole_signs(text):
    """Leave out a last sign that is not whole, as streams do."""
    return text.rstrip("\ufffd")


def test_chat_is_answered_as_generate_answers(server, caches, folder):
    answer = server.chat([SYSTEM, user("Who was the first?")], max_tokens=12)
    assert set(caches) == {PagedCache}
    model = server.model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [SYSTEM, user("Who was the first?")],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    out = model.generate(
        **inputs, max_new_tokens=12, do_sample=False, cache_implementation="paged_int8"
    )
    new = out[0, inputs["input_ids"].shape[1] :]
    assert answer.choices[0].message.content == tokenizer.decode(new, skip_special_tokens=True)
    assert answer.usage.prompt_tokens == inputs["input_ids"].shape[1]


def test_second_turn_computes_neither_the_first_prompt_nor_its_answer(server, folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # words that are tokens of their own, so that the answer is tokenized as it was generated
    bias = {str(tokenizer.encode(" the")[0]): 100.0}
    first = [SYSTEM, user("What did they do?")]
    answer = server.chat(first, max_tokens=150, logit_bias=bias)
    before = server.store()
    said = {"role": "assistant", "content": answer.choices[0].message.content}
    second = server.chat([*first, said, user("And then?")])
    after = server.store()
    computed = after["tokens_computed"] - before["tokens_computed"]
    assert after["tokens"] - before["tokens"] == second.usage.prompt_tokens
    assert after["rows_hit"] == before["rows_hit"] + 1
    new = second.usage.prompt_tokens - first_tokens(answer)
    assert new > 0 and computed <= new + 64  # what is new, and part of one page


def first_tokens(answer):
    return answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tenants_of_a_header_share_no_prefix(server, stream):
    chat = [user(f"{stream}" + TEXT[:400])]

    def hit(salt):
        before = server.store()["rows_hit"]
        answer = server.chat(
            chat, stream=stream, extra_headers={"X-Cache-Salt": salt} if salt else {}
        )
        if stream:
            list(answer)
        assert wait_until(lambda: server.store()["pages_in_use"] == server.store()["pages"])
        return server.store()["rows_hit"] - before

    assert [hit(salt) for salt in ("a", "b", "a", "", "b", "")] == [0, 0, 1, 0, 1, 1]


def lost_client(server, stream):
    """Send a request, and reset the connection before the answer is there."""
    body = {"model": server.model_name, "messages": [SYSTEM, user("Lost")], "stream": stream}
    sent = json.dumps({**body, "max_tokens": 4000 if stream else 60, "temperature": 0}).encode()
    host, port = server.address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as one:
        one.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(sent), sent)
        )
        if stream:
            assert one.recv(16).startswith(b"HTTP/1.1 200")
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_client_that_disappears_ends_its_generation_and_leaves_the_server_as_it_was(server, stream):
    expected = server.chat("Who is there?").choices[0].message.content
    steps = []
    hook = server.model().register_forward_pre_hook(lambda *_: steps.append(None))
    for _ in range(3):
        lost_client(server, stream)
    # one thread generates: this answer comes when those of the lost ones have ended
    assert server.chat("Who is there?").choices[0].message.content == expected
    hook.remove()
    assert len(steps) < 4000
    assert wait_until(lambda: server.store()["pages_in_use"] == server.store()["pages"])


OWN_CACHES = [{"cache_config": {"recent_tokens": 4}}, {"cache_implementation": "dynamic"}]


@pytest.mark.parametrize("asked", [*OWN_CACHES, {"cache_config": [1]}], ids=str)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_generation_config_of_a_request_has_no_cache_of_its_own(server, asked, stream):
    check_own_cache(server, asked, stream)


def check_own_cache(server, asked, stream=False):
    """Whether a request that names a cache gets status 400 with the reason, and one that does not is answered."""
    given = {"do_sample": False, "max_new_tokens": 4}
    plain, own = ({"generation_config": json.dumps(one)} for one in (given, given | asked))
    with pytest.raises(openai.BadRequestError, match=f"{next(iter(asked))} of a request must be"):
        server.chat("?", stream=stream, extra_body=own)
    assert server.chat("?", extra_body=plain).choices


def test_two_salts_are_status_400(server):
    """The first of two won, so that a client's own went before that of a proxy."""
    connection = http.client.HTTPConnection(server.address.partition("//")[2])
    connection.putrequest("GET", "/kv_hf/stats")
    for salt in ("a", "b"):
        connection.putheader("X-Cache-Salt", salt)
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 400 and b"must be given once, got 2" in answer.read()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}, 403),
        ({"Host": "localhost:1", "Origin": "http://localhost:1"}, 200),
        ({"Host": "[::1]:1"}, 200),
        ({}, 200),
    ],
    ids=str,
)
def test_pages_of_other_sites_get_no_route_of_the_operator(server, headers, status):
    """A page in a browser of this machine could unload the model, and a name that leads here read the counts."""
    connection = http.client.HTTPConnection(server.address.partition("://")[2])
    routes = [("GET", "/kv_hf/stats")]
    if status == 403:
        routes += [("POST", "/reset"), ("POST", "/load_model")]
    for method, route in routes:
        connection.request(method, route, headers=headers)
        answer = connection.getresponse()
        assert (answer.status, bool(answer.read())) == (status, True)


def test_prompt_beyond_the_budget_is_status_400_and_others_go_on(folder):
    with running(folder, "paged_int8", '{"max_pages": 4}', "0") as server:
        assert server.store() is None
        for stream in (False, True):
            with pytest.raises(
                openai.BadRequestError, match="there is room for 324 of one request"
            ):
                server.chat(TEXT, stream=stream)
        short = server.chat("A short one", max_tokens=2000)
        usage = short.usage
        assert short.choices[0].finish_reason == "length" and usage.completion_tokens < 2000
        # 4 sinks, 4 pages, an open one, and the last token, which is never stored
        assert usage.total_tokens == 4 + 5 * 64
        streamed = text_of(server.chat("A short one", max_tokens=2000, stream=True))[1]
        assert streamed[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("batches", [False, True])
def test_prompt_beyond_the_context_is_status_400_and_others_go_on(tmp_path, batches):
    """Its positions are in no table: the error ended the batches of all clients. So did an answer that nothing bounds."""
    if batches and not fits_transformers():
        pytest.skip("transformers before 5.18")
    name = save_model(tmp_path, "gpt2", max_position_embeddings=256)
    with running(name, "paged_int8", store=None, continuous_batching=batches) as server:
        for text, plain in (("?", {}), ("the " * 240, {"extra_body": {"generation_config": "{}"}})):
            used = server.chat(text, max_tokens=None, **plain).usage
            assert used.total_tokens == 256
        with pytest.raises(openai.BadRequestError, match="there is room for 256"):
            server.chat(TEXT)
        assert server.chat("?").choices


def test_reset_drops_the_store_with_its_model(folder):
    with running(folder) as server:
        server.chat([SYSTEM, user("One")])
        assert server.store()["pages"] > 0
        store = weakref.ref(store_of(server))
        openai.OpenAI(base_url=server.address, api_key="none", max_retries=0).post(
            "/reset", cast_to=object
        )
        assert wait_until(lambda: server.get("/kv_hf/stats")["models"] == {})
        gc.collect()
        assert store() is None
        server.chat([SYSTEM, user("One")])
        assert server.store()["rows"] == 1 and server.store()["rows_hit"] == 0


# -- faults --------------------------------------------------------------------------------------------------


def store_of(server):
    """The prefix store of the server's model."""
    managers = server.serve._generation_state.get_manager.__self__
    return managers.served(server.model(), "?").store


def check_balance(server):
    """Nobody but the store holds a page when no request runs."""
    server.chat("the last one", max_tokens=1)  # one thread generates: all others are over
    gc.collect()
    store = store_of(server)
    store.page_memory.pool(None).check_integrity()
    assert store.page_memory.num_held == store.stats().pages


@contextlib.contextmanager
def failing_at(model, step):
    """Let the model's forward number `step` fail within the block."""
    calls = []

    def fail(*_):
        calls.append(None)
        if len(calls) == step:
            raise RuntimeError("the device is on fire")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


@pytest.mark.parametrize("step", [1, 5], ids=["prefill", "decode"])
def test_request_that_fails_frees_its_pages_and_others_go_on(folder, step):
    with running(folder) as server:
        server.chat(TEXT[:600])
        # from here on its prefix is read from pages, as by every later request
        expected = server.chat(TEXT[:600]).choices[0].message.content
        with failing_at(server.model(), step), pytest.raises(openai.InternalServerError):
            server.chat(TEXT[600:1500])
        with (
            failing_at(server.model(), step),
            pytest.raises(openai.APIError, match="the device is on fire|during streaming"),
        ):
            list(server.chat(TEXT[600:1500], stream=True))
        assert server.chat(TEXT[:600]).choices[0].message.content == expected
        check_balance(server)


# -- continuous batches ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batching(folder):
    """A server of batches, in place of one request at a time."""
    if not fits_transformers():
        pytest.skip("transformers before 5.18")
    config = '{"max_bytes": "1MiB"}'
    with running(folder, "paged_exact", config, store=None, continuous_batching=True) as found:
        found.chat("start", max_tokens=1)
        yield found


def scheduler_of(batching):
    return batching.serve._generation_state._cb_manager.scheduler


def check_idle(batching):
    """No request holds anything, and the pages that are left belong to known prefixes."""
    scheduler = scheduler_of(batching)
    assert wait_until(lambda: not scheduler.active_requests and not scheduler.waiting_requests)
    assert isinstance(scheduler.cache, BatchCache)
    check_batch(scheduler.cache)


def ask(server, index, stream, **more):
    chat = [SYSTEM, user(f"Question {index}: " + TEXT[index : 100 + 9 * index])]
    answer = server.chat(chat, max_tokens=6, stream=stream, **more)
    return text_of(answer)[0] if stream else whole_signs(answer.choices[0].message.content)


def ask_at_once(server, **more):
    """Return the answers to 16 clients, of which every second one streams and the others read the counts."""

    def of(index):
        if not index % 2:
            server.get("/kv_hf/stats")
        return ask(server, index, index % 2 == 1, **more)

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(of, range(16)))


def test_sixteen_clients_at_once_get_the_answers_of_one_at_a_time(server):
    expected = [ask(server, index, stream=False) for index in range(16)]
    before = server.store()
    assert ask_at_once(server) == expected
    assert wait_until(lambda: server.store()["rows"] == before["rows"] + 16)
    assert server.store()["rows_hit"] == before["rows_hit"] + 16
    assert wait_until(lambda: server.store()["pages_in_use"] == server.store()["pages"])


def test_batched_answers_are_those_of_requests_that_run_alone(batching, folder):
    """All of one id: a second one took the first's answer, left it waiting for ever and had its salt."""
    with running(folder, "paged_exact", store="0") as alone:
        expected = [ask(alone, index, stream=False) for index in range(16)]
    assert ask_at_once(batching, extra_headers={"X-Request-Id": "mine"}) == expected
    check_idle(batching)
    (model,) = batching.get("/kv_hf/stats")["models"].values()
    assert model["batches"]["requests"] == 0
    assert model["batches"]["prefixes"]["rows"] >= 16
    assert 0 < model["batches"]["pages_kept"] == model["batches"]["pages"]


@pytest.mark.parametrize("asked", OWN_CACHES, ids=str)
def test_a_cache_of_a_requests_own_is_status_400(batching, asked):
    check_own_cache(batching, asked)


def test_prompt_without_room_is_status_400_and_others_go_on(batching):
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, batching, index, False) for index in range(4)]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="there is room for"):
                batching.chat(TEXT * 40, stream=stream)
        assert all(other.result() for other in others)
    check_idle(batching)


def test_an_answer_ends_with_the_context_of_the_model(batching):
    """It ends with the room of the cache as well. 10**30 tokens kept the batch busy when their client had left."""
    _, manager = batching.serve._generation_state.get_manager.__self__._batches
    for most in (10**30, float("nan")):
        config = GenerationConfig(max_new_tokens=most)
        manager.prepare(batching.model(), {"input_ids": [5] * 10}, config, "one")
        assert config.max_new_tokens == min(8192, manager.cache.most_tokens) - 10


def test_options_that_batches_cannot_follow_end_the_start(batching):
    refused = pytest.raises(ValueError, match="continuous batching allocates all pages")
    given = {"config": '{"offload": "cpu"}', "store": None, "continuous_batching": True}
    with refused, running(batching.model_name, **given):
        pass
