"""The formats of one layer: of its keys and values, or of its latents and RoPE keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..backends.registry import layout_for
from ..config import CacheConfig
from ..errors import CacheOptionError
from ..formats import Scheme, k_rope_scheme, key_scheme, value_scheme
from ..notices import warn_once
from ..spec import LATENT_SIDES, ROWS, PageSpec


@dataclass(frozen=True)
class LayerFormats:
    """Formats of one layer.

    Attributes:
        keys, values: of an ordinary attention layer.
        page_size: tokens in a page.
        rank: kv_lora_rank of a layer with multi-head latent attention (MLA), None of any other.
        latent: format of its latents.
        k_rope: name of the format of the RoPE keys beside them.
        key_group_size, value_group_size: as in CacheConfig, for formats in place of those of `keys` and `values`.
        widen: as in CacheConfig.
    """

    keys: Scheme
    values: Scheme
    page_size: int
    rank: int | None = None
    latent: Scheme | None = None
    k_rope: str = "exact"
    key_group_size: int | None = None
    value_group_size: int | None = None
    widen: str = "auto"

    @classmethod
    def of(
        cls, options: CacheConfig, layer_idx: int, num_layers: int, rank: int | None = None
    ) -> "LayerFormats":
        """Return what `options` say about a layer. Raises CacheOptionError where they do not fit it."""
        keys, values = options.schemes(layer_idx, num_layers)
        if rank is None:
            return cls(
                keys,
                values,
                options.page_size,
                key_group_size=options.key_group_size,
                value_group_size=options.value_group_size,
                widen=options.widen,
            )
        if options.value_group_size is not None:
            raise CacheOptionError(
                f"value_group_size={options.value_group_size}: a model with latent attention stores no values; its latents "
                "are read by key_group_size (4 and 2 bits) and latent_group_size (8 bits)"
            )
        latent = options.latent_scheme(layer_idx, num_layers)
        latent.resolve(options.page_size, rank, "latent")
        k_rope = options.k_rope_format(latent)
        return cls(keys, values, options.page_size, rank, latent, k_rope)

    def spec(self, **sizes: Any) -> PageSpec:
        """Return what pages of such keys and values are like; transformers hands latents over as keys of one head.

        Args:
            sizes: as for PageSpec.build: num_kv_heads, key_dim, value_dim, dtype, and value_dtype and layout where they are others.
        Raises: CacheOptionError where a format cannot store them.
        """
        if self.latent is None or (sizes["num_kv_heads"], sizes["key_dim"]) != (1, self.rank):
            return PageSpec.build(self.keys, self.values, page_size=self.page_size, **sizes)
        k_rope = k_rope_scheme(self.k_rope, sizes["value_dim"])
        return PageSpec.build(
            self.latent, k_rope, page_size=self.page_size, sides=LATENT_SIDES, **sizes
        )

    @property
    def if_widening(self) -> "LayerFormats | None":
        """These formats where a side may get a wider one: latents keep theirs, and nothing is wider than exact."""
        exact = self.keys.is_exact and self.values.is_exact
        return None if exact or self.widen != "auto" or self.latent is not None else self

    def widened_spec(
        self, names: Mapping[str, str], like: PageSpec, device: torch.device
    ) -> PageSpec:
        """Return `spec` with other formats for some sides ("keys", "values"), the sizes and dtypes of `like`, and the layout of `device`.

        That may be another than the layout of `like`, whose codes may not fill whole words.
        """
        made = self
        if "keys" in names:
            made = replace(made, keys=key_scheme(names["keys"], self.key_group_size))
        if "values" in names:
            made = replace(made, values=value_scheme(names["values"], self.value_group_size))
        keys, values = like.sides
        return made.spec(
            num_kv_heads=keys.num_kv_heads,
            key_dim=keys.head_dim,
            value_dim=values.head_dim,
            dtype=keys.dtype,
            value_dtype=values.dtype,
            layout=layout_for(device),
        )

    def are_latents(self, keys: torch.Tensor) -> bool:
        """Say whether `keys` [batch, num_kv_heads, q_len, ..] of a model are latents, which have a single head."""
        return self.latent is not None and keys.shape[1] == 1 and keys.shape[-1] == self.rank

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


FEW = 2  # bits


# formats of keys and values -> (cache, facts found) of 20 that were planted in 2,048 tokens; DynamicCache finds all. A test compares
# the rows of results/long_context.jsonl
MEASURED = {
    ("int2_mixed", "int2_rotated"): ("paged_int2", 14),
    ("int2", "int2"): ("paged_int2_v1", 4),
}


def _figures(names: tuple[str, str]) -> str:
    cache, found = MEASURED[names]
    return (
        f"{cache} ({names[0]} keys, {names[1]} values) found {found} of 20 facts that were planted in 2,048 tokens "
        "(smollm2-135m), DynamicCache 20"
    )


def warn_of_two_bits(layers: Sequence[LayerFormats]) -> None:
    """Warn once where keys and values of most layers have codes of 2 bits (latents: where these have)."""
    few = [one for one in layers if _is_few(one)]
    if 2 * len(few) <= len(layers):
        return
    names = [one.names for one in few]
    keys, values = most = max(names, key=names.count)
    other = f"{keys} and {values} were not measured, {_figures(next(iter(MEASURED)))}"
    figures = _figures(most) if most in MEASURED else other
    warn_once(
        f"two bits {keys} {values}",
        f"Keys and values of 2 bits lose single facts of a text: {figures}. int8 is the safe choice, int4 where memory is "
        "short (docs/formats.md)",
    )


def _is_few(formats: LayerFormats) -> bool:
    sides = (formats.latent,) if formats.latent is not None else (formats.keys, formats.values)
    return all(0 < scheme.bits <= FEW for scheme in sides)
