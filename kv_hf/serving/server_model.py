"""What `kv-hf serve` is asked for, and what becomes of it for one model: its prefix store, and the cache of each request. Knows no HTTP."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cache.encoder_decoder import PagedEncoderDecoderCache
from ..cache.model_shape import is_encoder_decoder
from ..cache.paged_cache import PagedCache
from ..cache.prefix_store import PrefixStore
from ..cache_names import parse_cache_name
from ..config import CacheConfig
from ..errors import CacheOptionError, PagePoolExhaustedError
from ..formats import cache_names, is_cache_name
from ..geometry import Geometry
from ..printable import short
from ..texts import longest_context
from ..units import parse_bytes

STORE = "1GiB"
NEW_TOKENS = 20  # of an answer that nothing bounds, as generate() has it
OF_BATCHES = "max_bytes"  # an option that continuous batching alone reads


@dataclass(frozen=True)
class ServerOptions:
    """The cache of a server's requests.

    Attributes:
        name: of a paged cache, without options.
        cache_config: options beside it.
        store_bytes: bound of the prefix store of each model, 0 for none.
        batching: whether requests run in continuous batches.
        folder: of the prefix store, None for none.
    """

    name: str
    cache_config: Mapping[str, Any]
    store_bytes: int
    batching: bool = False
    folder: str | None = None

    @classmethod
    def parse(
        cls,
        cache: str,
        cache_config: str | None = None,
        prefix_store: str | None = None,
        batching: bool = False,
        prefix_folder: str | None = None,
    ) -> "ServerOptions":
        """Read the options as the command line has them.

        Args:
            cache: "paged_int4", with options as in "paged_int4:recent_tokens=32".
            cache_config: a JSON object of options, which win over those beside the name; None for none.
            prefix_store: a size such as "1GiB"; "0" for no store; None for what `batching` calls for.
            batching: whether requests run in continuous batches, which share prefixes in a pool of their own.
            prefix_folder: where prefixes outlive the server; None for memory alone.
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
        if batching and prefix_folder is not None:
            size = parse_bytes("--prefix-store", STORE)
        if prefix_folder is not None and not size:
            raise CacheOptionError(
                f"--prefix-folder {prefix_folder} keeps the pages of a prefix store, and --prefix-store 0 makes none: leave one "
                "of them out"
            )
        options = {**beside, **_cache_options(cache_config)}
        found = cls(name, options, size, batching, prefix_folder)
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
        if not self.store_bytes:
            return None
        return PrefixStore(self.store_bytes, keep_answers=True, folder=self.folder)

    def options_of(self, store: PrefixStore | None) -> dict[str, Any]:
        """Return the `cache_config` of a request, with the store of its model, or None."""
        of_model = {} if store is None else {"prefix_store": store}
        return {**self.cache_config, **of_model}


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


class ServedModel:
    """The prefix store of one loaded model, and the cache of its requests.

    Args:
        model: a loaded model; it is not kept.
        options: of the server.
    Raises: KVCacheError where pages cannot be the model's cache, or not with a prefix store.
    """

    def __init__(self, model: Any, options: ServerOptions) -> None:
        self.options = options
        self.store = options.make_store()
        self._default = model.generation_config
        self._longest = int(min(longest_context(model.config), _room(model, options, self.store)))

    def prepare(self, generation_config: Any, prompt_tokens: int, salt: str = "") -> None:
        """Set the server's cache in a request's own `generation_config`, and let its answer end where there is no more room.

        Args:
            generation_config: of this request alone; it is changed.
            prompt_tokens: of its prompt.
            salt: of its tenant, who finds prefixes of that salt alone.
        Raises: CacheOptionError for a request that names a cache or options of its own; PagePoolExhaustedError for a prompt
            without room.
        """
        store = None if self.store is None else self.store.for_tenant(salt)
        options = self.options.options_of(store)
        set_cache(generation_config, self._default, self.options.name, options)
        end_with_room(generation_config, prompt_tokens, self._longest)

    def counts(self) -> dict[str, Any] | None:
        """Return the counts of the store in JSON types, None without one.

        Beside those of PrefixStats: `skipped`, the part of the tokens that no forward computed; `max_bytes`;
        `pages_in_use`, the pages that the store or a running request holds.
        """
        if self.store is None:
            return None
        stats = self.store.stats()
        return {
            **vars(stats),
            "skipped": stats.skipped,
            "max_bytes": self.store.max_bytes,
            "pages_in_use": self.store.page_memory.num_held,
        }


def set_cache(
    generation_config: Any, default: Any, name: str, cache_config: Mapping[str, Any]
) -> None:
    """Set the server's cache in a request's config. Raises CacheOptionError where that names another one, or options of its own.

    Args:
        default: the generation config of the model's own file, from which a request has what it does not say.
    """
    served = {"cache_implementation": name, "cache_config": cache_config}
    for argument, of_server in served.items():
        asked = getattr(generation_config, argument)
        if asked not in (None, getattr(default, argument, None), of_server):
            raise CacheOptionError(
                f"{argument} of a request must be left out: the cache of all requests is the server's (--cache, --cache-config), "
                f"got {short(asked)}"
            )
    vars(generation_config).update(served)


def end_with_room(generation_config: Any, prompt_tokens: int, longest: int) -> None:
    """Let an answer end where prompt and answer have `longest` tokens; it then ends with finish_reason "length".

    Raises: PagePoolExhaustedError for a prompt that has no room for a token behind it.
    """
    if prompt_tokens >= longest:
        raise PagePoolExhaustedError(
            f"the prompt takes {prompt_tokens} tokens, and there is room for {longest} of one request, its answer included: in the "
            "model's context, or in the cache of this server; send a shorter prompt"
        )
    new, length = generation_config.max_new_tokens, generation_config.max_length
    if new is None:
        new = NEW_TOKENS if length is None else max(1, length - prompt_tokens)
    generation_config.max_new_tokens = min(longest - prompt_tokens, new)  # NaN bounds nothing


def _room(model: Any, options: ServerOptions, store: Any) -> float:
    """Make a cache as a request will, which raises what would be raised then; return the tokens that `max_pages` has room for.

    Infinity: without max_pages, and where no layer keeps its whole text. The last token counts, which is never stored.
    """
    given = options.options_of(store)
    if is_encoder_decoder(model.config):
        PagedEncoderDecoderCache.from_implementation(model.config, options.name, given)
        return math.inf
    config = CacheConfig.from_options(options.name, given)
    cache = PagedCache.from_options(model.config, config)
    if config.max_pages is None or all(group.window is not None for group in cache.groups):
        return math.inf
    shape = Geometry(config.page_size, config.sink_tokens, config.recent_tokens)
    return shape.kept + (config.max_pages + 1) * config.page_size
