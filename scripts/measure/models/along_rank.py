"""Latents grouped along the rank at 4 and 2 bits: what kv_hf's own grouping over tokens is compared with."""

from dataclasses import dataclass

from kv_hf.cache.paged_cache import PagedCache
from kv_hf.config import CacheConfig
from kv_hf.evaluation.cache_kinds import CacheKind
from kv_hf.formats import ATTENTION_NAME, Scheme, value_scheme


@dataclass(frozen=True)
class GroupedAlongTheRank(CacheConfig):
    """Options whose 4- and 2-bit latents have a scale and an offset per token and part of the rank, as values have.

    Not an option of kv_hf: it is measured beside what kv_hf stores (docs/mla_accuracy.md), and only the reference reads it.
    """

    def latent_scheme(self, layer_idx: int, num_layers: int) -> Scheme:
        """Return the scheme of one layer's latents: groups of 64 numbers at 4 bits, of 32 at 2."""
        return value_scheme(self.keys, -64 if self.keys == "int4" else -32)


def along_the_rank(name: str) -> CacheKind:
    """Return the cache with latents in format `name` (int4 or int2), grouped along the rank; else as paged_int4."""
    options = GroupedAlongTheRank(keys=name, values=name, kernel="reference")
    return CacheKind(
        f"{name} along the rank",
        ATTENTION_NAME,
        lambda config, _: PagedCache.from_options(config, options),
    )
