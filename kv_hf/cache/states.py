"""What the layers of a cache hold beside pages, as named tensors: states of linear attention, and an indexer's keys.

conv_states.<i>, recurrent_states.<i>   [rows, ..]: state i of a layer of linear attention, of a convolution, or of a hybrid layer
past_kernels                            [states] int64: columns of its convolutions; while past recording keeps more or fewer
indexer_keys                            [rows, columns, index_head_dim]: of a sparse layer of latents
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from ..errors import CacheMismatchError
from ..pages.moved import persistent_tensors

States = Mapping[str, torch.Tensor]
INDEX, KERNELS = "indexer_keys", "past_kernels"
STATES = ("conv_states", "recurrent_states")  # without the second a convolution goes on


def state_names(layer: Any) -> list[str]:
    """Return the names of all tensors that such a layer may hold beside pages."""
    if isinstance(layer, LinearAttentionLayer):
        states = product(STATES, range(layer.number_of_states))
        return [*(f"{kind}.{i}" for kind, i in states), KERNELS]
    return [INDEX] if getattr(layer, "has_index", False) else []


def states_of(layer: Any) -> dict[str, torch.Tensor]:
    """Return the tensors [rows, ..] of a layer beside its pages, by name."""
    if not isinstance(layer, LinearAttentionLayer):
        return {name: layer.indexer_keys for name in state_names(layer) if layer._indexed}
    held = {f"{kind}.{i}": one for kind in STATES for i, one in getattr(layer, kind).items()}
    found = {name: state for name, state in held.items() if state is not None}
    if layer.record_past:
        sizes = [size or 0 for size in layer.conv_kernel_size.values()]
        found[KERNELS] = torch.tensor(sizes, device="cpu")
    return found


def states_of_row(layers: Sequence[Any], row: int) -> dict[str, torch.Tensor]:
    """Return copies of the states [1, ..] of one row, by layer and name: "3.conv_states.0"."""
    with persistent_tensors():
        return {
            f"{index}.{name}": state[row : row + 1].clone()
            for index, layer in enumerate(layers)
            for name, state in states_of(layer).items()
        }


def restore_rows(layers: Sequence[Any], rows: Sequence[States]) -> None:
    """Let empty layers hold copies of the states of rows, as `states_of_row` gave them."""
    for index, layer in enumerate(layers):
        names = [name for name in state_names(layer) if f"{index}.{name}" in rows[0]]
        parts = {name: [row[f"{index}.{name}"] for row in rows] for name in names}
        restore_states(layer, {name: torch.cat(states) for name, states in parts.items()})


def check_states(cache: Any, index: int, states: States) -> None:
    """Raise CacheMismatchError unless a layer of a cache, whose pages are there, may hold `states`.

    They are in the dtype of its exact tokens or fp32. Sizes that neither rows nor columns tell are taken as they are.
    """
    layer, rows, seen = cache.layers[index], len(cache._group), cache._group.seen
    for name in state_names(layer):
        state, dtypes = states.get(name), (cache.paged_layers[0].dtype, torch.float32)
        if state is None:
            fits = not name.startswith((INDEX, STATES[0]))
        elif name == KERNELS:
            fits = state.dtype == torch.int64 and state.shape == (layer.number_of_states,)
            fits = fits and int(state.min()) > 0
        else:
            fits = state.dtype in dtypes and state.ndim > 1 and state.numel() > 0
            fits = fits and state.shape[0] == rows
            fits = fits and (name != INDEX or (state.ndim, state.shape[1]) == (3, seen))
        if not fits:
            told = state if state is None else f"{[*state.shape]} of {state.dtype}"
            raise CacheMismatchError(
                f"layer {index} has {told} as {name} after {seen} columns of {rows} rows"
            )


def check_crop(layer: Any, count: int, seen: int) -> None:
    """Raise CacheMismatchError where the recorded states of a layer do not reach `count` of `seen` tokens back.

    Without past recording transformers' layer refuses any crop itself; with it, it would take what there is.
    """
    if not count or not getattr(layer, "record_past", False):
        return
    goes_back = not any(layer.is_recurrent_states_initialized.values())
    for index, state in layer.conv_states.items():
        if state is not None:  # a convolution's own column is not read again
            context = min(layer.conv_kernel_size[index] - 1, seen - count)
            goes_back = goes_back and state.shape[-1] - count >= context
    if not goes_back:
        raise CacheMismatchError(
            f"a crop of {count} tokens needs states that are gone: recurrent ones cannot go back, and those of convolutions "
            "only as far as the last crop. Call reset(), and compute the text again"
        )


def restore_states(layer: Any, states: States, device: torch.device | None = None) -> None:
    """Let an empty layer hold copies of `states`, which were checked, on `device`; None: where they are."""
    for name, state in states.items():
        kind, _, index = name.partition(".")
        if index:
            update = getattr(layer, f"update_{kind.removesuffix('s')}")
            update(state.to(device=device), state_idx=int(index))
        elif name == INDEX:
            layer.update_indexer(state.to(device))
        else:  # behind the states, whose own sizes these were until here
            layer.conv_kernel_size = dict(enumerate(state.tolist()))
            layer.record_past = True
