"""The tensors of one layer of a preallocated cache, made once and then changed in place on their device."""

import torch

from ..backends.base import Backend
from ..backends.inputs import PagedKV
from ..backends.registry import without_waiting
from ..backends.torch_ops import spec_name, traceable, write_pair
from ..bridge.traced import TracedView
from ..errors import CacheOptionError
from ..pages.group_state import GroupState
from ..pages.persistent import persistent_tensors
from ..pages.static_table import StaticStep, StaticTable
from ..pages.storage import PageStorage, Pair
from ..spec import PageSpec
from .state import StateTensors, field_from_rows
from .store import LayerStore


def check_static_kernel(kernel: Backend, device: torch.device, spec: PageSpec) -> None:
    """Raise CacheOptionError where a step by `kernel` over such pages would wait for the device."""
    if device.type == "cpu" or not kernel.waits:
        return
    able, reasons = without_waiting(device, spec)
    if able:
        names = " or ".join(f"kernel={name!r}" for name in able)
        remedy = f"take {names}, which never waits here, or leave max_length out"
    else:
        others = "".join(f" {name!r} cannot run: {reason}." for name, reason in reasons.items())
        remedy = f"every backend that can run here does so.{others} Leave max_length out"
    raise CacheOptionError(
        f"max_length on {device} needs a backend whose steps never wait for the device, and kernel {kernel.name!r} reads "
        f"numbers from it at every step; {remedy}"
    )


class StaticStore:
    """Pages and windows of one layer with room for all of `table.max_length` columns.

    Args:
        layer_idx: position in the model, for messages.
        spec: shapes and formats of both sides.
        table: rows and lengths, allocated.
        kernel: CacheConfig.kernel. Raises CacheOptionError when that one cannot run on these pages.
    Attributes:
        base: the pages and windows themselves, and their checks.
        hollow: two scalars of nan; expanded, they stand for keys and values while a forward is traced.
    """

    def __init__(self, layer_idx: int, spec: PageSpec, table: StaticTable, kernel: str) -> None:
        self.table = table
        device = table.seen.device
        with persistent_tensors():
            pages = PageStorage(spec, device)
        self.base = LayerStore(layer_idx, pages, table.sink_tokens, kernel)
        check_static_kernel(self.base.kernel, device, spec)
        with persistent_tensors():
            self.base.pages.grow(table.rows * table.pages_per_row)
            for window in self.base.residuals:
                window.fit(table.rows, table.slots)
            self.hollow = tuple(
                torch.full((), float("nan"), dtype=side.dtype, device=device) for side in spec.sides
            )
        self.damaged = self.base.damaged
        self.name = spec_name(spec)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of this layer: fields [pages, ..], windows [rows, num_kv_heads, slots, head_dim], and scalars."""
        found = [t for side in self.base.pages.sides for t in side.fields.values()]
        found += [window.tokens for window in self.base.residuals]
        return [*found, *self.hollow, self.damaged]

    def append(
        self, step: StaticStep, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new tokens and seal the pages that they fill; return, per side, the exact tokens to be read now.

        Args:
            keys, values: [rows, num_kv_heads, q_len, head_dim], padding columns included.
        """
        new, q_len = (keys.detach(), values.detach()), keys.shape[2]
        own_keys, own_values = self.base.residuals
        if q_len == 1:
            # one that fills its page leaves an empty tail: the next one is written over it
            runs = own_keys.tokens, own_values.tokens
        else:
            runs = (
                self._with_room(own_keys.tokens, q_len),
                self._with_room(own_values.tokens, q_len),
            )
        self._write(runs, new, step)
        if q_len > 1:
            for window, run in zip(self.base.residuals, runs, strict=True):
                window.tokens.copy_(self._rest(run, step))
        return runs

    def _write(self, runs: Pair, new: Pair, step: StaticStep) -> None:
        """Append `new` to `runs` and seal what is full: by one operator where a forward is traced."""
        base = self.base
        fields = base.pages.keys.fields, base.pages.values.fields
        if torch.compiler.is_compiling():
            write_pair(
                base.kernel.name, self.name, runs, new, step.starts, step.skips, step.jobs, fields, self.damaged
            )  # fmt: skip
            return
        base.kernel.write_pair(
            runs, new, step.starts, step.skips, step.jobs, fields, base.spec, self.damaged, base.launches
        )  # fmt: skip

    @staticmethod
    def _with_room(window: torch.Tensor, q_len: int) -> torch.Tensor:
        """Return the window with room for `q_len` tokens behind it."""
        rows, heads, _, dim = window.shape
        return torch.cat([window, window.new_zeros(rows, heads, q_len, dim)], 2)

    def _rest(self, run: torch.Tensor, step: StaticStep) -> torch.Tensor:
        """Return what stays exact of `run`: the sinks, and the tail behind the pages that were sealed."""
        table = self.table
        slot = torch.arange(table.slots, device=run.device)
        gone = step.full.long()[:, None] * table.page_size * (slot >= table.sink_tokens)
        index = (slot + gone).clamp(max=run.shape[2] - 1)[:, None, :, None]
        return run.gather(2, index.expand(-1, run.shape[1], -1, run.shape[3]))

    def kv(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        num_pages: torch.Tensor,
        exact_lens: torch.Tensor,
    ) -> PagedKV:
        """Return the input of a kernel: the layer's pages and the given exact tokens.

        Args:
            keys, values: [rows, num_kv_heads, slots, head_dim], the model's dtype.
            num_pages, exact_lens: [rows], int32: sealed pages, and tokens in the window.
        """
        return PagedKV(
            key_pages=self.base.pages.keys.fields,
            value_pages=self.base.pages.values.fields,
            spec=self.base.spec,
            block_table=self.table.block_table,
            num_pages=num_pages,
            residual_keys=keys,
            residual_values=values,
            exact_lens=exact_lens,
            padding=self.table.padding,
            seen=self.table.max_length,
            sink_tokens=self.table.sink_tokens,
            launches=self.base.launches,
            budget=self.table.reading.budget,
        )

    def traced(self, kv: PagedKV) -> TracedView:
        """Return `kv` with the pair of hollow tensors that stands for it."""
        shapes = [(kv.rows, side.num_kv_heads, kv.seen, side.head_dim) for side in kv.spec.sides]
        keys, values = (
            scalar.expand(shape) for scalar, shape in zip(self.hollow, shapes, strict=True)
        )
        first = self.base.layer_idx == 0
        return TracedView(
            kv, traceable(self.base.kernel, self.name), keys, values, self.table, first
        )

    def fill(self, tensors: StateTensors, group: GroupState) -> None:
        """Take over the pages and the exact tokens that another layer left; rows that shared a page get one each."""
        places = self.table.places(group)
        for side, window in zip(self.base.pages.sides, self.base.residuals, strict=True):
            name = side.spec.side
            for field in side.fields:
                for first, piece in tensors.pages(self.base.layer_idx, name, field):
                    side.spread(first, field, field_from_rows(field, piece, side.spec), places)
            held = tensors.window(self.base.layer_idx, name)[:, :, : group.longest]
            window.tokens[:, :, : group.longest] = held.to(window.tokens.device)

    def reorder(self, sources: torch.Tensor) -> None:
        """Let row i continue the former row sources[i]: pages and windows are copied, in place."""
        for side, window in zip(self.base.pages.sides, self.base.residuals, strict=True):
            for field in side.fields.values():
                if field.shape[0]:
                    rows = field.view(self.table.rows, self.table.pages_per_row, *field.shape[1:])
                    rows.copy_(rows.index_select(0, sources))
            window.tokens.copy_(window.tokens.index_select(0, sources))
