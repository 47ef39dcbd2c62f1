"""Many requests and chats: prompts over one prefix, continuous batching, and servers asked over HTTP."""

import functools
import gc
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kv_hf.cache.paged_cache import PagedCache
from kv_hf.cache.prefix_store import PrefixStore
from kv_hf.evaluation.caches import layer_shapes
from kv_hf.evaluation.memory import random_prompt
from kv_hf.texts import load_text
from measure import shapes
from measure.runner import Fields, Verdict, workload
from measure.shapes import RANDOM_MODELS, folder_of, load

WAIT_S = 300
BATCH = 512  # most tokens of a forward
MIB = 1 << 20
BLOCK = 256  # tokens of a block of transformers' own pages
OWN, STOCK = "transformers", "transformers serve"
SYSTEM, QUESTION = (
    2000,
    24,
)  # tokens that all prompts of `prefix` share, and those of each one's own
QUESTIONS = ("What is this text about?", "Who wrote it, and when?")


@functools.cache
def text_ids(model: str) -> list[int]:
    """Return a long text as a model's token ids; of a random model, which has no tokenizer, random ones."""
    if model in RANDOM_MODELS:
        vocab = RANDOM_MODELS[model].vocab_size
        return random_prompt(vocab, 1, 3000, torch.device("cpu"))[0].tolist()
    text = "\n\n".join(load_text(name) for name in ("novel", "lincoln_1862"))
    return list(AutoTokenizer.from_pretrained(folder_of(model))(text)["input_ids"])


# -- prefixes


def run_requests(
    model: Any, prompts: Sequence[Sequence[int]], implementation: str, batch: int, shared: bool, new_tokens: int = 1
) -> tuple[Fields, torch.Tensor]:  # fmt: skip
    """Generate for all prompts, `batch` at a time, keeping every cache; return figures and tokens.

    Args:
        prompts: token ids, all of one length.
        shared: whether all calls use one PrefixStore.
    """
    store = PrefixStore()
    caches: list[PagedCache] = []
    outs = []
    gc.collect()
    start = time.perf_counter()
    for first in range(0, len(prompts), batch):
        ids = torch.tensor(prompts[first : first + batch], device=model.device)
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None,
            cache_implementation=implementation, cache_config={"prefix_store": store} if shared else None,
            return_dict_in_generate=True,
        )  # fmt: skip
        caches.append(out.past_key_values)
        outs.append(out.sequences[:, ids.shape[1] :])
    seconds, tokens = time.perf_counter() - start, sum(map(len, prompts))
    computed = store.stats().tokens_computed if shared else tokens
    pools = {id(cache.group.pool): cache.group.pool for cache in caches}.values()
    page_bytes = sum(layer.spec.page_bytes for layer in caches[0].paged_layers if layer.spec)
    figures = {
        "value": seconds, "tokens": tokens, "tokens_computed": computed, "skipped": 1 - computed / tokens,
        "pages": sum(pool.num_held for pool in pools), "page_bytes": page_bytes,
    }  # fmt: skip
    return figures, torch.cat(outs)


def _over_one_prefix(model: str, requests: int) -> list[list[int]]:
    ids = text_ids(model)
    starts = range(SYSTEM, SYSTEM + requests)
    return [[*ids[:SYSTEM], *ids[start : start + QUESTION]] for start in starts]


def same_tokens(device: torch.device, model: str, **others: Any) -> Iterator[Verdict]:
    """Compare three requests of 16 tokens with and without sharing, in fp32."""
    loaded, prompts = load(model, device, "float32"), _over_one_prefix(model, 3)
    runs = [run_requests(loaded, prompts, "paged_exact", 1, shared, 16)[1] for shared in (False, True)]  # fmt: skip
    yield Verdict("tokens with a prefix store", float(not torch.equal(*runs)), 0.0)


@workload(
    "prefix",
    # without sharing a larger batch computes the same tokens: one way stands for all
    grid=[
        {"model": ["smollm2-135m"], "requests": [64], "batch": batches, "prefix_store": [shared]}
        for shared, batches in ((False, [1]), (True, [1, 64]))
    ],
    tiny=[{"model": ["tiny"], "requests": [2], "batch": [1], "prefix_store": [False, True]}],
    gate=same_tokens,
    columns="value tokens tokens_computed skipped pages",
)
def prefix(
    device: torch.device, model: str, requests: int, batch: int, prefix_store: bool
) -> Iterator[Fields]:
    """The prefill of many requests over one system prompt, with and without a prefix store."""
    loaded, prompts = load(model, device, "bfloat16"), _over_one_prefix(model, requests)
    run_requests(loaded, [prompt[:64] for prompt in prompts[:2]], "paged_int4", 1, True)  # warm-up
    config = {
        "implementation": "paged_int4", "requests": requests, "system_tokens": SYSTEM, "question_tokens": QUESTION,
        "batch": batch, "prefix_store": prefix_store,
    }  # fmt: skip
    figures, _ = run_requests(loaded, prompts, "paged_int4", batch, prefix_store)
    yield {
        "config": config,
        "metric": "prefill",
        "unit": "s",
        "dtype": "bfloat16",
        "n": 1,
        **figures,
    }


