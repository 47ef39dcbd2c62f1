"""The paged cache: a transformers `Cache` whose layers live in pages. Its layers, copies, shared pages and states."""

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from transformers.cache_utils import DynamicCache

from ..bridge.handles import view_of, warn_dense
from ..bridge.masks import MaskLength, check_padding_mask, takes_length
from ..config import CacheConfig
from ..errors import (
    CacheMismatchError,
    CacheOptionError,
    InterruptedForwardError,
)
from ..pages import moved
from ..pages.cpu_memory import PrefillWatch
from ..pages.moved import persistent_tensors
from ..pages.offload import OffloadMemory
from ..pages.storage import Pair
from ..spec import MemoryReport
from . import compiled, saved
from .build import MadeOfOptions, make_room, page_layers
from .layer import HandleLayer, PagedLayer
from .layer_kinds import HybridLayer
from .model_shape import (
    attention_config,
    cross_config,
    decoder_config,
    forget_tokens,
    is_chunked,
    is_dummy,
    kept_layers,
    removed_by_crop,
    signature,
)
from .origin import Origin, check_token_ids
from .report import LayerReport, measure_memory, one_line, report_layers
from .states import check_crop


def filled_layer(layers: Sequence[Any], layer_idx: int) -> int:
    """Return `layer_idx`, or where it is not run here the first layer behind it that has tokens, of its own kind if there is one.

    Under pipeline parallelism a process runs a run of the layers and its cache fills only those, but models ask
    the first layer of a kind for lengths. An empty layer with no filled one before it is either empty like all
    others, or not run here: layers run in order.
    """
    if layer_idx >= len(layers) or any(map(_filled, layers[: layer_idx + 1])):
        return layer_idx
    kind = _kind(layers[layer_idx])
    filled = [i for i in range(layer_idx + 1, len(layers)) if _filled(layers[i])]
    # no min() with a key, of which torch.compile knows nothing
    return ([i for i in filled if _kind(layers[i]) == kind] or filled or [layer_idx])[0]


def _kind(layer: Any) -> tuple[type, int | None]:
    return type(layer), getattr(layer, "sliding_window", None)


def _filled(layer: Any) -> bool:
    return bool(getattr(layer, "is_initialized", False)) and not is_dummy(layer)


