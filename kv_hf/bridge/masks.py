"""Masks of a paged cache: left padding is learnt from 2D masks, and masks that hide what pages hide anyway are not built."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_map_only

from ..errors import CacheMismatchError
from ..pages import moved
from ..pages.step import Numbers
from .handles import returns_views, written_by

# additive masks hide with a dtype's lowest number, -inf or -1e4; no weight is left below this
HIDDEN = -100.0


class LazyMask(torch.Tensor):
    """A bool mask [batch, 1, q_len, kv_len] that is built when some code computes with it, once for all layers.

    It hides what pages hide by themselves: later tokens, left padding, and what lies before a sliding window. Attention
    over pages leaves it out, unless it is to `read` it; a model that changes keys before its attention gets the mask that
    it would have had.

    Attributes:
        make: builds the mask.
        causal: it hides nothing but later tokens: query i of q_len sees all columns but the last q_len - 1 - i.
        read: some code may have written to it, so that it hides more.
    """

    make: Callable[[], torch.Tensor]
    causal: bool
    read: bool
    _made: torch.Tensor | None

    # shape, dtype and device are then answered in C++ without coming back to Python
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        device: torch.device,
        make: Callable[[], torch.Tensor],
        causal: bool = False,
    ) -> "LazyMask":
        """Stand for what `make()` returns."""
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.make, mask.causal, mask.read = make, causal, False
        mask._made = None
        return mask

    def dense(self) -> torch.Tensor:
        """Return the mask [batch, 1, q_len, kv_len]; what is written to it stays written."""
        if self._made is None:
            self._made = self.make()
        return self._made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        copied = func is torch.ops.aten._to_copy.default and not kwargs.get("dtype")
        if copied and device and not args[0].read:  # accelerate's hooks move the inputs of layers
            mask = args[0]
            return cls(tuple(mask.shape), device, lambda: mask.make().to(device), mask.causal)
        for mask in written_by(func, args, kwargs):
            if isinstance(mask, cls):
                mask._own()
        ask = cls._own if returns_views(func) else cls.dense
        args, kwargs = tree_map_only(cls, ask, (args, kwargs))
        return func(*args, **kwargs)

    def _own(self) -> torch.Tensor:
        """Return the mask as a tensor that code may write to; attention has to read it from now on."""
        if not self.read:
            # rows of an expanded mask share their memory, which nobody could write to
            self._made = self.dense().clone(memory_format=torch.contiguous_format)
            self.read = True
        return self.dense()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask(shape={tuple(self.shape)})"


# -- left padding ----------------------------------------------------------------------------------------------------

# cache -> whether its last mask in this call of generate() hid left padding and nothing else
_compared: ContextVar[WeakKeyDictionary[Any, bool] | None] = ContextVar(
    "kv_hf_compared", default=None
)


@contextmanager
def within_generate() -> Iterator[None]:
    """Within this block masks grow by ones: those of single tokens are compared once, where that waits for a device."""
    before = _compared.set(WeakKeyDictionary())
    try:
        yield
    finally:
        _compared.reset(before)


# names of attention whose mask function knows what a MaskLength is: hf/dispatch.py has wrapped it
takes_length: set[str] = set()


class MaskLength(int):
    """The kv_length of a mask, which knows its cache: `update()` gets keys and values, and never sees the 2D mask."""

    cache: Any

    def __new__(cls, length: int, cache: Any) -> "MaskLength":
        """Make the length `length` of a mask for `cache`."""
        self = super().__new__(cls, length)
        self.cache = cache
        return self

    def stored(self) -> Any:
        """Return the first rows that hold tokens, so that attention gets handles; None where none does."""
        return next((group for group in self.cache.groups if group.seen), None)

    def ends_with(self, new: int) -> bool:
        """Say whether the newest of `new` columns is the last one, and no row begins with padding."""
        group = self.stored()
        return int(self) == group.seen + new and not group.batch.padding.any()

    def observe(
        self, mask: torch.Tensor | None, new: int, device: torch.device | str
    ) -> bool | None:
        """Learn left padding from the mask of a forward of `new` columns; say whether pages hide the same by themselves.

        Args:
            mask: [rows, columns], bool, False in columns of padding; None hides nothing, other masks say nothing.
            device: of the forward.
        Returns: None where no tokens are stored yet.
        Raises: CacheMismatchError where the mask shows columns that were left out as padding before.
        """
        known, cache = _compared.get(), self.cache
        if known is not None and new == 1 and cache in known and not moved.is_host(device):
            return known[cache]
        stored = self.stored()
        if stored is not None and mask is not None and mask.ndim == 2:
            end = min(stored.seen + new, stored.offset + int(self))
            if mask.shape[1] < end:
                cache.forward.check()  # behind one that was stopped its columns count, too
            _check_end(mask.shape[1], end, new)
        same = None if stored is None else hides_padding(stored, mask, new)
        if known is not None and same is not None:
            known[cache] = same
        for group in cache.groups:
            if mask is None:
                group.forget_padding()
            else:
                group.observe_padding(mask)
        return same


def _check_end(columns: int, end: int, new: int) -> None:
    """Raise CacheMismatchError where a 2D mask ends before the last of `new` columns, `end`: transformers hides what is missing."""
    if columns < end:
        raise CacheMismatchError(
            f"attention_mask has {columns} columns, and this forward's tokens end at column {end}: transformers would hide the last "
            f"ones. The cache holds {end - new} columns: pass the mask of the whole text with the {new} new tokens alone, or call "
            "cache.reset() and pass the whole text"
        )


def hides_padding(group: Any, mask: torch.Tensor | None, new: int) -> bool:
    """Say whether the 2D mask of `new` columns more hides a group's left padding and nothing else.

    Args:
        mask: [rows, columns], bool, or None.
    Raises: CacheMismatchError where it shows padding that was not stored.
    """
    padding = group.batch.padding
    if mask is None:
        if (padding > group.offset).any():
            raise CacheMismatchError(
                f"attention_mask is None, but the rows begin with {padding.tolist()} columns of left padding, which was "
                "hidden when the cache took it in, and was not stored: without a mask they would be attended to. Pass the "
                "mask [batch, columns] of the whole text so far, or call cache.reset() and start again"
            )
        return True
    if mask.ndim != 2 or mask.shape[0] != len(padding):
        return False
    end = group.seen + new
    mask = mask[:, :end].bool()
    if not padding.any():
        return mask.shape[1] == end and bool(mask.all())
    check_hidden(padding, mask[:, None, None], end)
    real = torch.arange(end, device=mask.device) >= _column(padding, mask.device)
    return mask.shape[1] == end and bool((mask == real).all())


def check_hidden(padding: Numbers, mask: torch.Tensor, seen: int) -> None:
    """Raise CacheMismatchError where a real token would attend to left padding, which was not stored.

    Args:
        padding: of each row.
        mask: bool or additive float [batch or 1, heads or 1, q_len or 1, columns] of the newest of `seen` columns.
    """
    longest = min(int(padding.max()), mask.shape[-1])
    if mask.shape[0] not in (1, len(padding)) or not longest:
        return
    known = _column(padding, mask.device)[:, None, None]
    visible = mask[..., :longest]
    visible = visible if mask.dtype == torch.bool else visible > HIDDEN
    queries = torch.arange(seen - mask.shape[2], seen, device=mask.device)[:, None]
    columns = torch.arange(longest, device=mask.device)
    wrong = (visible & (columns < known) & (queries >= known)).any(2).any(1).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise CacheMismatchError(
            f"attention_mask shows column {column} of row {row}, which was hidden as left padding when the cache took it "
            f"in, and was not stored (padding of that row: {padding[row]} columns). Pass the mask of the whole text so "
            "far, with the same padding, or call cache.reset() and start again"
        )


def check_padding_mask(mask: Any, rows: int, late: bool) -> None:
    """Raise CacheMismatchError unless `mask` is a 2D mask, and of `rows` rows (0: any) that are not `late`."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        got = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise CacheMismatchError(f"attention_mask must be a tensor [batch, columns], got {got}")
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise CacheMismatchError(
            f"attention_mask must hold 0 and 1 (or be bool), got {mask.dtype} from {mask.min()} to {mask.max()}"
        )
    if rows and (rows != mask.shape[0] or late):
        raise CacheMismatchError(
            f"attention_mask of {mask.shape[0]} rows comes too late or to another batch: this cache holds the tokens of "
            f"{rows} rows; call observe_padding before the first forward"
        )


def _column(padding: Numbers, device: torch.device) -> torch.Tensor:
    return moved.moved(torch.from_numpy(padding.copy()), device)[:, None]
