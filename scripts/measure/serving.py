"""Many requests: prompts over one prefix, and continuous batching."""

import functools
import gc
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kv_hf.cache.model_shape import CACHE
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.cache.prefix_store import PrefixStore
from kv_hf.evaluation.caches import layer_shapes
from kv_hf.texts import load_text
from measure import shapes
from measure.runner import Device, Fields, Verdict, equal, workload
from measure.shapes import RANDOM_MODELS, folder_of

Prompts = list[list[int]]
BATCH = 512  # most tokens of a forward
BLOCK = 256  # tokens of a block of transformers' own pages
OWN = "transformers"
SYSTEM, QUESTION = 2000, 24  # tokens that all prompts of `prefix` share, and of each one's own


@functools.cache
def text_ids(model: str) -> list[int]:
    """Return a long text as a model's token ids; of a random model, which has no tokenizer, random ones."""
    if model in RANDOM_MODELS:
        vocab = RANDOM_MODELS[model].vocab_size
        return random.Random(0).choices(range(3, vocab), k=3000)
    text = "\n\n".join(load_text(name) for name in ("novel", "lincoln_1862"))
    return list(AutoTokenizer.from_pretrained(folder_of(model))(text)["input_ids"])


def over_one_prefix(ids: list[int], requests: int, shared: int, own: int) -> Prompts:
    """Return prompts of one prefix of `shared` tokens, each with `own` tokens behind it."""
    return [ids[:shared] + ids[shared + i * own :][:own] for i in range(requests)]


# -- prefixes


def run_requests(
    model: Any,
    prompts: Prompts,
    cache: str,
    batch: int,
    store: PrefixStore | None,
    new_tokens: int = 1,
) -> tuple[Fields, Tensor]:
    """Generate for all prompts of one length, `batch` at a time, keeping every cache; return figures and tokens.

    Args:
        store: that all calls use.
    """
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
            cache_config={"prefix_store": store},
            return_dict_in_generate=True,
        )
        caches.append(out[CACHE])
        outs.append(out.sequences[:, ids.shape[1] :])
    seconds, tokens = time.perf_counter() - start, sum(map(len, prompts))
    computed = tokens if store is None else store.stats().tokens_computed
    pools = {cache._group.pool for cache in caches}
    pages = sum(pool.num_held for pool in pools)
    page_bytes = sum(layer.spec.page_bytes for layer in caches[0].paged_layers if layer.spec)
    figures = {
        "value": seconds,
        "tokens_computed": computed,
        "skipped": 1 - computed / tokens,
        "pages_bytes": pages * page_bytes,
    }
    return figures, torch.cat(outs)


def same_tokens(device: Device, model: str, **others: Any) -> Iterator[Verdict]:
    """Compare 16 tokens of three requests with and without sharing, in fp32."""
    loaded = shapes.load(model, device, "float32")
    prompts = over_one_prefix(text_ids(model), 3, SYSTEM, QUESTION)
    _, alone = run_requests(loaded, prompts, "paged_exact", 1, None, 16)
    _, shared = run_requests(loaded, prompts, "paged_exact", 1, PrefixStore(), 16)
    yield equal("tokens with a prefix store", alone, shared)


HOW = {"cache": "paged_int4", "dtype": "bfloat16", "question_tokens": QUESTION}


@workload(
    "prefix",
    # without sharing a larger batch computes the same tokens: one way stands for all
    grid=[
        {"model": "smollm2-135m", "requests": 64, "batch": 1, "prefix_store": "none"},
        {"model": "smollm2-135m", "requests": 64, "batch": [1, 64], "prefix_store": "memory"},
    ],
    gate=same_tokens,
    columns="value tokens_computed skipped pages_bytes",
)
def prefix(
    device: Device, model: str, requests: int, batch: int, prefix_store: str
) -> Iterator[Fields]:
    """The prefill of many requests over one system prompt, without a prefix store and with one."""
    loaded = shapes.load(model, device, "bfloat16")
    prompts = over_one_prefix(text_ids(model), requests, SYSTEM, QUESTION)
    run_requests(loaded, [prompt[:64] for prompt in prompts[:2]], "paged_int4", 1, PrefixStore())
    store = None if prefix_store == "none" else PrefixStore()
    figures, _ = run_requests(loaded, prompts, "paged_int4", batch, store)
    yield {"metric": "prefill", "system_tokens": SYSTEM, **HOW, **figures}


