"""The paged cache whose storage grows with the text."""

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ..bridge.mask_length import MaskLength, check_padding_mask, takes_length
from ..checks import check_int
from ..config import CacheConfig
from ..errors import CacheOptionError
from ..pages.ahead import Expected
from ..pages.offload import OffloadArena
from ..spec import MemoryReport
from .build import page_layers
from .compat import forget_tokens, is_dummy
from .handle_layer import HandleLayer
from .layer import PagedLayer
from .model_shape import is_chunked, kept_layers
from .offloading import make_room
from .pipeline_parallel import answering_layer
from .report import LayerReport, in_lines, measure_memory, one_line, report_layers
from .residual import chosen_rows
from .sharing import SharingCache


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
        self.layers, self.groups, self.arena = page_layers(
            self.layers, decoder, options, self._kept, kind
        )
        if options.prefix_store is not None:
            self.release_when_gone()
        self._first_paged = self.paged_layers[0].layer_idx
        for group in self.groups:
            group.watch_masks(self._watch)
        # a mask is made once for all layers of a kind: it is left out only where the kernels read all of them
        self._masks_skippable = not is_chunked(decoder) and all(
            isinstance(layer, PagedLayer) or linear or is_dummy(layer)
            for layer, linear in zip(self.layers, self.is_linear, strict=True)
        )

    @property
    def group(self) -> Any:
        """The first group with tokens (full attention comes first): its rows stand for all.

        A process that runs some of the layers only (pipeline parallelism) may have no tokens in the very first.
        """
        return next((group for group in self.groups if group.seen), self.groups[0])

    def _refuse_halfway(self) -> None:
        self.check_whole()

    def _prepare_update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> None:
        """Find out now whether layers that come later will refuse; this layer's own group asks by itself."""
        own = getattr(self.layers[layer_idx], "group", None)
        for group in self.groups:
            if group is not own:
                group.prepare_append(keys.shape[0], keys.shape[2])
        if isinstance(self.arena, OffloadArena):
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
            return MaskLength(length, self.groups, self._masks_skippable, self._watch), offset
        return length, offset

    def reset(self) -> None:
        """Forget all tokens and give the memory back; afterwards any batch size fits."""
        self.forget_origin()
        self._watch.clear()
        self.halfway = True
        for layer in self.layers:
            layer.reset()
            if isinstance(layer, DynamicLayer) and not isinstance(layer, PagedLayer):
                forget_tokens(layer)
        self.halfway = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens of all layers, or of none where some layer cannot; see `PagedLayer.crop`.

        A crop of more tokens than there are leaves none, as with DynamicCache.
        """
        if tokens_to_remove < 0:
            self.check_steps()
            for group in self.groups:
                group.check_crop(-int(tokens_to_remove))
        self.change_layers(lambda layer: layer.crop(tokens_to_remove))
        if self.token_ids is not None:
            self.forget_tokens(self.get_seq_length())

    def end_recording(self) -> None:
        """Turn past recording off: full pages are sealed at once again, pages out of sight given back."""
        for group in self.groups:
            group.end_recording()

    # -- rows: one list of row numbers for all layers, read from the device once ---------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue the former row beam_idx[i]; sealed pages are shared, not copied."""
        self.check_steps()
        self._select_rows(beam_idx.tolist(), "reorder_cache")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (numbers [n] or a bool mask [rows])."""
        if not self.group.rows:
            return
        self.check_steps()
        self._select_rows(chosen_rows(indices, len(self.group.rows)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; sealed pages are shared, not copied."""
        if self.group.rows:
            self.check_steps()
            self._select_rows([row for row in range(len(self.group.rows)) for _ in range(repeats)])

    def _select_rows(self, sources: list[int], method: str = "batch_select_indices") -> None:
        """Let row i continue the former row sources[i]; transformers' own layers by `method`, where they have it."""
        for group in self.groups:
            group.check_rows(sources)
        indices: Any = torch.tensor(sources)

        def select(layer: Any) -> None:
            if isinstance(layer, PagedLayer):
                layer.select_rows(sources)
            else:  # states of linear attention know reorder_cache only
                getattr(layer, method, layer.reorder_cache)(indices)

        self.change_layers(select)
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
                group.ahead.expect(Expected(prompt, end))

    def memory(self) -> MemoryReport:
        """Return the bytes of all tensors that this cache holds, by part."""
        return measure_memory(self.layers, self.groups)

    def report(self) -> list[LayerReport]:
        """Return, for each layer, how it is cached and why."""
        return report_layers(self.layers, self._kept)

    def __repr__(self) -> str:
        return one_line(self, type(self).__name__, len(self.group.rows))

    def __str__(self) -> str:
        return in_lines(self, type(self).__name__, len(self.group.rows))
