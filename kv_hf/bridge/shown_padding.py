"""Masks that reach attention must hide what was left out as left padding: it is not there to be attended to.

Masks that transformers makes of a 2D mask are compared before (mask_length.py). Here come those that a caller or a model
made or changed: 4D masks, and none at all where there was one.
"""

from typing import Any

import torch

from ..errors import CacheMismatchError
from ..pages import moved
from .handle import KVView

# additive masks hide with a dtype's lowest number, -inf or -1e4; no weight is left below this
HIDDEN = -100.0
REMEDY = (
    "was not stored. Call cache.reset() and start again, with the 2D mask [batch, columns] of the whole text so far in each "
    "forward, or a 4D mask that hides the padding"
)
LATE = (
    f"the 4D attention_mask of an earlier forward of one token showed left padding, which was hidden when the cache took it in, and {REMEDY}. "
    "On this device such masks are compared without waiting, one forward late"
)


def vouch(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask [batch, 1, q_len, kv_len] made of a 2D mask that was compared already; it is not compared again unless changed."""
    if mask is not None and not torch.compiler.is_compiling():
        vars(mask)["kv_hf_vouched"] = _version(mask)
    return mask


def check_shown(view: KVView, mask: torch.Tensor | None, q_len: int) -> None:
    """Compare the mask of a layer's newest `q_len` queries with the padding that the layer did not store.

    Args:
        mask: what attention was given: bool, or additive float, [batch or 1, heads or 1, q_len or 1, columns]; None shows all.
    Raises: CacheMismatchError where a real token would attend to padding; on a device that has to be waited for, a mask of a
        single query is compared there, and a later forward raises.
    """
    group = getattr(view.layer, "group", None)
    if mask is None:
        # without a mask function (a loop over bare layers) None says nothing
        if group is not None and group.masked_step == group.epoch:
            _refuse("no attention_mask reached the attention", group.batch.padding)
        return
    if torch.compiler.is_compiling() or vars(mask).get("kv_hf_vouched") == _version(mask):
        return
    if group is None:
        _check_preallocated(view, mask, q_len)
        return
    if not group.batch.padding.any():
        return
    mark = (id(group), group.epoch, _version(mask))
    if vars(mask).get("kv_hf_checked") == mark:
        return
    vars(mask)["kv_hf_checked"] = mark
    watch, single = group.watch, q_len == 1 and not moved.is_host(mask.device)
    if watch is not None:
        watch.look()
    padding = torch.from_numpy(group.batch.padding - (group.seen - view.kv.seen)).clamp(min=0)
    shown = _shown(mask, moved.moved(padding, mask.device), int(padding.max()), view.kv.seen, q_len)
    if shown is None:
        return
    if single and watch is not None:
        watch.ask(~shown, LATE)
    elif bool(shown):
        _refuse("attention_mask shows columns", group.batch.padding)


def _check_preallocated(view: KVView, mask: torch.Tensor, q_len: int) -> None:
    """Do the same for a preallocated cache on the CPU; on other devices its table compares masks (StaticTable.note_mask)."""
    table = view.table
    if table is None or not moved.is_host(table.padding.device) or not bool(table.padding.any()):
        return
    padding = table.padding
    shown = _shown(mask, padding, int(padding.max()), table.columns(), q_len)
    if shown is not None and bool(shown):
        _refuse("attention_mask shows columns", padding)


def _shown(
    mask: torch.Tensor, padding: torch.Tensor, longest: int, seen: int, q_len: int
) -> torch.Tensor | None:
    """Return whether one of the newest `q_len` of `seen` columns attends to padding and is none itself; None: impossible."""
    longest = min(longest, mask.shape[-1])
    if not longest or not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        return None
    visible = mask[..., :longest]
    if mask.dtype != torch.bool:
        visible = visible > HIDDEN
    padding = padding[:, None, None, None]
    columns = torch.arange(longest, device=mask.device)
    queries = torch.arange(seen - q_len, seen, device=mask.device)[:, None]
    return (visible & (columns < padding) & (queries >= padding)).any()


def _refuse(what: str, padding: Any) -> None:
    raise CacheMismatchError(
        f"{what}, but the left padding of this text ({padding.tolist()} columns) was hidden when the cache took it in, and {REMEDY}"
    )


def _version(mask: torch.Tensor) -> int:
    """Return a number that changes with each write to the mask (in inference mode nobody counts)."""
    return -1 if mask.is_inference() else mask._version
