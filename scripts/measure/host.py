"""What a decode step costs the host, and what it launches and waits for, on a GPU that is not there.

Triton's kernels are compiled for an NVIDIA GPU and their launches do nothing (backends/triton/fake_driver.py); tensors
lie on the CPU. Times are of the calling thread alone, so that they hold on a busy machine. Needs Triton and no GPU.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kv_hf.backends import registry
from kv_hf.cache import store
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.formats import ATTENTION_NAME
from kv_hf.hf.attention import kv_hf_attention, kv_hf_mask
from kv_hf.pages import moved
from measure.runner import Fields, workload
from measure.shapes import AttentionShape

# what torch answers without a kernel
VIEW_NAMES = (
    "view transpose slice select detach expand unsqueeze _unsafe_view reshape permute alias split unbind empty new_empty "
    "as_strided squeeze empty_like empty_strided new_empty_strided unflatten lift_fresh t narrow"
)
VIEWS = frozenset(VIEW_NAMES.split())
# methods of a tensor that wait for its device
WAITING = "item tolist numpy cpu nonzero __bool__ __int__ __float__ __index__"
BLOCK = 10  # steps of one cache before the other's turn


@dataclass(frozen=True)
class HostStep:
    """What one step of all layers launches and waits for.

    Attributes:
        kernels, launches: of torch and of Triton.
        in_a_layer: most of both in a layer behind the first, which also does what is done once per step.
        waits: reads of numbers that would wait for the device.
    """

    kernels: int
    launches: int
    in_a_layer: int
    waits: int


class _Kernels(TorchDispatchMode):
    """Counts the operations that launch a kernel."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        library, name = func._schema.name.split("::")
        self.found += name not in VIEWS and not library.startswith("kv_hf")
        return func(*args, **(kwargs or {}))


@contextmanager
def _waits(found: Counter[str]) -> Iterator[None]:
    """Count calls that wait for a device, by name."""

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            # masks are compared on the device; what arrived on the host without being waited for is read there
            found[name] += sys._getframe(1).f_code.co_name != "look"
            return function(*args, **options)

        return call

    with ExitStack() as stack:
        for where, name in [*((torch.Tensor, name) for name in WAITING.split()), (torch, "equal")]:
            wrapped = counting(name, getattr(where, name))
            stack.enter_context(patch.object(where, name, wrapped))
        yield


@contextmanager
def gpu() -> Iterator[Any]:
    """Take the CPU for a GPU: for kernels, and for everything that asks whether a device has to be waited for."""
    from kv_hf.backends.triton import fake_driver  # imports triton

    triton = registry.load("triton")
    with (
        fake_driver.pretend_gpu() as fake,
        patch.object(store, "choose", lambda *asked: triton),
        patch.object(moved, "is_host", lambda device: False),
        patch.object(torch, "get_num_threads", lambda: 1),
    ):
        yield fake


