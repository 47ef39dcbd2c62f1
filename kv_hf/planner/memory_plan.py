"""Memory of a model's caches and the loads that fit, before anything is loaded: `kv_hf.plan(...)`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..checks import check_int
from ..config import CacheConfig
from ..errors import CacheOptionError, KVCacheError
from ..printable import short
from ..spec import MemoryReport
from ..units import format_bytes, parse_bandwidth, parse_bytes, parse_tokens
from .choices import Choice, choices_of, default_caches
from .devices import find_device
from .fit import Fit, find_fit
from .growing import behind_prefill
from .inventory import Inventory
from .roofline import Decode, cache_read, weights_read
from .shares import device_share
from .source import load_inventory

DEFAULT_CONTEXT = 8192
MOST_BATCH = 1_000_000  # rows are listed one by one
MOST_CONTEXT = 1 << 40


@dataclass(frozen=True)
class CachePlan:
    """One cache of a plan. Bytes are those of one device.

    Attributes:
        cache: its name, with options behind a colon.
        memory: what it holds at the plan's batch and context, by part; `memory.offloaded` lies outside of the device.
        bytes_per_token: of one more token of one row in the long run, on the device; windows that are full do not grow.
        outside_bytes_per_token: the same outside of the device.
        ratio: bytes of a DynamicCache / `memory.total`.
        decode: bytes that a decode step reads.
        tokens_per_second: over all rows, at most; None without a bandwidth.
        fit: what the memory behind the weights holds; None without `device_memory` or where the weights are not known.
        fits: whether weights, reserve and cache go into the device's memory; None where `fit` is.
    """

    cache: str
    memory: MemoryReport
    bytes_per_token: float
    outside_bytes_per_token: float
    ratio: float
    decode: Decode
    tokens_per_second: float | None
    fit: Fit | None
    fits: bool | None

    @property
    def total(self) -> int:
        """Bytes of the cache on the device."""
        return self.memory.total

    def __str__(self) -> str:
        fits = {None: "", True: ", fits", False: ", does not fit"}[self.fits]
        outside = (
            f" and {format_bytes(self.memory.offloaded)} outside" if self.memory.offloaded else ""
        )
        beside = (
            "" if self.cache == "dynamic" else f", dynamic takes {self.ratio:.2f} times as much"
        )
        return f"{self.cache}: {format_bytes(self.total)}{outside}{beside}{fits}"


@dataclass(frozen=True)
class Plan:
    """Memory of the caches of a model, at a batch and a context.

    Attributes:
        inventory: of the whole model.
        batch, context: rows, and tokens of each that the cache holds.
        prompt: tokens of a row that came in one prefill, or None.
        tensor_parallel: devices that share the model; all bytes are those of one of them.
        weights: bytes of the weights, None where their number is not known.
        device: name of a known device, or None.
        device_memory, bandwidth, host_bandwidth: in bytes and bytes per second, None where not given.
        reserve: bytes of the device that are kept free of weights and caches.
        rows: one per cache.
        notes: what was assumed, and what does not fit, in words.
    """

    inventory: Inventory
    batch: int
    context: int
    prompt: int | None
    tensor_parallel: int
    weights: int | None
    device: str | None
    device_memory: int | None
    bandwidth: int | None
    host_bandwidth: int | None
    reserve: int
    rows: tuple[CachePlan, ...]
    notes: tuple[str, ...]

    @property
    def available(self) -> int | None:
        """Bytes behind weights and reserve, below zero where these do not fit; None where one of them is not known."""
        if self.device_memory is None or self.weights is None:
            return None
        return self.device_memory - self.reserve - self.weights

    def __str__(self) -> str:
        weights = "" if self.weights is None else f", weights {format_bytes(self.weights)}"
        room = (
            ""
            if self.device_memory is None
            else f", {format_bytes(self.device_memory)} of device memory"
        )
        rows = f"{self.batch:,} row{'s' * (self.batch > 1)} of {self.context:,} tokens"
        return "\n".join(
            [
                f"{self.inventory.name}: {rows}{weights}{room}",
                *(f"  {row}" for row in self.rows),
                *(f"  note: {note}" for note in self.notes),
            ]
        )

    def row(self, cache: str) -> CachePlan:
        """Return the row of a cache by its name. Raises CacheOptionError for one that was not planned."""
        for row in self.rows:
            if row.cache == cache:
                return row
        names = ", ".join(row.cache for row in self.rows)
        raise CacheOptionError(f"cache must be one of the plan's ({names}), got {cache!r}")

    def as_dict(self) -> dict[str, Any]:
        """Return the plan in JSON types, totals included."""
        found = {**asdict(self), "inventory": self.inventory.as_dict(), "available": self.available}
        found["notes"] = list(self.notes)
        found["rows"] = []
        for row in self.rows:
            given = asdict(row)
            given["memory"]["total"] = row.total
            given["decode"]["step_bytes"] = row.decode.step_bytes
            given["decode"]["bytes_per_token"] = row.decode.bytes_per_token
            found["rows"].append(given)
        return found


def plan(
    model: str | os.PathLike[str] | Inventory | Any,
    *,
    caches: Sequence[str | CacheConfig] | None = None,
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
        caches: names ("dynamic", "static", "offloaded", "paged_int4", "paged_int4:keys=int8,offload=cpu",
            "recipe:PATH") or CacheConfigs. None takes the common ones that the model can have.
        batch: rows, a million at most.
        context: tokens per row that the cache holds: a number or "128k" (128 * 1024). None takes 8,192, or what the
            model was made for if that is less.
        prompt: how many of them came in one prefill; None: the most that any prompt takes (with offload: all but one).
            What fits is for any prompt.
        cache_config: options of all paged caches that are given by name, as a dict or a CacheConfig; there has to be one.
        device: a name of kv_hf.planner.devices, for `device_memory` and `bandwidth` that are not given.
        device_memory: bytes, "24GiB" or "24GB".
        bandwidth: of the device's memory: bytes per second or "3.35TB/s".
        host_bandwidth: of the way to pages outside of the device, for caches that offload.
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
    held = _weights(whole, weights, tensor_parallel, notes)
    available = None if memory is None or held is None else memory - kept - held
    if memory is not None and held is None:
        notes.append("so what fits is not known either: give weights (0 to leave them out)")
    if memory is not None and available is not None and available <= 0:
        also = f" and the reserve of {format_bytes(kept)}" if kept else ""
        notes.append(
            f"the weights ({format_bytes(held or 0)}){also} do not fit into {format_bytes(memory)}: no cache does"
        )
    planner = _Planner(inventory, batch, context, prompt, held, available, speed, host)
    rows = planner.rows(caches, cache_config, notes)
    if prompt is None and any(row.cache == "dynamic" for row in rows):
        more = behind_prefill(inventory, [context] * batch, inventory.torch_dtype)
        if more:
            notes.append(
                "dynamic: right behind a prefill transformers' sliding layers keep the whole prompt alive (up to "
                f"{format_bytes(more)} more), until the next token"
            )
    if host is None and any(row.decode.outside for row in rows) and speed is not None:
        notes.append(
            "tokens/s of pages outside of the device need host_bandwidth, of the way to them; tokens_per_second of the plan "
            "leaves that way out"
        )
    if available is not None and any(row.outside_bytes_per_token for row in rows):
        notes.append(
            "what fits with an offload is what the device holds: the place outside of it is taken to be endless"
        )
    name = None if known is None else known.name
    return Plan(
        whole, batch, context, prompt, tensor_parallel, held, name, memory, speed, host, kept, rows, tuple(notes)
    )  # fmt: skip


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


def _weights(
    inventory: Inventory, given: int | str | None, degree: int, notes: list[str]
) -> int | None:
    """Return the bytes of the weights on one device."""
    if given is not None:
        return -(-parse_bytes("weights", given, least=0) // degree)
    if inventory.stored_bytes is None:
        notes.append("the number of weights is not known: they are left out")
        return None
    return -(-inventory.stored_bytes // degree)


@dataclass(frozen=True)
class _Planner:
    """Everything that the rows of a plan have in common; `inventory` is that of one device."""

    inventory: Inventory
    batch: int
    context: int
    prompt: int | None
    weights: int | None
    available: int | None
    bandwidth: int | None
    host_bandwidth: int | None

    def rows(
        self,
        caches: Sequence[str | CacheConfig] | None,
        cache_config: CacheConfig | Mapping[str, Any] | None,
        notes: list[str],
    ) -> tuple[CachePlan, ...]:
        """Plan every cache. One of `default_caches` that the model cannot have becomes a note."""
        if isinstance(caches, str):
            raise CacheOptionError(f"caches must be a sequence of names, got {caches!r}")
        dynamic = self._memory(Choice("dynamic", "dynamic")).total
        rows = []
        for choice in choices_of(default_caches() if caches is None else caches, cache_config):
            try:
                rows.append(self._row(choice, dynamic))
            except KVCacheError as error:
                if caches is not None:
                    raise
                notes.append(f"no {choice.name}: {error}")
        return tuple(rows)

    def _memory(self, choice: Choice) -> MemoryReport:
        return choice.predict(self.inventory, [self.context] * self.batch, self.prompt)

    def _row(self, choice: Choice, dynamic: int) -> CachePlan:
        memory = self._memory(choice)
        here, outside = choice.slope(self.inventory)
        read, from_outside = cache_read(
            choice, self.inventory, memory, batch=self.batch, context=self.context
        )
        weights = weights_read(self.inventory, self.batch, self.weights)
        decode = Decode(self.batch, weights, read, from_outside)
        speed = None
        if self.bandwidth is not None:
            speed = decode.tokens_per_second(self.bandwidth, self.host_bandwidth)
        fit = None
        if self.available is not None:
            fit = find_fit(
                choice,
                self.inventory,
                self.available,
                batch=self.batch,
                context=self.context,
            )
        return CachePlan(
            cache=choice.name,
            memory=memory,
            bytes_per_token=here,
            outside_bytes_per_token=outside,
            ratio=dynamic / memory.total if memory.total else 1.0,
            decode=decode,
            tokens_per_second=speed,
            fit=fit,
            fits=None if self.available is None else memory.total <= self.available,
        )
