"""Steps of a cache with max_length that torch.compile takes whole: an operator appends, another attends.

A compiled step holds no Python object. It finds its cache by a number in a tensor, and its operators run the cache's own code
when the step runs: rows are planned, pages sealed and attended to as in any other forward. So one graph serves all steps.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.library import Library, register_fake

from ..backends.base import AttentionCall
from ..backends.dispatch import MAX_DECODE_QUERIES, paged_attention
from ..bridge.handles import KVView, TracedView, check_taken, forget, hand_over, traceable, view_of
from ..errors import CacheOptionError
from ..pages.rows import Rows
from ..pages.step import FixedStep
from .layer_kinds import LatentLayer

_LIBRARY = Library("kv_hf", "FRAGMENT")
_UNSAFE = (torch.Tag.cudagraph_unsafe,)  # Python plans each step: inductor must not replay it
for _schema in (
    # the number counts as written, so that these stay in order (inductor moves what only reads it) and none is left out; torch
    # keeps compiled graphs by the names of their operators: one that writes to other arguments than before needs another name
    "append(Tensor(a!) number, Tensor keys, Tensor values, int layer) -> Tensor",
    "seen(Tensor(a!) number, Device device) -> Tensor",
    "attend(Tensor number, Tensor handle, int layer, int out_dim, Tensor query, Tensor? mask, float softmax_scale, "
    "float? softcap, Tensor? sink_logits) -> Tensor",
):
    _LIBRARY.define(_schema, tags=_UNSAFE)
_caches: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = iter(range(1, 2**62))


class CompiledSteps:
    """What a cache with max_length keeps for steps that torch.compile takes, or that are replayed as a CUDA graph.

    Attributes:
        number: by which operators find the cache as long as it lives: [], int64, on the CPU.
        holds_latents: whether any layer does.
        captured: whether generate() replays decode steps as a CUDA graph.
        fixed: the step of each group while one is recorded, None otherwise.
        views: what the last append to each layer left to attend to.
        compared: the last mask that was compared with pages, and whether they hide the same.
    """

    captured = False
    fixed: Mapping[Rows, FixedStep] | None = None

    def __init__(self, cache: Any) -> None:
        number = next(_numbers)
        _caches[number] = cache
        with torch.inference_mode(False):
            self.number = torch.tensor(number, device="cpu")
        self.holds_latents = any(isinstance(layer, LatentLayer) for layer in cache.layers)
        self.clear()

    def clear(self) -> None:
        """Forget the tokens of before."""
        self.views: dict[int, Any] = {}
        self.compared: tuple[Any, ...] = ()


def columns(cache: Any) -> torch.Tensor:
    """Return the columns that a cache has seen when the compiled step runs: [], int64."""
    return torch.ops.kv_hf.seen(cache._compiled.number, cache._tokens_on)


def update(
    cache: Any, keys: torch.Tensor, values: torch.Tensor, layer_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do what `PagedCache.update` does while a forward is traced.

    Returns: the given tensors on an empty cache; else hollow ones [rows, num_kv_heads, max_length, head_dim], which attention
        over pages takes (bridge/handles.py).
    Raises: CacheOptionError where attention could not read them.
    """
    if layer_idx:
        check_taken()
    _check_traceable(cache, keys)
    handle = torch.ops.kv_hf.append(cache._compiled.number, keys, values, layer_idx)
    if cache._tokens_on is None:
        return keys, values
    rows, heads, _, key_dim = keys.shape
    out_dim, most = values.shape[3], cache.options.max_length
    stand_ins = (
        handle.expand(rows, heads, most, key_dim),
        handle.to(values.dtype).expand(rows, heads, most, out_dim),
    )
    attend = partial(torch.ops.kv_hf.attend, cache._compiled.number, handle, layer_idx, out_dim)
    return hand_over(TracedView(*stand_ins, attend))


