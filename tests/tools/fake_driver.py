"""A GPU that is not here: Triton compiles for it, tensors lie on the CPU, and launches are counted and do nothing.

What a step costs the host, how many kernels it launches and how many variants it compiles become visible on any
machine. Results are whatever their memory held. Knows nothing of caches.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import compiler
from triton.runtime import driver as triton_driver
from triton.runtime.jit import JITFunction

from kv_hf.backends import registry
from kv_hf.backends.triton import launch, support
from kv_hf.spec import ROWS

H200_SHARED = 232448  # bytes of shared memory that one program may take


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
def pretend_gpu(capability: int = 90, shared_memory: int = H200_SHARED) -> Iterator[FakeGpu]:
    """Take the CPU for an NVIDIA GPU within the context: its tensors, its kernels (compiled for real) and its pages.

    Modules that have imported one of the functions that it replaces by name are changed as well, and back. Neither for
    threads nor for Triton's interpreter.

    Args:
        capability: compute capability * 10; shared_memory: bytes that one program may take.
    """
    gpu = FakeGpu()
    replaced: list[tuple[ModuleType, str, Any]] = [
        (support, "target_isa", lambda where: capability),
        (support, "shared_memory", lambda where: shared_memory),
        (launch, "refuse_cpu", lambda: None),
        (support, "why_not", lambda *args, **options: None),
        (registry, "layout_for", lambda where: ROWS),
    ]
    kept = [(name, getattr(module, name), value) for module, name, value in replaced]
    active = triton_driver._active
    _forget_compiled()
    for name, own, value in kept:
        _replace(name, own, value)
    triton_driver.set_active(_Driver(gpu, capability, shared_memory))
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
    loaded = list(sys.modules.values())
    return [module for module in loaded if getattr(module, "__name__", "").startswith("kv_hf.")]


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
    def __init__(self, gpu: FakeGpu, capability: int, shared_memory: int) -> None:
        self.gpu, self.capability = gpu, capability
        self.utils = _Utils(shared_memory)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Count a compiled kernel, and return what counts its launches."""
        name = metadata.name
        launches = self.gpu.launches
        self.gpu.variants[name] += 1

        def launch(x: int, y: int, z: int, *args: Any) -> None:
            launches.append((name, x * y * z))

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