@workload(
    "restart",
    grid=[{"model": ["smollm2-135m", "qwen2.5-coder-1.5b"], "system_tokens": 4096}],
    columns="prefix_store value tokens_computed folder_bytes",
)
def restart(device: Device, model: str, system_tokens: int) -> Iterator[Fields]:
    """The first token behind a long system prompt: computed without a store, kept in memory and in a folder too, and found there."""
    loaded = shapes.load(model, device, "bfloat16")
    first, second = over_one_prefix(text_ids(model), 2, system_tokens, QUESTION)
    run_requests(loaded, [first[:64]], "paged_int4", 1, PrefixStore())  # to warm up
    with TemporaryDirectory() as folder:
        for name in ("none", "memory", "folder", "folder, started anew"):
            place = folder if name.startswith("folder") else None
            store = None if name == "none" else PrefixStore(folder=place)
            prompt = second if name.endswith("anew") else first
            figures, _ = run_requests(loaded, [prompt], "paged_int4", 1, store)
            if store is not None:
                store.flush()
            files = sum(one.stat().st_size for one in Path(folder).rglob("*") if one.is_file())
            yield {"prefix_store": name, "folder_bytes": files, **HOW, **figures}


# -- continuous batching


def mixed_prompts(ids: list[int], requests: int, least: int, most: int) -> Prompts:
    """Return prompts of `least` to `most` tokens, their logarithms evenly spread, that are cut out of a text."""
    draw = random.Random(0)
    prompts = []
    for i in range(requests):
        size = round(least * (most / least) ** (i / max(1, requests - 1)))
        start = draw.randrange(len(ids) - most)
        prompts.append(ids[start : start + size])
    draw.shuffle(prompts)
    return prompts


def run_load(model: Any, prompts: Prompts, answer: int, cache: str, budget: int) -> Fields:
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
    results: list[Any] = []
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:
        held = manager.batch_processor.cache
        block = BLOCK if cache == OWN else held.options.page_size
        begin = time.perf_counter()
        manager.add_requests(prompts, max_new_tokens=answer, record_timestamps=True)
        while len(results) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError(f"the manager stopped behind {len(results)} requests")
            if result is not None and result.error:
                raise RuntimeError(result.error)
            if result is not None and result.is_finished():
                results.append(result)
        seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "tokens_per_s": sum(len(one.generated_tokens) for one in results) / seconds,
        "first_token_s": statistics.median(one.timestamps[0] - begin for one in results),
        "capacity_tokens": block * held.num_blocks,
    }


LOAD: Fields = {
    "model": "smollm2-135m",
    "requests": 32,
    "least": 128,
    "most": 2048,
    "answer": 128,
}


@workload(
    "serving/batches",
    grid=[
        LOAD | {"load": ["mixed", "shared"], "budget_bytes": 2048 << 20},
        LOAD | {"load": "tight", "budget_bytes": 192 << 20},
    ],
    kind="batches",
    file="serving",
    columns="cache capacity_tokens seconds tokens_per_s ratio_to_transformers first_token_s",
)
def batches(
    device: Device,
    model: str,
    load: str,
    requests: int,
    least: int,
    most: int,
    answer: int,
    budget_bytes: int,
) -> Iterator[Fields]:
    """Continuous batching on paged caches beside transformers' own pages in the same bytes."""
    loaded, ids = shapes.load(model, device, "bfloat16"), text_ids(model)
    if load == "shared":
        prompts = over_one_prefix(ids, requests, most // 2, 32)
    else:
        prompts = mixed_prompts(ids, requests, least, most)
    own: Fields = {}
    for cache in (OWN, "paged_int4"):
        found = run_load(loaded, prompts, answer, cache, budget_bytes)
        own = own or found
        yield {
            **found,
            "cache": cache,
            "prompt_tokens": sum(map(len, prompts)),
            "batch_tokens": BATCH,
            "dtype": "bfloat16",
            "ratio_to_transformers": found["tokens_per_s"] / own["tokens_per_s"],
            "first_token_ratio": found["first_token_s"] / own["first_token_s"],
        }
