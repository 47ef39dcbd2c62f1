"""Memory of a model's caches and the loads that fit, before anything is loaded: `kv_hf.plan(...)`."""

import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from ..cache_names import parse_cache_name
from ..checks import check_int
from ..config import CacheConfig, given_options
from ..errors import CacheOptionError, DeviceBudgetError, KVCacheError, PagePoolExhaustedError
from ..formats import cache_names, is_cache_name
from ..page_summary import part_bytes
from ..printable import short
from ..spec import MemoryReport
from ..units import format_bytes, parse_bandwidth, parse_bytes, parse_tokens
from .cache_bytes import Pages, Stock
from .devices import find_device
from .inventory import Inventory, device_share
from .plan_table import MOST_ROWS, CachePlan, Decode, Fit, Plan
from .source import load_inventory

DEFAULT_CONTEXT = 8192
MOST_BATCH = 1_000_000  # rows are listed one by one
MOST_CONTEXT = 1 << 30  # windows are followed page by page
MOST_TOKENS = 1 << 30  # what still fits at this size has no limit
FAR_PAGES = 1 << 13  # a power of two, for which storage has no page to spare (spec.page_capacity)
EXACT_CACHES = ("dynamic", "static")  # transformers' own whose bytes are predicted


def plan(
    model: str | os.PathLike[str] | Inventory | Any,
    *,
    caches: Iterable[str | CacheConfig] | None = None,
    batch: int = 1,
    context: int | str | None = None,
    prompt: int | str | None = None,
    cache_config: CacheConfig | Mapping[str, Any] | None = None,
    device: str | None = None,
    device_memory: int | str | None = None,
    bandwidth: int | str | None = None,
    host_bandwidth: int | str | None = None,
    reserve: int | str = 0,
    weights: int | str | None = None,
    dtype: str | torch.dtype | None = None,
    kv_heads: int | None = None,
    tensor_parallel: int = 1,
) -> Plan:
    """Say what the caches of a model take, what fits, and how fast memory lets it decode. Loads no weights.

    Args:
        model: a preset (`kv-hf memory --list-presets`), a hub id, a folder, a config.json, a transformers config or an
            Inventory.
        caches: names ("dynamic", "static", "paged_int4", "paged_int4:keys=int8,offload=cpu") or CacheConfigs. None takes
            the common ones that the model can have.
        batch: rows, a million at most.
        context: tokens per row that the cache holds: a number or "128k" (128 * 1024). None takes 8,192, or what the
            model was made for if that is less.
        prompt: how many of them came in one prefill; None: the most that any prompt takes. What fits is for any prompt.
            With offload: one prefill, whatever the prompt; token by token, offloaded pages take a quarter more room.
        cache_config: options of all paged caches that are given by name, as a dict or a CacheConfig; there has to be one.
        device: a name of kv_hf.planner.devices, for `device_memory` and `bandwidth` that are not given.
        device_memory: bytes, "24GiB" or "24GB".
        bandwidth: of the device's memory: bytes per second or "3.35TB/s".
        host_bandwidth: of the way to offloaded pages, for caches that offload.
        reserve: bytes to keep free of weights and caches (activations, the driver).
        weights: bytes of the weights, where they are not one number of `dtype` each, as in quantized checkpoints; 0 to
            plan for the caches alone.
        dtype: of weights and cache; None takes the config's.
        kv_heads: of each layer, in place of the model's.
        tensor_parallel: devices that share every layer; all bytes are then those of one device.
    Raises: CacheOptionError for bad arguments, UnsupportedModelError for models without a cache that was asked for.
    """
    check_int("batch", batch, 1)
    if batch > MOST_BATCH:
        raise CacheOptionError(f"batch must be at most {MOST_BATCH:,} rows, got {batch:,}")
    whole = load_inventory(model, dtype=dtype, kv_heads=kv_heads)
    inventory, sharing = device_share(whole, tensor_parallel)
    notes = [*whole.notes, *sharing]
    context = _context(whole, context, notes)
    prompt = None if prompt is None else parse_tokens("prompt", prompt)
    if prompt is not None and prompt > context:
        raise CacheOptionError(f"prompt must be at most the context of {context}, got {prompt}")
    known = None if device is None else find_device(device)
    if known is not None and device_memory is None:
        device_memory = known.memory
        if not known.reported:
            notes.append(f"memory of {known.name}: {known.memory_source}")
    if known is not None and bandwidth is None:
        bandwidth = known.bandwidth
    memory = None if device_memory is None else parse_bytes("device_memory", device_memory)
    speed = None if bandwidth is None else parse_bandwidth("bandwidth", bandwidth)
    host = None if host_bandwidth is None else parse_bandwidth("host_bandwidth", host_bandwidth)
    kept = parse_bytes("reserve", reserve, least=0)
    held = whole.stored_bytes if weights is None else parse_bytes("weights", weights, least=0)
    held = held if held is None else -(-held // tensor_parallel)
    name = None if known is None else known.name
    empty = Plan(
        whole, batch, context, prompt, tensor_parallel, held, name, memory, speed, host, kept, (), ()
    )  # fmt: skip
    if held is None:
        notes.append("the number of weights is not known: they are left out")
        if memory is not None:
            notes.append("so what fits is not known either: give weights (0 to leave them out)")
    elif memory is not None and (empty.available or 0) <= 0:
        also = f" and the reserve of {format_bytes(kept)}" if kept else ""
        notes.append(
            f"the weights ({format_bytes(held)}){also} do not fit into {format_bytes(memory)}: no cache does"
        )
    if isinstance(caches, str):
        raise CacheOptionError(f"caches must be a sequence of names, got {caches!r}")
    stock = Stock(inventory, "dynamic")
    dynamic = stock.filled(batch, context, prompt).total
    on_cpu = known is not None and known.is_cpu
    rows: list[CachePlan] = []
    common = (*planned_caches(), "paged_int4:offload=cpu")
    options, names = given_options(cache_config), common if caches is None else tuple(caches)
    asked = [Choice.read(name, options) for name in names]
    if options and not any(isinstance(n, str) and is_cache_name(n.split(":")[0]) for n in names):
        raise CacheOptionError(
            f"cache_config={options} is for paged caches that are given by name, and caches has none; leave it "
            "out, or put it into the CacheConfig"
        )
    for choice in asked:
        try:
            rows.append(_row(choice.name, choice.of(inventory, on_cpu), empty, dynamic))
        except KVCacheError as error:
            if caches is not None:
                raise
            notes.append(f"no {choice.name}: {error}")  # a default cache that the model cannot have
    more = stock.filled(batch, context, context).total - dynamic
    if prompt is None and more > 0 and any(row.cache == "dynamic" for row in rows):
        notes.append(
            "dynamic: right after a prefill transformers' sliding layers keep the whole prompt alive (up to "
            f"{format_bytes(more)} more), until the next token"
        )
    if host is None and speed and any(row.decode.offloaded for row in rows):
        notes.append(
            "tokens/s of pages outside of the device need host_bandwidth, of the way to them; tokens_per_second of the plan "
            "leaves that way out"
        )
    return replace(empty, rows=tuple(rows), notes=tuple(notes))


def _context(inventory: Inventory, given: int | str | None, notes: list[str]) -> int:
    most = inventory.max_positions
    if given is None:
        return min(DEFAULT_CONTEXT, most or DEFAULT_CONTEXT)
    context = parse_tokens("context", given)
    if context > MOST_CONTEXT:
        raise CacheOptionError(
            f"context must be at most {MOST_CONTEXT:,} tokens of a row, got {short(given)}"
        )
    if most is not None and context > most:
        notes.append(f"the model was made for {most:,} positions, fewer than {context:,}")
    return context


def _row(name: str, cache: Stock | Pages, asked: Plan, dynamic: int) -> CachePlan:
    """Return the row of a cache, which is one device's."""
    memory = cache.filled(asked.batch, asked.context, asked.prompt)
    here, offloaded = slope(cache)
    decode = Decode(
        asked.batch,
        weights_read(cache.inventory, asked.batch, asked.weights),
        *cache_read(cache, memory, batch=asked.batch, context=asked.context),
    )
    speed, fit, available = None, None, asked.available
    if asked.bandwidth is not None:
        speed = decode.tokens_per_second(asked.bandwidth, asked.host_bandwidth)
    if available is not None:
        fit = find_fit(cache, available, batch=asked.batch, context=asked.context)
    return CachePlan(
        cache=name,
        memory=memory,
        bytes_per_token=here,
        offloaded_bytes_per_token=offloaded,
        ratio=dynamic / memory.total if memory.total else 1.0,
        decode=decode,
        tokens_per_second=speed,
        fit=fit,
        fits=None if available is None else memory.total <= available,
    )


# -- the caches of a plan ------------------------------------------------------------------------------------------


def planned_caches() -> tuple[str, ...]:
    """Return the names of caches whose bytes are predicted."""
    return (*EXACT_CACHES, *cache_names())


class Choice(NamedTuple):
    """A cache to plan for.

    Attributes:
        name: as the user wrote it, the label of its row.
        options: of a paged cache; None for one of transformers.
        length: columns that a static cache is made for; None: as many as the longest row has tokens.
    """

    name: str
    options: CacheConfig | None = None
    length: int | None = None

    @classmethod
    def read(cls, given: str | CacheConfig, cache_config: Mapping[str, Any]) -> "Choice":
        """Read a name such as "paged_int4:keys=int8", or take options of a paged cache as they are.

        Args:
            cache_config: options of every paged cache that is given by name; those in the name win.
        Raises: CacheOptionError for unknown names and options, and for caches whose bytes are not predicted.
        """
        if isinstance(given, CacheConfig):
            return cls(_label(given), given)
        if not isinstance(given, str):
            raise CacheOptionError(
                f"caches must be names such as 'paged_int4:keys=int8' or kv_hf.CacheConfig, got {given!r}"
            )
        try:
            base, options = parse_cache_name(given)
        except CacheOptionError:
            raise
        except ValueError as error:
            raise CacheOptionError(str(error)) from None
        if base not in planned_caches():
            raise CacheOptionError(
                f"cache {base!r} is not planned: its bytes are another library's; planned are {', '.join(planned_caches())}"
            )
        if is_cache_name(base):
            return cls(given, CacheConfig.from_options(base, {**cache_config, **options}))
        length = options.pop("max_length", None) if base == "static" else None
        if options:
            takes = "only max_length" if base == "static" else "no options"
            raise CacheOptionError(f"cache {base!r} takes {takes}, got {given!r}")
        return cls(given, None, None if length is None else parse_tokens("max_length", length))

    def of(self, inventory: Inventory, on_cpu: bool = False) -> Stock | Pages:
        """Return this cache of a model."""
        if self.options is not None:
            return Pages(inventory, self.options, on_cpu)
        return Stock(inventory, self.name.partition(":")[0], self.length)


def slope(cache: Stock | Pages) -> tuple[float, float]:
    """Return the bytes of one more token of one row in the long run, on the device and outside of it.

    Pages only: block tables (4 bytes per page) are not counted. A budget of an offload is taken to be used up: what
    comes then is offloaded.
    """
    grown, tokens = cache.unbounded(), FAR_PAGES * cache.page_size
    while tokens <= 2 * cache.widest:
        tokens *= 2
    near, far = (grown.report([cache.exact + tokens * times]) for times in (1, 2))
    here = far.total - far.tables - (near.total - near.tables)
    return here / tokens, (far.offloaded - near.offloaded) / tokens


def _label(options: CacheConfig) -> str:
    """Return a name for options that were given without one: the cache name that differs in the fewest, and these."""
    given = {one.name: getattr(options, one.name) for one in fields(options)}
    plain = {name: CacheConfig.from_options(name, None) for name in cache_names()}
    found = {
        name: [f"{key}={value}" for key, value in given.items() if value != getattr(own, key)]
        for name, own in plain.items()
    }
    base = min(found, key=lambda name: len(found[name]))
    return base + (":" if found[base] else "") + ",".join(found[base])


# -- what fits ----------------------------------------------------------------------------------------------------------


def find_fit(cache: Stock | Pages, available: int, *, batch: int, context: int) -> Fit:
    """Search what fits into `available` bytes, whatever the prompts; 0 where not even one token, row or page does.

    What the cache itself would refuse, by max_pages or the budget of an offload, does not fit.
    """
    bound, page, exact = cache.bound, cache.page_size, cache.exact

    def cost(row_tokens: Sequence[int]) -> float:
        try:
            return cache.report(row_tokens).total
        except (DeviceBudgetError, PagePoolExhaustedError):
            return math.inf

    def of_pages(pages: int) -> float:
        each, more = divmod(pages, batch)
        tokens = [exact + (each + (row < more)) * page for row in range(batch)]
        return cost([count for count in tokens if count])

    most = MOST_TOKENS if bound is None else bound
    most_pages = max(0, most - exact) // page * (1 if bound is None else batch)
    tokens = largest(lambda count: cost([count] * batch), available, most)
    rows = largest(lambda count: cost([context] * count), available, MOST_ROWS)
    pages = largest(of_pages, available, most_pages)
    if bound is not None:  # no row is longer
        tokens = bound if tokens is None else tokens
        pages = most_pages if pages is None else pages
    return Fit(tokens, rows, None if pages is None else pages * page)


def largest(cost: Callable[[int], float], limit: int, most: int) -> int | None:
    """Return the largest number of 1 to `most` with cost(number) <= limit: 0 if none, None if `most` still fits.

    `cost` must not fall.
    """
    found = bisect_left(range(1, most + 1), True, key=lambda count: cost(count) > limit)
    return None if found == most > 0 else found


# -- what a decode step reads -----------------------------------------------------------------------------------------


def weights_read(inventory: Inventory, batch: int, weights: int | None) -> int | None:
    """Return the bytes of `weights` bytes of weights that a step of `batch` tokens reads.

    Of routed experts the share that at least one token is expected to take, 1 - (1 - per_token / experts) ** batch:
    tokens choose independently, and all experts are equally likely.
    """
    if weights is None or not inventory.experts or not inventory.parameters:
        return weights
    passed_by = (1 - inventory.experts_per_token / inventory.experts) ** batch
    of_experts = weights * inventory.expert_parameters / inventory.parameters
    return round(weights - of_experts * passed_by)


def cache_read(
    cache: Stock | Pages, report: MemoryReport, *, batch: int, context: int
) -> tuple[int, int]:
    """Return the bytes of a cache that a step reads, and how many of them lie outside of the device.

    A layer with a window reads the tokens in it. Sealed tokens are read as stored, with their scales; the others exact.
    Of a static cache transformers reads all columns, those too that hold no token yet. Where steps read a part of the pages, a
    choice reads of every page what page_summary.part_fields lists, which lies on the device, and attention the pages that it
    takes, at most.

    Args:
        report: of the cache, for the part of its pages that is offloaded.
    """
    inventory, dtype = cache.inventory, cache.inventory.torch_dtype
    columns = cache.bound if isinstance(cache, Stock) and cache.bound is not None else context
    stored = chosen_by = exact = 0.0
    for index, layer in enumerate(inventory.layers):
        plain = tokens = columns if layer.window is None else min(columns, layer.window)
        if isinstance(cache, Pages) and index in cache.specs:
            budget, spec = cache.options.budget, cache.specs[index]
            sizes = cache.sizes(layer.window)
            plain, count = min(tokens, sizes.exact(context)), sizes.sealed(context)
            sealed = float(tokens - plain)
            if budget is not None and layer.window is None and budget.chooses(count, context):
                sealed = budget.most(count) * sizes.page_size
                chosen_by += layer.readers * count * part_bytes(spec.keys)
            stored += layer.readers * sealed * spec.page_bytes / sizes.page_size
        exact += layer.readers * plain * layer.elements * dtype.itemsize
        # an indexer's positions grow in any cache
        read = columns * layer.index_bytes(dtype) + context * layer.position_bytes
        exact += layer.readers * read + layer.state_bytes(dtype)
    held = report.payload + report.scales + report.offloaded
    offloaded = stored * report.offloaded / held if held else 0.0
    return round((stored + chosen_by + exact) * batch), round(offloaded * batch)
