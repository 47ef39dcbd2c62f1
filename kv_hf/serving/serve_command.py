"""`kv-hf serve`: transformers' own server (OpenAI's API) with a paged cache, and a prefix store between its requests."""

import argparse
import inspect
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from transformers.utils import logging

from kv_hf_cli import command_parser

from ..checks import check_choice, usable_device
from ..errors import KVCacheError
from ..hub import why_not_model
from ..printable import tell_error
from .server import serve_class, start
from .server_model import ServerOptions, json_object

# parameters of transformers' `Serve` that are ours to set
_OURS = {"self", "force_model", "non_blocking"}
KWARGS = """a JSON object of arguments of the chat template such as '{"enable_thinking": false}'"""


def serve(words: Sequence[str], prog: str) -> int:
    """Serve until a signal ends the server; return the exit code: 2 for bad arguments.

    Args:
        words: of `kv-hf serve`; the options among them are those of kv_hf_cli.py and of transformers.
        prog: what errors begin with.
    """
    try:
        asked = command_parser("serve", prog)
        add_transformers_options(asked)
        args = vars(asked.parse_args(words))
        model = args.pop("model")
        options = ServerOptions.parse(
            args.pop("cache"),
            args.pop("cache_config"),
            args.pop("prefix_store"),
            bool(args.get("continuous_batching")),
            args.pop("prefix_folder"),
        )
        _check(model, args)
        start(options, model, **args)
    except (KVCacheError, ImportError, OSError, ValueError) as error:
        tell_error(prog, error)
        return 2
    return 0


def _check(model: str, args: dict[str, Any]) -> None:
    """Raise ValueError for what transformers would find wrong only behind loading a model, and for a model that is not there."""
    if args.get("compile"):
        raise ValueError(
            "--compile gives requests transformers' static cache, and --cache is a paged one: leave --compile out, or "
            "run transformers serve"
        )
    port = args.get("port")
    if port is not None and not 0 < port < 2**16:
        raise ValueError(f"--port must be 1 to {2**16 - 1}, got {port}")
    if "log_level" in args:
        args["log_level"] = args["log_level"].lower()
        check_choice("--log-level", args["log_level"], logging.log_levels)
    if "chat_template_kwargs" in args:
        json_object("--chat-template-kwargs", args["chat_template_kwargs"], KWARGS)
    if args.get("device", "").startswith("cuda"):
        usable_device(args["device"])
    decisions = args.get("decision_config")
    if decisions is not None and not Path(decisions).is_file():
        raise ValueError(f"--decision-config must be the path of a JSON file, got {decisions!r}")
    repository, _, file = model.partition(":")
    reason = None if file.endswith(".gguf") else why_not_model(repository.partition("@")[0])
    if reason is not None:
        raise ValueError(f"MODEL {model!r}: {reason}")


def add_transformers_options(found: argparse.ArgumentParser) -> None:
    """Add every option of transformers' `Serve` under the name and with the help that it has there.

    Only those that are given reach the result, so that their defaults stay transformers'.

    Raises: ImportError naming a package that the server lacks.
    """
    group = found.add_argument_group("options of transformers serve, passed on")
    make = serve_class().__init__
    hints = get_type_hints(make, include_extras=True)
    for name, parameter in inspect.signature(make).parameters.items():
        if name in _OURS:
            continue
        kind, text = _kind_and_help(hints.get(name, str))
        flag = f"--{name.replace('_', '-')}"
        shown = parameter.default
        if shown is not None and kind is not bool:
            text += f" (default: {getattr(shown, 'value', shown)})"
        told: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if kind is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, **told)
        elif issubclass(kind, Enum):
            choices = [one.value for one in kind]
            group.add_argument(flag, choices=choices, **told)
        else:
            group.add_argument(flag, type=kind, metavar=kind.__name__.upper(), **told)


def _kind_and_help(hint: Any) -> tuple[type, str]:
    """Return the type of an option and its help from Annotated[type | None, typer.Option(help=..)]."""
    text = ""
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        text = next((note.help for note in notes if getattr(note, "help", None)), "")
    kinds = [one for one in get_args(hint) or (hint,) if one is not type(None)]
    return (kinds[0] if isinstance(kinds[0], type) else str), text