class HostRun:
    """A cache with a context, stepped by single tokens of all rows.

    Args:
        shape: of the layers; batch, context: rows, and columns that they have seen.
        keys: the paged cache's format; None: DynamicCache and sdpa.
        ragged: rows have paddings of 0 to 199 columns, so that they seal in different steps.
        options: of the paged cache.
    """

    def __init__(
        self,
        shape: AttentionShape,
        batch: int,
        context: int,
        keys: str | None,
        *,
        ragged: bool = False,
        **options: Any,
    ) -> None:
        self.layers, self.paged = shape.layers, keys is not None
        self.config = shape.config(shape.layers)
        self.config._attn_implementation = ATTENTION_NAME
        self.new = torch.randn(batch, shape.num_kv_heads, 1, shape.head_dim, dtype=torch.bfloat16)
        self.query = torch.randn(batch, shape.num_heads, 1, shape.head_dim, dtype=torch.bfloat16)
        padding = torch.arange(batch)[:, None] * 37 % 200 * ragged
        self.mask = (torch.arange(context) >= padding).long()
        self.module: Any = SimpleNamespace(num_key_value_groups=shape.group, is_causal=True)
        self.cache: Any = DynamicCache(config=self.config)
        if keys is not None:
            self.cache = PagedCache(self.config, keys=keys, **options)
            self.cache.observe_padding(self.mask)
        prompt = self.new.new_zeros(batch, shape.num_kv_heads, context, shape.head_dim)
        for layer in range(shape.layers):
            self.cache.update(prompt, prompt, layer)

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        """Append a token to all layers and attend; `between` is called behind each layer."""
        attend: Any = kv_hf_attention if self.paged else sdpa_attention_forward
        mask = self._next_mask() if self.paged else None
        for layer in range(self.layers):
            keys, values = self.cache.update(self.new, self.new, layer)
            attend(self.module, self.query, keys, values, mask, scaling=0.1)
            between()

    def _next_mask(self) -> Any:
        """Return the mask that a model would be given for the next token."""
        length, offset = self.cache.get_mask_sizes(1, 0)
        return kv_hf_mask(
            batch_size=self.mask.shape[0],
            q_length=1,
            kv_length=length,
            q_offset=length - 1,
            kv_offset=offset,
            attention_mask=self.mask,
            allow_is_causal_skip=True,
            device=self.mask.device,
            config=self.config,
        )

    def _grow_mask(self) -> None:
        self.mask = torch.cat([self.mask, self.mask.new_ones(self.mask.shape[0], 1)], 1)

    def time(self) -> float:
        """Return the thread's microseconds of a step, per layer."""
        self._grow_mask()
        with torch.no_grad():
            start = time.thread_time()
            self.step()
            return 1e6 * (time.thread_time() - start) / self.layers

    def count(self, fake: Any) -> HostStep:
        """Return what a step launches and waits for."""
        self._grow_mask()
        before, waits, behind = len(fake.launches), Counter[str](), []
        with torch.no_grad(), _waits(waits), _Kernels() as kernels:
            self.step(lambda: behind.append(len(fake.launches) + kernels.found))
        most = max((two - one for one, two in pairwise(behind)), default=behind[0])
        return HostStep(kernels.found, len(fake.launches) - before, most, waits.total())


def _sealed(run: HostRun) -> int:
    """Return the pages sealed so far; of a preallocated cache, whose counts lie on the device, none."""
    batch = getattr(run.cache.group, "batch", None)
    return 0 if batch is None else int(batch.counts.sum())


@workload(
    "host",
    grid=[
        {
            "setting": ["batch 1", "batch 16", "ragged 16", "ragged 64", "preallocated"],
            "format": ["int4"],
            "layers": [32],
            "steps": [130],
        }
    ],
    kind="host_step",
    columns="paged_us_per_layer sealing_us_per_layer dynamic_us_per_layer launches_plain launches_sealing synchronisations",
)
def host(
    device: torch.device, setting: str, format: str, layers: int, steps: int
) -> Iterator[Fields]:
    """What a step costs the host, without the GPU's work: time, launches and waits, beside DynamicCache and sdpa."""
    torch.set_num_threads(1)
    shape = AttentionShape(32, 8, 128, layers)
    kind, _, rows = setting.partition(" ")
    context = 300 if rows not in ("", "1") else 1000
    room = {"max_length": 2048} if kind == "preallocated" else {"reserve_tokens": context + 512}
    times: dict[str, list[float]] = {"paged": [], "sealing": [], "dynamic": []}
    with gpu() as fake:
        run = HostRun(shape, int(rows or 1), context, format, ragged=kind == "ragged", **room)
        one_head = AttentionShape(1, 1, 128, layers)
        stock = HostRun(one_head, 1, 4, None)  # a GPU's host does the same for any batch and heads
        run.time(), stock.time()  # kernels are compiled
        counted = [run.count(fake) for _ in range(64)]  # every row seals once
        for number in range(2 * steps):
            if number // BLOCK % 2:
                times["dynamic"].append(stock.time())
                continue
            sealed, took = _sealed(run), run.time()
            times["sealing" if _sealed(run) > sealed else "paged"].append(took)
    if kind == "ragged":  # where some row seals in many of the steps
        times["paged"] += times["sealing"]
    sealing = max(counted, key=lambda step: step.launches)
    plain = min(counted, key=lambda step: (step.launches, step.in_a_layer))
    least = {name: round(min(found), 1) if found else None for name, found in times.items()}
    yield {
        **{f"{name}_us_per_layer": found for name, found in least.items()},
        "launches_plain": plain.in_a_layer,
        "launches_sealing": sealing.in_a_layer,
        "synchronisations": max(step.waits for step in counted),
    }
