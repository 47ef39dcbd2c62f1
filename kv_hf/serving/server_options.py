"""What `kv-hf serve` is asked for: the cache of every request and the store between them, checked before a model is loaded."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cache.prefix_store import PrefixStore
from ..cache_names import parse_cache_name
from ..config import CacheConfig
from ..errors import CacheOptionError
from ..formats import cache_names, is_cache_name
from ..printable import short
from ..units import parse_bytes

STORE = "1GiB"
OF_BATCHES = "max_bytes"  # an option that continuous batching alone reads


@dataclass(frozen=True)
class ServerOptions:
    """The cache of a server's requests.

    Attributes:
        name: of a paged cache, without options.
        cache_config: options beside it.
        store_bytes: bound of the prefix store of each model, 0 for none.
        batching: whether requests run in continuous batches.
    """

    name: str
    cache_config: Mapping[str, Any]
    store_bytes: int
    batching: bool = False

    @classmethod
    def parse(
        cls,
        cache: str,
        cache_config: str | None = None,
        prefix_store: str | None = None,
        batching: bool = False,
    ) -> "ServerOptions":
        """Read the options as the command line has them.

        Args:
            cache: "paged_int4", with options as in "paged_int4:recent_tokens=32".
            cache_config: a JSON object of options, which win over those beside the name; None for none.
            prefix_store: a size such as "1GiB"; "0" for no store; None for what `batching` calls for.
            batching: whether requests run in continuous batches, which share prefixes in a pool of their own.
        Raises: CacheOptionError or ValueError naming argument, value and rule.
        """
        name, beside = parse_cache_name(cache)
        if not is_cache_name(name):
            raise CacheOptionError(
                f"--cache must be a paged cache ({', '.join(cache_names())}), got {cache!r}: transformers serve has "
                "transformers' own caches"
            )
        if prefix_store is None:
            prefix_store = "0" if batching else STORE
        size = parse_bytes("--prefix-store", prefix_store, least=0)
        if size and batching:
            raise CacheOptionError(
                f"--prefix-store {prefix_store} is for requests that run one by one; --continuous-batching shares prefixes in its "
                "own pool of pages: leave --prefix-store out"
            )
        found = cls(name, {**beside, **_cache_options(cache_config)}, size, batching)
        CacheConfig.from_options(name, found.cache_config)  # what is wrong without a store
        try:
            CacheConfig.from_options(name, found.options_of(found.make_store()))
        except CacheOptionError as error:
            raise CacheOptionError(f"{error}; --prefix-store 0 serves without a store") from error
        if not batching and OF_BATCHES in found.cache_config:
            raise CacheOptionError(
                f"{OF_BATCHES} bounds the cache of --continuous-batching; requests that run one by one are bounded by max_pages "
                "(with --prefix-store 0), and what is kept between them by --prefix-store"
            )
        return found

    def make_store(self) -> PrefixStore | None:
        """Make the prefix store of one model, which keeps prompts and answers; None where none is asked for."""
        return PrefixStore(self.store_bytes, keep_answers=True) if self.store_bytes else None

    def options_of(self, store: PrefixStore | None) -> dict[str, Any]:
        """Return the `cache_config` of a request that runs alone, with the store of its model, or None."""
        found = {name: value for name, value in self.cache_config.items() if name != OF_BATCHES}
        return found if store is None else {**found, "prefix_store": store}


def json_object(argument: str, text: str, rule: str) -> dict[str, Any]:
    """Return the object that `text` holds as JSON. Raises CacheOptionError naming argument and rule for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CacheOptionError(f"{argument} must be {rule}, got {short(text)}: {error}") from error
    if not isinstance(found, dict):
        raise CacheOptionError(f"{argument} must be {rule}, got {short(text)}")
    return found


def _cache_options(text: str | None) -> dict[str, Any]:
    """Return the options of --cache-config. Raises CacheOptionError for what is none, and for a store."""
    if text is None:
        return {}
    found = json_object(
        "--cache-config", text, """a JSON object of cache options such as '{"recent_tokens": 32}'"""
    )
    if "prefix_store" in found:
        raise CacheOptionError(
            "--cache-config names prefix_store, which the server makes: give its size by --prefix-store, as in "
            f"--prefix-store {STORE}"
        )
    return found
