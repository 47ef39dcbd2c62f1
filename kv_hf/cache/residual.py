"""The exact tokens of one layer: the first tokens and the open tail of each row, in the model's dtype."""

from collections.abc import Sequence

import torch

from ..pages.persistent import persistent_tensors
from ..pages.step import Step
from ..spec import SideSpec


def chosen_rows(indices: torch.Tensor, rows: int) -> list[int]:
    """Turn row numbers [n] or a bool mask [rows] into a list of row numbers."""
    return torch.arange(rows)[torch.as_tensor(indices).cpu()].tolist()


class Residual:
    """[rows, num_kv_heads, slots, head_dim] of one side; slots at and past a row's length hold anything."""

    def __init__(self, spec: SideSpec, device: torch.device) -> None:
        self.spec = spec
        self.tokens = torch.zeros(
            (0, spec.num_kv_heads, 0, spec.head_dim), dtype=spec.dtype, device=device
        )

    def begin(self, tokens: Sequence[torch.Tensor | None], slots: int) -> None:
        """Make room for `slots` tokens of each row, and put `tokens` [num_kv_heads, n, head_dim] in front."""
        with persistent_tensors():
            self.tokens = self._resized(len(tokens), slots)
            for index, first in enumerate(tokens):
                if first is not None:
                    self.tokens[index, :, : first.shape[1]] = first

    def fit(self, rows: int, slots: int) -> torch.Tensor:
        """Make room for `slots` tokens of `rows` rows; return the window [rows, num_kv_heads, slots, head_dim]."""
        self.tokens = self._resized(rows, slots)
        return self.tokens

    def part(self, first: int, last: int) -> "Residual":
        """Return the windows of the rows first .. last - 1, which share memory with these as long as nobody replaces them."""
        part = Residual.__new__(Residual)
        part.spec, part.tokens = self.spec, self.tokens[first:last]
        return part

    def hold(self, tokens: torch.Tensor) -> None:
        """Hold a copy of `tokens` [rows, num_kv_heads, slots, head_dim] in place of all before, on the same device."""
        self.tokens = tokens.to(self.tokens.device, copy=True)

    def to(self, device: torch.device) -> None:
        """Move the tokens to `device`."""
        self.tokens = self.tokens.to(device)

    def _resized(self, rows: int, slots: int) -> torch.Tensor:
        """Return the tokens in a tensor of at least these sizes; new slots are zero."""
        old = self.tokens
        if old.shape[0] == rows and old.shape[2] == slots:
            return old
        with persistent_tensors():
            new = old.new_zeros((rows, old.shape[1], slots, old.shape[3]))
        kept = (min(rows, old.shape[0]), min(slots, old.shape[2]))
        new[: kept[0], :, : kept[1]] = old[: kept[0], :, : kept[1]]
        return new

    def drop_pages(self, step: Step, sinks: int) -> None:
        """Take the tokens of the pages sealed first out of each row, behind its sinks."""

        def place() -> torch.Tensor:
            gone = [len(row.sealed_first) * self.spec.page_size for row in step.rows]
            return _without(gone, sinks, self.tokens.shape[2], self.tokens.shape[2])

        self.tokens = _picked(self.tokens, step.index("drop", self.tokens.device, place))

    def run(self, step: Step, new: torch.Tensor) -> torch.Tensor:
        """Return each row's window with the new tokens behind it, left-aligned: [rows, num_kv_heads, longest, head_dim].

        The window is untouched. Without a window and without padding this is `new` itself, not a copy.

        Args:
            new: [rows, num_kv_heads, q_len, head_dim].
        """
        if all(row.exact_before == 0 and row.skip == 0 for row in step.rows):
            return new
        slots = self.tokens.shape[2] if len(self.tokens) else 0
        windows = self.tokens if slots else new[:, :, :0]

        def place() -> torch.Tensor:
            longest = max(row.exact_before + row.new for row in step.rows)
            slot = torch.arange(longest)[None]
            before, skip = torch.tensor([[row.exact_before, row.skip] for row in step.rows]).T
            behind = slots + slot + (skip - before)[:, None]
            found = torch.where(slot < before[:, None], slot, behind)
            return _once(found.clamp(max=slots + new.shape[2] - 1))

        both = torch.cat([windows, new], 2)
        return _picked(both, step.index(("run", slots), new.device, place))

    def keep_rest(self, step: Step, run: torch.Tensor, slots: int, sinks: int) -> None:
        """Keep the tokens of `run` [rows, num_kv_heads, longest, head_dim] that the step did not seal: the sinks and the tail."""

        def place() -> torch.Tensor:
            gone = [(row.passed + len(row.sealed)) * self.spec.page_size for row in step.rows]
            return _without(gone, sinks, slots, run.shape[2])

        self.tokens = _picked(run, step.index(("rest", run.shape[2]), run.device, place))

    def select_rows(self, step: Step) -> None:
        """Let row i continue the former row `step.rows[i].source`.

        In a batch of the same size only rows that change are copied, in place: beams do this in every step.
        """
        targets, sources = step.moves(self.tokens.device, self.tokens.shape[0])
        if targets is None:
            self.tokens = self.tokens.index_select(0, sources)
        elif len(sources):
            self.tokens.index_copy_(0, targets, self.tokens.index_select(0, sources))

    def reopen(self, tokens: torch.Tensor, index: int, sinks: int) -> None:
        """Put the decoded tokens [num_kv_heads, n, head_dim] of a page back behind row `index`'s sinks."""
        slots = max(self.tokens.shape[2], sinks + tokens.shape[1])  # a loaded window may be shorter
        self.tokens = self._resized(self.tokens.shape[0], slots)
        self.tokens[index, :, sinks : sinks + tokens.shape[1]] = tokens


def _without(gone: Sequence[int], sinks: int, slots: int, held: int) -> torch.Tensor:
    """Return [rows, slots]: where each slot's token lies in a run of `held` that loses `gone` tokens behind its sinks."""
    slot = torch.arange(slots)[None]
    lost = torch.tensor(gone)[:, None]
    return _once(torch.where(slot < sinks, slot, slot + lost).clamp(max=held - 1))


def _once(places: torch.Tensor) -> torch.Tensor:
    """Return places [rows, slots], or [1, slots] where they are the same for all rows."""
    return places[:1] if bool((places == places[:1]).all()) else places


def _picked(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return tokens[b, :, places[b, s]] as [rows, heads, slots, head_dim]."""
    if places.shape[0] == 1:
        return tokens.index_select(2, places[0])
    index = places[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3])
    return tokens.gather(2, index)
