"""Get a model's config.json from the Hugging Face hub, or from the local cache of it."""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from huggingface_hub import constants
from transformers.utils import cached_file

from ..errors import PlanError
from .presets import near_presets

_CONFIG = "config.json"
_CONNECT_S = 5.0


def cached_config(model: str) -> Path | None:
    """Return the path of a hub model's config.json in the local cache, None where it has none."""
    try:
        path = cached_file(model, _CONFIG, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if path is None else Path(path)


def fetch_config(model: str) -> Path:
    """Return the path of a hub model's config.json, fetched. Raises PlanError where there is none."""
    hint = near_presets(model)
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or model.endswith(".json"):
        raise PlanError(f"there is no file or folder {model!r}{hint}")
    try:
        _check_network()
        path = cached_file(model, _CONFIG)
    except (OSError, ValueError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        raise PlanError(
            f"{model!r} is no folder, file or preset, and its config could not be had from the hub ({reason}){hint}"
        ) from error
    if path is None:
        raise PlanError(f"the hub's {model!r} has no {_CONFIG}{hint}")
    return Path(path)


def _check_network() -> None:
    """Raise OSError where the hub cannot be reached: its own client would try for half a minute."""
    if any(
        os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
    ):
        return
    parts = urlsplit(constants.ENDPOINT)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise OSError(f"{parts.hostname} cannot be reached: {error}") from error
