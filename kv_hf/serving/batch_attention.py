"""Attention of one layer in a forward of continuous batching: each part as a batch of its own, by attention over pages."""

from typing import Any

import torch

from ..backends.inputs import PagedKV
from ..bridge.handles import KVView, LazyKV
from ..bridge.masks import LazyMask
from ..errors import UnsupportedModelError
from ..hf.attention import kv_hf_attention
from ..pages.step import Step
from .batch_forward import Forward, Part
from .batch_store import BatchStore

# what transformers' continuous batching hands down for attention functions of its own
FOR_OTHERS = (
    "cache", "read_index", "write_index", "block_table", "logits_indices", "logits_processor_args",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "is_causal",
)  # fmt: skip


def attend_in_parts(
    store: BatchStore,
    forward: Forward,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, None]:
    """Append a layer's new tokens to its pages, and attend to all tokens of each request.

    Args:
        query: [1, num_heads, tokens, head_dim]; key, value: [1, num_kv_heads, tokens, ..], of this forward.
        kwargs: all further arguments of the attention function.
    Returns: ([1, tokens, num_heads, value_dim], None).
    Raises: UnsupportedModelError where the model hands over other tokens than the forward has.
    """
    if query.shape[0] != 1 or not query.shape[2] == key.shape[2] == forward.tokens:
        raise UnsupportedModelError(
            f"continuous batching passes {forward.tokens} tokens in one row, and attention of layer {store.layer_idx} got queries "
            f"{tuple(query.shape)} and keys {tuple(key.shape)}: this model changes them on the way. Use generate()"
        )
    given = {name: one for name, one in kwargs.items() if name not in FOR_OTHERS}
    out = None
    for part, step in zip(forward.parts, forward.steps[store.window], strict=True):
        new = part.cut(key), part.cut(value)
        runs = store.append_part(step, part.first, new)
        keys, values, mask = _read(store, step, part, new, runs)
        attended, _ = kv_hf_attention(module, part.cut(query), keys, values, mask, **given)
        store.finish_part(step, part.first, runs)
        if len(forward.parts) == 1 and isinstance(part.tokens, slice):
            return attended.reshape(1, forward.tokens, *attended.shape[2:]), None
        if out is None:
            out = attended.new_empty(1, forward.tokens, *attended.shape[2:])
        part.put(out, attended)
    assert out is not None
    return out, None


def _read(
    store: BatchStore,
    step: Step,
    part: Part,
    new: tuple[torch.Tensor, torch.Tensor],
    runs: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, LazyMask]:
    """Return keys and values that a part attends to, and the mask that hides what comes later, and other rows' padding."""
    window, q_len, device = store.window, part.q_len, new[0].device
    if step.seen_before == 0:  # a prompt's first tokens: exact, as in generate()
        hides = window is not None and q_len > window
        shape = (part.rows, 1, q_len, q_len)
        mask = LazyMask(
            shape, device, lambda: _visible(None, part.rows, q_len, q_len, window, device),
            causal=not hides,
        )  # fmt: skip
        return *new, mask
    assert step.view is not None
    # the tokens of a prompt read everything, however many of them came into this forward
    kv = store.kv(step.view, *runs, step.columns, None if part.prompt else store.budget)
    keys, values = LazyKV.pair(KVView(kv, store, store.revision, store.kernel, window))
    shape = (part.rows, 1, q_len, kv.seen)
    mask = LazyMask(
        shape, device, lambda: _visible(kv, part.rows, q_len, kv.seen, window, device),
        causal=part.rows == 1 and window is None,
    )  # fmt: skip
    return keys, values, mask


def _visible(
    kv: PagedKV | None, rows: int, q_len: int, seen: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return [rows, 1, q_len, seen], bool: the columns that the newest queries see."""
    columns = torch.arange(seen, device=device)
    queries = torch.arange(seen - q_len, seen, device=device)[:, None]
    visible = columns <= queries
    if window is not None:
        visible = visible & (columns > queries - window)
    visible = visible[None, None].expand(rows, 1, q_len, seen)
    if kv is None:
        return visible
    return visible & (columns >= kv.padding.to(device)[:, None, None, None])
