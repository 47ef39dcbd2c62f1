"""The second turn of a chat over HTTP: how long a server takes, and how much of the prompt it computes.

A server runs in a process of its own, and only this module's client talks to it. Processor time is the server's, over all its
threads: other work on the machine disturbs the time on the clock far more.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

READY = "Uvicorn running on"
WAIT_S = 300


@dataclass(frozen=True)
class Turn:
    """One request and its answer.

    Attributes:
        first_s, whole_s: seconds until the first text of the answer, and until its end.
        cpu_s: processor time of the server for it.
        prompt_tokens, tokens_computed: tokens of the prompt, and those that a forward computed.
        answer: its text.
    """

    first_s: float
    whole_s: float
    cpu_s: float
    prompt_tokens: int
    tokens_computed: int
    answer: str


class Server:
    """A server's process and its port."""

    def __init__(self, process: subprocess.Popen[str], port: int, model: str) -> None:
        self.process, self.port, self.model = process, port, model

    def cpu_s(self) -> float:
        """Return the processor seconds of all threads so far (Linux)."""
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def computed(self) -> int | None:
        """Return the prompt tokens that went through the model so far; None where the server does not say."""
        answer = self._request("GET", "/kv_hf/stats")
        if answer.status != 200:
            answer.read()
            return None
        stores = [one["prefix_store"] for one in json.load(answer)["models"].values()]
        return sum(one["tokens_computed"] for one in stores if one) if any(stores) else None

    def ask(self, messages: Sequence[dict[str, str]], new_tokens: int) -> Turn:
        """Send a chat, greedily, and read the answer as a stream."""
        body = {"model": self.model, "messages": list(messages), "stream": True}
        before, cpu = self.computed(), self.cpu_s()
        start = time.perf_counter()
        answer = self._request(
            "POST", "/v1/chat/completions", {**body, "max_tokens": new_tokens, "temperature": 0}
        )
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read()[:500]!r}")
        text, first, usage = "", 0.0, None
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise RuntimeError(f"the stream ended with an error: {chunk['error']}")
            part = chunk["choices"][0]["delta"].get("content")
            if part:
                first = first or time.perf_counter() - start
                text += part
            usage = chunk.get("usage") or usage
        whole = time.perf_counter() - start
        assert usage is not None
        after = self.computed()
        tokens = usage["prompt_tokens"]
        computed = tokens if before is None or after is None else after - before
        return Turn(first, whole, self.cpu_s() - cpu, tokens, computed, text)

    def _request(
        self, method: str, route: str, body: dict[str, Any] | None = None
    ) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        headers = {"Content-Type": "application/json"}
        connection.request(method, route, None if body is None else json.dumps(body), headers)
        return connection.getresponse()


@contextmanager
def server(command: Sequence[str], model: str) -> Iterator[Server]:
    """Run a server within the block, on a free port of this machine.

    Args:
        command: what starts it, without host and port.
        model: as requests name the model.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    said = []
    try:
        for line in process.stderr:
            said.append(line)
            if READY in line:
                break
        else:
            raise RuntimeError(f"{' '.join(command)} did not start: {''.join(said[-5:])}")
        yield Server(process, port, model)
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(WAIT_S)


def of_transformers(model: str) -> list[str]:
    """Return the command of transformers' own server."""
    start = "from transformers.cli.transformers import app; app()"
    return [sys.executable, "-W", "ignore", "-c", start, "serve", model]


def of_kv_hf(model: str, cache: str, *options: str) -> list[str]:
    """Return the command of the server with a paged cache."""
    start = "import sys; from kv_hf_cli import main; sys.exit(main())"
    return [sys.executable, "-W", "ignore", "-c", start, "serve", model, "--cache", cache, *options]


def two_turns(asked: Server, system: str, questions: Sequence[str], new_tokens: int) -> list[Turn]:
    """Hold a chat of as many turns as there are questions; return them."""
    messages = [{"role": "system", "content": system}]
    turns = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        turns.append(asked.ask(messages, new_tokens))
        messages.append({"role": "assistant", "content": turns[-1].answer})
    return turns
