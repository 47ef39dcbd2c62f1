"""The base of every paged cache: built from a model's config and options, asked by generate() before its first forward.

Decides nothing about storage: growing.py and static_cache.py do, which are siblings here.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache

from ..backends.registry import choose, layout_for
from ..bridge.lazy_kv import view_behind, warn_dense
from ..bridge.mask_watch import MaskWatch
from ..config import CacheConfig, shows_options
from ..errors import CacheMismatchError, CacheOptionError, InterruptedForwardError
from ..pages.arena import PageArena
from ..pages.host_heap import PrefillWatch
from ..spec import MemoryReport
from .layer_formats import planned_specs
from .model_shape import attention_config, decoder_config, page_sizes, signature
from .portable import Portable
from .prefix_store import PrefixStore
from .report import LayerReport


class CacheBase(Portable, DynamicCache):
    """Keys and values of a model in pages; `_build` of a subclass makes the layers.

    Attributes:
        options: of the cache.
        model_signature: sizes of the model that it was built for.
        groups: what knows rows and lengths, one for all layers that see the same tokens.
        arena: where sealed pages lie.
        halfway: a change of all layers is going on; outside of one, it was interrupted.
    """

    options: CacheConfig
    arena: PageArena
    halfway = False
    _first_paged = (
        -1
    )  # layer in front of which other groups are asked before an update; -1: there are none to ask
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
        self._watch = MaskWatch()
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
        if self.halfway:
            self._refuse_halfway()
        if layer_idx >= len(self.layers):
            self._refuse_layer(layer_idx)
        if layer_idx <= self._last_updated:
            # a forward begins: asked once, as a config of transformers takes its time to answer
            self._dense_asked = self._attention_config._attn_implementation == "flex_attention"
            if not torch.compiler.is_compiling():
                self._prefill.begin(key_states.shape[2], key_states.device)
        self._last_updated = layer_idx
        if layer_idx <= self._first_paged:
            self._prepare_update(key_states, value_states, layer_idx)
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

    def _refuse_halfway(self) -> None:
        """Raise InterruptedForwardError: a change of all layers stopped half-way."""
        raise InterruptedForwardError(
            "an earlier forward stopped half-way, so that layers hold different texts; call reset() and start again"
        )

    def _refuse_layer(self, layer_idx: int) -> None:
        """Raise CacheMismatchError for a layer that this cache has not: the layers before it hold another model's tokens now."""
        self.halfway = True
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