class PagedCache(MadeOfOptions, DynamicCache):
    """Keys and values in fixed-size pages, stored exactly or quantized.

        cache = kv_hf.PagedCache(model.config, keys="int8", values="int4", page_size=64)
        model.generate(**inputs, past_key_values=cache)

    Without formats nothing is quantized: `from_implementation(model.config, "paged_int8")` takes those of a name.

    With `max_length` it makes room for all of a text at the first forward and holds no longer one; a decode step then compiles as
    one graph (compiled.py), and generate() can replay it as a CUDA graph.

    Args:
        config: the model's config (`model.config`).
        cache_config: a kv_hf.CacheConfig, or a dict of options; options by name win over it.
        keys, values: exact (the default), fp8, int8, int4, int2 or another format; `values` defaults to the format of
            `keys`.
        **options: the other fields of `kv_hf.CacheConfig`.
    Attributes:
        options: of the cache.
        origin: the model that it was built for, and what is known of its tokens.
        paged_layers: those of `layers` that live in pages.
        groups: rows and lengths, one for all layers that see the same tokens; full attention first.
        forward: the forward in progress, by which one that stopped is noticed.
        page_memory: where sealed pages lie.
        _compiled: what steps keep that are not run by Python; None where the cache has no max_length.
        _masks_skippable: whether kernels hide by themselves what a mask of left padding hides, in all layers.
    Raises: CacheOptionError for a bad option, UnsupportedModelError for a model without attention layers.
    """

    _layer_class = PagedLayer
    _flex = False  # the model's attention is flex_attention, which is traced: it gets no handles
    # where the first layer's keys came from; None: it holds no tokens, which compiled code depends on
    _tokens_on: torch.device | None = None
    _compiled: Any = None

    def _build(self, config: Any, options: CacheConfig) -> None:
        """Make all parts. Raises CacheOptionError for options that do not fit, UnsupportedModelError for the model."""
        options.refuse("encoder", "is for encoder-decoder models (PagedEncoderDecoderCache)")
        options.refuse("batch", "bounds the cache of continuous batching, and max_pages this one")
        decoder = decoder_config(config)
        DynamicCache.__init__(self, config=decoder)
        self.options = options
        self._config = decoder
        self._attention_config = attention_config(config)
        self.origin = Origin(signature(decoder))
        self._prefill = PrefillWatch()
        self._kept = kept_layers(decoder)
        # a model that attends to images in layers of the same cache asks each layer whether it has keys
        kind = HandleLayer if self._kept else self._layer_class
        self.layers, self.forward, self.page_memory = page_layers(
            self.layers, decoder, options, self._kept, kind
        )
        self.groups = self.forward.groups
        self.paged_layers = [layer for layer in self.layers if isinstance(layer, PagedLayer)]
        # a mask is made once for all layers of a kind: it is left out only where the kernels read all of them
        self._masks_skippable = not is_chunked(decoder) and all(
            isinstance(layer, PagedLayer) or linear or is_dummy(layer)
            for layer, linear in zip(self.layers, self.is_linear, strict=True)
        )
        self._number()

    def _number(self) -> None:
        """Let operators of compiled steps find this cache, where it has a max_length."""
        if self.options.max_length is not None:
            self._compiled = compiled.CompiledSteps(self)

    @property
    def token_ids(self) -> torch.Tensor | None:
        """Ids of the text whose first columns this cache holds, [rows, columns] int64, padding included, as far as they are known."""
        return self.origin.token_ids

    def fresh(self, **changes: Any) -> Self:
        """Return an empty cache of the same options, but for `changes`, for the same model."""
        return type(self).from_options(self._config, replace(self.options, **changes))

    @property
    def _group(self) -> Any:
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
        """Append keys and values of one layer; return what this forward's attention shall read.

        Args:
            key_states: [batch, num_kv_heads, q_len, key_dim], the model's dtype.
            value_states: [batch, num_kv_heads, q_len, value_dim].
            layer_idx: position in the model.
        Returns: keys and values [batch, num_kv_heads, seen, ..]: see `PagedLayer.update`.
        Raises: the errors of `PagedLayer.update`; InterruptedForwardError after a forward that stopped half-way.
        """
        if torch.compiler.is_dynamo_compiling() and self._compiled is not None:
            return compiled.update(self, key_states, value_states, layer_idx)
        if layer_idx >= len(self.layers):
            self._refuse_layer(layer_idx)
        layer: Any = self.layers[layer_idx]
        if isinstance(layer, PagedLayer) and layer.seen == layer.group.seen:
            self._begin(key_states, value_states)
        found: Pair = layer.update(key_states, value_states, *args, **kwargs)
        if self._tokens_on is None:
            self._tokens_on = key_states.device
        if self._flex and (view := view_of(*found)) is not None:
            warn_dense("flex_attention")
            return view.dense("keys"), view.dense("values")
        return found

    def update_conv_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Move the state of a convolution as DynamicCache does."""
        self.forward.states_moved = True
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Move a state of linear attention as DynamicCache does."""
        self.forward.states_moved = True
        return super().update_recurrent_state(*args, **kwargs)

    def _begin(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Note what holds for a whole forward, which begins: a config of transformers takes its time to answer."""
        recorded = self._compiled is not None and self._compiled.fixed is not None
        if not recorded and moved.is_recorded(keys.device):
            raise CacheOptionError(
                "a CUDA graph of a forward over a paged cache would write to the same places at every replay, because Python plans "
                "each step. Let generate() replay graphs of its own (cuda_graph), or run this forward outside of the capture"
            )
        self._flex = self._attention_config._attn_implementation == "flex_attention"
        self._prefill.begin(keys.shape[2], keys.device)
        if isinstance(self.page_memory, OffloadMemory):
            make_room(self, keys, values)

    def _refuse_layer(self, layer_idx: int) -> None:
        """Raise CacheMismatchError for a layer that this cache has not: the layers before it hold another model's tokens now."""
        self.forward.changing = True
        raise CacheMismatchError(
            f"layer_idx={layer_idx}: this cache was built for a model of {len(self.layers)} layers "
            f"(model_type={self.origin.sizes['model_type']!r}), and a model of more writes to it. Its layers hold "
            "tokens of that forward now: call cache.reset(), and make a cache of the other model's config"
        )

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the columns seen by a layer, padding included; of a layer that another process runs, those of one here.

        While a step is compiled or recorded it is a tensor, [], int64: the number differs from step to step.
        """
        if self._compiled is not None:
            if torch.compiler.is_dynamo_compiling() and self._tokens_on is not None:
                return compiled.columns(self)
            if self._compiled.fixed is not None:
                return next(iter(self._compiled.fixed.values())).seen
        if layer_idx < len(self.layers) and (seen := getattr(self.layers[layer_idx], "seen", 0)):
            return seen
        return super().get_seq_length(filled_layer(self.layers, layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (kv_length, kv_offset) for the mask of the next `query_length` columns of a layer.

        The length also says where the mask function reports left padding.
        """
        if self._compiled is not None:
            most = self.options.max_length or 0
            if torch.compiler.is_dynamo_compiling():
                return (query_length if self._tokens_on is None else most), 0
            if self._compiled.fixed is not None:
                return MaskLength(most, self), 0
        layer: Any = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if getattr(layer, "seen", 0):
            length, offset = layer.get_mask_sizes(query_length)
        else:
            filled = filled_layer(self.layers, layer_idx)
            length, offset = super().get_mask_sizes(query_length, filled)
        if self._attention_config._attn_implementation in takes_length:
            return MaskLength(length, self), offset
        return length, offset

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Return max_length, or -1 without it."""
        return self.options.max_length or -1

    def reset(self) -> None:
        """Forget all tokens and give the memory back; afterwards any batch size fits."""
        self.origin.forget()
        self._tokens_on = None
        if self._compiled is not None:
            self._compiled.clear()
        self.forward.changing = True
        for group in self.groups:
            group.reset()
        for layer in self.layers:
            if isinstance(layer, PagedLayer):
                layer.forget()
            else:
                with torch.inference_mode():  # states that were made in it are zeroed nowhere else
                    layer.reset()
                forget_tokens(layer)
        self.page_memory.clear()
        self.forward.clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens of all layers, or of none where some layer cannot.

        `-n` removes n; before transformers 5.18 also `n` keeps n. A crop of more tokens than there are leaves none, as with
        DynamicCache. A crop that ends inside a sealed page decodes that page back into the window: exact pages lose nothing,
        encoded ones keep their rounding (said once). With past recording on, what is left stands confirmed, also by a crop of
        0, and may be sealed from the next forward on.
        """
        count = removed_by_crop(tokens_to_remove, self._group.seen)
        self.forward.check()
        for group in self.groups:
            group.check_crop(count)
        layer: Any
        for layer in self.layers:
            check_crop(layer, count, self._group.seen)
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
                layer.follow(layer.group.step)
        if not self._group.seen:
            self._tokens_on = None
        self.origin.crop(self._group.seen)

    # -- rows: one list of row numbers for all layers, read from the device once ---------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i continue the former row beam_idx[i]; sealed pages are shared, not copied."""
        self._select_rows(beam_idx.tolist(), "reorder_cache")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` (numbers [n] or a bool mask [rows])."""
        self.forward.check()  # or a mask might not fit the rows that a change has left
        if rows := len(self._group):
            self._select_rows(torch.arange(rows)[torch.as_tensor(indices).cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times; sealed pages are shared, not copied."""
        if rows := len(self._group):
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
                # states of linear attention know reorder_cache only
                if not isinstance(layer, PagedLayer):
                    getattr(layer, method, layer.reorder_cache)(indices)
                elif layer.group.step is not None:
                    layer.follow(layer.group.step)
        self.origin.select(sources)

    # -- what transformers does not ask for ----------------------------------------------------------------

    @contextmanager
    def reading_everything(self) -> Iterator[None]:
        """Have forwards within read all pages, whatever the option `read` says: a prompt reads everything."""
        with ExitStack() as stack:
            for group in self.groups:
                stack.enter_context(group.reading.of_everything())
            yield

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
        check_token_ids(token_ids, len(self._group), seen)
        self.origin.note_text(token_ids[:, :seen], 0, seen)

    def observe_padding(self, attention_mask: torch.Tensor | None) -> None:
        """Learn the left padding of rows that hold no token yet, so that padding is never stored.

        transformers' mask functions do this by themselves; code that calls a model without them may do it before the first
        forward.

        Args:
            attention_mask: [batch, columns], 0 or False = padding; None changes nothing.
        Raises: CacheMismatchError for anything else, for another batch size, and once all rows hold tokens.
        """
        if attention_mask is not None:
            check_padding_mask(attention_mask, len(self._group), not self._group.needs_padding())
            for group in self.groups:
                group.observe_padding(attention_mask)

    def memory(self) -> MemoryReport:
        """Return the bytes of all tensors that this cache holds, by part."""
        return measure_memory(self.layers, self.groups)

    def report(self) -> list[LayerReport]:
        """Return, for each layer, how it is cached and why."""
        return report_layers(self.layers, self._kept)

    def __repr__(self) -> str:
        return one_line(self)

    # -- copies, states and shared pages -------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an independent cache that shares this one's sealed pages, which never change.

        The exact windows are copied. Both caches draw new pages from one pool: `max_pages` bounds them together.
        """
        own = ("options", "_config", "_attention_config")
        shared = (*self.page_memory.shared_parts(), *(getattr(self, name) for name in own))
        memo.update((id(part), part) for part in shared)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        with persistent_tensors():
            vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        copied._number()
        return copied

    def __copy__(self) -> Self:
        # two caches with one set of rows would pull the rug from under each other
        return copy.deepcopy(self)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out by what this process finds the cache."""
        return {**vars(self), "_compiled": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a pickle; compiled steps find the cache by another number here."""
        if torch.is_inference_mode_enabled():  # nothing could write to what was read in it
            with persistent_tensors():
                state = copy.deepcopy(state)
        vars(self).update(state)
        self._number()

    def _check_done(self) -> None:
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
        self._check_done()
        for group in self.groups:
            group.check_integrity()

    def _held_rows(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return (tokens, ids of its sealed pages) of each row. Raises InterruptedForwardError after a forward that stopped half-way."""
        self._check_done()
        group = self._group
        return list(zip(group.lengths().tolist(), group.batch.pages, strict=True))

    # -- models and files ----

    def save(
        self, path: str | os.PathLike[str], model: Any, token_ids: torch.Tensor | None = None
    ) -> None:
        """Write this cache of `model` into a safetensors file, which takes the place of `path` when it is complete.

        Args:
            model: whose keys and values these are; only the same weights and active adapters can load them.
            token_ids: [rows, columns seen or more], padding included, for the loaded cache's `token_ids`; None: as far as this
                cache knows all of its text, its own.
        Raises: CacheMismatchError for an empty cache, a model of other sizes or weights, other token ids, and where generate()
            filled the cache with other adapters than the model has now;
            InterruptedForwardError after a forward that stopped half-way; UnsupportedModelError where transformers
            keeps keys of layers; OSError where the disk refuses. The old file then is what it was.
        """
        saved.save(self, path, model, token_ids)

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
        return saved.load(cls, path, model, device, kernel=kernel, max_length=max_length)


class CrossCache(PagedCache):
    """The cross-attention half of an encoder-decoder cache, in pages of the formats of the self-attention half.

        EncoderDecoderCache(kv_hf.PagedCache(config, keys="int4"), kv_hf.CrossCache(config, keys="int4"))

    Models call `update()` once per text, in its first forward, which attends to the exact tensors that it gave;
    later steps read the `keys` and `values` of a layer, which are handles here. Every column of the encoder is
    stored, its padding too, which the model masks. Arguments and errors are those of PagedCache;
    `recent_tokens` and what a step reads (`read`), which are about text that grows, are not used.
    """

    _layer_class = HandleLayer

    def _build(self, config: Any, options: CacheConfig) -> None:
        exact = replace(options, read=None, recent_tokens=0)
        super()._build(cross_config(config), exact)
        self._attention_config = attention_config(config)
        for layer in self.layers:
            if isinstance(layer, HandleLayer):
                layer.attention_of = self._attention_config
