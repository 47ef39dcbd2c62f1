"""The exact tokens of one layer: the first tokens and the open tail of each row, in the model's dtype."""

from collections.abc import Callable, Sequence

import torch

from ..pages.step import Step
from ..pages.storing import storing
from ..spec import SideSpec


def chosen_rows(indices: torch.Tensor, rows: int) -> list[int]:
    """Turn row numbers or a bool mask over `rows` rows into a list of row numbers."""
    return torch.arange(rows)[torch.as_tensor(indices).cpu()].tolist()


class ExactWindow:
    """[rows, num_kv_heads, slots, head_dim] of one side; slots at and past a row's length hold anything."""

    def __init__(self, spec: SideSpec, device: torch.device) -> None:
        self.spec = spec
        self.tokens = torch.zeros(
            (0, spec.num_kv_heads, 0, spec.head_dim), dtype=spec.dtype, device=device
        )

    def begin(self, tokens: Sequence[torch.Tensor | None], slots: int) -> None:
        """Make room for `slots` tokens of each row, and put `tokens` [num_kv_heads, n, head_dim] in front."""
        with storing():
            self.tokens = self._resized(len(tokens), slots)
            for index, first in enumerate(tokens):
                if first is not None:
                    self.tokens[index, :, : first.shape[1]] = first

    def _resized(self, rows: int, slots: int) -> torch.Tensor:
        """Return the tokens in a tensor of at least these sizes; new slots are zero."""
        old = self.tokens
        if old.shape[0] == rows and old.shape[2] == slots:
            return old
        with storing():
            new = old.new_zeros((rows, old.shape[1], slots, old.shape[3]))
        kept = (min(rows, old.shape[0]), min(slots, old.shape[2]))
        new[: kept[0], :, : kept[1]] = old[: kept[0], :, : kept[1]]
        return new

    def append(
        self,
        step: Step,
        new: torch.Tensor,
        slots: int,
        append_tokens: Callable[..., None],
    ) -> torch.Tensor:
        """Write the new tokens behind each row's window, in place, and return the window.

        `append_tokens` does it where rows differ, as reference.append_tokens.
        """
        self.tokens = self._resized(len(step.rows), slots)
        if step.uniform is not None:
            start, skip, count = step.uniform
            self.tokens.narrow(2, start, count).copy_(new[:, :, skip:] if skip else new)
        else:
            append_tokens(self.tokens, new, *step.offsets(new.device))
        return self.tokens

    def drop_pages(self, pages: Sequence[Sequence[int]], sinks: int) -> None:
        """Take the tokens of these many pages out of each row, behind its sinks, in place."""
        for index, row_pages in enumerate(pages):
            gone = len(row_pages) * self.spec.page_size
            if gone:
                rest = self.tokens[index, :, sinks + gone :].clone()
                self.tokens[index, :, sinks : sinks + rest.shape[1]] = rest

    def run(self, step: Step, new: torch.Tensor) -> torch.Tensor:
        """Return each row's window with the new tokens behind it, left-aligned; the window is untouched.

        Without a window and without padding this is `new` itself, not a copy.
        """
        if all(row.exact_before == 0 and row.skip == 0 for row in step.rows):
            return new
        longest = max(row.exact_before + row.new for row in step.rows)
        out = new.new_zeros((new.shape[0], new.shape[1], longest, new.shape[3]))
        for index, row in enumerate(step.rows):
            end = row.exact_before + row.new
            if row.exact_before:
                out[index, :, : row.exact_before] = self.tokens[index, :, : row.exact_before]
            out[index, :, row.exact_before : end] = new[index, :, row.skip :]
        return out

    def keep_rest(self, step: Step, run: torch.Tensor, slots: int, sinks: int) -> None:
        """Keep of `run` what the step did not seal: the sinks and the tail."""
        kept = self.tokens.new_zeros((len(step.rows), run.shape[1], slots, run.shape[3]))
        page_size = self.spec.page_size
        for index, row in enumerate(step.rows):
            head = min(sinks, row.exact_after)
            behind = head + (row.passed + len(row.sealed)) * page_size
            kept[index, :, :head] = run[index, :, :head]
            kept[index, :, head : row.exact_after] = run[
                index, :, behind : behind + row.exact_after - head
            ]
        self.tokens = kept

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
