"""Whether a name is a model that can be loaded: a folder, or a model of the Hugging Face hub. Downloads nothing.

The hub's own client tries for half a minute where there is no network. Every command and function that takes a model's name asks
here first, and says within seconds why there is no such model.
"""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

CONFIG = "config.json"
CONNECT_S = 5.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def looks_like_path(name: str) -> bool:
    """Say whether a name can only be meant as a path: it begins as one, has several parts, or names a JSON file."""
    if Path(name).is_absolute() or name.startswith((".", "~")):
        return True
    return name.count("/") > 1 or "\\" in name or name.endswith(".json")


def cached_config(model: str) -> Path | None:
    """Return the path of a hub model's config.json in the local hub cache, None where it has none."""
    try:
        found = huggingface_hub.try_to_load_from_cache(model, CONFIG)
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def why_not_model(name: str) -> str | None:
    """Return why a model cannot be had, None where nothing speaks against it. Loads nothing.

    A folder, and a model in the local hub cache, ask nobody. For any other name the hub is asked for its config.json, for at most
    a few seconds; with HF_HUB_OFFLINE no connection is opened.
    """
    folder = Path(name)
    if folder.is_dir():
        return None if (folder / CONFIG).is_file() else f"a folder without a {CONFIG}"
    if folder.is_file():
        return "a file, and no folder of a model"
    if looks_like_path(name):
        return "there is no such folder"
    try:
        validate_repo_id(name)
    except HFValidationError:
        return "neither a folder nor a name that the hub could have"
    if cached_config(name) is not None:
        return None
    return _why_not_on_hub(name)


def _why_not_on_hub(name: str) -> str | None:
    if constants.HF_HUB_OFFLINE:
        return (
            "neither a folder nor in the local hub cache, and HF_HUB_OFFLINE forbids asking the hub"
        )
    unreached = _why_unreached()
    if unreached is not None:
        return f"neither a folder nor in the local hub cache, and {unreached}"
    try:
        address = huggingface_hub.hf_hub_url(name, CONFIG)
        huggingface_hub.get_hf_file_metadata(address, timeout=CONNECT_S)
    except GatedRepoError:
        return f"gated: accept its terms at {constants.ENDPOINT}/{name}, and log in with `hf auth login`"
    except RepositoryNotFoundError:
        return "neither a folder nor a model of the hub (a private one needs `hf auth login`)"
    except EntryNotFoundError:
        return f"on the hub, but without a {CONFIG}"
    # a slow or unwilling hub: its client, which asks more than once, has the last word
    except Exception:
        return None
    return None


def _why_unreached() -> str | None:
    """Return why no connection to the hub can be opened, or None; behind a proxy nobody knows before a request."""
    if any(os.environ.get(name) for name in PROXIES):
        return None
    parts = urlsplit(constants.ENDPOINT)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"{parts.hostname} cannot be reached: {error}"
    return None
