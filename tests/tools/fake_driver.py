"""A GPU that is not here: Triton compiles for it, tensors lie on the CPU, and launches are counted and do nothing.

What a step costs the host, how many kernels it launches and how many variants it compiles become visible on any
machine. Results are whatever their memory held, unless a callback carries the launches out (emulated_gpu).

A HostRun tells what a decode step of a whole cache launches and waits for there.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver as triton_driver
from triton.runtime.jit import JITFunction

from kv_hf.backends import dispatch, triton
from kv_hf.backends.triton import direct, meta_params
from kv_hf.cache import store
from kv_hf.cache.paged_cache import PagedCache
from kv_hf.pages import moved
from kv_hf.spec import ROWS

SHARED = {80: 166912, 90: 232448}  # bytes of shared memory that one program may take, by capability
# a compiled kernel's source and metadata, its grid and arguments
CarryOut = Callable[[Any, Any, tuple[int, int, int], tuple[Any, ...]], None]
LAUNCHED = 6  # what a launcher is given behind the grid: stream, function, metadata and hooks


@dataclass
class FakeGpu:
    """What was asked of the GPU that is not here.

    Attributes:
        launches: (kernel's name, programs) in order.
        variants: how often each kernel was compiled or loaded, by name.
        device, stream: what the next launches find as the current ones; a stream is a number.
    """

    launches: list[tuple[str, int]] = field(default_factory=list)
    variants: Counter[str] = field(default_factory=Counter)
    device: int = 0
    stream: int = 0

    def names(self) -> list[str]:
        """Return the names of the kernels launched so far, in order."""
        return [name for name, _ in self.launches]


@contextmanager
def pretend_gpu(
    capability: int = 90, shared_memory: int | None = None, carry_out: CarryOut | None = None
) -> Iterator[FakeGpu]:
    """Take the CPU for an NVIDIA GPU within the context: its tensors, its kernels (compiled for real) and its pages.

    Modules that have imported one of the functions that it replaces by name are changed as well, and back. Neither for
    threads nor for Triton's interpreter.

    Args:
        capability: compute capability * 10; shared_memory: bytes that one program may take, None: as many as there.
        carry_out: called with each launch.
    """
    gpu = FakeGpu()
    shared_memory = shared_memory or SHARED[capability]
    replaced: list[tuple[ModuleType, str, Any]] = [
        (meta_params, "target_isa", lambda where: capability),
        (meta_params, "shared_memory", lambda where: shared_memory),
        (direct, "refuse_cpu", lambda: None),
        (triton, "_why_not", lambda *args, **options: None),
        (dispatch, "layout_for", lambda where: ROWS),
    ]
    kept = [(name, getattr(module, name), value) for module, name, value in replaced]
    active = triton_driver._active
    _forget_compiled()
    for name, own, value in kept:
        _replace(name, own, value)
    triton_driver.set_active(_Driver(gpu, capability, shared_memory, carry_out))
    try:
        yield gpu
    finally:
        for compiled in _forget_compiled():
            compiled.module = None  # nothing was loaded that Triton could unload
        triton_driver._active = active
        for name, own, value in kept:
            _replace(name, value, own)


def _replace(name: str, old: Any, new: Any) -> None:
    """Give `new` that name wherever the package's modules, as loaded by now, have `old` under it."""
    for module in _own_modules():
        if vars(module).get(name) is old:
            setattr(module, name, new)


def _own_modules() -> list[Any]:
    return [module for name, module in list(sys.modules.items()) if name.startswith("kv_hf.")]


def _forget_compiled() -> list[Any]:
    """Forget what the kernels were compiled for, and return it; other packages' kernels are left alone."""
    found: list[Any] = []
    for module in _own_modules():
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                for known, *_ in function.device_caches.values():
                    found += known.values()
                function.device_caches.clear()
    compiler.max_shared_mem.cache_clear()
    return found


class _Utils:
    def __init__(self, shared_memory: int) -> None:
        self.properties = {"max_shared_mem": shared_memory, "multiprocessor_count": 132}

    def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
        return 1, 1, 128, 0, 1024  # module, function, registers, spills, threads

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, index: int) -> dict[str, int]:
        return self.properties


class _Driver:
    def __init__(
        self, gpu: FakeGpu, capability: int, shared_memory: int, carry_out: CarryOut | None
    ) -> None:
        self.gpu, self.capability, self.carry_out = gpu, capability, carry_out
        self.utils = _Utils(shared_memory)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Count a compiled kernel, and return what counts its launches."""
        name = metadata.name
        launches = self.gpu.launches
        self.gpu.variants[name] += 1

        def launch(x: int, y: int, z: int, *args: Any) -> None:
            launches.append((name, x * y * z))
            if self.carry_out is not None:
                self.carry_out(source, metadata, (x, y, z), args[LAUNCHED:])

        return launch

    def get_current_device(self) -> int:
        return self.gpu.device

    def set_current_device(self, index: int) -> None:
        self.gpu.device = index

    def get_current_stream(self, index: int) -> int:
        return self.gpu.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_device_capability(self, index: int = 0) -> tuple[int, int]:
        return divmod(self.capability, 10)


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
        kernels: operations of torch.
        in_a_layer: most of these and of Triton's launches in a layer behind the first, which also does what is done once
            per step.
        waits: reads of numbers that would wait for the device.
    """

    kernels: int
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
    triton = dispatch.load("triton")
    with (
        pretend_gpu() as fake,
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
        for one in self.cache.paged_layers:
            one.storage.judged = True  # as by the pages of a text; those of nothing would be looked at again and again

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
        found, behind = Counter(), []
        with waits(found), Kernels() as kernels:
            self.step(lambda: behind.append(len(fake.launches) + kernels.found))
        most = max((two - one for one, two in pairwise(behind)), default=behind[0])
        return HostStep(kernels.found, most, found.total())
