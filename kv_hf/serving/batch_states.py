"""States beside pages in a batch that requests join and leave (linear attention, state spaces, convolutions), and forwards over them.

A state runs through a whole row of a forward, so that requests cannot stand in one row behind each other. The parts of
a forward go through the model one after the other: the rows that grow by one token in one batch, and each prompt.
"""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from ..cache.model_shape import CACHE
from ..cache.states import KERNELS, States, restore_states, states_of
from ..hf.prefill import last_logit
from ..pages.moved import persistent_tensors


def stateful(layers: Sequence[Any]) -> dict[int, LinearAttentionLayer]:
    """Return the layers that hold states, by their indices."""
    return {i: layer for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionLayer)}


class RowStates:
    """The states of one layer, of all rows that there may be.

    Args:
        layer: of a cache that a forward has gone through.
        rows: how many.
    """

    def __init__(self, layer: Any, rows: int) -> None:
        self.number_of_states = layer.number_of_states
        found = {name: state for name, state in states_of(layer).items() if name != KERNELS}
        with persistent_tensors():
            self.states: States = {
                name: state.new_zeros((rows, *state.shape[1:])) for name, state in found.items()
            }
        self._rows, self._layer = slice(0), LinearAttentionLayer()

    @property
    def nbytes(self) -> int:
        """Bytes of the states of all rows."""
        return sum(state.nbytes for state in self.states.values())

    def select(self, order: Sequence[int]) -> None:
        """Let row i have the state of the former row order[i]."""
        moved = [row for row, source in enumerate(order) if row != source]
        for state in self.states.values() if moved else ():
            state[moved] = state[[order[row] for row in moved]]

    def layer_of(self, rows: slice, begun: bool) -> LinearAttentionLayer:
        """Return a layer as transformers has it with the states of some rows: where they have `begun`, over the tensors themselves."""
        if not begun:
            return LinearAttentionLayer(self.number_of_states)
        if rows != self._rows:  # else that of the forward before
            self._rows, self._layer = rows, LinearAttentionLayer(self.number_of_states)
            restore_states(self._layer, {name: state[rows] for name, state in self.states.items()})
            self.put(rows, self._layer)
        return self._layer

    def put(self, rows: slice, layer: Any) -> None:
        """Take the states of some rows from a layer, whose own tensors these are then."""
        for name, state in states_of(layer).items():
            view = self.states[name][rows]
            if state.data_ptr() != view.data_ptr():
                view.copy_(state)
                kind, _, index = name.partition(".")
                getattr(layer, kind)[int(index)] = view


class PartCache(Cache):
    """What a model sees as its cache in one part of a forward: the states of its rows. Attention stores keys and values."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Return keys and values as they are."""
        return key_states, value_states


def called(model: Any, cache: Any) -> Callable[..., Any]:
    """Return what to call for a forward of `cache`, a BatchCache: the model itself, or each part through it."""
    return functools.partial(_run_parts, model) if cache.states else model


def _run_parts(
    model: Any,
    *,
    cache: Any,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    logits_indices: torch.Tensor,
    **_: Any,
) -> Any:
    """Run the parts of the forward that `cache`, a BatchCache, has planned, one after the other.

    Args:
        input_ids, position_ids: [1, tokens], of all parts.
        logits_indices: [n], int64: last tokens of requests; others that fill it up have any logits.
    Returns: a namespace of logits [1, n, vocab].
    """
    tokens, whole = input_ids.shape[1], cache.forward
    places = torch.arange(tokens, device=input_ids.device)
    ends, logits = [], []
    for index, part in enumerate(whole.parts):
        shape = part.rows, part.q_len
        rows = slice(part.first, part.first + part.rows)
        cache.forward, cache.layers_reached = whole.alone(index), set()
        begun = next(iter(whole.steps.values()))[index].seen_before > 0
        layers: list[Any] = [DynamicLayer() for _ in range(cache.num_layers)]
        for layer_idx, states in cache.states.items():
            layers[layer_idx] = states.layer_of(rows, begun)
        out = model(
            input_ids=input_ids[0, part.tokens].view(shape),
            position_ids=position_ids[0, part.tokens].view(shape),
            attention_mask=input_ids.new_zeros((part.rows, 1, part.q_len, 0), dtype=torch.bool),
            use_cache=True,
            paged_batch=cache,
            **{CACHE: PartCache(layers)},
            **last_logit(model),
        )
        cache.finish()
        for layer_idx, states in cache.states.items():
            states.put(rows, layers[layer_idx])
        ends.append(places[part.tokens].view(shape)[:, -1])
        logits.append(out.logits[:, -1])
    row_of = torch.zeros_like(places)
    found = torch.cat(ends)
    row_of[found] = places[: len(found)]
    return SimpleNamespace(logits=torch.cat(logits)[row_of[logits_indices]][None])
