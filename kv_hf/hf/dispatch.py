"""Attention finds pages by the handle: transformers' registered attention and mask functions are wrapped, models are not.

Where the keys of a call are a handle of pages, attention over pages takes it; every other call goes to the function that
was registered, behind a check of types. A model that computes with a handle by itself gets dense tensors
(bridge/handles.py).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from ..bridge.handles import LazyKV, reads_eagerly
from ..bridge.masks import LazyMask, MaskLength, takes_length
from .attention import kv_hf_attention

Function = Callable[..., Any]

_READ_OVER_PAGES = ("softcap", "s_aux", "position_bias", "indices")

# what was put into transformers' tables, and what stood there before: (table, name, ours, before)
_registered: list[tuple[dict[str, Any], str, Function, Function]] = []
_families: dict[Function, Function] = {}  # eager attention -> what stands in its place


def register() -> None:
    """Wrap what is registered under "sdpa" and flash names, and the masks of "eager", as far as they are not wrapped.

    Somebody's own function under the name "sdpa" stays as it is, and computes with dense tensors: it may do more.
    """
    tables: tuple[Any, ...] = (
        AttentionInterface._global_mapping,
        AttentionMaskInterface._global_mapping,
    )
    for table, over in zip(tables, (_over_attention, _over_mask), strict=True):
        for name, function in list(table.items()):
            flash = "flash" in name and "|" not in name
            known = flash or function in (sdpa_attention_forward, sdpa_mask, eager_mask)
            if known and not hasattr(function, "takes_handles"):
                table[name] = over(function, flash)
                _registered.append((table, name, table[name], function))
    takes_length.update(name for table, name, *_ in _registered if table is tables[1])


def unregister() -> None:
    """Put back what stood there before, where nobody has registered something else since."""
    for table, name, ours, before in reversed(_registered):
        if table.get(name) is ours:
            table[name] = before
    _registered.clear()
    takes_length.clear()


def _over_attention(original: Function, flash: bool = False) -> Function:
    """Wrap an attention function: ours where keys or mask are handles, or a batch of requests comes; else the original."""
    read = list(inspect.signature(original).parameters)
    later, eager = read[5:], reads_eagerly(original)
    # what sdpa drops, pages must not read
    dropped = () if flash or eager else [one for one in _READ_OVER_PAGES if one not in read]
    dense = sdpa_attention_forward if flash else original  # our masks have four dimensions

    @functools.wraps(original)
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if (
            type(key) is LazyKV
            or type(attention_mask) is LazyMask
            or (eager and attention_mask is not None and attention_mask.dtype == torch.bool)
            or key.stride(-1) == 0  # the hollow keys of a traced layer
            or "paged_batch" in kwargs
        ):
            kwargs.update(zip(later, args, strict=False))
            for name in dropped:
                kwargs.pop(name, None)
            return kv_hf_attention(module, query, key, value, attention_mask, dense=dense, **kwargs)
        return original(module, query, key, value, attention_mask, *args, **kwargs)

    attend.takes_handles = True  # type: ignore[attr-defined]
    return attend


def _over_mask(original: Function, flash: bool) -> Function:
    """Wrap a mask function: ours where the length of the keys is that of a paged cache; else the original.

    Ours returns None where nothing is hidden from a single query, else a lazy mask, which is not built where pages hide the
    same by themselves. Masks that hide more are made at once.
    """
    eager = original is eager_mask
    made = sdpa_mask if flash or eager else original  # of four dimensions

    @functools.wraps(original)
    def mask(*args: Any, **kwargs: Any) -> Any:
        length = kwargs.get("kv_length")
        if type(length) is not MaskLength:
            return original(*args, **kwargs)
        kwargs["kv_length"] = int(length)
        given, new = kwargs.get("attention_mask"), kwargs["q_length"]
        device = torch.device(kwargs.get("device", "cpu"))
        same = length.observe(given, new, device)
        if same is None or (eager and not reads_eagerly(type(kwargs.get("config")))):
            return original(*args, **kwargs)
        full = kwargs.get("local_size") is None
        may_skip = kwargs.get("allow_is_causal_skip", True)
        # transformers never lets the mask of a single query on a preallocated cache be skipped
        plain = may_skip or kwargs.get("mask_function") is causal_mask_function
        # eager attention knows no causality beside its mask, and a lazy one stands for all of it
        whole = {**kwargs, "allow_is_causal_skip": False}
        if not (same and plain and length.cache._masks_skippable):
            return made(*args, **(whole if eager else kwargs))
        if may_skip and full and new == 1 and given is None:
            return None
        whole["allow_is_bidirectional_skip"] = False
        make: Function = functools.partial(sdpa_mask, *args, **whole)
        return LazyMask(
            (kwargs["batch_size"], 1, new, int(length)),
            device,
            make,
            causal=full and new > 1 and length.ends_with(new),
        )

    mask.takes_handles = True  # type: ignore[attr-defined]
    return mask


# -- families without sdpa -------------------------------------------------------------------------------------------------


def over_eager(original: Function) -> Function:
    """Wrap AttentionInterface.get_interface, which code of a model gives its family's eager attention to, beside a name."""

    @functools.wraps(original)
    def get_interface(self: Any, attn_implementation: str, default: Function) -> Function:
        if attn_implementation == "eager":
            default = _of_family(default)
        return original(self, attn_implementation, default)

    return get_interface


def _of_family(eager: Function) -> Function:
    """Return the eager attention of a family, wrapped where kernels compute the same over pages."""
    if not reads_eagerly(eager):
        return eager
    if eager not in _families:  # no functools.cache, of which torch.compile warns
        _families[eager] = _over_attention(eager)
    return _families[eager]
