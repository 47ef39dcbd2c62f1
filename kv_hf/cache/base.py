"""The base of every paged cache: built from a model's config and options, asked by generate() before its first forward.

Decides nothing about storage: growing.py and static_cache.py do, which are siblings here.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache

from ..backends.registry import choose, layout_for
from ..bridge.handles import view_of, warn_dense
from ..checks import check_int
from ..config import CacheConfig, shows_options
from ..errors import CacheMismatchError, CacheOptionError, InterruptedForwardError
from ..pages.cpu_memory import PrefillWatch
from ..pages.offload import OffloadArena
from ..pages.storage import PageArena
from ..printable import short
from ..spec import MemoryReport
from .identity import ModelId
from .layer_formats import planned_specs
from .model_shape import attention_config, decoder_config, page_sizes, signature
from .origin import Origin, check_token_ids
from .prefix_store import PrefixStore
from .report import LayerReport
from .state import CacheState, LayerPages, in_rows


class Portable(Origin):
    """The half of a cache that is saved, loaded and handed over; the other half makes layers and groups.

    Attributes:
        model_signature: sizes of the model that it was built for.
        groups: what knows rows and lengths, one for all layers that see the same tokens.
    """

    model_signature: dict[str, Any]
    groups: tuple[Any, ...]

    @classmethod
    def from_options(cls, config: Any, options: CacheConfig) -> Self:
        """Build the cache of validated options."""
        raise NotImplementedError

    @property
    def paged_layers(self) -> list[Any]:
        """The layers that live in pages."""
        raise NotImplementedError

    def check_model(self, config: Any) -> None:
        """Raise CacheMismatchError when this cache was built for a model of other sizes."""
        self.check_signature(signature(decoder_config(config)))

    def check_signature(self, theirs: Mapping[str, Any]) -> None:
        """Raise CacheMismatchError when this cache was built for a model of other sizes than `theirs`."""
        found = ModelId(self.model_signature).difference(ModelId(dict(theirs)))
        if found is not None:
            raise CacheMismatchError(f"this cache was built for {found}; use one cache per model")

    def state(self) -> CacheState:
        """Return what this cache holds, for a file or another cache."""
        raise NotImplementedError

    def save(
        self, path: str | os.PathLike[str], model: Any, token_ids: torch.Tensor | None = None
    ) -> None:
        """Write this cache of `model` into a safetensors file, which takes the place of `path` when it is complete.

        Args:
            model: whose keys and values these are; only the same weights and active adapters can load them.
            token_ids: [rows, columns seen or more], padding included, for the loaded cache's `token_ids`.
        Raises: CacheMismatchError for an empty cache, a model of other sizes or weights, other token ids, and where generate()
            filled the cache with other adapters than the model has now;
            InterruptedForwardError after a forward that stopped half-way; UnsupportedModelError where transformers
            keeps states of layers; OSError where the disk refuses. The old file then is what it was.
        """
        from .saved import check_model_argument, save_state  # pydantic, only where it is needed

        check_model_argument(model)
        self.check_model(model.config)
        self.check_filled_by(ModelId.of(model))
        save_state(self.state(), path, model, token_ids)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: Any,
        device: torch.device | str | None = None,
        kernel: str | None = None,
        max_length: int | None = None,
    ) -> Self:
        """Read what `save` wrote. The cache goes on bit by bit as the saved one would have.

        Args:
            model: the model that it was saved with.
            device: where the layers go; None: where those of `model` are.
            kernel: as in CacheConfig, in place of the saved one.
            max_length: as in CacheConfig; files do not keep it.
        Raises: CacheFileError for a damaged, foreign or forged file and for another model; OSError where it cannot
            be opened.
        """
        from .saved import opened_state

        if max_length is not None:
            check_int("max_length", max_length, 1)
        with opened_state(path, model, device, kernel) as (state, token_ids):
            cache = cls.from_state(model.config, state, kernel=kernel, max_length=max_length)
            held: Any = cache
            if token_ids is not None:
                cache.note_text(token_ids, 0, int(held.get_seq_length()))
            cache.from_file, cache.weights = True, ModelId.of(model).weights
        return cache

    @classmethod
    def from_state(
        cls,
        config: Any,
        state: CacheState,
        *,
        kernel: str | None = None,
        max_length: int | None = None,
    ) -> Self:
        """Build a cache of the same model that goes on, bit by bit, as the one would have that gave `state`.

        Args:
            config: the model's config.
            kernel: as in CacheConfig, in place of the state's.
            max_length: as in CacheConfig: None makes a cache that grows, whatever the one was like that gave the state.
                The reference alone sums over all columns that there is room for: its results then differ by rounding.
        Raises: CacheMismatchError, or another ValueError, where the state does not fit the model or itself: before pages or
            windows are allocated.
        """
        asked = replace(state.options, max_length=max_length, kernel=kernel or state.options.kernel)
        cache = cls.from_options(config, asked)
        cache.take_over(state)
        return cache

    def take_over(self, state: CacheState) -> None:
        """Hold what another cache held: done once, by `from_state`."""
        self.check_signature(state.signature)
        pages = self._pages_of(state)
        state.tensors.check(pages)
        self._take_over(state, pages)
        self.computed_by = state.computed_by

    def _take_over(self, state: CacheState, pages: Mapping[int, LayerPages]) -> None:
        raise NotImplementedError

    def _pages_of(self, state: CacheState) -> dict[int, LayerPages]:
        """Return what the pages of the state's layers are like here. Raises CacheMismatchError for other layers or groups."""
        windows = [group.window for group in self.groups]
        claimed = [group.window for group in state.groups]
        if windows != claimed:
            raise CacheMismatchError(
                f"its groups have the windows {short(claimed)}, this model's {windows}"
            )
        paged = {layer.layer_idx: layer for layer in self.paged_layers}
        found = {}
        for one in state.layers:
            layer = paged.get(one.layer)
            if layer is None:
                raise CacheMismatchError(
                    f"it holds layer {one.layer}, which is no paged layer of this model"
                )
            if not one.value_dim and layer.formats.latent is None:
                raise CacheMismatchError(f"it holds layer {one.layer} with values of no channels")
            spec = layer.formats.spec(
                num_kv_heads=one.num_kv_heads,
                key_dim=one.key_dim,
                value_dim=one.value_dim,
                dtype=one.key_dtype,
                value_dtype=one.value_dtype,
            )
            found[one.layer] = LayerPages(in_rows(spec), self._group_number(layer))
        held = {one.group for one in found.values()}
        empty = [window for number, window in enumerate(windows) if number not in held]
        if empty:
            raise CacheMismatchError(f"it holds no layer of the groups with windows {empty}")
        return found

    def _group_number(self, layer: Any) -> int:
        """Return the place of a layer's group."""
        return 0


