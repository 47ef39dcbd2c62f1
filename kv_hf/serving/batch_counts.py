"""What a manager of continuous batching holds and has done: numbers for dashboards, read at any moment."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import UnsupportedModelError
from .batch_cache import BatchCache


@dataclass(frozen=True)
class BatchCounts:
    """The cache of a manager of continuous batching at one moment. Pages are those of the full-attention layers.

    Attributes:
        requests, rows: requests that hold tokens, and how many may at once.
        tokens: that they hold, shared ones as often as they are.
        pages, pages_allocated: pages that requests or the prefix store hold, and pages there are.
        pages_shared: pages that two requests or more hold.
        pages_kept: pages that the prefix store alone holds; they give way to requests.
        bytes_pages, bytes_exact: allocated for sealed pages, and for the exact tokens of all rows.
        bytes_host: of requests that wait on the host.
        prompts, prompts_hit, prompt_tokens, prompt_tokens_computed: that the prefix store was asked for, those of which it had
            a page, their tokens, and those that went through the model.
        pages_evicted: pages that the prefix store gave up.
        requests_evicted, requests_moved: that left a full cache to be computed anew, and for the host.
    """

    requests: int
    rows: int
    tokens: int
    pages: int
    pages_allocated: int
    pages_shared: int
    pages_kept: int
    bytes_pages: int
    bytes_exact: int
    bytes_host: int
    prompts: int
    prompts_hit: int
    prompt_tokens: int
    prompt_tokens_computed: int
    pages_evicted: int
    requests_evicted: int
    requests_moved: int

    @classmethod
    def of(cls, manager: Any) -> "BatchCounts":
        """Return the counts of a manager that `init_continuous_batching` made with a paged cache, once it has started.

        Raises: UnsupportedModelError for a manager without one.
        """
        cache = getattr(getattr(manager, "batch_processor", None), "cache", None)
        if not isinstance(cache, BatchCache):
            raise UnsupportedModelError(
                "this manager has no paged cache: it has not started, or its generation_config names none"
            )
        return cls.of_cache(cache)

    @classmethod
    def of_cache(cls, cache: BatchCache) -> "BatchCounts":
        """Return the counts of a manager's cache."""
        group = cache.groups.get(None) or next(iter(cache.groups.values()))
        with group.pool.lock:
            uses = Counter(page for pages in group.batch.pages for page in pages)
            held = group.pool.num_held
            tokens = sum(group.length(index) for index in range(len(group)))
        memory = cache.memory()
        stats = None if cache.prefix_store is None else cache.prefix_store.stats()
        return cls(
            requests=len(group),
            rows=cache.room.rows,
            tokens=tokens,
            pages=held,
            pages_allocated=cache.num_pages,
            pages_shared=sum(count > 1 for count in uses.values()),
            pages_kept=max(0, held - len(uses)),
            bytes_pages=memory.payload + memory.scales,
            bytes_exact=memory.tail,
            bytes_host=cache.bytes_away(),
            prompts=0 if stats is None else stats.rows,
            prompts_hit=0 if stats is None else stats.rows_hit,
            prompt_tokens=0 if stats is None else stats.tokens,
            prompt_tokens_computed=0 if stats is None else stats.tokens_computed,
            pages_evicted=0 if stats is None else stats.evictions,
            requests_evicted=cache.requests_evicted,
            requests_moved=cache.requests_moved,
        )

    def as_metrics(self) -> dict[str, int]:
        """Return the counts under names for OpenTelemetry or Prometheus: "kv_hf.cache.pages" and so on."""
        return {f"kv_hf.cache.{name}": value for name, value in asdict(self).items()}
