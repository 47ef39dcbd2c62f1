"""What 2 bits of keys and values cost in facts: the rates that were measured, and the warning that quotes them."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..notices import warn_once
from .layer_formats import LayerFormats

FEW = 2  # bits


@dataclass(frozen=True)
class NeedleRate:
    """Planted facts that were found again, from the rows of results/long_context.jsonl (a test compares them).

    Attributes:
        keys, values: formats.
        cache: name of the cache in the rows.
        found, dynamic: facts that were found through this cache, and through DynamicCache.
        asked: facts that were asked for.
        tokens: length of the texts.
        model: name of the model in the rows.
    """

    keys: str
    values: str
    cache: str
    found: int
    dynamic: int
    asked: int
    tokens: int
    model: str

    def __str__(self) -> str:
        return (
            f"{self.cache} ({self.keys} keys, {self.values} values) found {self.found} of {self.asked} facts that were planted in "
            f"{self.tokens:,} tokens ({self.model}), DynamicCache {self.dynamic}"
        )


MEASURED = (
    NeedleRate("int2_mixed", "int2_rotated", "paged_int2", 14, 20, 20, 2048, "smollm2-135m"),
    NeedleRate("int2", "int2", "paged_int2_v1", 4, 20, 20, 2048, "smollm2-135m"),
)


def warn_of_two_bits(layers: Sequence[LayerFormats]) -> None:
    """Warn once where keys and values of most layers have codes of 2 bits (latents: where these have)."""
    few = [one for one in layers if _is_few(one)]
    if 2 * len(few) <= len(layers):
        return
    names = [one.names for one in few]
    keys, values = max(names, key=names.count)
    rates = [one for one in MEASURED if (one.keys, one.values) == (keys, values)]
    figures = str(rates[0]) if rates else f"{keys} and {values} were not measured, {MEASURED[0]}"
    warn_once(
        f"two bits {keys} {values}",
        f"Keys and values of 2 bits lose single facts of a text: {figures}. int8 is the safe choice, int4 where memory is "
        "short (docs/formats.md)",
    )


def _is_few(formats: LayerFormats) -> bool:
    sides = (formats.latent,) if formats.latent is not None else (formats.keys, formats.values)
    return all(0 < scheme.bits <= FEW for scheme in sides)
