"""The generation managers of transformers' server, with the cache of each request set. Imported when a server starts."""

import asyncio
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from transformers.cli.serving.utils import (
    BaseGenerateManager,
    CBGenerateManager,
    GenerateManager,
)

from ..errors import CacheOptionError
from ..texts import longest_context
from .batch_counts import BatchCounts
from .batch_manager import check_here
from .batch_options import check_model, options_of
from .server_model import ServedModel, check_room, end_with_context
from .server_options import ServerOptions
from .server_tenants import tenant

POLL_S = 0.01
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
        return super().submit(_reported, self._take_current(), fn, *args, **kwargs)

    def async_submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future:
        """Queue a call for the inference thread; return its awaitable future."""
        return super().async_submit(_reported, self._take_current(), fn, *args, **kwargs)

    def _take_current(self) -> ServedModel | None:
        """Return the model of the request that is queued now, and forget it: the store of an unloaded model must go."""
        current, self._current = self._current, None
        return current


class PagedBatchManager(BaseGenerateManager):
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
        pause = threading.Event()
        while self._cache() is None and self._batches.is_alive():
            pause.wait(POLL_S)

    def generate_streaming(  # type: ignore[override]
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        **named: Any,
    ) -> Any:
        """Start a stream. Raises PagePoolExhaustedError for a prompt without room, before anything is sent."""
        own = self._admit(model, inputs, gen_config, request_id)
        return self._batches.generate_streaming(model, processor, inputs, gen_config, own, **named)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str
    ) -> Any:
        """Run a request to its end. Raises PagePoolExhaustedError for a prompt without room, before it is queued."""
        own = self._admit(model, inputs, gen_config, request_id)
        return await self._batches.generate_non_streaming(model, processor, inputs, gen_config, own)

    def stop(self) -> None:
        """Stop the batches."""
        self._batches.stop()

    def counts(self) -> dict[str, int] | None:
        """Return the counts of the batches' cache (BatchCounts), None before they have one."""
        cache = self._cache()
        return None if cache is None else asdict(BatchCounts.of_cache(cache))

    def _cache(self) -> Any:
        """Return the cache of the batches, None before they have one."""
        try:
            return self._batches.scheduler.cache
        except RuntimeError:
            return None

    def _admit(self, model: Any, inputs: Any, gen_config: Any, request_id: str) -> str:
        """Check that a prompt has room, and note the salt of its prefixes for when the batches take it.

        Returns: an id that no other request has, whatever its client calls it: answers are handed out by it.
        """
        own, cache = f"{request_id}/{next(_numbers)}", self._cache()
        prompt_tokens = len(inputs["input_ids"])
        end_with_context(gen_config, prompt_tokens, longest_context(model.config))
        if cache is not None:
            check_room(prompt_tokens + 1, cache.most_tokens)
            if tenant.get():
                cache.salt(own, tenant.get())
        return own


def _reported(served: ServedModel | None, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn` in the inference thread, and log what it took from the prefix store."""
    if served is None:
        return fn(*args, **kwargs)
    before = served.stats()
    try:
        return fn(*args, **kwargs)
    finally:
        served.report(before)


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
        self._models: weakref.WeakKeyDictionary[Any, ServedModel] = weakref.WeakKeyDictionary()
        self._names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
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
            asked = SimpleNamespace(
                cache_implementation=self.options.name, cache_config=self.options.cache_config
            )
            options_of(asked)
            check_model(model)
        else:
            self.served(model, model_id)

    def served(self, model: Any, model_id: str) -> ServedModel:
        """Return what is kept of a loaded model; a model that is unloaded takes its prefix store with it.

        Raises: KVCacheError where pages cannot be the model's cache.
        """
        with self._lock:
            found = self._models.get(model)
            if found is None:
                found = self._models[model] = ServedModel(model, self.options)
                self._names[model] = model_id
            return found

    def stats(self) -> dict[str, Any]:
        """Return the server's cache, and the counts of each model's prefix store or batches, in JSON types."""
        with self._lock:
            served = {self._names[model]: one for model, one in self._models.items()}
        models: dict[str, Any] = {
            name: {"prefix_store": one.counts()} for name, one in served.items()
        }
        if self._batches is not None:
            name, manager = self._batches
            models.setdefault(name, {})["batches"] = manager.counts()
        return {
            "cache": self.options.name,
            "cache_config": dict(self.options.cache_config),
            "models": models,
        }
