"""What a decode step launches and waits for, on a GPU that is not there.

Triton's kernels are compiled for an NVIDIA GPU and their launches do nothing (tools/fake_driver.py); tensors
lie on the CPU. Needs Triton and no GPU.
"""

import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kv_hf.backends import registry
from kv_hf.cache import store
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.pages import moved

# what torch answers without a kernel
VIEW_NAMES = (
    "view transpose slice select detach expand unsqueeze _unsafe_view reshape permute alias split unbind empty new_empty "
    "as_strided squeeze empty_like empty_strided new_empty_strided unflatten lift_fresh t narrow"
)
VIEWS = frozenset(VIEW_NAMES.split())
# methods of a tensor that wait for its device
WAITING = "item tolist numpy cpu nonzero __bool__ __int__ __float__ __index__"


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


class Kernels(TorchDispatchMode):
    """Counts the operations that launch a kernel."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        library, name = func._schema.name.split("::")
        self.found += name not in VIEWS and not library.startswith("kv_hf")
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(found):
    """Count calls that wait for a device, by name."""

    def counting(name, function):
        def call(*args, **options):
            # what arrived on the host without being waited for is read there
            found[name] += sys._getframe(1).f_code.co_name != "look"
            return function(*args, **options)

        return call

    with ExitStack() as stack:
        for where, name in [*((torch.Tensor, name) for name in WAITING.split()), (torch, "equal")]:
            wrapped = counting(name, getattr(where, name))
            stack.enter_context(patch.object(where, name, wrapped))
        yield


@contextmanager
def gpu():
    """Take the CPU for a GPU: for kernels, and for everything that asks whether a device has to be waited for."""
    import fake_driver  # imports triton

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
        shape: measure.shapes.AttentionShape of the layers; batch, context: rows, and columns that they have seen.
        ragged: rows have paddings of 0 to 199 columns, so that they seal in different steps.
        options: of the cache.
    """

    def __init__(self, shape, batch, context, keys, *, ragged=False, **options):
        self.layers, self.config = shape.layers, shape.config(shape.layers)
        self.config._attn_implementation = "sdpa"
        self.new = torch.randn(batch, shape.num_kv_heads, 1, shape.head_dim, dtype=torch.bfloat16)
        self.query = torch.randn(batch, shape.num_heads, 1, shape.head_dim, dtype=torch.bfloat16)
        padding = torch.arange(batch)[:, None] * 37 % 200 * ragged
        self.mask = (torch.arange(context) >= padding).long()
        self.module = SimpleNamespace(num_key_value_groups=shape.group, is_causal=True)
        self.cache = PagedCache(self.config, keys=keys, **options)
        self.cache.observe_padding(self.mask)
        prompt = self.new.new_zeros(batch, shape.num_kv_heads, context, shape.head_dim)
        for layer in range(shape.layers):
            self.cache.update(prompt, prompt, layer)

    @torch.no_grad()
    def step(self, between=lambda: None):
        """Append a token to all layers and attend; `between` is called behind each layer."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], 1)
        length, offset = self.cache.get_mask_sizes(1, 0)
        mask = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](  # as a model is given it
            batch_size=len(self.mask),
            q_length=1,
            kv_length=length,
            q_offset=length - 1,
            kv_offset=offset,
            attention_mask=self.mask,
            allow_is_causal_skip=True,
            device=self.mask.device,
            config=self.config,
        )
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        for layer in range(self.layers):
            keys, values = self.cache.update(self.new, self.new, layer)
            attend(self.module, self.query, keys, values, mask, scaling=0.1)
            between()

    def count(self, fake):
        """Return what a step launches and waits for."""
        before, found, behind = len(fake.launches), Counter(), []
        with waits(found), Kernels() as kernels:
            self.step(lambda: behind.append(len(fake.launches) + kernels.found))
        most = max((two - one for one, two in pairwise(behind)), default=behind[0])
        return HostStep(kernels.found, len(fake.launches) - before, most, found.total())
