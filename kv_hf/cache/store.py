"""The tensors of one layer: sealed pages and exact windows, moved along by the steps of its group."""

from contextlib import nullcontext
from typing import Any

import torch

from ..backends.base import PagedKV
from ..backends.dispatch import choose
from ..errors import CacheMismatchError
from ..notices import warn_once
from ..pages import moved
from ..pages.moved import persistent_tensors
from ..pages.step import Step, TableView
from ..pages.storage import PageStorage, Pair, ReadablePages
from ..quant.codec import decode
from ..read_budget import ReadBudget
from ..spec import PageSpec, PageWrite, SideSpec
from .layer_formats import LayerFormats
from .widening import may_wait, widen


class Residual:
    """[rows, num_kv_heads, slots, head_dim] of one side; slots at and past a row's length hold anything."""

    def __init__(self, spec: SideSpec, device: torch.device) -> None:
        self.spec = spec
        self.tokens = torch.zeros(
            (0, spec.num_kv_heads, 0, spec.head_dim), dtype=spec.dtype, device=device
        )

    def over(self, tokens: torch.Tensor) -> "Residual":
        """Return windows like these in the memory of `tokens` [rows, num_kv_heads, slots, head_dim], until somebody replaces them."""
        part = Residual.__new__(Residual)
        part.spec, part.tokens = self.spec, tokens
        return part

    def resize(self, rows: int, slots: int) -> None:
        """Make room for `slots` tokens of `rows` rows; new slots are zero."""
        old = self.tokens
        with persistent_tensors():
            self.tokens = old.new_zeros((rows, old.shape[1], slots, old.shape[3]))
        kept = (min(rows, old.shape[0]), min(slots, old.shape[2]))
        self.tokens[: kept[0], :, : kept[1]] = old[: kept[0], :, : kept[1]]

    def run(self, step: Step, new: torch.Tensor) -> torch.Tensor:
        """Return each row's window with the new tokens behind it, left-aligned: [rows, num_kv_heads, longest, head_dim].

        The window is untouched. Without a window and without padding this is `new` itself, not a copy.

        Args:
            new: [rows, num_kv_heads, q_len, head_dim].
        """
        if not (step.exact_before.any() or step.skip.any()):
            return new
        counts = step.exact_before, step.skip, step.new
        slots = self.tokens.shape[2] if len(self.tokens) else 0
        windows = self.tokens if slots else new[:, :, :0]

        def place() -> torch.Tensor:
            before, skip, added = (torch.from_numpy(count)[:, None] for count in counts)
            slot = torch.arange(int((before + added).max()), device="cpu")[None]
            found = torch.where(slot < before, slot, slots + slot + skip - before)
            return _once(found.clamp(max=slots + new.shape[2] - 1))

        both = torch.cat([windows, new], 2)
        return _picked(both, step.tensor(("run", slots), new.device, place))

    def keep_rest(
        self, step: Step, run: torch.Tensor, slots: int, sinks: int, leaving: str = "leaving"
    ) -> None:
        """Keep the tokens of `run` [rows, num_kv_heads, longest, head_dim] that stay: the sinks, and those behind what leaves.

        Args:
            leaving: the field of the step that says how many leave: "leaving", or "first_leaving" before the append.
        """

        def place() -> torch.Tensor:
            """Return [rows, slots]: where each slot's token lies in `run`."""
            slot = torch.arange(slots, device="cpu")[None]
            gone = torch.from_numpy(getattr(step, leaving))[:, None]
            return _once(torch.where(slot < sinks, slot, slot + gone).clamp(max=run.shape[2] - 1))

        self.tokens = _picked(run, step.tensor((leaving, run.shape[2]), run.device, place))

    def select_rows(self, step: Step) -> None:
        """Let row i continue the former row `step.sources[i]`.

        In a batch of the same size only rows that change are copied, in place: beams do this in every step.
        """
        same_size = len(step.sources) == self.tokens.shape[0]

        def moving() -> torch.Tensor:
            pairs = [
                pair for pair in enumerate(step.sources) if not same_size or pair[0] != pair[1]
            ]
            moves = torch.tensor(pairs, dtype=torch.int64, device="cpu")
            return moves.reshape(-1, 2).T.contiguous()

        targets, sources = step.tensor("moves", self.tokens.device, moving)
        if not same_size:
            self.tokens = self.tokens.index_select(0, sources)
        elif len(sources):
            self.tokens.index_copy_(0, targets, self.tokens.index_select(0, sources))

    def reopen(self, tokens: torch.Tensor, index: int, sinks: int) -> None:
        """Put the decoded tokens [num_kv_heads, n, head_dim] of a page back behind row `index`'s sinks."""
        slots = max(self.tokens.shape[2], sinks + tokens.shape[1])  # a loaded window may be shorter
        self.resize(self.tokens.shape[0], slots)
        self.tokens[index, :, sinks : sinks + tokens.shape[1]] = tokens


