"""Handles: tensors with a shape but no storage, which `update()` hands to attention in place of keys and values.

The paged attention function takes the pages behind a pair of handles. Any other code that computes with a
handle gets a correct dense tensor, with one warning about its price. What it writes would be lost with that tensor: writing
to a handle, or to a view of one, is an error. While torch.compile traces a forward, hollow tensors take the handles' place.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ..backends.base import Backend, PagedKV
from ..errors import StaleHandleError, UnsupportedModelError
from ..notices import warn_once
from ..spec import SideSpec


@dataclass(eq=False)
class KVView:
    """The keys and values of one layer as one forward sees them; valid until the layer changes again."""

    kv: PagedKV
    layer: Any
    revision: object
    kernel: Backend
    sliding_window: int | None = None  # tokens that a query sees, itself included

    def check(self) -> None:
        """Raise StaleHandleError when the layer has moved on since."""
        if self.layer.revision != self.revision:
            raise StaleHandleError(
                "these keys and values belong to an earlier forward: the cache has changed since. Read them "
                "before the next forward, or keep a copy (tensor.clone())"
            )

    def dense(self, side: str) -> torch.Tensor:
        """Return "keys" or "values" as [rows, num_kv_heads, seen, head_dim]. Raises StaleHandleError when the layer has moved on."""
        self.check()
        return self.kernel.dense(self.kv, side)


class LayerView(KVView):
    """The keys or values that a layer holds now; nothing is gathered before some code computes with them."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.revision = layer.revision
        self.kernel = layer.store.kernel
        self.sliding_window = layer.window

    @functools.cached_property
    def kv(self) -> PagedKV:  # type: ignore[override]
        """The pages. Raises InterruptedForwardError where a forward has not reached the layer yet."""
        found: PagedKV = self.layer.current_kv()
        return found

    def handle(self, side: str) -> "LazyKV":
        """Return the handle [rows, num_kv_heads, seen, head_dim] of one side."""
        layer, spec = self.layer, getattr(self.layer.spec, side)
        return LazyKV(self, side, spec, len(layer.group), layer.get_seq_length(), layer.device)


class _ReadOnly(torch.Tensor):
    """Keys or values that pages hold: code computes with them as with any tensor, and cannot write to them."""

    # shape, dtype and device are then answered in C++ without coming back to Python
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _read(func, args, kwargs or {})

    def dense(self) -> torch.Tensor:
        """Return an ordinary tensor [rows, num_kv_heads, seen, head_dim] of these numbers, with memory of its own."""
        raise NotImplementedError

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.dense()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)


class LazyKV(_ReadOnly):
    """One side of a KVView in the guise of a tensor [rows, num_kv_heads, seen, head_dim]."""

    view_of_pages: KVView
    side: str

    @staticmethod
    def __new__(
        cls, view: KVView, side: str, spec: SideSpec, rows: int, seen: int, device: torch.device
    ) -> "LazyKV":
        """Make the handle of one side of `view`, which `spec` describes."""
        shape = (rows, spec.num_kv_heads, seen, spec.head_dim)
        handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=spec.dtype, device=device)
        handle.view_of_pages, handle.side = view, side
        return handle

    @classmethod
    def pair(cls, view: KVView) -> "tuple[LazyKV, LazyKV]":
        """Return the handles of both sides of a view that was made just now."""
        kv, made = view.kv, []
        rows, seen, device = kv.residual_keys.shape[0], kv.seen, kv.residual_keys.device
        # not by __new__: every layer comes here in every step
        make = torch.Tensor._make_wrapper_subclass
        for side, spec in (("keys", kv.spec.keys), ("values", kv.spec.values)):
            shape = (rows, spec.num_kv_heads, seen, spec.head_dim)
            handle: Any = make(cls, shape, dtype=spec.dtype, device=device)
            handle.view_of_pages, handle.side = view, side
            made.append(handle)
        return made[0], made[1]

    def dense(self) -> torch.Tensor:
        """Return the dense tensor that this handle stands for: [rows, num_kv_heads, seen, head_dim]."""
        return self.view_of_pages.dense(self.side)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyKV({self.side}, shape={tuple(self.shape)}, dtype={self.dtype})"


