"""Lazy keys and values: tensors with a shape but no storage, which `update()` hands to attention.

The paged attention function takes the pages behind a pair of handles. Any other code that computes with a
handle gets a correct dense tensor, with one warning about its price.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..errors import StaleHandleError
from ..kernels.choice import Kernel
from ..kernels.inputs import PagedKV
from ..notices import warn_once


class KVView:
    """The keys and values of one layer as one forward sees them; valid until the layer changes again."""

    mla = "auto"  # CacheConfig.mla, of layers that hold latents
    table: Any = None  # lengths on the device, of a preallocated cache (pages/static_table.py)
    is_first = False  # whether the layer is the first of a preallocated cache

    def __init__(
        self,
        kv: PagedKV,
        layer: Any,
        revision: object,
        kernel: Kernel,
        sliding_window: int | None = None,
    ) -> None:
        self.kernel = kernel
        self.sliding_window = sliding_window  # tokens that a query sees, itself included
        self._kv = kv
        self._layer = layer
        self._revision = revision

    @property
    def kv(self) -> PagedKV:
        """The pages. Raises StaleHandleError when the layer has moved on since."""
        self._check()
        return self._kv

    def _check(self) -> None:
        if self._layer.revision != self._revision:
            raise StaleHandleError(
                "these keys and values belong to an earlier forward: the cache has changed since. Read them "
                "before the next forward, or keep a copy (tensor.clone())"
            )

    def empty_like(self, side: str) -> tuple[torch.Size, torch.dtype, torch.device]:
        """Return shape [rows, num_kv_heads, seen, head_dim], dtype and device of one side."""
        kv = self.kv
        spec = getattr(kv.spec, side)
        window = kv.window_keys if side == "keys" else kv.window_values
        shape = torch.Size((kv.rows, spec.num_kv_heads, kv.seen, spec.head_dim))
        return shape, window.dtype, window.device

    def dense(self, side: str) -> torch.Tensor:
        """Return "keys" or "values" as [rows, num_kv_heads, seen, head_dim]."""
        return self.kernel.dense(self.kv, side)


class KVHandle(torch.Tensor):
    """One side of a KVView in the guise of a tensor [rows, num_kv_heads, seen, head_dim]."""

    view_of_pages: KVView
    side: str

    # shape, dtype and device are then answered in C++ without coming back to Python
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, view: KVView, side: str) -> "KVHandle":
        """Make the handle of one side of `view`."""
        shape, dtype, device = view.empty_like(side)
        handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        handle.view_of_pages = view
        handle.side = side
        return handle

    @classmethod
    def pair(cls, view: KVView) -> "tuple[KVHandle, KVHandle]":
        """Return the handles of both sides of a view that was made just now."""
        kv = view._kv
        keys, values = kv.spec.sides
        rows, seen, device = kv.rows, kv.seen, kv.window_keys.device
        make = torch.Tensor._make_wrapper_subclass
        shape = (rows, keys.num_kv_heads, seen, keys.head_dim)
        first: Any = make(cls, shape, dtype=keys.dtype, device=device)
        shape = (rows, values.num_kv_heads, seen, values.head_dim)
        second: Any = make(cls, shape, dtype=values.dtype, device=device)
        first.view_of_pages = second.view_of_pages = view
        first.side, second.side = "keys", "values"
        return first, second

    def dense(self) -> torch.Tensor:
        """Return the dense tensor behind this handle."""
        return self.view_of_pages.dense(self.side)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        warn_dense(str(func))
        args, kwargs = tree_map_only(cls, cls.dense, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"KVHandle({self.side}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.dense()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)


def warn_dense(reader: str) -> None:
    """Say once what reading the cache densely costs, and the remedy."""
    warn_once(
        "dense",
        "An attention implementation or other code that does not know kv_hf reads the cached keys and "
        f"values ({reader}): each layer's whole cache is written out densely at every step, which costs the "
        "time and the transient memory that pages save. Use model.set_attn_implementation('kv_hf') where "
        "the model supports it",
    )


def check_unchanged(side: str, held: torch.Tensor | None, value: Any) -> None:
    """Accept what is `held` already (code that copies a cache writes clones back), refuse anything else."""
    if (
        held is not None
        and isinstance(value, torch.Tensor)
        and (held.shape, held.dtype) == (value.shape, value.dtype)
        and torch.equal(held, value)
    ):
        return
    raise AttributeError(
        f"{side} of a paged layer are a read-only view; use update() to append tokens"
    )


def view_behind(keys: torch.Tensor, values: torch.Tensor) -> KVView | None:
    """Return the view that both tensors are handles of, or None when they are ordinary tensors."""
    if not (isinstance(keys, KVHandle) and isinstance(values, KVHandle)):
        return None
    same = keys.view_of_pages is values.view_of_pages
    return keys.view_of_pages if same and (keys.side, values.side) == ("keys", "values") else None
