"""The caches that a plan compares, by name, and what each would hold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..cache_names import cache_label, parse_cache_name
from ..checks import check_int
from ..config import CacheConfig
from ..config_given import given_options
from ..config_reading import is_reading_part
from ..errors import CacheOptionError
from ..formats import cache_names, is_cache_name
from ..spec import MemoryReport
from ..units import parse_tokens
from .inventory import Inventory
from .predict import predict

EXACT_CACHES = ("dynamic", "static")  # transformers' own whose bytes are predicted
NOT_PLANNED = {"offloaded": "the layer that is being computed"}
FAR_PAGES = 1 << 13  # a power of two, for which storage has no page to spare (spec.page_capacity)


def planned_caches() -> tuple[str, ...]:
    """Return the names of caches whose bytes are predicted."""
    return (*EXACT_CACHES, *cache_names())


def default_caches() -> tuple[str, ...]:
    """Return what a plan compares where no cache is named."""
    return (*planned_caches(), "paged_int4:offload=cpu")


@dataclass(frozen=True)
class Choice:
    """A cache to plan for.

    Attributes:
        name: as the user wrote it, the label of its row.
        kind: what `predict` calls it: "dynamic", "static" or "paged".
        options: of a paged cache.
        length: columns that a static cache is made for; None: as many as the longest row has tokens.
    """

    name: str
    kind: str
    options: CacheConfig | None = None
    length: int | None = None

    @classmethod
    def of(
        cls, given: str | CacheConfig, cache_config: CacheConfig | Mapping[str, Any] | None
    ) -> "Choice":
        """Read a name such as "paged_int4:keys=int8", or take options of a paged cache as they are.

        Args:
            cache_config: options of every paged cache that is given by name; those in the name win.
        Raises: CacheOptionError for unknown names and options, and for caches whose bytes are not predicted.
        """
        if isinstance(given, CacheConfig):
            return cls(_label(given), "paged", given)
        if not isinstance(given, str):
            raise CacheOptionError(
                f"caches must be names such as 'paged_int4:keys=int8' or kv_hf.CacheConfig, got {given!r}"
            )
        try:
            base, options = parse_cache_name(given)
        except CacheOptionError:
            raise
        except ValueError as error:
            raise CacheOptionError(str(error)) from None
        if base not in planned_caches():
            raise CacheOptionError(
                f"cache {base!r} is not planned: its bytes depend on {NOT_PLANNED.get(base, 'another package')}; planned "
                f"are {', '.join(planned_caches())}"
            )
        if base == "static":
            length = options.pop("max_length", None)
            if length is not None:
                length = parse_tokens("max_length", length) if isinstance(length, str) else length
                check_int("max_length", length, 1)
            if not options:
                return cls(given, base, length=length)
        if not is_cache_name(base):
            if options:
                takes = "only max_length" if base == "static" else "no options"
                raise CacheOptionError(f"cache {base!r} takes {takes}, got {given!r}")
            return cls(given, base)
        both = {**given_options(cache_config, CacheConfig), **options}
        return cls(cache_label(given), "paged", CacheConfig.from_options(base, both))

    def predict(
        self, inventory: Inventory, row_tokens: Sequence[int], prompt: int | None = None
    ) -> MemoryReport:
        """Return the bytes of rows that hold `row_tokens` tokens, of which `prompt` came at once."""
        return predict(
            inventory,
            self.kind,
            self.options,
            row_tokens=row_tokens,
            prompt=prompt,
            max_length=self.length,
        )

    @property
    def max_length(self) -> int | None:
        """Tokens of a row at most, for which room is made at once; None: rows grow."""
        return self.length if self.options is None else self.options.max_length

    @property
    def page_size(self) -> int:
        """Tokens of a page; 1 where there are no pages."""
        return 1 if self.options is None else self.options.page_size

    @property
    def exact_tokens(self) -> int:
        """Tokens of a row that stay beside the pages for ever."""
        return 0 if self.options is None else self.options.sink_tokens + self.options.recent_tokens

    def slope(self, inventory: Inventory) -> tuple[float, float]:
        """Return the bytes of one more token of one row in the long run, on the device and outside of it.

        Pages only: block tables (4 bytes per page) are not counted. A budget of an offload is taken to be used up: what
        comes then lies outside.
        """
        grown = replace(self, length=None)
        if self.options is not None:
            free = replace(
                self.options,
                max_length=None,
                max_pages=None,
                reserve_tokens=0,
                device_bytes=None,
                device_pages=None,
            )
            grown = replace(grown, options=free)
        widest = max((layer.window or 0 for layer in inventory.layers), default=0)
        if self.options is not None and is_reading_part(self.options):
            # from where on staging buffers stop to grow
            widest = max(widest, self.options.read_from)
        pages = FAR_PAGES
        while pages * self.page_size <= 2 * widest:
            pages *= 2
        reports = [
            grown.predict(inventory, [self.exact_tokens + pages * times * self.page_size])
            for times in (1, 2)
        ]
        tokens = pages * self.page_size
        here = [report.total - report.tables for report in reports]
        outside = [report.offloaded for report in reports]
        return (here[1] - here[0]) / tokens, (outside[1] - outside[0]) / tokens


def choices_of(
    caches: Sequence[str | CacheConfig], cache_config: CacheConfig | Mapping[str, Any] | None
) -> list[Choice]:
    """Return every cache of `caches` as `Choice.of` reads it.

    Raises: CacheOptionError as that does, and for options in `cache_config` that no cache reads.
    """
    options = given_options(cache_config, CacheConfig)
    found = [Choice.of(given, options) for given in caches]
    read = any(
        isinstance(given, str) and choice.kind == "paged"
        for given, choice in zip(caches, found, strict=True)
    )
    if options and not read:
        raise CacheOptionError(
            f"cache_config={options} is for paged caches that are given by name, and caches has none; leave it "
            "out, or put it into the CacheConfig"
        )
    return found


def _label(options: CacheConfig) -> str:
    """Return a name for options that were given without one: the cache name that differs in the fewest, and these."""

    def others(name: str) -> list[str]:
        plain = CacheConfig.from_options(name, None)
        return [
            f"{field.name}={getattr(options, field.name)}"
            for field in fields(options)
            if getattr(options, field.name) != getattr(plain, field.name)
        ]

    found = {name: others(name) for name in cache_names()}
    base = min(found, key=lambda name: len(found[name]))
    return base + (":" if found[base] else "") + ",".join(found[base])
