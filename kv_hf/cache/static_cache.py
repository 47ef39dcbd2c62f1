"""The preallocated paged cache: `max_length` columns per row, made at the first forward."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ..backends.registry import choose
from ..bridge.mask_length import MaskLength, check_padding_mask, takes_length
from ..config import CacheConfig
from ..errors import CacheMismatchError, CacheOptionError, UnsupportedModelError
from ..pages import moved
from ..pages.arena import PageArena
from ..pages.static_table import StaticTable
from ..spec import MemoryReport
from .base import CacheBase
from .layer_formats import LayerFormats, planned_specs
from .model_shape import kept_layers, latent_rank, page_sizes
from .report import LayerReport, held_formats, in_lines, one_line
from .state import CacheState, LayerPages, LayerState, LiveTensors, portable, with_wider
from .static_layer import StaticPagedLayer, refused
from .static_store import check_static_kernel

HEAD_COUNTS = ("num_key_value_heads", "num_attention_heads")


class StaticPagedCache(CacheBase):
    """A paged cache whose tensors never move, so that torch.compile and CUDA graphs can hold a decode step.

    Made by `PagedCache(config, .., max_length=N)` and `cache_config={"max_length": N}`.
    """

    def _build(self, config: Any, options: CacheConfig) -> None:
        if options.max_length is None:
            raise CacheOptionError("StaticPagedCache needs max_length; use PagedCache without it")
        decoder = self._describe(config, options)
        self.arena = PageArena()  # of nobody's use: each layer has storage of its own
        self.captured = False  # whether generate() runs its decode steps as a CUDA graph
        others = sorted({type(layer).__name__ for layer in self.layers} - {DynamicLayer.__name__})
        kept = kept_layers(decoder)  # their tokens are not the text's, nor as many
        if others or kept or not self.layers or latent_rank(decoder) is not None:
            inside = "cross-attention to images" if kept else "latent attention"
            kind = ", ".join(others) or inside
            raise UnsupportedModelError(
                f"max_length={options.max_length}: {getattr(config, 'model_type', config)!r} has layers ({kind}) that a "
                "preallocated cache cannot hold; leave max_length out"
            )
        kind = getattr(config, "model_type", config)
        budget = options.budget_of(kind, [None] * len(self.layers), False)
        sizes = options.page_size, options.sink_tokens, options.max_length
        self.groups = (StaticTable(*sizes, budget),)
        count = len(self.layers)
        formats = [LayerFormats.of(options, index, count) for index in range(count)]
        planned_specs(page_sizes(decoder), formats)
        for index, own in enumerate(formats):
            self.layers[index] = StaticPagedLayer(
                index, index == count - 1, self.table, own, decoder, options.kernel
            )

    @property
    def table(self) -> StaticTable:
        """Rows and lengths, shared by all layers."""
        table: StaticTable = self.groups[0]
        return table

    def __deepcopy__(self, memo: dict[int, Any]) -> "StaticPagedCache":
        """Return an independent cache with tensors of its own, which nobody else ever shares here."""
        memo.update((id(part), part) for part in (self._config, self._attention_config))
        copied: Any = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def __copy__(self) -> "StaticPagedCache":
        return copy.deepcopy(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Raise CacheOptionError, unless there is nothing to remove."""
        for layer in self.paged_layers:
            layer.crop(tokens_to_remove)

    def state(self) -> CacheState:
        """Return what this cache holds, for a file or another cache; waits for the device.

        Raises: CacheMismatchError for an empty cache, InterruptedForwardError after a forward that stopped half-way.
        """
        table, layers = self.table, {layer.layer_idx: layer for layer in self.paged_layers}
        if not table.started:
            raise CacheMismatchError("this cache is empty: there is nothing to save")
        self.check_integrity()
        ids = [
            page
            for row, held in enumerate(table.num_pages.tolist())
            for page in table.block_table[row, :held].tolist()
        ]
        return CacheState(
            with_wider(portable(self.options), self.paged_layers),
            self.model_signature,
            (table.state(),),
            tuple(
                LayerState.of(index, layer.store.base.spec, 0, layer.device)
                for index, layer in layers.items()
                if layer.store is not None
            ),
            LiveTensors(layers, dict.fromkeys(layers, ids)),
            self.computed_by,
        )

    def _take_over(self, state: CacheState, pages: Mapping[int, LayerPages]) -> None:
        (group,) = state.groups
        if len(pages) != len(self.layers):
            raise CacheMismatchError(
                f"this state is of layers {sorted(pages)} alone; a preallocated cache holds all {len(self.layers)}"
            )
        self.table.check_state(group)
        for one in sorted(state.layers, key=lambda one: one.layer):
            self.paged_layers[one.layer].resume(one, state.tensors, group)
        self.table.restore(group)
        self.check_integrity()

    def _check_padding(self, mask: Any) -> None:
        check_padding_mask(mask, self.table.rows if self.table.started else 0, False)

    def expect_length(self, end: int, prompt: int = 0) -> None:
        """Nothing: all room is made at the first forward."""

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the columns seen, padding included; on the device once there are some."""
        return self.paged_layers[0].get_seq_length()

    @property
    def max_length(self) -> int:
        """Columns (padding included) that a row has room for."""
        return self.table.max_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) for the mask of the next `query_length` columns of a layer."""
        if not torch.compiler.is_compiling():
            self.table.check_flag()
        length, offset = self.paged_layers[layer_idx].get_mask_sizes(query_length)
        if torch.compiler.is_compiling():
            return length, offset
        # a single token comes after the prompt, whose mask has said it all
        learns = query_length > 1 or not self.table.started
        known = learns or not moved.is_host(self.table.seen.device)
        if known and takes_length(self._attention_config._attn_implementation):
            return MaskLength(length, self.groups if learns else (), False, self._watch), offset
        return length, offset

    @property
    def paged_layers(self) -> list[StaticPagedLayer]:
        """All layers."""
        return [layer for layer in self.layers if isinstance(layer, StaticPagedLayer)]

    def reset(self) -> None:
        """Forget all tokens; the tensors stay, so that the same batch size runs the same compiled code."""
        self.forget_origin()
        for layer in self.paged_layers:
            layer.reset()
        if self.halfway:  # else it stays an attribute of the class, and compiled code stays valid
            del self.halfway

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue the former row beam_idx[i]; pages are copied, one tensor at a time."""
        self.table.take_turn(0)
        for layer in self.paged_layers:
            layer.reorder_cache(beam_idx)
        self.table.give_turn(0)
        if self.token_ids is not None:
            self.select_tokens(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Raise CacheOptionError: the number of rows is fixed."""
        raise refused("change its number of rows")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Raise CacheOptionError for any choice of rows `indices` [n]: the number of rows is fixed."""
        raise refused("change its number of rows")

    # -- what transformers does not ask for ----------------------------------------------------------------

    def check_kernel(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise CacheOptionError when the kernel that such a model gets cannot run, or waits for the device."""
        super().check_kernel(device, dtype)
        if device.type != "cpu":
            formats = [layer.formats for layer in self.paged_layers]
            for spec in planned_specs(page_sizes(self._config), formats, dtype):
                check_static_kernel(choose(self.options.kernel, device, spec), device, spec)

    def bytes_of(self, rows: int, dtype: torch.dtype) -> int | None:
        """Return the most bytes that pages and exact windows of a batch of `rows` take; None where the config does not say."""
        formats = [layer.formats for layer in self.paged_layers]
        specs = planned_specs(page_sizes(self._config), formats, dtype)  # of one head
        named = (self.model_signature.get(name) for name in HEAD_COUNTS)
        heads = next((count for count in named if isinstance(count, int)), None)
        if not specs or heads is None:
            return None
        pages, slots = rows * self.table.pages_per_row, self.table.slots
        return heads * sum(pages * one.page_bytes + one.window_bytes(rows, slots) for one in specs)

    def memory(self) -> MemoryReport:
        """Return the bytes of all tensors that this cache holds, by part; waits for the device."""
        stores = [layer.store for layer in self.paged_layers if layer.store is not None]
        table = self.table
        if not stores:
            return MemoryReport(0, 0, 0, 0, 0, 0, 0, 0)
        sides = [side for store in stores for side in store.base.pages.sides]
        payload = sum(side.nbytes["codes"] for side in sides)
        for store in stores:
            store.base.report_damage()
        pages = int(table.num_pages.sum())
        return MemoryReport(
            payload=payload,
            scales=sum(sum(side.nbytes.values()) for side in sides) - payload,
            tail=sum(window.tokens.nbytes for store in stores for window in store.base.residuals),
            tables=sum(tensor.nbytes for tensor in table.tensors),
            other=0,
            pages_held=pages,
            pages_allocated=table.rows * table.pages_per_row,
            tokens=pages * table.page_size + int(table.exact_lens.sum()),
        )

    def report(self) -> list[LayerReport]:
        """Return, for each layer, how it is cached."""
        rows = []
        for layer in self.paged_layers:
            rows.append(LayerReport(layer.layer_idx, "paged", *held_formats(layer)))
        return rows

    def check_integrity(self) -> None:
        """Raise ValueError unless lengths add up."""
        self.table.check_integrity()

    def __repr__(self) -> str:
        return one_line(self, "PagedCache", self.table.rows)  # what users call, with max_length

    def __str__(self) -> str:
        return in_lines(self, "PagedCache", self.table.rows)