class KVPart(_ReadOnly):
    """A view of what a handle stands for (`keys[:, :, 2:]`): an ordinary tensor but that nobody writes to it.

    Whatever is computed from it is an ordinary tensor, views of it are such parts again.
    """

    plain: torch.Tensor

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> "KVPart":
        """Share the memory of `plain`."""
        part: KVPart = torch.Tensor._make_subclass(cls, plain)
        part.plain = plain
        return part

    def dense(self) -> torch.Tensor:
        """Return a copy [any shape]."""
        return self.plain.clone()

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array that shares the memory and refuses writes."""
        array = self.plain.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the numbers as nested lists."""
        return self.plain.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.plain)


def plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the ordinary tensor [any shape] of a view of a handle, anything else as it is."""
    return tensor.plain if isinstance(tensor, KVPart) else tensor


def _read(func: Any, args: Any, kwargs: Any) -> Any:
    """Call an operator on what handles and views of them stand for. Raises UnsupportedModelError where it writes to them."""
    for tensor in written_by(func, args, kwargs):
        if isinstance(tensor, _ReadOnly):
            raise UnsupportedModelError(
                f"{func} writes to keys or values that a paged cache handed out. They are read-only: pages would not take the "
                "change over. Change a copy (keys = keys.clone()), or use a DynamicCache for this model"
            )
    handles = [one for one in tree_leaves((args, kwargs)) if isinstance(one, LazyKV)]
    if handles:
        warn_dense(str(func))
        warn_read_whole(handles[0].view_of_pages, "their attention does not read pages")
    args, kwargs = tree_map_only(LazyKV, LazyKV.dense, (args, kwargs))
    args, kwargs = tree_map_only(KVPart, plain_tensor, (args, kwargs))
    found = func(*args, **kwargs)
    if not returns_views(func):
        return found
    read = {_memory(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
    # reshape() and to() copy where they must, and may come here before they are taken apart (inference mode)
    return tree_map_only(torch.Tensor, lambda x: KVPart(x) if _memory(x) in read else x, found)


def _memory(tensor: torch.Tensor) -> int:
    # the same object for all views, with an address or without
    return tensor.untyped_storage()._cdata


def warn_dense(reader: str) -> None:
    """Say once what reading the cache densely costs, and the remedy."""
    warn_once(
        "dense",
        "An attention implementation or other code that does not know kv_hf reads the cached keys and "
        f"values ({reader}): each layer's whole cache is written out densely at every step, which costs the "
        "time and the transient memory that pages save. Use model.set_attn_implementation('sdpa') where "
        "the model supports it",
    )


def warn_read_whole(view: KVView, reason: str) -> None:
    """Say once that steps read everything, and why, where the forward that got `view` was to read a part."""
    if type(view) is not KVView:
        return  # of a layer that somebody looks at
    budget = view.kv.budget
    if budget is not None and budget.chooses(view.kv.block_table.shape[1], view.kv.seen):
        warn_once(
            "read: dense",
            f"Steps read everything, whatever the option 'read' says: {reason}",
        )


def warn_gradients() -> None:
    """Say once that a backward pass ends at the cache."""
    warn_once(
        "gradients",
        "No gradient flows through the keys and values of a paged cache, not even those of the newest tokens: their "
        "projections get no gradient, and earlier layers lack this part of theirs. Use torch.no_grad() for generation, or a "
        "DynamicCache for training through the cache",
    )


def check_unchanged(side: str, held: torch.Tensor | None, value: Any) -> None:
    """Accept None and clones of the `held` tensor [rows, num_kv_heads, seen, head_dim] (copies write them back), refuse all else."""
    if value is None or (
        held is not None
        and isinstance(value, torch.Tensor)
        and held.dtype == value.dtype
        and torch.equal(held, value)
    ):
        return
    raise AttributeError(
        f"{side} of a paged layer are a read-only view; use update() to append tokens"
    )


def view_of(keys: torch.Tensor, values: torch.Tensor) -> KVView | None:
    """Return the view that keys and values [rows, num_kv_heads, seen, head_dim] are handles of, None for other tensors.

    Raises: StaleHandleError when the layer has moved on since.
    """
    if type(keys) is not LazyKV or type(values) is not LazyKV:
        return None
    view = keys.view_of_pages
    if view is not values.view_of_pages or keys.side != "keys" or values.side != "values":
        return None
    if view.layer.revision != view.revision:
        view.check()
    return view


# -- forwards that torch.compile traces ------------------------------------------------------------------------------


# A handle cannot be traced. A traced layer returns a pair of hollow tensors instead (the right shape, nan everywhere, no
# memory) and leaves its pages here; the attention function, which is called next, takes them if it is given that very
# pair. Whoever else reads a hollow tensor gets nan, not a plausible number.


@dataclass(frozen=True)
class TracedView:
    """The layer that was updated last, and the pair that stands for its pages.

    Attributes:
        attend: takes query, mask, scale, softcap and sink logits; returns [rows, q_len, num_heads, value_dim].
    """

    keys: torch.Tensor
    values: torch.Tensor
    attend: Callable[..., torch.Tensor]


CHANGED = (
    "this model changes keys or values between its cache and its attention, or computes attention by itself, so that a "
    "compiled forward cannot read pages; leave max_length out of the cache's options, or pass disable_compile=True"
)


class _Waiting(threading.local):
    view: TracedView | None = None


_waiting = _Waiting()


def hand_over(view: TracedView) -> tuple[torch.Tensor, torch.Tensor]:
    """Leave `view` for the attention function; return the pair [rows, num_kv_heads, columns, head_dim] that stands for it."""
    _waiting.view = view
    return view.keys, view.values


def forget() -> None:
    """Drop a view that nobody took: a forward stopped, or left compiled code, before its attention."""
    _waiting.view = None


def check_taken() -> None:
    """Raise UnsupportedModelError where attention did not take the view of the layer before."""
    if _waiting.view is not None:
        raise UnsupportedModelError(CHANGED)


def taken(keys: torch.Tensor, values: torch.Tensor) -> TracedView | None:
    """Return the view that was left with this pair [rows, num_kv_heads, columns, head_dim], or None when no traced layer left one.

    Raises: UnsupportedModelError when the pair given is made of the one that stands for it.
    """
    view = _waiting.view
    if view is None:
        return None
    _waiting.view = None
    if keys is view.keys and values is view.values:
        return view
    if keys.shape[2] != view.keys.shape[2]:
        return None  # another cache's keys: the view was left by a forward that never got here
    raise UnsupportedModelError(CHANGED)


# -- what an operator does to its arguments, by its schema -----------------------------------------------------------


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors [any shape] that the call `func(*args, **kwargs)` writes to (in place, or as `out`)."""
    schema = getattr(func, "_schema", None)  # a higher-order operator has none
    if schema is None or not schema.is_mutable:
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (one for one in tree_leaves(value) if isinstance(one, torch.Tensor))


