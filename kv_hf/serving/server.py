"""Start transformers' own server with pages as the cache of its requests. The server, its routes and its queue are transformers'.

One function of transformers is replaced while the server is built, `build_server`: behind it the managers of requests are
exchanged, a route for the counts is added, and errors of a request's options become status 400.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import CacheOptionError, PagePoolExhaustedError
from ..hf.asked import with_hint
from .server_interface import check_server, serve_class
from .server_options import ServerOptions
from .server_tenants import STATS_ROUTE, Tenants

# what a client can mend by sending another request
_OF_THE_REQUEST = (CacheOptionError, PagePoolExhaustedError)


def start(options: ServerOptions, model: str, **arguments: Any) -> Any:
    """Load a model and serve it, until a signal ends the server.

    Args:
        options: the cache.
        model: as `transformers serve` takes it: hub id, folder, or GGUF file of a repository.
        **arguments: of transformers' `Serve`; with non_blocking=True the server runs in a thread, until `kill_server`.
    Returns: transformers' `Serve`.
    Raises: ImportError naming a missing package and the extra; KVCacheError where transformers' server is another one or pages
        cannot be the model's cache.
    """
    check_server()
    with paged_server(options):
        return serve_class()(force_model=model, **arguments)


@contextmanager
def paged_server(options: ServerOptions) -> Iterator[None]:
    """Let servers that transformers builds within the block take pages as their cache."""
    from transformers.cli.serving import server

    original = server.build_server
    vars(server)["build_server"] = _with_pages(original, options)
    try:
        yield
    finally:
        vars(server)["build_server"] = original


def _with_pages(original: Callable[..., Any], options: ServerOptions) -> Callable[..., Any]:
    """Wrap transformers' build_server."""
    from .server_managers import PagedManagers

    @functools.wraps(original)
    def build(model_manager: Any, *args: Any, generation_state: Any, **kwargs: Any) -> Any:
        managers = PagedManagers(generation_state, options)
        for model_id, timed in list(model_manager.loaded_models.items()):
            managers.check(timed.model, model_id)  # a model that pages do not fit ends the start
        generation_state.get_manager = managers.get_manager
        app = original(model_manager, *args, generation_state=generation_state, **kwargs)
        app.add_api_route(STATS_ROUTE, managers.stats, methods=["GET"])
        app.add_middleware(Tenants)
        for error in _OF_THE_REQUEST:
            app.add_exception_handler(error, _bad_request)
        app.add_exception_handler(ValueError, _bad_value)
        return app

    return build


async def _bad_request(request: Any, error: Exception) -> Any:
    """Answer with status 400 and the reason, in the form that OpenAI's clients read."""
    from fastapi.responses import JSONResponse

    found = {"message": str(error), "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": found}, status_code=400)


async def _bad_value(request: Any, error: Exception) -> Any:
    """Answer a cache's name that transformers refuses like a wrong option; every other ValueError stays what it is."""
    assert isinstance(error, ValueError)
    told = with_hint(error)
    if told is error:
        raise error
    return await _bad_request(request, told)
