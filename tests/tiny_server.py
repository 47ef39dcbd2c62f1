"""transformers' server on a free port of this machine, with a tiny random model: a second to start, no download."""

import json
import socket
import threading
import urllib.request
from contextlib import contextmanager

import pytest
import torch
from tiny_models import make_model
from tiny_tokenizer import TURNS, make_tokenizer
from transformers.utils import logging

from kv_hf.serving.server_model import ServerOptions

WAIT_S = 30.0


def save_model(folder, family="llama", **changes):
    """Save a random model and a tokenizer with a chat template; return the folder's path."""
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = TURNS
    config = {"vocab_size": 1000, "max_position_embeddings": 8192, **changes}
    model = make_model(family, torch.float32, **config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def free_port():
    """Return a port that nothing listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_until(condition):
    """Wait for another thread's work, at most WAIT_S; say whether it came to be."""
    pause = threading.Event()
    for _ in range(int(WAIT_S / 0.02)):
        if condition():
            return True
        pause.wait(0.02)
    return False


def check_batch(cache):
    """Check the counts of a BatchCache, and that each row is that of its request."""
    for group in cache.groups.values():
        group.pool.check_integrity()
        assert len(group) == len(cache.requests)
    for row, request in enumerate(cache.requests):
        assert request.row == row and cache.known[request.name] is request


class Running:
    """A server that runs in this process.

    Attributes:
        serve: transformers' Serve.
        model_name: as requests name the model.
        address: "http://127.0.0.1:PORT".
    """

    def __init__(self, serve, model_name, address):
        self.serve, self.model_name, self.address = serve, model_name, address

    def client(self):
        """Return an OpenAI client that does not try again."""
        openai = pytest.importorskip("openai")
        return openai.OpenAI(
            base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        )

    def chat(self, messages, **options):
        """Send a chat, greedily unless asked otherwise; a string is one message of a user."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        given = {"max_tokens": 8, "temperature": 0, **options}
        return self.client().chat.completions.create(
            model=self.model_name, messages=messages, **given
        )

    def get(self, route):
        """Return the JSON that a route answers with."""
        with urllib.request.urlopen(self.address + route, timeout=WAIT_S) as answer:
            return json.load(answer)

    def store(self):
        """Return the counts of the one loaded model's prefix store."""
        (found,) = self.get("/kv_hf/stats")["models"].values()
        return found["prefix_store"]

    def model(self):
        """Return the one loaded model."""
        (timed,) = self.serve._model_manager.loaded_models.values()
        return timed.model


@contextmanager
def running(model_name, cache="paged_int4", config=None, store="64MiB", **arguments):
    """Serve a model within the block."""
    for package in ("fastapi", "uvicorn", "openai"):
        pytest.importorskip(package)
    from kv_hf.serving.server import start

    port = arguments.setdefault("port", free_port())
    batching = bool(arguments.get("continuous_batching"))
    options = ServerOptions.parse(cache, config, store, batching)
    given = {"host": "127.0.0.1", "device": "cpu", **arguments}
    verbosity = logging.get_verbosity()  # the server sets that of the process
    serve = start(options, model_name, non_blocking=True, **given)
    try:
        assert wait_until(lambda: serve.server.started)
        yield Running(serve, model_name, f"http://127.0.0.1:{port}")
    finally:
        serve.kill_server()
        serve._thread.join(WAIT_S)
        logging.set_verbosity(verbosity)
        assert not serve._thread.is_alive()
