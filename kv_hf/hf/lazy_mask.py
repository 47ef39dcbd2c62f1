"""A mask that nobody may need: kernels hide by themselves what it would hide, other code gets it when it asks."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class LazyMask(torch.Tensor):
    """A bool mask [batch, 1, q_len, kv_len] that is made when somebody computes with it, and then kept.

    Models hand it on to the attention function, which leaves it out where pages are read, or where sdpa needs none. A
    model that changes keys before its attention, or the mask itself, gets the mask that it would have had. It hides
    what causality, left padding and a sliding window hide, so that its last rows are those of the last queries: a
    model that keeps only these (logits_to_keep) gets a lazy mask again.

    Attributes:
        make: returns the mask.
        plain: sdpa would get None in its place, which there means causal from the first key on, in a causal module.
        certain: causal in any module: the mask stands for one that eager attention would have been given.
        causal: it hides nothing but later tokens: query i of q_len sees all columns but the last q_len - 1 - i.
    """

    make: Callable[[], torch.Tensor | None]
    plain: bool
    certain: bool
    causal: bool
    _made: torch.Tensor | None

    # shape, dtype and device are then answered in C++ without coming back to Python
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        device: torch.device,
        make: Callable[[], torch.Tensor | None],
        plain: bool = False,
        certain: bool = True,
        causal: bool = False,
    ) -> "LazyMask":
        """Stand for what `make()` returns."""
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.make, mask.plain, mask.certain, mask.causal = make, plain, certain, causal
        mask._made = None
        return mask

    def dense(self) -> torch.Tensor:
        """Return the mask itself, the same tensor each time: the layers of a forward ask one after the other."""
        if self._made is None:
            self._made = self.make()
        assert self._made is not None  # asked for without leave to skip it
        return self._made

    def last_queries(self, start: int) -> "LazyMask":
        """Return the mask of the queries from `start` on."""
        shape = list(self.shape)
        shape[-2] -= start
        return LazyMask(
            tuple(shape),
            self.device,
            lambda: self.dense()[..., start:, :],
            self.plain and not start,
            self.certain,
            self.causal,
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if func is torch.ops.aten._to_copy.default and device and not kwargs.get("dtype"):
            mask = args[0]  # accelerate's hooks move the inputs of layers on other devices
            kind = mask.plain, mask.certain, mask.causal
            return cls(tuple(mask.shape), device, lambda: mask.dense().to(device), *kind)
        if func is torch.ops.aten.slice.Tensor:
            kept = _queries_kept(*args, **kwargs)
            if kept is not None:
                return args[0].last_queries(kept)
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].last_queries(0)
        args, kwargs = tree_map_only(cls, cls.dense, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask(shape={tuple(self.shape)})"


def _queries_kept(
    mask: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> int | None:
    """Return the first query that a slice keeps where it keeps all behind that and all columns, else None."""
    size = mask.shape[dim]
    first, last, step = slice(start, end, step).indices(size)
    if step != 1 or last < size or first >= size:
        return None
    if dim % mask.ndim == mask.ndim - 2:
        return first
    return 0 if not first else None
