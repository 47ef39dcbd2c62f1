"""Formats of installed packages, found by the entry-point group "kv_hf.formats"."""

from importlib.metadata import EntryPoint, entry_points

from ..errors import first_line
from ..notices import warn_once
from .registry import is_registered, register_format

GROUP = "kv_hf.formats"


def load_plugins() -> None:
    """Register the format that each entry point of GROUP names: a class of kv_hf.Format, or an object of one.

    What cannot be loaded or registered is left out, with a warning that names the package and the reason: a broken
    plugin must not keep kv_hf from being imported.
    """
    for point in entry_points(group=GROUP):
        try:
            _load(point)
        # whatever another package raises when it is imported, also where it would end the program
        except (Exception, SystemExit) as error:
            package = point.dist.name if point.dist is not None else "?"
            warn_once(
                f"{GROUP} {point.name}",
                f"The number format {point.name!r} of package {package!r} is left out: {type(error).__name__}: "
                f"{first_line(error)}",
            )


def _load(point: EntryPoint) -> None:
    found = point.load()
    kind = found if isinstance(found, type) else type(found)
    if not is_registered(kind):  # a module may have registered it when it was loaded
        register_format(found)
