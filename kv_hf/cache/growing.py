"""The paged cache whose storage grows with the text: its layers, copies, shared pages and pages outside of the device."""

import copy
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicLayer

from ..backends.dispatch import MAX_DECODE_QUERIES
from ..bridge.masks import MaskLength, check_padding_mask, takes_length
from ..checks import check_int
from ..config import CacheConfig
from ..errors import (
    CacheMismatchError,
    CacheOptionError,
    InterruptedForwardError,
    UnsupportedModelError,
)
from ..pages.forward import Forward
from ..pages.offload import OffloadArena
from ..pages.rows import Expected, Rows, held_pages
from ..pages.step import Row
from ..spec import MemoryReport, page_capacity, reserved_pages
from .base import CacheBase
from .build import page_layers
from .layer import HandleLayer, PagedLayer
from .layer_kinds import HybridLayer
from .model_shape import forget_tokens, is_chunked, is_dummy, kept_layers, removed_by_crop
from .prefix_store import HeldRow
from .report import LayerReport, in_lines, measure_memory, one_line, report_layers, tensor_bytes
from .state import CacheState, LayerPages, LayerState, LiveTensors, portable, with_wider


def answering_layer(layers: Sequence[Any], layer_idx: int, any_kind: bool = False) -> int:
    """Return `layer_idx`, or the first layer of its kind behind it that has tokens where it is not run here.

    With `any_kind` a layer of another kind answers where none of its own has tokens: all have seen as many.

    Under pipeline parallelism a process runs a run of the layers and its cache fills only those, but models ask
    the first layer of a kind for lengths. An empty layer with no filled one before it is either empty like all
    others, or not run here: layers run in order.
    """
    if layer_idx >= len(layers) or any(_filled(layer) for layer in layers[: layer_idx + 1]):
        return layer_idx
    kind = _kind(layers[layer_idx])
    filled = [i for i in range(layer_idx + 1, len(layers)) if _filled(layers[i])]
    alike = [i for i in filled if _kind(layers[i]) == kind]
    return next(iter(alike or (filled if any_kind else ())), layer_idx)


def _kind(layer: Any) -> tuple[type, int | None]:
    return type(layer), getattr(layer, "sliding_window", None)


def _filled(layer: Any) -> bool:
    return bool(getattr(layer, "is_initialized", False)) and not is_dummy(layer)


