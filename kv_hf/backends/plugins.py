"""Backends of installed packages, found by the entry-point group "kv_hf.backends"."""

from importlib.metadata import EntryPoint

from ..backend_names import backend_names
from ..errors import CacheOptionError
from ..plugins import load_group

GROUP = "kv_hf.backends"


def load_plugins() -> None:
    """Call the function that each entry point of GROUP names; it registers a backend under the entry point's name."""
    load_group(GROUP, "attention backend", _register)


def _register(point: EntryPoint) -> None:
    register = point.load()
    if point.name in backend_names():  # a module may have registered it when it was loaded
        return
    if not callable(register):
        raise CacheOptionError(
            f"entry point must be a function that calls register_backend, got {register!r}"
        )
    register()
    if point.name not in backend_names():
        raise CacheOptionError(
            f"entry point must register a backend under its own name {point.name!r}; the names are "
            f"{', '.join(backend_names())}"
        )