# -- continuous batching


def requests_of(load: str, ids: list[int], requests: int, least: int, most: int) -> list[list[int]]:
    """Return prompts that are cut out of a text.

    "shared": over one prefix of `most` / 2 tokens, each with 32 tokens behind it. Any other load: of `least` to `most`
    tokens, their logarithms evenly spread.
    """
    if load == "shared":
        first, rest = ids[: most // 2], ids[most // 2 :]
        return [first + rest[i * 32 : (i + 1) * 32] for i in range(requests)]
    draw = random.Random(0)
    sizes = [least * (most / least) ** (i / max(1, requests - 1)) for i in range(requests)]
    draw.shuffle(sizes)
    starts = [draw.randrange(len(ids) - most) for _ in sizes]
    return [ids[start : start + round(size)] for start, size in zip(starts, sizes, strict=True)]


def run_load(
    model: Any, prompts: Sequence[list[int]], answer: int, cache: str, budget: int
) -> Fields:
    """Run requests that all come at once through continuous batching, on a paged cache or OWN.

    Args:
        budget: bytes of the cache.
    Returns: seconds, tokens_per_s (new tokens), first_token_s (median), first_token_s_most, cache_bytes (allocated),
        capacity_tokens, evicted, and outputs: token ids by request.
    """
    generation = GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=answer
    )
    batching = ContinuousBatchingConfig(max_batch_tokens=BATCH, max_requests_per_batch=len(prompts))  # fmt: skip
    if cache == OWN:
        token = sum(shape[0] * (shape[1] + shape[2]) for shape in layer_shapes(model) if shape)
        batching.num_blocks = budget // (BLOCK * token * model.dtype.itemsize)
    else:
        generation.cache_implementation, generation.cache_config = cache, {"max_bytes": budget}
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=batching
    )
    manager.warmup()
    held = manager.batch_processor.cache
    sizes = (
        {"cache_bytes": held.cache_tensor.nbytes, "capacity_tokens": held.num_blocks * BLOCK}
        if cache == OWN
        else {"cache_bytes": held.memory().total, "capacity_tokens": held.num_pages * held.options.page_size}
    )  # fmt: skip
    manager.start()
    begin = time.perf_counter()
    manager.add_requests(list(prompts), max_new_tokens=answer, record_timestamps=True)
    results: list[Any] = []
    while len(results) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(f"the manager stopped after {len(results)} of {len(prompts)} requests")  # fmt: skip
        if result is not None and result.error:
            raise RuntimeError(result.error)
        if result is not None and result.is_finished():
            results.append(result)
    seconds = time.perf_counter() - begin
    evicted = getattr(held, "requests_evicted", None)
    manager.stop(block=True)
    manager.destroy()
    firsts = [one.timestamps[0] - begin for one in results]
    results.sort(key=lambda one: int(one.request_id.removeprefix("req_")))
    return {
        "seconds": seconds, "tokens_per_s": sum(len(one.generated_tokens) for one in results) / seconds,
        "first_token_s": statistics.median(firsts), "first_token_s_most": max(firsts), "evicted": evicted, **sizes,
        "outputs": [one.generated_tokens for one in results],
    }  # fmt: skip


@workload(
    "serving/batches",
    grid=[
        {"model": ["smollm2-135m"], "load": loads, "requests": [32], "least": [128], "most": [2048], "answer": [128], "budget": [budget]}
        for loads, budget in ((["mixed", "shared"], 2048 * MIB), (["tight"], 192 * MIB))
    ],
    tiny=[{"model": ["tiny"], "load": ["mixed", "shared"], "requests": [2], "least": [20], "most": [60], "answer": [3], "budget": [4 * MIB]}],
    kind="batches",
    file="serving",
    columns="cache cache_bytes capacity_tokens seconds tokens_per_s ratio_to_transformers first_token_s equal_answers",
)  # fmt: skip
def batches(
    device: torch.device, model: str, load: str, requests: int, least: int, most: int, answer: int, budget: int
) -> Iterator[Fields]:  # fmt: skip
    """Continuous batching on paged caches beside transformers' own pages in the same bytes."""
    loaded = shapes.load(model, device, "bfloat16")
    prompts = requests_of(load, text_ids(model), requests, least, most)
    facts = {"prompt_tokens": sum(map(len, prompts)), "batch_tokens": BATCH, "dtype": "bfloat16"}
    own: Fields = {}
    for cache in (OWN, "paged_exact", "paged_int4"):
        found = run_load(loaded, prompts, answer, cache, budget)
        outputs = found.pop("outputs")
        own = own or {**found, "outputs": outputs}
        equal = sum(a == b for a, b in zip(outputs, own["outputs"], strict=True))
        yield {
            "cache": cache, **facts, **found, "ratio_to_transformers": found["tokens_per_s"] / own["tokens_per_s"],
            "first_token_ratio": found["first_token_s"] / own["first_token_s"], "equal_answers": equal,
        }  # fmt: skip


# -- servers


