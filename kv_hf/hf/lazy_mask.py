"""A mask that nobody may need: kernels hide by themselves what it would hide, other code gets it when it asks."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class LazyMask(torch.Tensor):
    """A bool mask [batch, 1, q_len, kv_len] that is made when somebody computes with it.

    Models hand it on to the attention function, which leaves it out where pages are read. A model that changes keys
    before its attention, or the mask itself, gets the mask that it would have had.
    """

    make: Callable[[], torch.Tensor | None]

    # shape, dtype and device are then answered in C++ without coming back to Python
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, shape: tuple[int, ...], device: torch.device, make: Callable[[], torch.Tensor | None]
    ) -> "LazyMask":
        """Stand for what `make()` returns."""
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.make = make
        return mask

    def dense(self) -> torch.Tensor:
        """Return the mask itself."""
        made = self.make()
        assert made is not None  # asked for without leave to skip it
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and device and not kwargs.get("dtype"):
            mask = args[0]  # accelerate's hooks move the inputs of layers on other devices
            return cls(tuple(mask.shape), device, lambda: mask.dense().to(device))
        args, kwargs = tree_map_only(cls, cls.dense, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask(shape={tuple(self.shape)})"
