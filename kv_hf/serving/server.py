"""Start transformers' own server with pages as the cache of its requests. The server, its routes and its queue are transformers'.

One function of transformers is replaced while the server is built, `build_server`: behind it the managers of requests are
exchanged, a route for the counts is added, and errors of a request's options become status 400.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..checks import extra
from ..errors import CacheOptionError, PagePoolExhaustedError
from ..hf.generation import with_hint
from .server_model import ServerOptions

# what a client can mend by sending another request
OF_CLIENTS = (CacheOptionError, PagePoolExhaustedError)


def serve_class() -> Any:
    """Return transformers' `Serve`, the command that starts its server; it needs typer, not fastapi.

    Raises: ImportError naming the missing package and the extra.
    """
    with extra("serving", "kv-hf serve"):
        import typer  # noqa: F401
    from transformers.cli.serve import Serve

    return Serve


def check_packages() -> None:
    """Raise ImportError naming a package that transformers' server lacks, and the extra."""
    with extra("serving", "kv-hf serve"):
        import fastapi  # noqa: F401
        import openai  # noqa: F401
        import pydantic  # noqa: F401
        import uvicorn  # noqa: F401


def start(options: ServerOptions, model: str, **arguments: Any) -> Any:
    """Load a model and serve it, until a signal ends the server.

    Args:
        options: the cache.
        model: as `transformers serve` takes it: hub id, folder, or GGUF file of a repository.
        **arguments: of transformers' `Serve`; with non_blocking=True the server runs in a thread, until `kill_server`.
    Returns: transformers' `Serve`.
    Raises: ImportError naming a missing package and the extra; KVCacheError where pages cannot be the model's
        cache.
    """
    check_packages()
    with paged_server(options):
        return serve_class()(force_model=model, **arguments)


@contextmanager
def paged_server(options: ServerOptions) -> Iterator[None]:
    """Let servers that transformers builds within the block take pages as their cache; end their batches behind it.

    The thread of a batch, which transformers leaves running, would keep the process from ending.
    """
    from transformers.cli.serving import server

    original = server.build_server
    with ExitStack() as ending:
        ending.callback(vars(server).update, build_server=original)
        vars(server)["build_server"] = _with_pages(original, options, ending)
        yield


def _with_pages(
    original: Callable[..., Any], options: ServerOptions, ending: ExitStack
) -> Callable[..., Any]:
    """Wrap transformers' build_server."""
    from .server_managers import STATS_ROUTE, PagedManagers, Tenants

    @functools.wraps(original)
    def build(model_manager: Any, *args: Any, generation_state: Any, **kwargs: Any) -> Any:
        managers = PagedManagers(generation_state, options)
        ending.callback(generation_state.shutdown)
        for model_id, timed in list(model_manager.loaded_models.items()):
            managers.check(timed.model, model_id)  # a model that pages do not fit ends the start
        generation_state.get_manager = managers.get_manager
        app = original(model_manager, *args, generation_state=generation_state, **kwargs)
        app.add_api_route(STATS_ROUTE, managers.stats, methods=["GET"])
        app.add_middleware(Tenants)
        for error in (*OF_CLIENTS, ValueError):
            app.add_exception_handler(error, _bad_request)
        return app

    return build


async def _bad_request(request: Any, error: Exception) -> Any:
    """Answer with status 400 and the reason, in the form that OpenAI's clients read.

    Also a cache's name that transformers refuses; every other ValueError stays what it is.
    """
    from fastapi.responses import JSONResponse

    told = with_hint(error)
    if not isinstance(told, OF_CLIENTS):
        raise error
    found = {"message": str(told), "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": found}, status_code=400)
