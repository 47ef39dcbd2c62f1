"""The cache that transformers sees: a DynamicCache whose attention layers live in pages."""

import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from ..bridge.handle import view_behind, warn_dense
from ..bridge.mask_length import MaskLength, check_padding_mask
from ..bridge.mask_watch import MaskWatch
from ..checks import check_int
from ..config import CacheConfig
from ..errors import CacheMismatchError, CacheOptionError
from ..formats import ATTENTION_NAME
from ..kernels.choice import choose, layout_for
from ..pages.ahead import Expected
from ..pages.offload import OffloadArena
from ..spec import MemoryReport
from .build import page_layers
from .compat import is_dummy
from .copies import Copyable
from .handle_layer import HandleLayer
from .layer import PagedLayer
from .layer_formats import planned_specs
from .model_shape import (
    attention_config,
    decoder_config,
    is_chunked,
    kept_layers,
    page_sizes,
    signature,
)
from .offloading import make_room
from .prefix_store import PrefixStore
from .report import LayerReport, measure_memory, report_layers
from .saved.savable import Savable
from .stages import answering_layer
from .window import chosen_rows


class PagedCache(Savable, Copyable):
    """Keys and values in fixed-size pages, stored exactly or quantized.

        cache = kv_hf.PagedCache(model.config, keys="int8", values="int4", page_size=64)
        model.generate(**inputs, past_key_values=cache)

    Args:
        config: the model's config (`model.config`).
        keys, values: exact (the default), fp8, int8, int4 or int2; `values` defaults to the format of `keys`.
        **options: the other fields of `kv_hf.CacheConfig`.
    Raises: CacheOptionError for a bad option, UnsupportedModelError for a model without attention layers.
    """

    def __new__(
        cls, config: Any = None, *, max_length: int | None = None, **options: Any
    ) -> "PagedCache":
        """Make the preallocated form where `max_length` asks for it."""
        if cls is PagedCache and max_length is not None:
            from .static_cache import StaticPagedCache

            cls = StaticPagedCache
        return super().__new__(cls)

    def __init__(
        self, config: Any, *, keys: str | None = None, values: str | None = None, **options: Any
    ) -> None:
        self._build(config, CacheConfig.from_arguments(keys, values, options))

    @classmethod
    def from_implementation(
        cls, config: Any, implementation: str, options: Mapping[str, Any] | None = None
    ) -> "PagedCache":
        """Build the cache of `cache_implementation=implementation, cache_config=options`."""
        return cls.from_options(config, CacheConfig.from_options(implementation, options))

    @classmethod
    def from_options(cls, config: Any, options: CacheConfig) -> "PagedCache":
        """Build the cache of validated options."""
        self = cls.__new__(cls, max_length=options.max_length)
        self._build(config, options)
        return self

    layer_class = PagedLayer
    _last_updated = sys.maxsize  # layer of the last update
    _dense_asked = False  # whether the model's attention is one that cannot be given handles

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
        decoder = decoder_config(config)
        super().__init__(config=decoder)
        self.options = options
        self._config = decoder
        self._attention_config = attention_config(config)
        self._kept = kept_layers(decoder)
        self.model_signature = signature(decoder)
        # a model that attends to images in layers of the same cache asks each layer whether it has keys
        kind = HandleLayer if self._kept else self.layer_class
        self.layers, self.groups, self.arena = page_layers(
            self.layers, decoder, options, self._kept, kind
        )
        if options.prefix_store is not None:
            self.release_when_gone()
        self._first_paged = self.paged_layers[0].layer_idx
        self._watch = MaskWatch()
        for group in self.groups:
            group.watch = self._watch
        # a mask is made once for all layers of a kind: it is left out only where the kernels read all of them
        self._masks_skippable = not is_chunked(decoder) and all(
            isinstance(layer, PagedLayer) or linear or is_dummy(layer)
            for layer, linear in zip(self.layers, self.is_linear, strict=True)
        )

    @property
    def prefix_store(self) -> PrefixStore | None:
        """The store that this cache shares prefixes with, or None."""
        return self.options.prefix_store

    def fresh(self) -> "PagedCache":
        """Return an empty cache of the same options for the same model."""
        made = type(self).__new__(type(self))
        made._build(self._config, self.options)
        return made

    @property
    def group(self) -> Any:
        """The first group with tokens (full attention comes first): its rows stand for all.

        A process that runs some of the layers only (pipeline parallelism) may have no tokens in the very first.
        """
        return next((group for group in self.groups if group.seen), self.groups[0])

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values of one layer; see `PagedLayer.update` for what comes back."""
        if self.halfway:
            self.check_whole()
        if layer_idx <= self._last_updated:
            # a forward begins: asked once, as a config of transformers takes its time to answer
            self._dense_asked = self._attention_config._attn_implementation == "flex_attention"
        self._last_updated = layer_idx
        if layer_idx <= self._first_paged:
            # find out now whether layers that come later will refuse; this layer's own group asks by itself
            own = getattr(self.layers[layer_idx], "group", None)
            for group in self.groups:
                if group is not own:
                    group.prepare_append(key_states.shape[0], key_states.shape[2])
            if isinstance(self.arena, OffloadArena):
                layers = self.paged_layers
                make_room(self.arena, layers, self.groups, key_states, value_states)
        if self.offloading:  # of whole layers, by transformers
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        else:
            layer: Any = self.layers[layer_idx]
            keys, values = layer.update(key_states, value_states, *args, **kwargs)
        if self._dense_asked:  # flex_attention is traced: no handles
            view = view_behind(keys, values)
            if view is not None:
                warn_dense("flex_attention")
                return view.dense("keys"), view.dense("values")
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the columns seen by a layer, padding included; of a layer run by another process, its neighbour's."""
        return super().get_seq_length(answering_layer(self.layers, layer_idx, any_kind=True))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) for the mask of the next `query_length` columns of a layer.

        For the "kv_hf" attention the length also says where its mask function reports left padding.
        """
        answering = answering_layer(self.layers, layer_idx)
        length, offset = super().get_mask_sizes(query_length, answering)
        if self._attention_config._attn_implementation == ATTENTION_NAME:
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
                # 5.17 zeroes these instead of dropping them, so that the next update would append to zeros
                layer.keys = layer.values = None
                layer.is_initialized = False
        self.halfway = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens of all layers, or of none where some layer cannot; see `PagedLayer.crop`."""
        if tokens_to_remove < 0:
            self.check_steps()
            for group in self.groups:
                group.check_crop(-int(tokens_to_remove))
        self.change_layers(lambda layer: layer.crop(tokens_to_remove))

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
        """Keep the rows `indices` (numbers or a bool mask)."""
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

    # -- what transformers does not ask for ----------------------------------------------------------------

    def check_model(self, config: Any) -> None:
        """Raise CacheMismatchError when this cache was built for a model of other sizes."""
        theirs = signature(decoder_config(config))
        differing = [name for name, value in self.model_signature.items() if value != theirs[name]]
        if differing:
            name = differing[0]
            raise CacheMismatchError(
                f"this cache was built for a model with {name}={self.model_signature[name]!r}, got a model with "
                f"{name}={theirs[name]!r}; use one cache per model"
            )

    def check_kernel(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise CacheOptionError when the kernel that was asked for by name cannot run for such a model.

        generate() asks before its first forward; the first update() asks again, about the tensors it gets.
        The same for an offload that has no meaning there.
        """
        if isinstance(self.arena, OffloadArena):
            self.arena.check_device(device)
        if self.options.kernel != "auto":
            formats = [layer.formats for layer in self.paged_layers]
            layout = layout_for(device)
            for spec in planned_specs(page_sizes(self._config), formats, dtype, layout):
                choose(self.options.kernel, device, spec)

    def observe_padding(self, attention_mask: torch.Tensor | None) -> None:
        """Learn the left padding of rows that hold no token yet, so that padding is never stored.

        generate() and the "kv_hf" attention do this by themselves; code that calls a model of another
        attention implementation directly may do it before the first forward.

        Args:
            attention_mask: [batch, columns], 0 or False = padding; None changes nothing.
        Raises: CacheMismatchError for anything else, for another batch size, and once all rows hold tokens.
        """
        if attention_mask is not None:
            self._check_padding(attention_mask)
            self.learn_padding(attention_mask)

    def _check_padding(self, mask: Any) -> None:
        check_padding_mask(mask, len(self.group.rows), not self.group.needs_padding())

    def learn_padding(
        self, attention_mask: torch.Tensor | None, columns: int | None = None
    ) -> None:
        """Learn what there is to learn from a mask; see `observe_padding` here and in PageGroup."""
        if attention_mask is not None:
            for group in self.groups:
                group.observe_padding(attention_mask, columns)

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
                group.ahead.expected = Expected(prompt, end)

    @property
    def bits_per_element(self) -> float:
        """Mean stored bits per number of a sealed page over all paged layers, scales included."""
        specs = [layer.spec for layer in self.paged_layers if layer.spec is not None]
        return sum(spec.bits_per_element for spec in specs) / len(specs) if specs else 0.0

    def memory(self) -> MemoryReport:
        """Return the bytes of all tensors that this cache holds, by part."""
        return measure_memory(self.layers, self.groups)

    def report(self) -> list[LayerReport]:
        """Return, for each layer, how it is cached and why."""
        return report_layers(self.layers, self._kept)

    def __repr__(self) -> str:
        memory = self.memory()
        return (
            f"PagedCache(keys={self.options.keys!r}, values={self.options.values!r}, "
            f"page_size={self.options.page_size}, rows={len(self.group.rows)}, tokens={memory.tokens}, "
            f"pages={memory.pages_held}, bytes={memory.total}"
            + (f", offloaded={memory.offloaded})" if self.options.offload else ")")
        )