class CacheBase(Portable, DynamicCache):
    """Keys and values of a model in pages; `_build` of a subclass makes the layers.

    Attributes:
        options: of the cache.
        model_signature: sizes of the model that it was built for.
        groups: what knows rows and lengths, one for all layers that see the same tokens.
        arena: where sealed pages lie.
        forward: the forward in progress, by which an interrupted one is noticed.
    """

    options: CacheConfig
    arena: PageArena
    forward: Any
    _last_updated = sys.maxsize  # layer of the last update
    _dense_asked = False  # whether the model's attention is one that cannot be given handles

    @shows_options
    def __init__(
        self,
        config: Any,
        cache_config: CacheConfig | Mapping[str, Any] | None = None,
        *,
        keys: str | None = None,
        values: str | None = None,
        **options: Any,
    ) -> None:
        self._build(config, CacheConfig.from_arguments(keys, values, options, cache_config))

    @classmethod
    def kind_for(cls, max_length: int | None) -> "type[CacheBase]":
        """Return the class that keeps a cache with this option: this one, unless it is one that chooses (PagedCache)."""
        return cls

    @classmethod
    def from_implementation(
        cls,
        config: Any,
        implementation: str,
        options: CacheConfig | Mapping[str, Any] | None = None,
    ) -> Self:
        """Build the cache of `cache_implementation=implementation, cache_config=options`."""
        return cls.from_options(config, CacheConfig.from_options(implementation, options))

    @classmethod
    def from_options(cls, config: Any, options: CacheConfig) -> Self:
        """Build the cache of validated options."""
        kind = cls.kind_for(options.max_length)
        made: Any = kind.__new__(kind)
        made._build(config, options)
        return made

    def _build(self, config: Any, options: CacheConfig) -> None:
        """Make all parts. Raises CacheOptionError for options that do not fit, UnsupportedModelError for the model."""
        raise NotImplementedError

    def _describe(self, config: Any, options: CacheConfig) -> Any:
        """Begin as a DynamicCache of the same model, and note what is known without layers; return the decoder's config."""
        if options.max_bytes is not None:
            raise CacheOptionError(
                f"max_bytes={options.max_bytes} bounds the cache of continuous batching alone; bound this one by max_pages, or leave "
                "it out"
            )
        decoder = decoder_config(config)
        DynamicCache.__init__(self, config=decoder)
        self.options = options
        self._config = decoder
        self._attention_config = attention_config(config)
        self.model_signature = signature(decoder)
        self._prefill = PrefillWatch()
        return decoder

    @property
    def prefix_store(self) -> PrefixStore | None:
        """The store that this cache shares prefixes with, or None."""
        return self.options.prefix_store

    def fresh(self) -> Self:
        """Return an empty cache of the same options for the same model."""
        made = type(self).__new__(type(self))
        made._build(self._config, self.options)
        return made

    @property
    def group(self) -> Any:
        """Return the object that knows the rows of the text."""
        return self.groups[0]

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values of one layer; return what this forward's attention shall read.

        Args:
            key_states: [batch, num_kv_heads, q_len, key_dim], the model's dtype.
            value_states: [batch, num_kv_heads, q_len, value_dim].
            layer_idx: position in the model.
        Returns: keys and values [batch, num_kv_heads, seen, ..]: see `PagedLayer.update`.
        Raises: the errors of `PagedLayer.update`; InterruptedForwardError after a forward that stopped half-way.
        """
        if layer_idx >= len(self.layers):
            self._refuse_layer(layer_idx)
        if layer_idx <= self._last_updated:
            # a forward begins: asked once, as a config of transformers takes its time to answer
            self._dense_asked = self._attention_config._attn_implementation == "flex_attention"
            if not torch.compiler.is_compiling():
                self._prefill.begin(key_states.shape[2], key_states.device)
        self._last_updated = layer_idx
        if isinstance(self.arena, OffloadArena):
            self._prepare_update(key_states, value_states, layer_idx)
        if self.offloading:  # of whole layers, by transformers
            keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        else:
            layer: Any = self.layers[layer_idx]
            keys, values = layer.update(key_states, value_states, *args, **kwargs)
        if self._dense_asked:  # flex_attention is traced: no handles
            view = view_of(keys, values)
            if view is not None:
                warn_dense("flex_attention")
                return view.dense("keys"), view.dense("values")
        return keys, values

    def _refuse_layer(self, layer_idx: int) -> None:
        """Raise CacheMismatchError for a layer that this cache has not: the layers before it hold another model's tokens now."""
        self.forward.changing = True
        raise CacheMismatchError(
            f"layer_idx={layer_idx}: this cache was built for a model of {len(self.layers)} layers "
            f"(model_type={self.model_signature['model_type']!r}), and a model of more layers writes to it. Its layers hold "
            "tokens of that forward now: call cache.reset() before its own model uses it again, and make a cache of "
            "the other model's config"
        )

    def _prepare_update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int) -> None:
        """Find out before the first layer whether one that comes later will refuse."""

    def end_recording(self) -> None:
        """Turn past recording off."""

    @contextmanager
    def reading_everything(self) -> Iterator[None]:
        """Have forwards within read all pages, whatever read_tokens, read_share and read_top_p say: a prompt reads everything."""
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.reading.of_everything())
            yield

    def read_next_as_prompt(self) -> None:
        """Have the next forward read all pages, as `reading_everything` does: the first of assisted decoding is the prompt's."""
        for group in self.groups:
            group.reading.next_of_everything()

    def end_prefill(self) -> None:
        """Give memory that a prefill has freed back to the system, where it runs on a CPU (docs/speed_and_memory.md).

        generate() says so behind its prefill. In loops of your own the next step does; without one, call this.
        """
        self._prefill.end()

    def note(self, token_ids: torch.Tensor) -> None:
        """Say which text this cache holds, where the model was called without generate(), which then refuses another text.

        Args:
            token_ids: [rows, columns seen or more] int64 or int32, padding included; those behind what is seen are not kept.
        Raises: CacheMismatchError for other rows, or fewer columns than the cache has seen.
        """
        seen = int(self.get_seq_length())
        check_token_ids(token_ids, self.num_rows, seen)
        self.note_text(token_ids[:, :seen], 0, seen)

    @property
    def num_rows(self) -> int:
        """Rows that this cache holds, 0 before the first forward."""
        raise NotImplementedError

    # -- what transformers does not ask for ----------------------------------------------------------------

    def check_kernel(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise CacheOptionError when the kernel that was asked for by name cannot run for such a model.

        generate() asks before its first forward; the first update() asks again, about the tensors it gets.
        """
        if self.options.kernel != "auto":
            formats = [layer.formats for layer in self.paged_layers]
            layout = layout_for(device)
            for spec in planned_specs(page_sizes(self._config), formats, dtype, layout):
                choose(self.options.kernel, device, spec)

    def observe_padding(self, attention_mask: torch.Tensor | None) -> None:
        """Learn the left padding of rows that hold no token yet, so that padding is never stored.

        transformers' mask functions do this by themselves; code that calls a model without them may do it before the first
        forward.

        Args:
            attention_mask: [batch, columns], 0 or False = padding; None changes nothing.
        Raises: CacheMismatchError for anything else, for another batch size, and once all rows hold tokens.
        """
        if attention_mask is not None:
            self._check_padding(attention_mask)
            self.learn_padding(attention_mask)

    def _check_padding(self, mask: Any) -> None:
        """Raise CacheMismatchError unless `mask` is a 2D mask of rows whose padding is still to be learnt."""
        raise NotImplementedError

    def learn_padding(self, attention_mask: torch.Tensor | None) -> None:
        """Learn the left padding of rows that hold no token yet, without checking the mask.

        Args:
            attention_mask: [batch, columns], 0 or False = padding; masks of other dimensions and None change nothing.
        """
        if attention_mask is not None:
            for group in self.groups:
                group.observe_padding(attention_mask)

    # -- what it tells about itself ----------------------------------------------------------------------------

    @property
    def bits_per_element(self) -> float:
        """Mean stored bits per number of a sealed page over all paged layers, scales included."""
        specs = [layer.spec for layer in self.paged_layers if layer.spec is not None]
        return sum(spec.bits_per_element for spec in specs) / len(specs) if specs else 0.0

    def memory(self) -> MemoryReport:
        """Return the bytes of all tensors that this cache holds, by part."""
        raise NotImplementedError

    def report(self) -> list[LayerReport]:
        """Return, for each layer, how it is cached and why."""
        raise NotImplementedError

    def check_integrity(self) -> None:
        """Raise ValueError unless counts, lengths and storage agree."""
        raise NotImplementedError
