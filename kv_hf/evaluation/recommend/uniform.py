"""The caches with one format of keys and one of values in all layers: what a recipe has to beat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ...config import CacheConfig
from ...errors import CacheOptionError
from ...formats import cache_names, cache_options
from ...recipe import MEASURED_OPTIONS
from .study import Selection, Study

DEFAULTS = {one.name: one.default for one in fields(CacheConfig)}
LATENT = ("latent", "latent_group_size", "k_rope", "mla")  # options of models that get no recipes


@dataclass(frozen=True)
class Uniform:
    """A uniform cache.

    Attributes:
        study: of its options.
        keys, values: its formats.
        predicted: sum of the KL of all keys and of all values, each alone.
        guessed: whether that is the sum with other options than the study's, with which nothing was measured.
    """

    study: Study
    keys: str
    values: str
    predicted: float
    guessed: bool = False

    @property
    def chosen(self) -> Selection:
        """The formats of every layer and side."""
        return self.study.uniform(self.keys, self.values)

    @property
    def name(self) -> str:
        """What commands and tables call it, with the options that are not the default."""
        return cache_of(self.keys, self.values, self.study.options_of(self.chosen))

    @property
    def total_bytes(self) -> int:
        """Bytes of its pages and of everything beside them."""
        pages = self.study.side_total("keys", self.keys)
        return pages + self.study.side_total("values", self.values) + self.study.outside_bytes


def cache_of(keys: str, values: str, options: Mapping[str, Any]) -> str:
    """Return the name of a cache, as kv_hf.cache_names.parse_cache_name reads it; the shortest that says it all."""
    whole = {"keys": keys, "values": values, **options}
    for name in cache_names():
        if _plain(cache_options(name)) == whole:
            return name
    for name in cache_names():
        if _plain(cache_options(name)) == {"keys": keys, "values": values}:
            break
    else:
        name, options = "paged_exact", whole
    return ":".join([name, ",".join(f"{key}={value}" for key, value in options.items())]).rstrip(":")  # fmt: skip


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a name without those at their default and those about latents; formats stay."""
    return {
        name: value
        for name, value in options.items()
        if name in ("keys", "values") or (name not in LATENT and value != DEFAULTS[name])
    }


def fitting_uniforms(studies: Sequence[Study], total_bytes: int) -> list[Uniform]:
    """Return every uniform cache of at most `total_bytes`, the least predicted loss first.

    They are all pairs of formats under the options of each study, and the registered cache names with options of their
    own. (Cache names whose layers differ, or that need an option which no recipe holds, are no uniform caches.)

    Args:
        studies: the first one's options are those that the names with own options add to.
    """
    found = []
    for study in studies:
        for (side, keys), key_loss in study.screened.items():
            for (other, values), value_loss in study.screened.items():
                if (side, other) == ("keys", "values"):
                    found.append(Uniform(study, keys, values, key_loss + value_loss))
    found += _named(studies[0])
    fitting = [one for one in found if one.total_bytes <= total_bytes]
    return sorted(fitting, key=lambda one: (one.predicted, one.total_bytes))


def opponents(fitting: Sequence[Uniform], count: int) -> list[Uniform]:
    """Return those to measure: the first `count`, and all whose loss is a guess."""
    return [*[one for one in fitting if not one.guessed][:count], *[one for one in fitting if one.guessed]]  # fmt: skip


def _named(study: Study) -> list[Uniform]:
    """Return the cache names that have options of their own."""
    found = []
    for name in cache_names():
        own = _plain(cache_options(name))
        keys, values = own.pop("keys", "exact"), own.pop("values", "exact")
        losses = [study.screened.get(one) for one in (("keys", keys), ("values", values))]
        if not own or None in losses or not set(own) <= set(MEASURED_OPTIONS):
            continue
        try:
            variant = study.variant(own)
        except (CacheOptionError, ValueError):  # no cache of this model, or of this context
            continue
        predicted = sum(one or 0.0 for one in losses)
        found.append(Uniform(variant, keys, values, predicted, guessed=True))
    return found
