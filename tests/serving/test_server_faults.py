"""Requests that fail, and a random load: pages are free again, counts balance, and the next request is served."""

import contextlib
import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_server import running, save_model

from kv_hf.texts import load_text

openai = pytest.importorskip("openai", reason="the extra `serving` is not installed")
pytest.importorskip("fastapi", reason="the extra `serving` is not installed")
pytest.importorskip("uvicorn", reason="the extra `serving` is not installed")

TEXT = load_text("lincoln_1863")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("faults") / "model")


def store_of(server):
    """The prefix store of the server's model."""
    managers = server.serve._generation_state.get_manager.__self__
    return managers.served(server.model(), "?").store


def check_balance(server):
    """Nobody but the store holds a page when no request runs."""
    server.chat("the last one", max_tokens=1)  # one thread generates: all others are over
    gc.collect()
    store = store_of(server)
    store.arena.pool(None).check_integrity()
    assert store.arena.num_held == store.stats().pages


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


def load(server, requests, clients):
    """Send random requests from several threads: whole, as a stream, and streams that are left in the middle."""

    def work(seed):
        choose = random.Random(seed)
        for _ in range(requests // clients):
            start = 100 * choose.randrange(4)
            chat = TEXT[start : start + choose.randrange(50, 1200)]
            stream = choose.random() < 0.6
            answer = server.chat(chat, max_tokens=choose.randrange(1, 30), stream=stream)
            if stream:
                left = choose.randrange(40)
                for _, _ in zip(range(left), answer, strict=False):
                    pass
                answer.close()

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(work, range(clients)))


def test_random_load_ends_with_balanced_counts(folder):
    """The store is small, so that pages are given up all the time."""
    with running(folder, store="48KiB") as server:
        load(server, 36, 6)
        check_balance(server)
        store = store_of(server)
        page_bytes = sum(spec.page_bytes for spec in store.arena.specs())
        assert server.store()["evictions"] > 0
        assert store.stats().pages * page_bytes <= store.max_bytes
    assert not [one for one in threading.enumerate() if one.name == "uvicorn-thread"]