def _once(places: torch.Tensor) -> torch.Tensor:
    """Return places [rows, slots], or [1, slots] where they are the same for all rows."""
    return places[:1] if bool((places == places[:1]).all()) else places


def _picked(tokens: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return tokens[b, :, places[b, s]] as [rows, heads, slots, head_dim]."""
    if places.shape[0] == 1:
        return tokens.index_select(2, places[0])
    index = places[:, None, :, None].expand(-1, tokens.shape[1], -1, tokens.shape[3])
    return tokens.gather(2, index)


class LayerStore:
    """Pages and windows of one layer.

    Args:
        layer: the PagedLayer whose tensors these are.
        pages: storage of the sealed pages, which other caches may share.
    Attributes:
        formats: of the layer, which its first pages may find too narrow.
        sink_tokens: slots at the front of the windows that are never sealed.
        windows: exact tokens of keys and of values, of all rows.
        residuals: those of the rows of the next forward.
    Raises: CacheOptionError where the kernel that was asked for cannot run on these pages.
    """

    def __init__(self, layer: Any, pages: PageStorage) -> None:
        device = self.device = pages.device
        self.on_host = device.type == "cpu"
        self.formats: LayerFormats = layer.formats
        self.kernel = choose(self.formats.options.kernel, device, pages.spec)
        self.layer_idx: int = layer.layer_idx
        self.pages = pages
        self.sink_tokens: int = layer.group.sizes.sink_tokens
        self.launches: dict[Any, Any] = {}
        self._checked: tuple[Any, ...] = ()  # shapes, dtypes and devices that were found to fit
        self._room = 0  # pages that there is room for, as far as was asked; storage never shrinks
        with persistent_tensors():
            self.windows = Residual(pages.spec.keys, device), Residual(pages.spec.values, device)
            # 1: numbers were made finite
            self.damaged = torch.zeros((), dtype=torch.uint8, device=device)
        self.residuals = self.windows

    def __getstate__(self) -> dict[str, Any]:
        """Leave the chosen kernel out: where a pickled cache is read, another one may be the best."""
        left_out = ("kernel", "launches", "_checked")
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Choose a kernel for this place: torch.load(map_location=...) may have moved the tensors."""
        vars(self).update(state, _room=0, launches={}, _checked=())
        self.device = self.residuals[0].tokens.device
        self.on_host = self.device.type == "cpu"
        self.kernel = choose(self.formats.options.kernel, self.device, self.spec)

    @property
    def spec(self) -> PageSpec:
        """What the pages are like: wider than before, once the first of them, which another cache may bring, called for it."""
        return self.pages.held.spec

    def fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Say whether keys and values [rows, num_kv_heads, q_len, head_dim] have this layer's heads, dtype and device."""
        k, v = self.spec.sides
        return (
            keys.shape[1] == values.shape[1] == k.num_kv_heads
            and (keys.shape[-1], values.shape[-1]) == (k.head_dim, v.head_dim)
            and (keys.dtype, values.dtype) == (k.dtype, v.dtype)
            and keys.device == values.device == self.device
        )

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Size:
        """Return the shape of `keys` [rows, num_kv_heads, q_len, head_dim]. Raises CacheMismatchError unless both fit this layer."""
        shape = keys.shape
        seen = shape, values.shape, keys.dtype, values.dtype, keys.device, values.device
        # what was seen before would become a guard of a compiled step
        traced = torch.compiler.is_dynamo_compiling()
        if not traced and seen == self._checked:
            return shape
        if self.fits(keys, values) and shape[:3] == values.shape[:3]:
            if not traced:
                self._checked = seen
            return shape
        k, v = self.spec.sides
        raise CacheMismatchError(
            f"layer {self.layer_idx} of this cache holds {k.num_kv_heads} kv heads of {k.head_dim} ({k.dtype} keys) and "
            f"{v.head_dim} ({v.dtype} values) on {self.device}; got {keys.dtype} keys {tuple(keys.shape)} and "
            f"{values.dtype} values {tuple(values.shape)} on {keys.device}. Use one cache per model and dtype"
        )

    def append(self, step: Step, keys: torch.Tensor, values: torch.Tensor, slots: int) -> Pair:
        """Write new tokens and seal pages; return, per side, the exact tokens that this forward reads.

        Args:
            keys, values: [rows, num_kv_heads, q_len, head_dim], padding columns included.
            slots: room of a row's window.
        """
        new = keys, values
        if keys.requires_grad or values.requires_grad:
            new = keys.detach(), values.detach()
        if step.capacity > self._room:
            self.make_room(step.capacity)
        if step.fits and self.residuals[0].tokens.shape[::2] != (keys.shape[0], slots):
            for window in self.residuals:
                window.resize(keys.shape[0], slots)
        if step.plain:
            return self._write(step, None, new)
        with persistent_tensors(), self.pages.lock:
            if step.first is not None:
                self._widen(step, step.first, self._write(step, step.first, None))
                for window in self.residuals:
                    held = window.tokens
                    window.keep_rest(step, held, held.shape[2], self.sink_tokens, "first_leaving")
            runs = self._write(step, step.seal, new) if step.fits else self._run(step, new)
            if step.seal is not None:
                self._widen(step, step.seal, runs)
            if not step.fits or step.moves_rest:
                for window, run in zip(self.residuals, runs, strict=True):
                    window.keep_rest(step, run, slots, self.sink_tokens)
        if moved.is_host(self.damaged.device):  # elsewhere that would wait: when asked
            self.report_damage()
        return runs

    def _run(self, step: Step, new: Pair) -> Pair:
        """Return the windows with `new` behind them, and seal what the step seals from that."""
        keys, values = self.residuals
        runs = keys.run(step, new[0]), values.run(step, new[1])
        if step.seal is not None:
            self._write(step, step.seal, None, runs)
        return runs

    def make_room(self, capacity: int) -> None:
        """Make room for `capacity` pages."""
        if capacity > self.pages.capacity:
            with persistent_tensors(), self.pages.lock:
                self.pages.grow(capacity)
        self._room = capacity

    def _write(
        self,
        step: Step,
        jobs: torch.Tensor | None,
        new: Pair | None,
        windows: Pair | None = None,
    ) -> Pair:
        """Append `new`, where there is any, to windows in place, and seal the pages of `jobs` from them; return the windows.

        Args:
            windows: None: the layer's own.
        """
        pages, view = self.pages, step.view
        assert view is not None
        if not self.on_host:
            view = view.on(self.device)
        if windows is None:
            windows = self.residuals[0].tokens, self.residuals[1].tokens
        (spec, *sides), here = pages.held, None
        fields = sides[0].fields, sides[1].fields
        if jobs is not None:
            here = step.tensor(("jobs", jobs is step.first), self.device, lambda: jobs)
        call = PageWrite(
            windows, fields, spec, self.damaged, self.launches, here, new, view.starts, view.skips
        )
        if jobs is None:
            self.kernel.write(call)
        else:
            pages.write(self.kernel, call, jobs)
            pages.sealed += len(jobs)
        return windows

    @property
    def looks(self) -> bool:
        """Whether the next pages that are sealed here decide about the layer's formats."""
        return self.formats.may_widen and not self.pages.judged

    def _widen(self, step: Step, jobs: torch.Tensor, tokens: Pair) -> None:
        """Where the formats are too narrow for the first pages that say something, give all pages wider ones and seal these once more."""
        if not (self.looks and may_wait(self.device)):
            return
        if bool((jobs[:, 2] < 0).any()):  # of a step that is recorded: some stand for no page
            return
        wider = self.pages.wider
        told = widen(self.layer_idx, self.formats, self.pages, self.kernel, jobs, tokens)
        if self.pages.wider is not wider:
            self.kernel = choose(self.formats.options.kernel, self.device, self.spec)
            self._write(step, jobs, None, tokens)
        self.pages.judged = told

    def select_rows(self, step: Step) -> None:
        """Let row i of the windows continue the former row `step.sources[i]`."""
        self.residuals = self.windows
        with persistent_tensors():
            for window in self.windows:
                window.select_rows(step)

    def put_sinks(self, row: int, sinks: Pair) -> None:
        """Let a row begin with exact keys and values [num_kv_heads, sink_tokens, head_dim]."""
        with persistent_tensors():
            for window, first in zip(self.windows, sinks, strict=True):
                window.tokens[row, :, : first.shape[1]] = first

    def sinks_of(self, row: int) -> Pair:
        """Return copies of the exact first keys and values of a row, [num_kv_heads, sink_tokens, head_dim]."""
        keys, values = (one.tokens[row, :, : self.sink_tokens].clone() for one in self.windows)
        return keys, values

    def reopen(self, step: Step) -> None:
        """Decode the pages that a crop cut into back into the windows; say so where that is not exact."""
        for index, page, count in step.reopened:
            if not all(side.scheme.is_exact for side in self.spec.sides):
                warn_once(
                    "reopened",
                    "A crop ended inside a sealed page: its first tokens were decoded back and keep their "
                    "rounding. Call cache.activate_past_recording() before forwards that may be rolled back",
                )
            with persistent_tensors():
                for pages, window in zip(self.pages.sides, self.residuals, strict=True):
                    tokens = decode(pages.take([page]), pages.spec, pages.spec.dtype)[0]
                    window.reopen(tokens[:, :count], index, self.sink_tokens)

    def kv(
        self,
        view: TableView,
        residual_keys: torch.Tensor,
        residual_values: torch.Tensor,
        columns: int,
        budget: ReadBudget | None = None,
    ) -> PagedKV:
        """Return the input of a kernel: these pages and the exact tokens [rows, num_kv_heads, slots, head_dim], in the order of `view`.

        Args:
            columns: that the forward may see.
        """
        pages = self.pages
        table = view if self.on_host else view.on(self.device)
        if pages.resident:
            spec, keys, values = pages.held
            found = ReadablePages(spec, keys.fields, values.fields, table.block_table, nullcontext)
        else:
            found = pages.readable(view)
        return PagedKV(  # by position, which takes a third of the time
            found.keys,
            found.values,
            found.spec,
            found.block_table,
            table.num_pages,
            residual_keys,
            residual_values,
            table.exact_lens,
            table.padding,
            columns,
            self.sink_tokens,
            found.hold,
            self.launches,
            budget,
            found.offloaded,
        )

    def report_damage(self) -> None:
        """Warn once when keys or values of a sealed page were not finite."""
        if not self.damaged.is_meta and bool(self.damaged):
            warn_once(
                "damaged",
                f"Keys or values of layer {self.layer_idx} hold inf, nan or numbers beyond float16's range. They "
                "are stored as the nearest finite number (nan as 0) in the page that they are in; other pages "
                "are not affected. The model itself produced them: look at its inputs and dtype",
            )