def make_room(
    arena: OffloadArena,
    layers: Sequence[Any],
    groups: Sequence[Rows],
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Make room, for all layers, for the pages that an append of keys and values [rows, heads, q_len, head_dim] will seal.

    Layers that have not seen keys yet are taken to have heads like these.
    Raises: DeviceBudgetError, OffloadError (also in a forked process), CacheOptionError, with the cache unchanged.
    """
    arena.check_device(keys.device)
    arena.check_process()
    capacities: dict[int, int] = {}
    slots: dict[int, int] = {}
    batch, q_len = keys.shape[0], keys.shape[2]
    for group in groups:
        count = group.plan(batch, q_len).num_pages
        group.pool.check_room(count)
        reserved = reserved_pages(batch, group.reserve, group.pool.max_pages)
        whole = bool(group.rows) and _reads_everything(group, q_len)
        if not count and group.rows and not whole and _is_settled(arena, layers, group):
            continue
        held = {page for row in group.rows for page in row.pages}
        capacity = max(page_capacity(group.pool.ids_with(count)), reserved)
        most = max(page_capacity(len(held) + count), min(reserved, capacity))
        budget = group.reading.usual
        if budget is not None and not whole:
            most = budget.batch_width(most, batch, group.page_size)
        for layer in layers:
            if layer.group is group:
                capacities[layer.layer_idx] = capacity
                slots[layer.layer_idx] = most
    if not capacities:
        return
    expected = {
        layer.layer_idx: (layer.formats.spec_of(keys, values), keys.device)
        for layer in layers
        if layer.store is None
    }
    arena.make_room(capacities, slots, expected)


def _is_settled(arena: OffloadArena, layers: Sequence[Any], group: Rows) -> bool:
    """Say whether room was made for the pages that a group holds: not so where they came out of a pickle."""
    known = any(arena.room_for(layer.layer_idx) for layer in layers if layer.group is group)
    return known or not any(row.pages for row in group.rows)


def _reads_everything(group: Rows, q_len: int) -> bool:
    """Say whether a forward reads all pages of a group whose steps read a part of them, if they can be told."""
    if group.reading.usual is None or not any(row.pages or row.exact for row in group.rows):
        return False  # as every step, or a first forward, which reads no pages
    return q_len > MAX_DECODE_QUERIES or group.reading.budget is None


def release_pages(layers: Sequence[Any]) -> None:
    """Let go of all pages of a cache that is gone: a finalizer, which may run at any moment."""
    for group in {layer.group for layer in layers if isinstance(layer, PagedLayer)}:
        group.let_go()


class Copyable(CacheBase):
    """Copies of a growing cache, the pages that they share, and the checks that every change was finished."""

    _releases = False
    groups: tuple[Rows, ...]

    @property
    def paged_layers(self) -> list[PagedLayer]:
        """The layers that live in pages."""
        return [layer for layer in self.layers if isinstance(layer, PagedLayer)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent cache that shares this one's sealed pages, which never change.

        The exact windows are copied. Both caches draw new pages from one pool: `max_pages` bounds them together.
        """
        own = ("options", "_config", "_attention_config")
        pages = [layer.storage for layer in self.paged_layers if layer.storage is not None]
        shared = (*self.arena.shared_parts(), *pages, *(getattr(self, name) for name in own))
        memo.update((id(part), part) for part in shared)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied._releases = False
        for cache in (self, copied):
            cache.release_when_gone()
        # last: stopped before, the copy holds no page, and stopped from here on, it gives back what it holds
        for theirs, ours in zip(copied.groups, self.groups, strict=True):
            theirs.share_rows(ours)
        return copied

    def __copy__(self) -> Self:
        # two caches with one set of rows would pull the rug from under each other
        return copy.deepcopy(self)

    def state(self) -> CacheState:
        """Return what this cache holds, for a file or another cache; its tensors are this cache's own, not copies.

        Raises: CacheMismatchError for an empty cache; InterruptedForwardError after a forward that stopped half-way;
            UnsupportedModelError where layers hold more than pages and exact tokens.
        """
        self._check_complete()
        held = {layer.layer_idx: layer for layer in self.paged_layers}
        pages = {id(group): held_pages(group.rows) for group in self.groups}
        return CacheState(
            with_wider(portable(self.options), self.paged_layers),
            self.model_signature,
            tuple(group.state() for group in self.groups),
            tuple(
                LayerState.of(
                    index, layer.store.spec, self._group_number(layer), layer.store.device
                )
                for index, layer in held.items()
                if layer.store is not None
            ),
            LiveTensors(held, {index: pages[id(layer.group)] for index, layer in held.items()}),
            self.computed_by,
        )

    def _check_complete(self) -> None:
        """Raise an error unless the cache holds tokens, in pages and exact windows alone, up to the same column."""
        if not self.group.rows:
            raise CacheMismatchError("this cache is empty: there is nothing to save")
        kept = [
            f"{index} ({type(layer).__name__})"
            for index, layer in enumerate(self.layers)
            if (layer.extra_bytes if isinstance(layer, PagedLayer) else tensor_bytes(vars(layer)))
        ]
        if kept:
            raise UnsupportedModelError(
                f"layers {', '.join(kept)} hold states beside their pages (transformers' own, or indexer keys); saved caches hold "
                "pages only"
            )
        layers = self.paged_layers
        without = [one.layer_idx for one in layers if not one.store]
        if without:
            raise InterruptedForwardError(
                f"layers {without} have not taken part in the forwards of this cache: an earlier one stopped half-way; it "
                "cannot be saved"
            )
        self.check_integrity()
        if any(layer.window != layer.group.window for layer in layers):
            raise UnsupportedModelError(
                "this cache keeps all pages of sliding layers for its prefix_store; save one that was made without a store"
            )

    def _take_over(self, state: CacheState, pages: Mapping[int, LayerPages]) -> None:
        for group, theirs in zip(self.groups, state.groups, strict=True):
            for index, row in enumerate(theirs.rows):
                if (row.pages or row.dropped) and row.exact < group.sink_tokens:
                    raise CacheMismatchError(f"row {index} holds pages, but not its first tokens")
            group.restore(theirs)
        for one in state.layers:
            layer: Any = self.layers[one.layer]
            num_pages = state.groups[pages[one.layer].group].num_pages
            layer.resume(one, state.tensors, num_pages)
        self.forward.resume(len(state.layers))
        self.check_integrity()

    def _group_number(self, layer: Any) -> int:
        return next(number for number, group in enumerate(self.groups) if group is layer.group)

    def release_when_gone(self) -> None:
        """See to it that pages are freed with this cache although others share their storage."""
        if not self._releases:
            weakref.finalize(self, release_pages, self.layers)
            self._releases = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a pickle: pages that other caches held in it are free here."""
        vars(self).update(state)
        self._releases = False
        for group in self.groups:
            group.pool.recount()

    def check_done(self) -> None:
        """Raise InterruptedForwardError where the last forward or change did not reach all layers."""
        self.forward.check()
        lacking = [
            one.layer_idx for one in self.paged_layers if one.store and one.seen != one.group.seen
        ]
        if lacking:
            raise InterruptedForwardError(
                f"layers {lacking} lack tokens that the others hold: a forward of this cache stopped half-way; call reset() "
                "and start again"
            )

    def check_integrity(self) -> None:
        """Raise ValueError unless counts, lengths, storage and layers agree.

        That is InterruptedForwardError where a forward, or a change of all layers, stopped half-way.
        """
        self.check_done()
        for group in self.groups:
            group.check_integrity()
        for layer in self.paged_layers:
            if layer.storage is None:
                continue
            layer.storage.check_integrity()
            most = max((page + 1 for row in layer.group.rows for page in row.pages), default=0)
            if layer.storage.capacity < most:
                raise ValueError(
                    f"layer {layer.layer_idx} has no room for a page of the block table"
                )


Sinks = Sequence[tuple[torch.Tensor, torch.Tensor]]  # of each layer: exact first keys and values


class SharingCache(Copyable):
    """A cache whose rows may begin with pages of a store, and whose pages a store may keep (PageSharer)."""

    def held_rows(self) -> list[HeldRow]:
        """Return tokens and pages of each row. Raises InterruptedForwardError after a forward that stopped half-way."""
        self.check_done()
        group = self.group
        return [HeldRow(group.tokens(row), row.pages) for row in group.rows]

    def begin_with(self, rows: Sequence[Row], sinks: Sequence[Sinks | None], seen: int) -> None:
        """Let this cache, which is empty, begin with `rows`, whose pages are in its storage, and have seen `seen` columns.

        Stopped half-way, by whatever exception, it holds no more pages than its rows do, and asks for reset().

        Args:
            sinks: for each row, and then each layer, its exact first keys and values; None for a row without pages.
        """
        with self.forward.change():
            self.group.adopt(rows, seen)
            for place, layer in enumerate(self.paged_layers):
                layer.adopt([None if one is None else one[place] for one in sinks], seen)

    def sinks_of(self, row: int) -> Sinks:
        """Return copies of the exact first keys and values of a row, for each layer."""
        return [layer.sinks_of(row) for layer in self.paged_layers]

    def share_pages(self, row: int, pages: tuple[int, ...]) -> None:
        """Let a row hold `pages`, which contain the same tokens, in place of its own; between two forwards.

        Handles of before become stale first, as they know the pages that the row lets go of.
        """
        for layer in self.paged_layers:
            layer.outdate()
        self.group.replace_pages(row, pages)


class GrowingCache(SharingCache):
    """A cache of pages that are handed out as the text grows. Rows may share pages, caches too.

    Made by `kv_hf.PagedCache`, whose arguments and errors it has.
    """

    layer_class = PagedLayer

    def _build(self, config: Any, options: CacheConfig) -> None:
        if options.max_length is not None:
            raise CacheOptionError(
                f"max_length={options.max_length}: {type(self).__name__} grows; use kv_hf.PagedCache itself"
            )
        if options.cross_attention != "exact":
            raise CacheOptionError(
                f"cross_attention={options.cross_attention!r} is for encoder-decoder models, whose cache is "
                "kv_hf.PagedEncoderDecoderCache"
            )
        decoder = self._describe(config, options)
        self._kept = kept_layers(decoder)
        # a model that attends to images in layers of the same cache asks each layer whether it has keys
        kind = HandleLayer if self._kept else self.layer_class
        self.layers, self.forward, self.arena = page_layers(
            self.layers, decoder, options, self._kept, kind
        )
        self.groups = self.forward.groups
        if options.prefix_store is not None:
            self.release_when_gone()
        # a mask is made once for all layers of a kind: it is left out only where the kernels read all of them
        self.masks_skippable = not is_chunked(decoder) and all(
            isinstance(layer, PagedLayer) or linear or is_dummy(layer)
            for layer, linear in zip(self.layers, self.is_linear, strict=True)
        )

    @property
    def group(self) -> Any:
        """The first group with tokens (full attention comes first): its rows stand for all.

        A process that runs some of the layers only (pipeline parallelism) may have no tokens in the very first.
        """
        return next((group for group in self.groups if group.seen), self.groups[0])

    def _prepare_update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> None:
        """Find out before a forward begins whether its pages have room on the device."""
        layer = self.layers[layer_idx]
        if isinstance(layer, PagedLayer) and layer.seen == layer.group.seen:
            assert isinstance(self.arena, OffloadArena)
            make_room(self.arena, self.paged_layers, self.groups, keys, values)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns seen by a layer, padding included; of a layer run by another process, its neighbour's."""
        return super().get_seq_length(answering_layer(self.layers, layer_idx, any_kind=True))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) for the mask of the next `query_length` columns of a layer.

        The length also says where the mask function reports left padding.
        """
        answering = answering_layer(self.layers, layer_idx)
        length, offset = super().get_mask_sizes(query_length, answering)
        if takes_length(self._attention_config._attn_implementation):
            return MaskLength(length, self), offset
        return length, offset

    def reset(self) -> None:
        """Forget all tokens and give the memory back; afterwards any batch size fits."""
        self.forget_origin()
        self.forward.changing = True
        for group in self.groups:
            group.reset()
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.forget()
            else:
                layer.reset()
                if isinstance(layer, DynamicLayer):
                    forget_tokens(layer)
        self.arena.clear()
        self.forward.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens of all layers, or of none where some layer cannot.

        `-n` removes n; before transformers 5.18 also `n` keeps n. A crop of more tokens than there are leaves none, as with
        DynamicCache. A crop that ends inside a sealed page decodes that page back into the window: exact pages lose nothing,
        encoded ones keep their rounding (said once). With past recording on, what is left stands confirmed, also by a crop of
        0, and may be sealed from the next forward on.
        """
        count = removed_by_crop(tokens_to_remove, self.group.seen)
        self.forward.check()
        for group in self.groups:
            group.check_crop(count)
        for layer in self.layers:  # states first: they may refuse, and then nothing has changed
            if isinstance(layer, HybridLayer):
                layer.crop_state(tokens_to_remove)
            elif not isinstance(layer, PagedLayer):
                layer.crop(tokens_to_remove)
            else:
                continue
            self.forward.changing = True
        self.forward.changing = False
        if not count:
            for group in self.groups:
                group.confirm()
            return
        with self.forward.change():
            for group in self.groups:
                group.crop(count)
            for layer in self.paged_layers:
                assert layer.group.step is not None
                layer.follow(layer.group.step)
        if self.token_ids is not None:
            self.forget_tokens(self.get_seq_length())

    def end_recording(self) -> None:
        """Turn past recording off: full pages are sealed at once again, pages out of sight given back."""
        for group in self.groups:
            group.end_recording()

    # -- rows: one list of row numbers for all layers, read from the device once ---------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue the former row beam_idx[i]; sealed pages are shared, not copied."""
        self._select_rows(beam_idx.tolist(), "reorder_cache")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (numbers [n] or a bool mask [rows])."""
        if rows := len(self.group):
            self._select_rows(torch.arange(rows)[torch.as_tensor(indices).cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; sealed pages are shared, not copied."""
        if rows := len(self.group):
            self._select_rows([row for row in range(rows) for _ in range(repeats)])

    def _select_rows(self, sources: list[int], method: str = "batch_select_indices") -> None:
        """Let row i continue the former row sources[i]; transformers' own layers by `method`, where they have it."""
        self.forward.check()
        for group in self.groups:
            group.check_rows(sources)
        indices: Any = torch.tensor(sources)
        with self.forward.change():
            for group in self.groups:
                if len(group):
                    group.select(sources)
            for layer in self.layers:
                if not isinstance(layer, PagedLayer):  # states of linear attention know reorder_cache only
                    getattr(layer, method, layer.reorder_cache)(indices)
                elif layer.group.step is not None:
                    layer.follow(layer.group.step)
        self.select_tokens(sources)

    # -- what transformers does not ask for ----------------------------------------------------------------

    def check_kernel(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise CacheOptionError when the kernel, or the offload, that was asked for cannot run for such a model."""
        if isinstance(self.arena, OffloadArena):
            self.arena.check_device(device)
        super().check_kernel(device, dtype)

    def _check_padding(self, mask: Any) -> None:
        check_padding_mask(mask, len(self.group.rows), not self.group.needs_padding())

    def expect_length(self, end: int, prompt: int = 0) -> None:
        """Say how long the text will be, so that storage grows in few steps: generate() does so on a GPU.

        Where storage grows, it then makes room for the prompt and as many columns ahead as there are (at least 1,024, and
        at most 4,096 or an eighth of those that there are), but not beyond the end. A text may end earlier or later.
        Without effect on pages that may leave the device, and where `max_length` made all room at once.

        Args:
            end, prompt: columns of the whole text and of its prompt, padding and what is cached already included.
        Raises: CacheOptionError for anything but numbers of at least 0.
        """
        check_int("end", end, 0)
        check_int("prompt", prompt, 0)
        if not isinstance(self.arena, OffloadArena):
            for group in self.groups:
                group.expected = Expected(prompt, end)

    def memory(self) -> MemoryReport:
        """Return the bytes of all tensors that this cache holds, by part."""
        return measure_memory(self.layers, self.groups)

    def report(self) -> list[LayerReport]:
        """Return, for each layer, how it is cached and why."""
        return report_layers(self.layers, self._kept)

    @property
    def num_rows(self) -> int:
        """Rows that this cache holds, 0 before the first forward."""
        return len(self.group.rows)

    def __repr__(self) -> str:
        return one_line(self, type(self).__name__, self.num_rows)

    def __str__(self) -> str:
        return in_lines(self, type(self).__name__, self.num_rows)
