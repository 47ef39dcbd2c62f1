"""The generation managers of transformers' server, with the cache of each request set, and whose request it is. Imported when a server starts."""

import itertools
import time
import weakref
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import asdict
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from ..config import CacheConfig
from ..texts import longest_context
from .batch_cache import BatchCache, BatchCounts, Salted
from .batch_manager import check_batches
from .server_model import ServedModel, ServerOptions, end_with_room, set_cache

HEADER = "x-cache-salt"
STATS_ROUTE = "/kv_hf/stats"
OF_THE_OPERATOR = {"/reset", "/load_model", STATS_ROUTE}
POLL_S = 0.01
# the salt of the request's prefixes, "" without the header
tenant: ContextVar[str] = ContextVar("kv_hf_tenant", default="")
_numbers = itertools.count()  # of all batched requests of this process


class PagedManager:
    """A manager of transformers' server, which runs requests one by one, with pages as the cache of each.

    Args:
        own: transformers' manager.
        served: returns what the server keeps of a loaded model.
    """

    def __init__(self, own: Any, served: Callable[[Any], ServedModel]) -> None:
        self._own, self._served = own, served

    def __getattr__(self, name: str) -> Any:
        """Return what transformers' manager has under this name."""
        return getattr(self._own, name)

    def prepare(self, model: Any, inputs: Any, gen_config: Any, request_id: str) -> str:
        """Set the cache of a request; return its id. Raises what `ServedModel.prepare` raises."""
        self._served(model).prepare(gen_config, inputs["input_ids"].shape[-1], tenant.get())
        return request_id

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, **named: Any
    ) -> Any:  # fmt: skip
        """Start a stream. Raises what `prepare` raises before anything is sent."""
        own = self.prepare(model, inputs, gen_config, request_id)
        return self._own.generate_streaming(model, processor, inputs, gen_config, own, **named)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """Run a request to its end. Raises what `prepare` raises before it is queued."""
        own = self.prepare(model, inputs, gen_config, request_id)
        return await self._own.generate_non_streaming(model, processor, inputs, gen_config, own)


class PagedBatches(PagedManager):
    """transformers' manager of continuous batching, with the server's cache named in the config of its batches.

    Args:
        own: transformers' CBGenerateManager.
        options: of the server.
    """

    def __init__(self, own: Any, options: ServerOptions) -> None:
        self._own, self._options = own, options
        self._cache_config = options.options_of(options.make_store())

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Start the batches at the first request, and wait until their cache is made or refused.

        Raises: KVCacheError where continuous batching cannot use these pages or this model, and for a request that names a cache
            or options of its own.
        """
        set_cache(gen_config, model.generation_config, self._options.name, dict(self._cache_config))
        self._own.init_cb(model, gen_config)
        while self.cache is None and self._own.is_alive():
            time.sleep(POLL_S)

    @property
    def cache(self) -> BatchCache | None:
        """The cache of the batches, None before they have one."""
        try:
            found: Any = self._own.scheduler.cache
        except RuntimeError:
            return None
        return found

    def prepare(self, model: Any, inputs: Any, gen_config: Any, request_id: str) -> str:
        """Return an id that no other request has, whatever its client calls it: answers are handed out by it.

        Raises: PagePoolExhaustedError for a prompt without room.
        """
        longest = longest_context(model.config)
        if self.cache is not None:
            longest = min(longest, self.cache.most_tokens)
        end_with_room(gen_config, len(inputs["input_ids"]), longest)
        return Salted(f"{request_id}/{next(_numbers)}", tenant.get())


class PagedManagers:
    """The managers and models of one server, around those that transformers' GenerationState makes.

    Args:
        state: transformers' GenerationState.
        options: of the server.
    """

    def __init__(self, state: Any, options: ServerOptions) -> None:
        self.options = options
        self._own: Callable[..., Any] = state.get_manager
        self._batches: tuple[str, PagedBatches] | None = None
        self._models: weakref.WeakKeyDictionary[Any, tuple[str, ServedModel]] = (
            weakref.WeakKeyDictionary()
        )

    def get_manager(self, model_id: str, use_cb: bool = False) -> PagedManager:
        """Return the manager of a model, as GenerationState.get_manager does."""
        own = self._own(model_id, use_cb=use_cb)
        if not use_cb:
            return PagedManager(own, lambda model: self.served(model, model_id))
        if self._batches is None or self._batches[1]._own is not own:
            # with a prefix store of its own
            self._batches = model_id, PagedBatches(own, self.options)
        return self._batches[1]

    def check(self, model: Any, model_id: str) -> None:
        """Raise KVCacheError where pages cannot be the model's cache."""
        if self.options.batching:
            options = self.options.options_of(self.options.make_store())
            check_batches(model, CacheConfig.from_options(self.options.name, options))
        else:
            self.served(model, model_id)

    def served(self, model: Any, model_id: str) -> ServedModel:
        """Return what is kept of a loaded model; a model that is unloaded takes its prefix store with it.

        Raises: KVCacheError where pages cannot be the model's cache.
        """
        if model not in self._models:
            self._models[model] = model_id, ServedModel(model, self.options)
        return self._models[model][1]

    async def stats(self) -> dict[str, Any]:
        """Return the server's cache, and the counts of each model's prefix store or batches, in JSON types."""
        models: dict[str, Any] = {
            name: {"prefix_store": one.counts()} for name, one in self._models.values()
        }
        if self._batches is not None:
            name, manager = self._batches
            counts = None if manager.cache is None else asdict(BatchCounts.of(manager._cb))
            models.setdefault(name, {})["batches"] = counts
        return {
            "cache": self.options.name,
            "cache_config": dict(self.options.cache_config),
            "models": models,
        }


class Tenants:
    """ASGI middleware: each request runs with the salt of its header as `tenant`; web pages get no route of the operator.

    Args:
        app: the application behind it.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass one request on."""
        headers = Headers(raw=list(scope.get("headers", ())))
        salts, path = headers.getlist(HEADER), scope.get("path")
        refused = None
        if len(salts) > 1:  # a proxy that adds its own must not lose to one that the client sent
            refused = 400, f"{HEADER} must be given once, got {len(salts)} of it"
        elif path in OF_THE_OPERATOR and _is_foreign(headers, scope.get("server") or ("",)):
            refused = 403, f"{path} is not for web pages: Host or Origin names another machine"
        if refused is not None:
            status, words = refused
            answer = JSONResponse({"error": {"message": words}}, status_code=status)
            await answer(scope, receive, send)
            return
        before = tenant.set("".join(salts))
        try:
            await self.app(scope, receive, send)
        finally:
            tenant.reset(before)


def _is_foreign(headers: Headers, server: Any) -> bool:
    """Say whether Origin is another site's, or Host a name that somebody made lead to this machine's loopback address."""
    host, origin = headers.get("host", ""), headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2] != host
    return foreign or (_is_loopback(server[0]) and not _is_loopback(host))


def _is_loopback(host: str) -> bool:
    """Say whether a host, with or without a port, is this machine to itself."""
    try:
        name = urlsplit(f"//{host}").hostname or host
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False
