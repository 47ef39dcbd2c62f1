"""The tensors of one layer in a batch that requests join and leave: pages, and an exact window for each row."""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from ..cache.layer_formats import LayerFormats
from ..cache.store import LayerStore, Residual
from ..cache.widening import Widening
from ..pages.cpu_memory import mapped_zeros
from ..pages.moved import persistent_tensors
from ..pages.step import Step
from ..pages.storage import PageArena, PageStorage, Pair
from ..read_budget import ReadBudget

Sinks = Sequence[tuple[torch.Tensor, torch.Tensor]]  # of each layer: exact first keys and values


class BatchStore(LayerStore):
    """Pages and windows of one layer; windows are there for all rows from the start.

    Args:
        layer_idx: position in the model.
        formats: of the layer.
        arena, pages: where the sealed pages lie.
        sink_tokens: slots at the front of the windows that are never sealed.
        kernel: CacheConfig.kernel.
        window: sliding window, None for full attention.
        rows, slots: windows, and exact tokens that each has room for.
        budget: how much of a row a decode step reads, None for everything.
    """

    revision = 0  # attention reads a part before the layer changes again (KVView)

    def __init__(
        self,
        layer_idx: int,
        formats: LayerFormats,
        arena: PageArena,
        pages: PageStorage,
        sink_tokens: int,
        kernel: str,
        window: int | None,
        rows: int,
        slots: int,
        budget: ReadBudget | None = None,
    ) -> None:
        watch = Widening.of(layer_idx, formats, arena)
        super().__init__(layer_idx, pages, sink_tokens, kernel, watch)
        self.window = window
        self.slots = slots
        self.budget = budget
        with persistent_tensors():
            for residual in self.residuals:
                residual.tokens = _windows(residual, rows, slots)

    def append_part(self, step: Step, first: int, new: Pair) -> Pair:
        """Write new tokens of the rows from `first` on and seal pages; return, per side, the exact tokens that they read.

        Args:
            new: keys and values [rows of the part, num_kv_heads, q_len, head_dim].
        Returns: [rows of the part, num_kv_heads, slots or more, head_dim] each, to be read before `finish_part`.
        """
        self.check(*new)
        if step.capacity > self._room:
            self.make_room(step.capacity)
        parts = self._windows(first, new[0].shape[0])
        with nullcontext() if step.seal is None else self._sealing():
            if step.fits:
                runs = parts[0].tokens, parts[1].tokens
                assert step.view is not None
                view = step.view.on(self.device)
                self.pages.write_pair(
                    self.kernel, runs, new, view, step.seal, self.damaged, self.launches
                )
            else:
                runs = parts[0].run(step, new[0]), parts[1].run(step, new[1])
                if step.seal is not None:
                    self._seal(step.seal, runs)
            if step.seal is not None:
                self._widen(step.seal, runs, new[0].shape[2])
        if step.seal is not None:
            self._look_for_damage()
        return runs

    def finish_part(self, step: Step, first: int, runs: Pair) -> None:
        """Keep the tokens of `runs` that the step did not seal, once attention has read them."""
        if step.fits and not step.moves_rest:
            return
        for part, run in zip(self._windows(first, runs[0].shape[0]), runs, strict=True):
            window = part.tokens
            part.keep_rest(step, run, self.slots, self.sink_tokens)
            window.copy_(part.tokens)

    def _windows(self, first: int, rows: int) -> tuple[Residual, Residual]:
        """Return the windows of the rows from `first` on, which share memory with those of all rows."""
        keys, values = (residual.part(first, first + rows) for residual in self.residuals)
        return keys, values

    def move(self, targets: torch.Tensor, sources: torch.Tensor) -> None:
        """Let the windows of the rows `targets` [n] become what those of `sources` [n] are, all at once; int64."""
        for residual in self.residuals:
            tokens = residual.tokens
            tokens.index_copy_(0, targets, tokens.index_select(0, sources))

    def put_sinks(self, row: int, sinks: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Let a row begin with exact keys and values [num_kv_heads, sink_tokens, head_dim]."""
        for residual, first in zip(self.residuals, sinks, strict=True):
            residual.tokens[row, :, : first.shape[1]] = first

    def sinks_of(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the exact first keys and values of a row, [num_kv_heads, sink_tokens, head_dim]."""
        keys, values = (
            residual.tokens[row, :, : self.sink_tokens].clone() for residual in self.residuals
        )
        return keys, values

    @property
    def nbytes(self) -> int:
        """Bytes of pages and windows."""
        pages = sum(sum(side.nbytes.values()) for side in self.pages.sides)
        return pages + sum(residual.tokens.nbytes for residual in self.residuals)


def _windows(residual: Residual, rows: int, slots: int) -> torch.Tensor:
    """Return windows [rows, num_kv_heads, slots, head_dim], all zero; on a CPU the system gives memory to those that are used."""
    spec = residual.spec
    none = residual.tokens.new_empty((0, spec.num_kv_heads, slots, spec.head_dim))
    mapped = mapped_zeros(none, rows)
    return none.new_zeros((rows, *none.shape[1:])) if mapped is None else mapped
