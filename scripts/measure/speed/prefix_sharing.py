"""What sharing a prefix saves: many requests over one system prompt, with and without a PrefixStore."""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kv_hf.cache.paged_cache import PagedCache
from kv_hf.cache.prefix_store import PrefixStore


@dataclass(frozen=True)
class SharingResult:
    """Prefill of a number of requests with one way of running them.

    Attributes:
        seconds: of all prefills, the first token of each request included.
        tokens, tokens_computed: of the prompts, and of those that went through the model.
        pages, page_bytes: pages held when all requests have their first token, and bytes of one over all layers.
    """

    seconds: float
    tokens: int
    tokens_computed: int
    pages: int
    page_bytes: int

    @property
    def skipped(self) -> float:
        """Part of the prompts' tokens that did not go through the model."""
        return 1 - self.tokens_computed / self.tokens


def requests_over(
    token_ids: Sequence[int], system: int, requests: int, question: int
) -> list[list[int]]:
    """Return `requests` prompts: the first `system` tokens of a text, and `question` tokens from further on in it."""
    starts = range(system, system + requests)
    return [[*token_ids[:system], *token_ids[start : start + question]] for start in starts]


def run_requests(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    implementation: str,
    batch: int,
    shared: bool,
    new_tokens: int = 1,
) -> tuple[SharingResult, torch.Tensor]:
    """Generate `new_tokens` for all prompts, `batch` at a time, keeping every cache; return figures and tokens.

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
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            cache_implementation=implementation,
            cache_config={"prefix_store": store} if shared else None,
            return_dict_in_generate=True,
        )
        caches.append(out.past_key_values)
        outs.append(out.sequences[:, ids.shape[1] :])
    seconds = time.perf_counter() - start
    tokens = sum(map(len, prompts))
    pools = {id(cache.group.pool): cache.group.pool for cache in caches}.values()
    specs = [layer.spec for layer in caches[0].paged_layers if layer.spec is not None]
    result = SharingResult(
        seconds,
        tokens,
        store.stats().tokens_computed if shared else tokens,
        sum(pool.num_held for pool in pools),
        sum(spec.page_bytes for spec in specs),
    )
    return result, torch.cat(outs)
