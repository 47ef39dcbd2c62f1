"""What a decode step costs the host, and what it launches, on a GPU that is not there.

Triton's kernels are compiled for an NVIDIA GPU and their launches do nothing (backends/triton/fake_driver.py); tensors
lie on the CPU. Times are of the calling thread alone, so that they hold on a busy machine.
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
from transformers import DynamicCache, LlamaConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kv_hf.backends import registry
from kv_hf.backends.triton import fake_driver
from kv_hf.cache import store
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.hf.attention import kv_hf_attention, kv_hf_mask
from kv_hf.pages import moved

# what torch answers without a kernel
VIEWS = frozenset(
    {
        *("view", "transpose", "slice", "select", "detach", "expand", "unsqueeze", "_unsafe_view", "reshape", "permute"),
        *("alias", "split", "unbind", "empty", "new_empty", "as_strided", "squeeze", "empty_like", "empty_strided"),
        *("new_empty_strided", "unflatten", "lift_fresh", "t", "narrow"),
    }
)  # fmt: skip
# methods of a tensor that wait for its device
WAITING = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
)


@dataclass(frozen=True)
class HostShape:
    """Sizes of the attention layers of a model."""

    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    def config(self) -> LlamaConfig:
        """Return a config of these sizes; no model is made of it."""
        config = LlamaConfig(
            vocab_size=8,
            hidden_size=self.heads * self.head_dim,
            intermediate_size=8,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
        )
        config._attn_implementation = "kv_hf"
        return config


@dataclass(frozen=True)
class HostStep:
    """One step of all layers.

    Attributes:
        seconds: thread time.
        kernels: torch kernels of the whole step.
        launches: Triton kernels of the whole step.
        in_a_layer: most kernels, torch's and Triton's, of a layer behind the first, which also does what is done once
            per step.
        waits: reads of numbers that would wait for the device.
    """

    seconds: float
    kernels: int
    launches: int
    in_a_layer: int
    waits: int


class _Kernels(TorchDispatchMode):
    """Counts the operations that launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in VIEWS and not func._schema.name.startswith("kv_hf"):
            self.found[name] += 1
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
        for name in WAITING:
            own = getattr(torch.Tensor, name)
            stack.enter_context(patch.object(torch.Tensor, name, counting(name, own)))
        stack.enter_context(patch.object(torch, "equal", counting("equal", torch.equal)))
        yield


@contextmanager
def gpu() -> Iterator[fake_driver.FakeGpu]:
    """Take the CPU for a GPU: for kernels, and for everything that asks whether a device has to be waited for."""
    with ExitStack() as stack:
        fake = stack.enter_context(fake_driver.pretend_gpu())
        triton = registry.load("triton")
        stack.enter_context(patch.object(store, "choose", lambda *asked: triton))
        stack.enter_context(patch.object(moved, "is_host", lambda device: False))
        stack.enter_context(patch.object(torch, "get_num_threads", lambda: 1))
        yield fake


class HostRun:
    """A cache of one format with a context, stepped by single tokens of all rows.

    Args:
        shape: of the model; batch, context: rows, and columns that they have seen.
        keys: the cache's format; None measures DynamicCache and sdpa, whose context is 4 tokens: their time on the CPU
            would be that of copying and of the products.
        ragged: rows have paddings of 0 to 199 columns, so that they seal in different steps.
        options: of the cache.
    """

    def __init__(
        self,
        shape: HostShape,
        batch: int,
        context: int,
        keys: str | None,
        *,
        ragged: bool = False,
        **options: Any,
    ) -> None:
        self.shape, self.paged = shape, keys is not None
        self.config = shape.config()
        context = context if keys is not None else 4
        size = (shape.kv_heads, 1, shape.head_dim)
        self.new = torch.randn(batch, *size, dtype=torch.bfloat16)
        self.query = torch.randn(batch, shape.heads, 1, shape.head_dim, dtype=torch.bfloat16)
        self.mask = torch.ones(batch, context, dtype=torch.long)
        if ragged:
            for row in range(batch):
                self.mask[row, : (row * 37) % 200] = 0
        self.module = SimpleNamespace(
            num_key_value_groups=shape.heads // shape.kv_heads, is_causal=True, training=False
        )
        self.cache: Any = DynamicCache(config=self.config)
        if keys is not None:
            self.cache = PagedCache(self.config, keys=keys, **options)
            self.cache.observe_padding(self.mask)
        prompt = self.new.new_zeros(batch, shape.kv_heads, context, shape.head_dim)
        with torch.no_grad():
            for layer in range(shape.layers):
                self.cache.update(prompt, prompt, layer)

    def step(self, between: Callable[[int], None] = lambda layer: None) -> None:
        """Append a token to all layers and attend; `between` is called behind each layer."""
        attend: Callable[..., Any] = kv_hf_attention if self.paged else sdpa_attention_forward
        mask = self._next_mask() if self.paged else None
        for layer in range(self.shape.layers):
            keys, values = self.cache.update(self.new, self.new, layer)
            attend(self.module, self.query, keys, values, mask, scaling=0.1)
            between(layer)

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

    def sealed_pages(self) -> int:
        """Return the pages sealed so far, of the rows of a cache that grows."""
        batch = getattr(getattr(self.cache, "group", None), "batch", None)
        return 0 if batch is None else int(batch.counts.sum())

    def time(self) -> float:
        """Return the thread seconds of a step."""
        self._grow_mask()
        with torch.no_grad():
            start = time.thread_time()
            self.step()
            return time.thread_time() - start

    def count(self, fake: fake_driver.FakeGpu) -> HostStep:
        """Return what a step launches and waits for; its time is not that of an undisturbed one."""
        self._grow_mask()
        before, behind, waits = len(fake.launches), [0], Counter[str]()
        with torch.no_grad(), _waits(waits), _Kernels() as kernels:
            start = time.thread_time()
            self.step(lambda layer: behind.append(len(fake.launches) + kernels.found.total()))
            seconds = time.thread_time() - start
        layers = [one - other for other, one in pairwise(behind[1:])]
        return HostStep(
            seconds,
            kernels.found.total(),
            len(fake.launches) - before,
            max(layers, default=behind[-1]),
            waits.total(),
        )
