"""What is measured beside each other: choosers that are simulated, and caches, each with what a step may read."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_hf.cache_names import parse_cache_name
from kv_hf.config import CacheConfig
from kv_hf.config_reading import check_reading, read_budget
from kv_hf.geometry import Geometry
from kv_hf.read_budget import ReadBudget
from measure.reading.choosers import CHOOSERS


@dataclass(frozen=True)
class Contender:
    """A way to read a long text.

    Attributes:
        name: of CHOOSERS, or a paged cache.
        read_tokens: most tokens that a step reads; None: all.
        read_from: tokens from which on pages are chosen.
        read_top_p: part of the attention mass that a step reads; None: no such bound. Of caches alone.
    """

    name: str
    read_tokens: int | None
    read_from: int
    read_top_p: float | None = None

    @property
    def simulated(self) -> bool:
        """Whether exact keys are read, without a store."""
        return self.name in CHOOSERS

    @property
    def cache(self) -> str:
        """The cache's name with its options; of a simulated chooser that of the exact pages whose budget it has."""
        base, given = ("paged_exact", {}) if self.simulated else parse_cache_name(self.name)
        if self.simulated and (page_size := CHOOSERS[self.name].page_size):
            given = {"page_size": page_size}
        bounds = {"read_tokens": self.read_tokens, "read_top_p": self.read_top_p}
        bounds = {name: bound for name, bound in bounds.items() if bound is not None}
        if bounds:
            given = {**given, **bounds, "read_from": self.read_from}
        return ":".join(filter(None, [base, ",".join(f"{k}={v}" for k, v in given.items())]))

    @property
    def options(self) -> CacheConfig:
        """The options of `cache`."""
        return CacheConfig.from_options(*parse_cache_name(self.cache))

    @property
    def places(self) -> Geometry:
        """Where the tokens of a row lie."""
        own = self.options
        return Geometry(own.page_size, own.sink_tokens, own.recent_tokens)

    @property
    def budget(self) -> ReadBudget | None:
        """What a step reads; None: everything."""
        return read_budget(self.options)

    def check(self) -> None:
        """Raise CacheOptionError for an unknown name, and for tokens that cannot be a budget."""
        check_reading(self.options)


def contenders(
    choosers: Sequence[str],
    caches: Sequence[str],
    read: Sequence[int],
    read_from: int,
    top_p: Sequence[float] = (),
) -> list[Contender]:
    """Return every chooser and cache with every number of tokens, each cache with every mass, and with everything.

    Raises: CacheOptionError as `Contender.check` does.
    """
    found = [Contender(name, tokens, read_from) for name in choosers for tokens in read]
    found += [Contender(name, tokens, read_from) for name in caches for tokens in (None, *read)]
    found += [Contender(name, None, read_from, mass) for name in caches for mass in top_p]
    for one in found:
        one.check()
    return found