def _check_traceable(cache: Any, keys: torch.Tensor) -> None:
    """Raise CacheOptionError where attention could not read hollow tensors.

    Under fullgraph=True that is an error; otherwise torch runs this call uncompiled, where handles do.
    """
    current = cache._attention_config._attn_implementation
    if not traceable(cache._attention_config):
        raise CacheOptionError(
            f"a compiled forward reads pages by the attention 'sdpa', and this model's is {current!r}: call "
            "model.set_attn_implementation('sdpa'), or leave max_length out where the model has no sdpa"
        )
    if cache._compiled.holds_latents:
        raise CacheOptionError(
            "a compiled forward does not attend to latents (MLA); run it without torch.compile, or pass disable_compile=True"
        )
    if cache._tokens_on is not None and keys.shape[2] > MAX_DECODE_QUERIES:
        raise CacheOptionError(
            f"a compiled forward on a cache that holds some takes at most {MAX_DECODE_QUERIES} tokens, got {keys.shape[2]}"
        )
    if cache._tokens_on is not None and keys.requires_grad and torch.is_grad_enabled():
        raise CacheOptionError("a compiled forward has no backward pass: use torch.no_grad()")


# -- what the operators do when the step runs ------------------------------------------------------------------------


def _append(
    number: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: int
) -> torch.Tensor:
    cache = _caches[int(number)]
    forget()
    cache._compiled.views[layer] = view_of(*cache.update(keys, values, layer))
    return keys.new_full((), float("nan"))


def _seen(number: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.tensor(_caches[int(number)].get_seq_length(), device=device)


def _attend(
    number: torch.Tensor,
    handle: torch.Tensor,
    layer: int,
    out_dim: int,
    query: torch.Tensor,
    mask: torch.Tensor | None,
    softmax_scale: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    cache = _caches[int(number)]
    view = cache._compiled.views[layer]
    if mask is not None:
        mask = _needed(cache._compiled, view, mask)
    call = AttentionCall(
        query, view.kv, softmax_scale, mask, softcap, sink_logits, view.sliding_window
    )
    return paged_attention(call, view.kernel).transpose(1, 2).contiguous()


def _needed(steps: CompiledSteps, view: KVView, mask: torch.Tensor) -> torch.Tensor | None:
    """Return a mask [batch or 1, heads or 1, q_len, max_length], or None where pages hide the same by themselves.

    It is compared on the CPU alone, once for all layers that get it.
    """
    group = view.layer.group
    if mask.device.type != "cpu" or mask.dtype != torch.bool or mask.shape[1:3] != (1, 1):
        return mask
    key = (mask.data_ptr(), group.step, view.sliding_window)
    if steps.compared[:3] != key:
        first = torch.from_numpy(group.batch.padding)[:, None]
        if view.sliding_window is not None:
            first = first.clamp(min=group.seen - view.sliding_window)
        columns = torch.arange(mask.shape[-1], device="cpu")
        visible = (columns >= first) & (columns < group.seen)
        # the mask is held, so that no other one comes to lie at its place
        steps.compared = (*key, bool((mask[:, 0, 0] == visible).all()), mask)
    return None if steps.compared[3] else mask


for _name, _function in (("append", _append), ("seen", _seen), ("attend", _attend)):
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")


@register_fake("kv_hf::append", lib=_LIBRARY)
def _fake_append(number, keys, values, layer):  # type: ignore[no-untyped-def]
    return keys.new_empty(())


@register_fake("kv_hf::seen", lib=_LIBRARY)
def _fake_seen(number, device):  # type: ignore[no-untyped-def]
    return number.new_empty((), device=device)


@register_fake("kv_hf::attend", lib=_LIBRARY)
def _fake_attend(number, handle, layer, out_dim, query, *rest):  # type: ignore[no-untyped-def]
    rows, heads, q_len, _ = query.shape
    return query.new_empty(rows, q_len, heads, out_dim)
