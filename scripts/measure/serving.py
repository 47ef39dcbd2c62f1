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
from measure.shapes import RANDOM_MODELS, folder_of

WAIT_S = 300
BATCH = 512  # most tokens of a forward
MIB = 1 << 20
BLOCK = 256  # tokens of a block of transformers' own pages
OWN, STOCK = "transformers", "transformers serve"
SYSTEM, QUESTION = 2000, 24  # tokens that all prompts of `prefix` share, and of each one's own
QUESTIONS = ("What is this text about?", "Who wrote it, and when?")


@functools.cache
def text_ids(model: str) -> list[int]:
    """Return a long text as a model's token ids; of a random model, which has no tokenizer, random ones."""
    if model in RANDOM_MODELS:
        vocab = RANDOM_MODELS[model].vocab_size
        return random_prompt(vocab, 1, 3000, torch.device("cpu"))[0].tolist()
    text = "\n\n".join(load_text(name) for name in ("novel", "lincoln_1862"))
    return list(AutoTokenizer.from_pretrained(folder_of(model))(text)["input_ids"])


def over_one_prefix(ids: list[int], requests: int, shared: int, own: int) -> list[list[int]]:
    """Return prompts of one prefix of `shared` tokens, each with `own` tokens behind it."""
    return [ids[:shared] + ids[shared + i * own :][:own] for i in range(requests)]


# -- prefixes


