"""Run many requests through continuous batching, on a paged cache or on transformers' own, and take their times."""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kv_hf.texts import load_text

OWN = "transformers"  # its own 16-bit pages
BLOCK = 256  # tokens of its blocks


@dataclass(frozen=True)
class Load:
    """Requests that come at once.

    Attributes:
        name: of the load, for rows.
        prompts: token ids.
        answer: new tokens of each request.
    """

    name: str
    prompts: Sequence[Sequence[int]]
    answer: int


def mixed_load(
    tokenizer: Any, requests: int, shortest: int, longest: int, answer: int, seed: int = 0
) -> Load:
    """Return requests with prompts of `shortest` to `longest` tokens (their logarithms evenly spread), cut out of texts."""
    ids = _text(tokenizer)
    draw = random.Random(seed)
    steps = [shortest * (longest / shortest) ** (i / max(1, requests - 1)) for i in range(requests)]
    draw.shuffle(steps)
    starts = [draw.randrange(len(ids) - longest) for _ in steps]
    prompts = [ids[start : start + round(size)] for start, size in zip(starts, steps, strict=True)]
    return Load("mixed", prompts, answer)


def shared_load(tokenizer: Any, requests: int, prefix: int, own: int, answer: int) -> Load:
    """Return requests over one prefix, each with `own` tokens behind it."""
    ids = _text(tokenizer)
    first, rest = ids[:prefix], ids[prefix:]
    prompts = [first + rest[i * own : (i + 1) * own] for i in range(requests)]
    return Load("shared", prompts, answer)


def _text(tokenizer: Any) -> list[int]:
    return list(
        tokenizer("\n\n".join(load_text(name) for name in ("novel", "lincoln_1862")))["input_ids"]
    )


def run_load(
    model: Any,
    load: Load,
    cache: str,
    budget: int,
    token_bytes: int,
    batch_tokens: int,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run a load and return what it took.

    Args:
        cache: name of a paged cache, or OWN.
        budget: bytes of the cache.
        token_bytes: of a token in 16 bits, over all layers.
        batch_tokens: most tokens of a forward.
    Returns: seconds, tokens_per_s (new tokens), first_token_s (median) and first_token_s_most, of requests that all came at
        the start; cache_bytes (allocated), capacity_tokens, evicted, outputs (token ids by request).
    """
    generation = GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=load.answer
    )
    batching: dict[str, Any] = {
        "max_batch_tokens": batch_tokens,
        "max_requests_per_batch": len(load.prompts),
    }
    if cache == OWN:
        batching["num_blocks"] = budget // (BLOCK * token_bytes)
    else:
        generation.cache_implementation = cache
        generation.cache_config = {**(options or {}), "max_bytes": budget}
    manager = model.init_continuous_batching(
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**batching),
    )
    manager.warmup()
    held = manager.batch_processor.cache
    if cache == OWN:
        sizes = {
            "cache_bytes": held.cache_tensor.nbytes,
            "capacity_tokens": held.num_blocks * BLOCK,
        }
    else:
        memory = held.memory()
        sizes = {
            "cache_bytes": memory.total,
            "capacity_tokens": held.num_pages * held.options.page_size,
        }
    manager.start()
    begin = time.perf_counter()
    manager.add_requests(
        list(map(list, load.prompts)), max_new_tokens=load.answer, record_timestamps=True
    )
    results: list[Any] = []
    while len(results) < len(load.prompts):
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise RuntimeError(
                f"the manager stopped after {len(results)} of {len(load.prompts)} requests"
            )
        if result is not None and result.is_finished():
            if result.error:
                raise RuntimeError(result.error)
            results.append(result)
    seconds = time.perf_counter() - begin
    evicted = getattr(held, "requests_evicted", None)
    manager.stop(block=True)
    manager.destroy()
    firsts = [one.timestamps[0] - begin for one in results]
    results.sort(key=lambda one: int(one.request_id.removeprefix("req_")))
    return {
        "seconds": seconds,
        "tokens_per_s": sum(len(one.generated_tokens) for one in results) / seconds,
        "first_token_s": statistics.median(firsts),
        "first_token_s_most": max(firsts),
        "evicted": evicted,
        **sizes,
        "outputs": [one.generated_tokens for one in results],
    }
