"""Formats of installed packages, found by the entry-point group "kv_hf.formats"."""

from importlib.metadata import EntryPoint

from ..plugins import load_group
from .registry import is_registered, register_format

GROUP = "kv_hf.formats"


def load_plugins() -> None:
    """Register the format that each entry point of GROUP names: a class of kv_hf.Format, or an object of one."""
    load_group(GROUP, "number format", _register)


def _register(point: EntryPoint) -> None:
    found = point.load()
    kind = found if isinstance(found, type) else type(found)
    if not is_registered(kind):  # a module may have registered it when it was loaded
        register_format(found)
