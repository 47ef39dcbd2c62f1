"""The formats of one layer: of its keys and values, or of its latents and RoPE keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..backends.dispatch import layout_for
from ..config import CacheConfig
from ..errors import CacheOptionError
from ..formats import Scheme, format_names, k_rope_scheme, key_scheme, value_scheme
from ..notices import warn_once
from ..spec import LATENT_SIDES, ROWS, PageSpec


@dataclass(frozen=True)
class LayerFormats:
    """Formats of one layer.

    Attributes:
        keys, values: of an ordinary attention layer.
        options: of the cache, the same for all of its layers.
        rank: kv_lora_rank of a layer with multi-head latent attention (MLA), None of any other.
        latent: format of its latents.
        k_rope: name of the format of the RoPE keys beside them.
    """

    keys: Scheme
    values: Scheme
    options: CacheConfig = field(compare=False)
    rank: int | None = None
    latent: Scheme | None = None
    k_rope: str = "exact"

    @classmethod
    def of(
        cls, options: CacheConfig, layer_idx: int, num_layers: int, rank: int | None = None
    ) -> "LayerFormats":
        """Return what `options` say about a layer. Raises CacheOptionError where they do not fit it."""
        keys, values = options.schemes(layer_idx, num_layers)
        if rank is None:
            return cls(keys, values, options)
        latent = options.latent_scheme(layer_idx, num_layers)
        latent.resolve(options.page_size, rank, "latent")
        k_rope = options.k_rope_format(latent)
        return cls(keys, values, options, rank, latent, k_rope)

    def spec(self, **sizes: Any) -> PageSpec:
        """Return what pages of such keys and values are like; transformers hands latents over as keys of one head.

        Args:
            sizes: as for PageSpec.build: num_kv_heads, key_dim, value_dim, dtype, and value_dtype and layout where they are others.
        Raises: CacheOptionError where a format cannot store them.
        """
        page_size = self.options.page_size
        if self.latent is None or (sizes["num_kv_heads"], sizes["key_dim"]) != (1, self.rank):
            return PageSpec.build(self.keys, self.values, page_size=page_size, **sizes)
        k_rope = k_rope_scheme(self.k_rope, sizes["value_dim"])
        return PageSpec.build(self.latent, k_rope, page_size=page_size, sides=LATENT_SIDES, **sizes)

    @property
    def may_widen(self) -> bool:
        """Whether a side may get a wider format: latents keep theirs, and nothing is wider than exact."""
        exact = self.keys.is_exact and self.values.is_exact
        return not exact and self.options.widen == "auto" and self.latent is None

    def widened(self, names: Mapping[str, str]) -> "LayerFormats":
        """Return these formats with others for some sides ("keys", "values")."""
        scheme, size = {"keys": key_scheme, "values": value_scheme}, self.options.group_size_of
        made: dict[str, Any] = {side: scheme[side](names[side], size(side)) for side in names}
        return replace(self, **made)

    def spec_of(self, keys: torch.Tensor, values: torch.Tensor) -> PageSpec:
        """Return `spec` for keys and values [batch, num_kv_heads, q_len, ..], in the layout of their device."""
        return self.spec(
            num_kv_heads=keys.shape[1],
            key_dim=keys.shape[-1],
            value_dim=values.shape[-1],
            dtype=keys.dtype,
            value_dtype=values.dtype,
            layout=layout_for(keys.device),
        )

    @property
    def names(self) -> tuple[str, str]:
        """Names of the two formats of a page."""
        if self.latent is not None:
            return self.latent.name, self.k_rope
        return self.keys.name, self.values.name


def planned_specs(
    sizes: dict[str, Any] | None,
    formats: list[LayerFormats],
    dtype: torch.dtype = torch.float32,
    layout: str = ROWS,
) -> list[PageSpec]:
    """Return what the pages of each layer will be like, as far as `sizes` (model_shape.page_sizes) are known.

    Without sizes the list is empty: such models are checked on their first keys. Raises CacheOptionError where a
    format cannot store them.
    """
    return [one.spec(**sizes, dtype=dtype, layout=layout) for one in formats] if sizes else []


def check_no_latents(options: CacheConfig, model: str) -> None:
    """Raise CacheOptionError for an option about latents, which a model, in words, does not cache.

    Beside a format that latents cannot have, `latent` is what a cache name says for other models.
    """
    one_sided = {options.keys, options.values} - {*format_names("latent")}
    if isinstance(options.latent, Mapping) or (options.latent and not one_sided):
        raise CacheOptionError(
            f"latent={options.latent!r} is for models with multi-head latent attention (MLA), which {model} is not; leave it out"
        )


FEW = 2  # bits


def warn_of_two_bits(layers: Sequence[LayerFormats]) -> None:
    """Warn once where keys and values of most layers have codes of 2 bits (latents: where these have)."""
    sides = [(one.keys, one.values) if one.latent is None else (one.latent,) for one in layers]
    few = sum(all(0 < scheme.bits <= FEW for scheme in pair) for pair in sides)
    if 2 * few > len(layers):
        warn_once(
            "two bits",
            "Keys and values of 2 bits lose single facts of a text, as names and numbers (docs/long_context.md, planted facts). "
            "int8 is the safe choice, int4 where memory is short",
        )
