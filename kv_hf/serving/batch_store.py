"""The tensors of layers in a batch that requests join and leave: pages and windows, attention over them, and states beside them."""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from ..bridge.handles import KVView, LazyKV
from ..bridge.masks import LazyMask
from ..cache.layer import PagedLayer
from ..cache.model_shape import CACHE
from ..cache.states import KERNELS, States, restore_states, states_of
from ..cache.store import LayerStore, Residual
from ..errors import UnsupportedModelError
from ..hf.attention import kv_hf_attention
from ..hf.dense import causal_mask
from ..hf.latent import expanded
from ..hf.prefill import last_logit
from ..pages.cpu_memory import mapped_zeros
from ..pages.moved import persistent_tensors
from ..pages.step import Step
from ..pages.storage import PageStorage, Pair
from .batch_rows import Forward, Part


class BatchStore(LayerStore):
    """Pages and windows of one layer; windows are there for all rows from the start.

    Args:
        layer: of a paged cache of the same model and options.
        pages: where the sealed pages lie.
        rows, slots: windows, and exact tokens that each has room for.
    Attributes:
        lends: whether other layers may attend to this one's keys and values.
        new: where it lends, its keys of the forward that runs, by which those layers find it.
    """

    revision = 0  # attention reads a part before the layer changes again (KVView)

    def __init__(self, layer: PagedLayer, pages: PageStorage, rows: int, slots: int) -> None:
        super().__init__(layer, pages)
        self.window, self.slots = layer.window, slots
        self.budget = layer.group.reading.budget  # how much of a row a decode step reads
        self.latent_decode = layer.formats.options.latent_decode
        self._rows, self._parts = slice(0), list[torch.Tensor]()
        self.lends = True
        self.new: torch.Tensor | None = None
        self._handed: list[tuple[torch.Tensor, torch.Tensor, LazyMask]] = []
        # old windows, and what they will hold
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        with persistent_tensors():
            for window in self.windows:
                spec = window.spec
                row = window.tokens.new_empty((0, spec.num_kv_heads, slots, spec.head_dim))
                window.tokens = _zeros(row, rows)

    # -- forwards ------------------------------------------------------------------------------------------------------

    def attend(
        self,
        forward: Forward,
        module: torch.nn.Module,
        states: Sequence[torch.Tensor],
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, None]:
        """Append the layer's new tokens to its pages, and attend to all tokens of each request; or let another layer attend to them.

        Args:
            module: attention of this layer, or of one that this layer lends its keys and values.
            states: query [rows, num_heads, tokens, head_dim], key and value [rows, num_kv_heads, tokens, ..], of this forward's
                shape; latents and RoPE keys where the layer stores these.
            kwargs: all further arguments of the attention function.
        Returns: ([rows, tokens, num_heads, value_dim], None).
        Raises: UnsupportedModelError where the model hands over other tokens than the forward has.
        """
        query, key, value = states
        rows, tokens = forward.shape
        if query.shape[0] != rows or not query.shape[2] == key.shape[2] == tokens:
            raise UnsupportedModelError(
                f"continuous batching passes {tokens} tokens in {rows} rows, and attention of layer {self.layer_idx} got queries "
                f"{tuple(query.shape)} and keys {tuple(key.shape)}: this model changes them on the way. Use generate()"
            )
        out, own = None, key is not self.new
        held = [] if own else self._handed
        if own and self.lends:
            self.new, self._handed = key, held
        for i, (part, step) in enumerate(
            zip(forward.parts, forward.steps[self.window], strict=True)
        ):
            if own:
                held.append(self._append(step, part, (part.cut(key), part.cut(value))))
            keys, values, mask = held[i]
            if self.spec.is_latent and not step.seen_before:
                keys, values = expanded(module, keys, values)
            attended, _ = kv_hf_attention(module, part.cut(query), keys, values, mask, **kwargs)
            if own and (not step.fits or step.moves_rest):  # in windows made anew
                there = slice(part.first, part.first + part.rows)
                for window, rest in zip(self.windows, self.residuals, strict=True):
                    self._late.append((window.tokens[there], rest.tokens))
            if not self.lends:
                self.finish()
            if len(forward.parts) == 1 and not isinstance(part.tokens, torch.Tensor):
                return attended.reshape(rows, tokens, *attended.shape[2:]), None
            if out is None:
                out = attended.new_empty(rows, tokens, *attended.shape[2:])
            out[0, part.tokens] = attended.reshape(-1, *attended.shape[2:])
        assert out is not None
        return out, None

    def finish(self) -> None:
        """Let the windows hold what they hold after the forward; nobody reads the old ones any more."""
        for window, rest in self._late:
            window.copy_(rest)
        self.new, self._handed, self._late = None, [], []

    def _append(
        self, step: Step, part: Part, new: Pair
    ) -> tuple[torch.Tensor, torch.Tensor, LazyMask]:
        """Write new tokens of a part's rows and seal pages; return keys and values that it attends to, and their mask.

        The mask hides what comes later, and other rows' padding.
        """
        self.check(*new)
        rows = slice(part.first, part.first + part.rows)
        if rows != self._rows:  # kernels are ready for the tensors of the last forward
            self._rows, self._parts = rows, [window.tokens[rows] for window in self.windows]
        keys, values = map(Residual.over, self.windows, self._parts)
        self.residuals = keys, values
        runs = self.append(step, *new, self.slots)
        seen, padding, window = part.q_len, None, self.window
        causal = window is None or seen <= window
        if step.seen_before:  # else a prompt's first tokens: exact, as in generate()
            assert step.view is not None
            # the tokens of a prompt read everything, however many of them came into this forward
            kv = self.kv(step.view, *runs, step.columns, None if part.prompt else self.budget)
            new = LazyKV.pair(KVView(kv, self, self.revision, self.kernel, window))
            seen, padding, causal = kv.seen, kv.padding, part.rows == 1 and window is None

        def visible() -> torch.Tensor:
            """Return [rows, 1, q_len, seen], bool: the columns that the newest queries see."""
            found = causal_mask(part.q_len, seen, seen, self.device)
            if window is not None:
                found = found.triu(seen - part.q_len - window + 1)
            if padding is not None:
                columns = torch.arange(seen, device=self.device)
                found = found & (columns >= padding[:, None, None, None])
            return found.expand(part.rows, -1, -1, -1)

        shape = (part.rows, 1, part.q_len, seen)
        return *new, LazyMask(shape, self.device, visible, causal=causal)


def _zeros(none: torch.Tensor, rows: int) -> torch.Tensor:
    """Return zeros [rows, ..] shaped as `none` [0, ..]; on a CPU the system gives memory to the rows that are used."""
    mapped = mapped_zeros(none, rows)
    return none.new_zeros((rows, *none.shape[1:])) if mapped is None else mapped


# -- states beside pages (linear attention, state spaces, convolutions) --------------------------------------------------------

# A state runs through a whole row of a forward, so that requests cannot stand in one row behind each other. The parts of
# a forward go through the model one after the other: the rows that grow by one token in one batch, and each prompt.


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
            self.states: States = {name: _zeros(state[:0], rows) for name, state in found.items()}
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