@dataclass(frozen=True)
class Turn:
    """One request and its answer.

    Attributes:
        first_s, whole_s: seconds until the first text of the answer, and until its end.
        cpu_s: processor time of the server for it, over all its threads.
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
    """A server's process, asked over HTTP; its model is named as requests name it."""

    def __init__(self, pid: int, port: int, model: str) -> None:
        import openai
        import psutil

        self.process, self.model = psutil.Process(pid), model
        address = f"http://127.0.0.1:{port}/v1"
        self.client = openai.OpenAI(base_url=address, api_key="none", timeout=WAIT_S, max_retries=0)

    def cpu_s(self) -> float:
        """Return the processor seconds of all threads so far."""
        return float(sum(self.process.cpu_times()[:2]))

    def computed(self) -> int | None:
        """Return the prompt tokens that went through the model so far; None where the server does not say."""
        import openai

        try:
            address = str(self.client.base_url).replace("/v1/", "/kv_hf/stats")
            stats: Any = self.client.get(address, cast_to=object)
        except openai.NotFoundError:
            return None
        return sum(one["prefix_store"]["tokens_computed"] for one in stats["models"].values() if one["prefix_store"])  # fmt: skip

    def ask(self, messages: Sequence[Any], new_tokens: int) -> Turn:
        """Send a chat, greedily, and read the answer as a stream."""
        before, cpu, start = self.computed(), self.cpu_s(), time.perf_counter()
        text, first, usage = "", 0.0, None
        stream = self.client.chat.completions.create(
            model=self.model, messages=list(messages), max_tokens=new_tokens, temperature=0, stream=True,
        )  # fmt: skip
        for chunk in stream:
            part = chunk.choices[0].delta.content if chunk.choices else None
            if part and not text:
                first = time.perf_counter() - start
            text += part or ""
            usage = chunk.usage or usage
        whole = time.perf_counter() - start
        assert usage is not None
        after, tokens = self.computed(), usage.prompt_tokens
        computed = tokens if before is None or after is None else after - before
        return Turn(first, whole, self.cpu_s() - cpu, tokens, computed, text)


def two_turns(asked: Server, system: str, questions: Sequence[str], new_tokens: int) -> list[Turn]:
    """Hold a chat of as many turns as there are questions; return them."""
    messages = [{"role": "system", "content": system}]
    turns = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        turns.append(asked.ask(messages, new_tokens))
        messages.append({"role": "assistant", "content": turns[-1].answer})
    return turns


@contextmanager
def server(start: str, model: str, *options: str) -> Iterator[Server]:
    """Run a server within the block, on a free port of this machine.

    Args:
        start: Python code that starts it, with the command line behind it.
        model: folder of the model, as requests name it.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-c", start, "serve", model, *options]
    process = subprocess.Popen(
        [*command, "--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            if "Uvicorn running on" in line:
                break
        else:
            raise RuntimeError(f"{' '.join(command)} did not start: {''.join(said[-5:])}")
        yield Server(process.pid, port, model)
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(WAIT_S)


@workload(
    "serving/turns",
    grid=[{"model": ["smollm2-135m"], "system_tokens": [1024], "new_tokens": [16], "chats": [3]}],
    kind="serve",
    file="serving",
    columns="implementation turn prompt_tokens tokens_computed first_token_s whole_s value",
)
def turns(
    device: torch.device, model: str, system_tokens: int, new_tokens: int, chats: int
) -> Iterator[Fields]:
    """Turns of a chat with `kv-hf serve` beside `transformers serve`; all servers run at once and take turns."""
    folder, ids = folder_of(model), text_ids(model)
    decode = AutoTokenizer.from_pretrained(folder).decode
    ours = "import sys; from kv_hf_cli import main; sys.exit(main())"
    found: dict[str, list[list[Turn]]] = {STOCK: [], "paged_exact": [], "paged_int4": []}
    with ExitStack() as stack:
        enter = stack.enter_context
        running = {
            name: enter(server(ours, folder, "--cache", name) if name != STOCK else server("from transformers.cli.transformers import app; app()", folder))
            for name in found
        }  # fmt: skip
        for number in range(chats + 1):  # the first chat warms them up
            text = str(decode(ids[97 * number : 97 * number + system_tokens]))
            for name in list(running)[:: 1 if number % 2 else -1]:
                found[name].append(two_turns(running[name], text, QUESTIONS, new_tokens))
    for name, held in found.items():
        for turn, asked in enumerate(zip(*held[1:], strict=True), 1):
            config = {"implementation": name, "system_tokens": system_tokens, "new_tokens": new_tokens, "batching": False}  # fmt: skip
            yield {
                "config": config, "implementation": name, "turn": turn, "metric": "cpu_per_turn", "unit": "s", "dtype": "bfloat16",
                "value": min(one.cpu_s for one in asked), "first_token_s": min(one.first_s for one in asked),
                "whole_s": min(one.whole_s for one in asked), "prompt_tokens": asked[-1].prompt_tokens,
                "tokens_computed": asked[-1].tokens_computed, "n": len(asked),
            }  # fmt: skip
