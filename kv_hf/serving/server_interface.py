"""The parts of transformers' server that kv_hf relies on, and a check that the installed version has them."""

import inspect
from pkgutil import resolve_name
from typing import Any

import transformers

from ..errors import KVCacheError
from ..extras import extra

TESTED = "5.17 to 5.23"
# class or function of transformers.cli.serving -> the parameters that are passed or read by these names
_USED = {
    "serve.Serve": ("force_model", "continuous_batching", "host", "port", "non_blocking"),
    "serving.server.build_server": ("model_manager", "generation_state"),
    "serving.utils.GenerationState.get_manager": ("model_id", "use_cb"),
    "serving.utils.CBGenerateManager.init_cb": ("model", "gen_config"),
    "serving.utils.CBGenerateManager.is_alive": (),
    "serving.utils.CBGenerateManager.scheduler": (),
    "serving.utils.GenerateManager.generate_streaming": (
        *("model", "processor", "inputs", "gen_config", "request_id", "response_parser"),
    ),
    "serving.utils.GenerateManager.generate_non_streaming": (
        *("model", "processor", "inputs", "gen_config", "request_id"),
    ),
    "serving.utils.GenerateManager.submit": ("fn", "args", "kwargs"),
    "serving.utils.GenerateManager.async_submit": ("fn", "args", "kwargs"),
}


class ServerInterfaceError(KVCacheError):
    """The installed transformers has no server, or one with another interface."""


def serve_class() -> Any:
    """Return transformers' `Serve`, the command that starts its server; it needs typer, not fastapi.

    Raises: ServerInterfaceError naming the installed version and the versions that fit.
    """
    with extra("serving", "kv-hf serve"):
        import typer  # noqa: F401
    try:
        from transformers.cli.serve import Serve
    except ImportError as error:
        raise _other_version(f"it has no transformers.cli.serve ({error})") from error
    return Serve


def check_server() -> None:
    """Check packages and interface of transformers' server.

    Raises: ImportError naming the missing package and the extra; ServerInterfaceError as `serve_class`.
    """
    with extra("serving", "kv-hf serve"):
        import fastapi  # noqa: F401
        import openai  # noqa: F401
        import pydantic  # noqa: F401
        import uvicorn  # noqa: F401
    serve_class()
    for path, names in _USED.items():
        try:
            found = resolve_name(f"transformers.cli.{path}")
        except (ImportError, AttributeError):
            raise _other_version(f"it has no transformers.cli.{path}") from None
        for name in names:
            if name not in inspect.signature(found).parameters:
                raise _other_version(f"transformers.cli.{path} has no parameter {name}")


def _other_version(why: str) -> ServerInterfaceError:
    return ServerInterfaceError(
        f"kv-hf serve starts the server of transformers {TESTED}, and transformers {transformers.__version__} is "
        f"installed: {why}. Install a version that fits"
    )
