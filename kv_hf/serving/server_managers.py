"""The generation managers of transformers' server, with the cache of each request set, and whose request it is. Imported when a server starts."""

import asyncio
import itertools
import threading
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
from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

from ..config import CacheConfig
from ..errors import CacheOptionError
from ..texts import longest_context
from .batch_cache import BatchCache, BatchCounts, Salted
from .batch_manager import check_here, check_model, check_options
from .server_model import ServedModel, ServerOptions, check_room, end_with_context

HEADER = "x-cache-salt"
STATS_ROUTE = "/kv_hf/stats"
OF_THE_OPERATOR = {"/reset", "/load_model", STATS_ROUTE}
POLL_S = 0.01
# the salt of the request's prefixes, "" without the header
tenant: ContextVar[str] = ContextVar("kv_hf_tenant", default="")
_numbers = itertools.count()  # of all batched requests of this process


class PagedGenerateManager(GenerateManager):
    """transformers' manager of plain requests, which runs them one by one, with pages as their cache.

    Args:
        served: returns what the server keeps of a loaded model.
    """

    def __init__(self, served: Callable[[Any], ServedModel]) -> None:
        super().__init__()
        self._served = served
        self._current: ServedModel | None = None

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *rest: Any, **named: Any
    ) -> Any:
        """Start a stream. Raises what `ServedModel.prepare` raises before anything is sent."""
        self._prepare(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *rest, **named)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *rest: Any, **named: Any
    ) -> Any:
        """Run a request to its end. Raises what `ServedModel.prepare` raises before it is queued."""
        self._prepare(model, inputs, gen_config)
        return await super().generate_non_streaming(
            model, processor, inputs, gen_config, *rest, **named
        )

    def _prepare(self, model: Any, inputs: Any, gen_config: Any) -> None:
        """Set the cache of a request, and note its model for `submit`, which comes next in this thread."""
        self._current = self._served(model)
        self._current.prepare(gen_config, inputs["input_ids"].shape[-1], tenant.get())

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Queue a call for the inference thread; return its future."""
        return super().submit(self._reported(fn), *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future:
        """Queue a call for the inference thread; return its awaitable future."""
        return super().async_submit(self._reported(fn), *args, **kwargs)

    def _reported(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn`, which logs in the inference thread what it took from the prefix store."""
        # forgotten here: the store of a model that is unloaded must go
        served, self._current = self._current, None
        if served is None:
            return fn

        def run(*args: Any, **kwargs: Any) -> Any:
            before = served.stats()
            try:
                return fn(*args, **kwargs)
            finally:
                served.report(before)

        return run


class PagedBatchManager:
    """transformers' manager of continuous batching, with the server's cache named in the config of its batches.

    Args:
        batches: transformers' CBGenerateManager.
        options: of the server.
    """

    def __init__(self, batches: CBGenerateManager, options: ServerOptions) -> None:
        self._batches, self._options = batches, options

    def init_cb(self, model: Any, gen_config: Any) -> None:
        """Start the batches at the first request, and wait until their cache is made or refused.

        Raises: KVCacheError where continuous batching cannot use these pages or this model, and for a request that names a cache
            or options of its own, as all requests of a batch share one cache.
        """
        own, default = self._options, model.generation_config
        served = {"cache_implementation": own.name, "cache_config": dict(own.cache_config)}
        for name, of_server in served.items():
            if getattr(gen_config, name) not in (None, getattr(default, name, None), of_server):
                raise CacheOptionError(
                    f"{name} of a request must be left out: continuous batches share the cache of the server"
                )
        vars(gen_config).update(served)
        self._batches.init_cb(model, gen_config)
        while self.cache is None and self._batches.is_alive():
            time.sleep(POLL_S)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str, **named: Any
    ) -> Any:  # fmt: skip
        """Start a stream. Raises PagePoolExhaustedError for a prompt without room, before anything is sent."""
        own = self._admit(model, inputs, gen_config, request_id)
        return self._batches.generate_streaming(model, processor, inputs, gen_config, own, **named)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """Run a request to its end. Raises PagePoolExhaustedError for a prompt without room, before it is queued."""
        own = self._admit(model, inputs, gen_config, request_id)
        return await self._batches.generate_non_streaming(model, processor, inputs, gen_config, own)

    @property
    def cache(self) -> BatchCache | None:
        """The cache of the batches, None before they have one."""
        try:
            found: Any = self._batches.scheduler.cache
        except RuntimeError:
            return None
        return found

    def _admit(self, model: Any, inputs: Any, gen_config: Any, request_id: str) -> str:
        """Check that a prompt has room.

        Returns: an id that no other request has, whatever its client calls it: answers are handed out by it.
        """
        prompt_tokens = len(inputs["input_ids"])
        end_with_context(gen_config, prompt_tokens, longest_context(model.config))
        if self.cache is not None:
            check_room(prompt_tokens + 1, self.cache.most_tokens)
        return Salted(f"{request_id}/{next(_numbers)}", tenant.get())


class PagedManagers:
    """The managers and models of one server, in place of the table that transformers' GenerationState has.

    Args:
        state: transformers' GenerationState, which still makes the manager of continuous batching.
        options: of the server.
    """

    def __init__(self, state: Any, options: ServerOptions) -> None:
        self.options = options
        self._batching: Callable[..., Any] = state.get_manager
        self._plain: dict[str, PagedGenerateManager] = {}
        self._batches: tuple[str, PagedBatchManager] | None = None
        self._models: weakref.WeakKeyDictionary[Any, tuple[str, ServedModel]] = (
            weakref.WeakKeyDictionary()
        )
        self._lock = threading.Lock()

    def get_manager(self, model_id: str, use_cb: bool = False) -> Any:
        """Return the manager of a model, as GenerationState.get_manager does."""
        if use_cb:
            found = PagedBatchManager(self._batching(model_id, use_cb=True), self.options)
            self._batches = model_id, found
            return found
        with self._lock:
            if model_id not in self._plain:
                self._plain[model_id] = PagedGenerateManager(
                    lambda model: self.served(model, model_id)
                )
            return self._plain[model_id]

    def check(self, model: Any, model_id: str) -> None:
        """Raise KVCacheError where pages cannot be the model's cache."""
        if self.options.batching:
            check_here()
            check_options(CacheConfig.from_options(self.options.name, self.options.cache_config))
            check_model(model)
        else:
            self.served(model, model_id)

    def served(self, model: Any, model_id: str) -> ServedModel:
        """Return what is kept of a loaded model; a model that is unloaded takes its prefix store with it.

        Raises: KVCacheError where pages cannot be the model's cache.
        """
        with self._lock:
            if model not in self._models:
                self._models[model] = model_id, ServedModel(model, self.options)
            return self._models[model][1]

    def stats(self) -> dict[str, Any]:
        """Return the server's cache, and the counts of each model's prefix store or batches, in JSON types."""
        with self._lock:
            served = dict(self._models.values())
        models: dict[str, Any] = {
            name: {"prefix_store": one.counts()} for name, one in served.items()
        }
        if self._batches is not None:
            name, manager = self._batches
            cache = manager.cache
            counts = None if cache is None else asdict(BatchCounts.of_cache(cache))
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
