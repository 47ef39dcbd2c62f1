"""A causal mask built only on demand. The kernels apply causality themselves, so most steps never build it."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..errors import UnsupportedModelError
from .operators import changes_shape, returns_views, written_by


class LazyMask(torch.Tensor):
    """A bool mask [batch, 1, q_len, kv_len] that is made when somebody computes with it, and then kept.

    Models hand it on to the attention function, which leaves it out where pages are read, or where sdpa needs none. A
    model that changes keys before its attention, or the mask itself, gets the mask that it would have had. It hides
    what causality, left padding and a sliding window hide, so that its last rows are those of the last queries: a
    model that keeps only these (logits_to_keep) gets a lazy mask again.

    A model may write to it. From then on, and once it was given a view that it may write to, nobody knows any more what
    the mask hides: it is `changed`, and attention has to read it.

    Attributes:
        make: returns the mask.
        causal: it hides nothing but later tokens: query i of q_len sees all columns but the last q_len - 1 - i.
        whole: the mask that this one shows the last queries of: itself, or one that it was cut out of.
        start: first query of `whole` that it shows.
    """

    make: Callable[[], torch.Tensor | None]
    causal: bool
    whole: "LazyMask | None"
    start: int
    _made: torch.Tensor | None
    _own: torch.Tensor | None

    # shape, dtype and device are then answered in C++ without coming back to Python
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        device: torch.device,
        make: Callable[[], torch.Tensor | None],
        causal: bool = False,
    ) -> "LazyMask":
        """Stand for what `make()` returns."""
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.make, mask.causal = make, causal
        mask.whole, mask.start = None, 0
        mask._made = mask._own = None
        return mask

    @property
    def changed(self) -> bool:
        """Return whether some code has written to the mask, or may have."""
        return (self if self.whole is None else self.whole)._own is not None

    def dense(self) -> torch.Tensor:
        """Return the mask as it is now, [batch, 1, q_len, kv_len], the same tensor for all layers of a forward."""
        if self.whole is not None:
            if self._made is None or self._own is not self.whole._own:
                self._own = self.whole._own
                self._made = self.whole.dense()[..., self.start :, :]
            return self._made
        return self._unwritten() if self._own is None else self._own

    def _unwritten(self) -> torch.Tensor:
        """Return the mask as it was made; nobody writes to it."""
        if self._made is None:
            self._made = self.make()
        assert self._made is not None  # asked for without leave to skip it
        return self._made

    def writable(self) -> torch.Tensor:
        """Return the mask [batch, 1, q_len, kv_len] as a tensor of its own that may be written to; it counts as changed then."""
        (self if self.whole is None else self.whole)._change()
        return self.dense()

    def _change(self) -> None:
        if self._own is None:
            # rows of an expanded mask share their memory, which nobody could write to
            made = self._unwritten().expand(self.shape)
            self._own = made.clone(memory_format=torch.contiguous_format)

    def last_queries(self, start: int) -> "LazyMask":
        """Return the mask of the queries from `start` on: a view of this one."""
        shape = list(self.shape)
        shape[-2] -= start
        part = LazyMask(tuple(shape), self.device, self.make, self.causal)
        part.whole = self if self.whole is None else self.whole
        part.start = self.start + start
        return part

    def moved(self, device: torch.device) -> "LazyMask":
        """Return a copy of this mask, which nobody has written to, on another device."""
        whole, start = self if self.whole is None else self.whole, self.start
        shape, causal = tuple(self.shape), self.causal
        return LazyMask(
            shape, device, lambda: whole._unwritten()[..., start:, :].to(device), causal
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        written = [one for one in written_by(func, args, kwargs) if isinstance(one, LazyMask)]
        if written:
            return _write(func, args, kwargs, written)
        device = kwargs.get("device")
        copied = func is torch.ops.aten._to_copy.default
        if copied and device and not kwargs.get("dtype") and not args[0].changed:
            return args[0].moved(device)  # accelerate's hooks move the inputs of layers
        if func is torch.ops.aten.slice.Tensor:
            kept = _queries_kept(*args, **kwargs)
            if kept is not None:
                return args[0].last_queries(kept)
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return args[0].last_queries(0)
        ask = cls.writable if returns_views(func) else cls.dense
        args, kwargs = tree_map_only(cls, ask, (args, kwargs))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask(shape={tuple(self.shape)})"


def _write(func: Any, args: Any, kwargs: Any, written: list[LazyMask]) -> Any:
    """Call an operator that writes to masks on the tensors that these then consist of."""
    if changes_shape(func):
        raise UnsupportedModelError(
            f"{func} changes the shape of an attention_mask in place, which kv_hf's masks do not allow; use the function "
            "without the underscore, which returns the mask in the new shape"
        )
    tensors = {id(mask): mask.writable() for mask in written}
    args, kwargs = tree_map_only(LazyMask, LazyMask.dense, (args, kwargs))
    found = func(*args, **kwargs)
    lazy = {id(tensors[id(mask)]): mask for mask in written}
    return tree_map_only(torch.Tensor, lambda x: lazy.get(id(x), x), found)


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
