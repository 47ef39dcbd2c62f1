"""`kv-hf serve --continuous-batching` over HTTP: the clients of test_server.py, with batches in place of one request at a time."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_server import check_batch, running, save_model, wait_until
from transformers import GenerationConfig

from kv_hf.serving.batch_cache import BatchCache
from kv_hf.serving.batch_manager import fits_transformers
from kv_hf.texts import load_text

openai = pytest.importorskip("openai", reason="the extra `serving` is not installed")
pytest.importorskip("fastapi", reason="the extra `serving` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serving` is not installed")

TEXT = load_text("lincoln_1863")
SYSTEM = {"role": "system", "content": TEXT[:600]}
pytestmark = pytest.mark.skipif(not fits_transformers(), reason="transformers before 5.18")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("batches") / "model")


@pytest.fixture(scope="module")
def server(folder):
    config = '{"max_bytes": "1MiB"}'
    with running(folder, "paged_exact", config, store=None, continuous_batching=True) as found:
        found.chat("start", max_tokens=1)
        yield found


def scheduler_of(server):
    return server.serve._generation_state._cb_manager.scheduler


def check_idle(server):
    """No request holds anything, and the pages that are left belong to known prefixes."""
    scheduler = scheduler_of(server)
    assert wait_until(lambda: not scheduler.active_requests and not scheduler.waiting_requests)
    assert isinstance(scheduler.cache, BatchCache)
    check_batch(scheduler.cache)


def ask(server, index, stream, **more):
    chat = [
        SYSTEM,
        {"role": "user", "content": f"Question {index}: " + TEXT[index : 100 + 9 * index]},
    ]
    answer = server.chat(chat, max_tokens=6, stream=stream, **more)
    text = (
        "".join(one.choices[0].delta.content or "" for one in answer)
        if stream
        else answer.choices[0].message.content
    )
    return text.rstrip("\ufffd")  # a stream leaves out a last sign that is not whole


def test_batched_answers_are_those_of_requests_that_run_alone(server, folder):
    """All of one id: a second one took the first's answer, left it waiting for ever and had its salt."""
    with running(folder, "paged_exact", store="0") as alone:
        expected = [ask(alone, index, stream=False) for index in range(16)]
    same = {"extra_headers": {"X-Request-Id": "mine"}}
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda index: ask(server, index, index % 2 == 1, **same), range(16)))
    assert found == expected
    check_idle(server)
    (model,) = server.get("/kv_hf/stats")["models"].values()
    assert model["batches"]["requests"] == 0
    assert model["batches"]["prefixes"]["rows"] >= 16
    assert 0 < model["batches"]["pages_kept"] == model["batches"]["pages"]


@pytest.mark.parametrize("asked", [{"cache_config": {"recent_tokens": 4}}, {"cache_implementation": "dynamic"}], ids=str)  # fmt: skip
def test_a_cache_of_a_requests_own_is_status_400(server, asked):
    config = json.dumps({"max_new_tokens": 4, **asked})
    with pytest.raises(
        openai.BadRequestError, match="continuous batches share the cache of the server"
    ):
        server.chat("?", extra_body={"generation_config": config})
    assert server.chat("?").choices


def test_prompt_without_room_is_status_400_and_others_go_on(server):
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, server, index, False) for index in range(4)]
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="has room for"):
                server.chat(TEXT * 40, stream=stream)
        assert all(other.result() for other in others)
    check_idle(server)


def test_an_answer_ends_with_the_context_of_the_model(server):
    """10**30 tokens kept the batch busy when their client had left."""
    _, manager = server.serve._generation_state.get_manager.__self__._batches
    config = GenerationConfig(max_new_tokens=10**30)
    manager.prepare(server.model(), {"input_ids": [5] * 10}, config, "one")
    assert config.max_new_tokens == 8192 - 10


def test_options_that_batches_cannot_follow_end_the_start(folder):
    refused = pytest.raises(ValueError, match="continuous batching allocates all pages")
    given = {"config": '{"offload": "cpu"}', "store": None, "continuous_batching": True}
    with refused, running(folder, **given):
        pass