@functools.cache
def returns_views(func: Any) -> bool:
    """Say whether `func` returns tensors that share the memory of an argument, without writing to it."""
    schema = getattr(func, "_schema", None)
    returns = () if schema is None else schema.returns
    return any(one.alias_info is not None and not one.alias_info.is_write for one in returns)


# -- families that transformers runs eagerly only --------------------------------------------------------------------


# Their eager functions are softmax(scaling * query @ keys + mask) @ values with what kernels know beside it: softcap, sinks
# (s_aux), a position bias. Read in transformers 5.17 to 5.24.
EAGER = (
    "bigbird_pegasus", "flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "hy_v4", "mimo_v2_flash", "nllb_moe",
    "speech_to_text", "switch_transformers", "t5gemma", "vaultgemma",
)  # fmt: skip


def reads_eagerly(part: Any) -> bool:
    """Say whether a class, or a function, is transformers' own of a family whose eager attention kernels can replace."""
    names = part.__module__.split(".")
    return names[:2] == ["transformers", "models"] and names[2] in EAGER


def traceable(config: Any) -> bool:
    """Say whether the attention that a config names takes the hollow tensors of a forward that torch.compile traces."""
    name = config._attn_implementation
    return name == "sdpa" or (name == "eager" and reads_eagerly(type(config)))
