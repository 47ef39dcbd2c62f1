"""Caches in files and in other caches: what every kind of cache does alike with its state."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch

from ..checks import check_int
from ..config import CacheConfig
from ..errors import CacheMismatchError
from ..printable import short
from .model_mark import model_mark
from .model_shape import decoder_config, signature
from .origin import Origin
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
        differing = [name for name, value in self.model_signature.items() if value != theirs[name]]
        if differing:
            name = differing[0]
            raise CacheMismatchError(
                f"this cache was built for a model with {name}={self.model_signature[name]!r}, got a model with "
                f"{name}={theirs[name]!r}; use one cache per model"
            )

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
        self.note_weights(model_mark(model), type(model).__name__)
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
            cache.note_file(token_ids, int(held.get_seq_length()))
            cache.note_weights(model_mark(model), type(model).__name__)
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
