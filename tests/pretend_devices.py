"""CPU tensors that claim to lie on GPUs, so that code for several devices can be run without any.

A `Pretended` tensor holds an ordinary CPU tensor and a device such as cuda:1. Operations compute on the CPU, and
refuse operands of two devices as torch does: only copies, and 0-dim tensors or indices from the CPU, may cross.
`pretended()` makes factories and moves (`device=`, `.to`, `.cpu`) answer with such tensors.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from kv_hf.bridge.handles import LazyKV
from kv_hf.bridge.masks import LazyMask

FIRST, SECOND = torch.device("privateuseone", 0), torch.device("privateuseone", 1)
CROSSING = ("aten::copy_", "aten::_to_copy")
UNASKED = ("scaled_dot_product_attention", "where", "__setitem__")
INDEXING = ("aten::index", "aten::index_put_", "aten::index_put")


class Pretended(torch.Tensor):
    """A CPU tensor `held` that claims to lie on another device."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> "Pretended":
        options = {"strides": inner.stride(), "dtype": inner.dtype, "device": device}
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **options)
        self.held = inner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if name not in CROSSING:
            refuse_strangers(name, (args, kwargs))
        pretended = [x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)]
        device = kwargs["device"] if kwargs.get("device") is not None else pretended[0].device
        device = torch.device(device)
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        known = {id(x.held): x for x in pretended}
        result = func(
            *tree_map_only(cls, lambda x: x.held, args),
            **tree_map_only(cls, lambda x: x.held, kwargs),
        )
        if name == "aten::copy_":
            return args[0]

        def back(x: torch.Tensor) -> torch.Tensor:
            return known.get(id(x)) if id(x) in known else place(x, device)

        return tree_map_only(torch.Tensor, back, result)

    def __deepcopy__(self, memo: Any) -> "Pretended":
        return Pretended(self.held.clone(), self.device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Pretended({self.held}, device={self.device})"


def refuse_strangers(name: str, arguments: Any) -> None:
    """Raise RuntimeError where tensors of two devices meet, as torch does."""
    leaves = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    devices = {x.device for x in leaves if isinstance(x, Pretended)}
    strangers = [x for x in leaves if not isinstance(x, Pretended) and x.ndim]
    if name in INDEXING:
        strangers = [x for x in strangers if x.dtype not in (torch.int64, torch.bool)]
    if len(devices) > 1 or (devices and strangers):
        found = sorted(str(x.device) for x in leaves)
        raise RuntimeError(f"Expected all tensors to be on the same device, got {found}: {name}")


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` (on the CPU) as one on `device`."""
    if isinstance(tensor, Pretended):
        tensor = tensor.held
    return tensor if device.type == "cpu" else Pretended(tensor, device)


class _Devices(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu") and args and isinstance(args[0], torch.Tensor):
            return self._move(func, name, args, kwargs)
        if name in UNASKED and any(isinstance(x, Pretended) for x in args):
            return _compute_inside(func, name, args, kwargs)
        if name == "tolist" and isinstance(args[0], Pretended):
            return args[0].held.tolist()
        device = kwargs.get("device")
        if device is None or torch.device(device).type == "cpu":
            return func(*args, **kwargs)
        if any(isinstance(x, Pretended) for x in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)  # it dispatches, with its device
        made = func(*args, **{**kwargs, "device": "cpu"})
        return tree_map(lambda x: place(x, torch.device(device)), made)

    def _move(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        tensor, *rest = args
        wanted = torch.device("cpu") if name == "cpu" else kwargs.pop("device", None)
        others = []
        for value in rest:
            if isinstance(value, torch.Tensor):
                wanted, kwargs["dtype"] = value.device, value.dtype
            elif isinstance(value, (str, torch.device)):
                wanted = torch.device(value)
            else:
                others.append(value)
        inner = tensor.held if isinstance(tensor, Pretended) else tensor
        wanted = tensor.device if wanted is None else torch.device(wanted)
        if isinstance(tensor, LazyMask):
            if wanted == tensor.device:
                return tensor
            make = lambda: tensor.dense().to(wanted)  # noqa: E731
            return LazyMask(tuple(tensor.shape), wanted, make, tensor.causal, tensor.read)
        kwargs.pop("non_blocking", None)
        moved = inner.to(*others, **kwargs) if others or kwargs else inner
        if wanted == tensor.device and moved is inner:
            return tensor
        if wanted != tensor.device and moved is inner:
            moved = inner.clone()
        return place(moved, wanted)


def _compute_inside(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Compute on the tensors held, where torch makes a tensor of the device without asking the dispatch above."""
    args, kwargs = tree_map_only(LazyKV, LazyKV.dense, (args, kwargs))
    refuse_strangers(name, (args, kwargs))
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Pretended)]
    args, kwargs = tree_map_only(Pretended, lambda x: x.held, (args, kwargs))
    return tree_map_only(torch.Tensor, lambda x: place(x, leaves[0].device), func(*args, **kwargs))


class _Backend:
    """What torch asks of the module of a device type."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register() -> None:
    """Tell torch of a device type without a compiled part. For a process of its own: it cannot be undone."""
    _setup_privateuseone_for_python_backend(backend_module=_Backend())


@contextmanager
def pretended() -> Iterator[None]:
    """Pretend that cuda:0, cuda:1 and so on are there."""
    with _Devices(), torch.no_grad():
        yield


def move_module(module: torch.nn.Module, device: torch.device) -> None:
    """Put the parameters and buffers of `module` on a pretended device."""
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                tensor = place(parameter.detach(), device)
                part._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = place(buffer, device)