def run_requests(
    model: Any,
    prompts: Sequence[list[int]],
    cache: str,
    batch: int,
    shared: bool,
    new_tokens: int = 1,
) -> tuple[Fields, torch.Tensor]:
    """Generate for all prompts of one length, `batch` at a time, keeping every cache; return figures and tokens.

    Args:
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
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            cache_implementation=cache,
            cache_config={"prefix_store": store} if shared else None,
            return_dict_in_generate=True,
        )
        caches.append(out.past_key_values)
        outs.append(out.sequences[:, ids.shape[1] :])
    seconds, tokens = time.perf_counter() - start, sum(map(len, prompts))
    computed = store.stats().tokens_computed if shared else tokens
    pools = {id(cache.group.pool): cache.group.pool for cache in caches}.values()
    figures = {
        "value": seconds,
        "tokens_computed": computed,
        "skipped": 1 - computed / tokens,
        "pages": sum(pool.num_held for pool in pools),
        "page_bytes": sum(layer.spec.page_bytes for layer in caches[0].paged_layers if layer.spec),
    }
    return figures, torch.cat(outs)


@workload(
    "prefix",
    # without sharing a larger batch computes the same tokens: one way stands for all
    grid=[
        {"model": ["smollm2-135m"], "requests": [64], "batch": batches, "prefix_store": [shared]}
        for shared, batches in ((False, [1]), (True, [1, 64]))
    ],
    gate=lambda device, model, **others: same_tokens(device, model),
    columns="value tokens_computed skipped pages",
)
def prefix(
    device: torch.device, model: str, requests: int, batch: int, prefix_store: bool
) -> Iterator[Fields]:
    """The prefill of many requests over one system prompt, with and without a prefix store."""
    loaded = shapes.load(model, device, "bfloat16")
    prompts = over_one_prefix(text_ids(model), requests, SYSTEM, QUESTION)
    run_requests(loaded, [prompt[:64] for prompt in prompts[:2]], "paged_int4", 1, True)  # warm-up
    figures, _ = run_requests(loaded, prompts, "paged_int4", batch, prefix_store)
    config = {
        "implementation": "paged_int4",
        "requests": requests,
        "system_tokens": SYSTEM,
        "question_tokens": QUESTION,
        "batch": batch,
        "prefix_store": prefix_store,
    }
    yield {"config": config, "metric": "prefill", "dtype": "bfloat16", **figures}


def same_tokens(device: torch.device, model: str) -> Iterator[Verdict]:
    """Compare 16 tokens of three requests with and without sharing, in fp32."""
    loaded = shapes.load(model, device, "float32")
    prompts = over_one_prefix(text_ids(model), 3, SYSTEM, QUESTION)
    alone, shared = (
        run_requests(loaded, prompts, "paged_exact", 1, share, 16)[1] for share in (False, True)
    )
    yield Verdict("tokens with a prefix store", float(not torch.equal(alone, shared)), 0.0)


# -- continuous batching


def mixed_prompts(ids: list[int], requests: int, least: int, most: int) -> list[list[int]]:
    """Return prompts of `least` to `most` tokens, their logarithms evenly spread, that are cut out of a text."""
    draw = random.Random(0)
    sizes = [least * (most / least) ** (i / max(1, requests - 1)) for i in range(requests)]
    draw.shuffle(sizes)
    starts = [draw.randrange(len(ids) - most) for _ in sizes]
    return [ids[start : start + round(size)] for start, size in zip(starts, sizes, strict=True)]


def run_load(
    model: Any, prompts: Sequence[list[int]], answer: int, cache: str, budget: int
) -> Fields:
    """Run requests that all come at once through continuous batching, on a paged cache or OWN, of `budget` bytes.

    Returns: seconds, tokens_per_s (new tokens), first_token_s (median), and capacity_tokens.
    """
    generation = GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=answer
    )
    batching = ContinuousBatchingConfig(max_batch_tokens=BATCH, max_requests_per_batch=len(prompts))
    if cache == OWN:
        token = sum(shape[0] * (shape[1] + shape[2]) for shape in layer_shapes(model) if shape)
        batching.num_blocks = budget // (BLOCK * token * model.dtype.itemsize)
    else:
        generation.cache_implementation = cache
        generation.cache_config = {"max_bytes": budget}
    manager = model.init_continuous_batching(
        generation_config=generation, continuous_batching_config=batching
    )
    manager.warmup()
    held = manager.batch_processor.cache
    pages = held.num_blocks * BLOCK if cache == OWN else held.num_pages * held.options.page_size
    manager.start()
    begin = time.perf_counter()
    manager.add_requests(list(prompts), max_new_tokens=answer, record_timestamps=True)
    results: list[Any] = []
    while len(results) < len(prompts):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(f"the manager stopped behind {len(results)} requests")
        if result is not None and result.error:
            raise RuntimeError(result.error)
        if result is not None and result.is_finished():
            results.append(result)
    seconds = time.perf_counter() - begin
    manager.stop(block=True)
    manager.destroy()
    return {
        "seconds": seconds,
        "tokens_per_s": sum(len(one.generated_tokens) for one in results) / seconds,
        "first_token_s": statistics.median(one.timestamps[0] - begin for one in results),
        "capacity_tokens": pages,
    }


LOAD = {"requests": [32], "least": [128], "most": [2048], "answer": [128]}


@workload(
    "serving/batches",
    grid=[
        {"model": ["smollm2-135m"], "load": loads, "budget": [budget], **LOAD}
        for loads, budget in ((["mixed", "shared"], 2048 * MIB), (["tight"], 192 * MIB))
    ],
    kind="batches",
    file="serving",
    columns="cache capacity_tokens seconds tokens_per_s ratio_to_transformers first_token_s",
)
def batches(
    device: torch.device,
    model: str,
    load: str,
    requests: int,
    least: int,
    most: int,
    answer: int,
    budget: int,
) -> Iterator[Fields]:
    """Continuous batching on paged caches beside transformers' own pages in the same bytes."""
    loaded, ids = shapes.load(model, device, "bfloat16"), text_ids(model)
    if load == "shared":
        prompts = over_one_prefix(ids, requests, most // 2, 32)
    else:
        prompts = mixed_prompts(ids, requests, least, most)
    facts = {"prompt_tokens": sum(map(len, prompts)), "batch_tokens": BATCH, "dtype": "bfloat16"}
    own: Fields = {}
    for cache in (OWN, "paged_exact", "paged_int4"):
        found = run_load(loaded, prompts, answer, cache, budget)
        own = own or found
        yield {
            "cache": cache,
            **facts,
            **found,
            "ratio_to_transformers": found["tokens_per_s"] / own["tokens_per_s"],
            "first_token_ratio": found["first_token_s"] / own["first_token_s"],
        }


# -- servers


class Server:
    """A server's process, asked over HTTP; its model is named as requests name it."""

    def __init__(self, pid: int, port: int, model: str) -> None:
        import openai
        import psutil

        self.process, self.model = psutil.Process(pid), model
        address = f"http://127.0.0.1:{port}/v1"
        self.client = openai.OpenAI(base_url=address, api_key="none", timeout=WAIT_S, max_retries=0)

    def computed(self) -> int | None:
        """Return the prompt tokens that went through the model so far; None where the server does not say."""
        import openai

        address = str(self.client.base_url).replace("/v1/", "/kv_hf/stats")
        try:
            stats: Any = self.client.get(address, cast_to=object)
        except openai.NotFoundError:
            return None
        stores = (one["prefix_store"] for one in stats["models"].values())
        return sum(store["tokens_computed"] for store in stores if store)

    def ask(self, messages: Sequence[Any], new_tokens: int) -> Fields:
        """Send a chat, greedily, and read the answer as a stream.

        Returns: seconds until its first text and its end, the server's processor seconds over all threads (value), tokens
            of the prompt, those that a forward computed, and the answer.
        """
        before, cpu, start = self.computed(), self.process.cpu_times(), time.perf_counter()
        text, first, usage = "", 0.0, None
        stream = self.client.chat.completions.create(
            model=self.model,
            messages=list(messages),
            max_tokens=new_tokens,
            temperature=0,
            stream=True,
        )
        for chunk in stream:
            part = chunk.choices[0].delta.content if chunk.choices else None
            if part and not text:
                first = time.perf_counter() - start
            text += part or ""
            usage = chunk.usage or usage
        whole, after, now = time.perf_counter() - start, self.computed(), self.process.cpu_times()
        assert usage is not None
        tokens = usage.prompt_tokens
        computed = tokens if before is None or after is None else after - before
        return {
            "first_token_s": first,
            "whole_s": whole,
            "value": now.user + now.system - cpu.user - cpu.system,
            "prompt_tokens": tokens,
            "tokens_computed": computed,
            "answer": text,
        }


def two_turns(
    asked: Server, system: str, questions: Sequence[str], new_tokens: int
) -> list[Fields]:
    """Hold a chat of as many turns as there are questions; return them."""
    messages = [{"role": "system", "content": system}]
    turns = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        turns.append(asked.ask(messages, new_tokens))
        messages.append({"role": "assistant", "content": turns[-1]["answer"]})
    return turns


@contextmanager
def server(cache: str, model: str) -> Iterator[Server]:
    """Run a server within the block, on a free port of this machine: kv-hf serve with a cache, or STOCK.

    Args:
        model: its folder, as requests name it.
    """
    ours = "import sys; from kv_hf_cli import main; sys.exit(main())"
    start = "from transformers.cli.transformers import app; app()" if cache == STOCK else ours
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-c", start, "serve", model, "--dtype", "bfloat16"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += [] if cache == STOCK else ["--cache", cache]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
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
    found: dict[str, list[list[Fields]]] = {STOCK: [], "paged_exact": [], "paged_int4": []}
    with ExitStack() as stack:
        running = {name: stack.enter_context(server(name, folder)) for name in found}
        for number in range(chats + 1):  # the first chat warms them up
            text = str(decode(ids[97 * number : 97 * number + system_tokens]))
            for name in list(running)[:: 1 if number % 2 else -1]:
                found[name].append(two_turns(running[name], text, QUESTIONS, new_tokens))
    sizes = {"system_tokens": system_tokens, "new_tokens": new_tokens}
    for name, held in found.items():
        for turn, asked in enumerate(zip(*held[1:], strict=True), 1):
            least = ("value", "first_token_s", "whole_s")
            yield {
                "config": {"implementation": name, **sizes},
                "implementation": name,
                "turn": turn,
                "dtype": "bfloat16",
                "n": chats,
                **{field: min(one[field] for one in asked) for field in least},
                "prompt_tokens": asked[-1]["prompt_tokens"],
                "tokens_computed": asked[-1]["tokens_computed"],
            }
