"""Objects that installed packages offer by entry points. Knows neither formats nor backends."""

from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from .errors import first_line
from .notices import warn_once


def load_group(group: str, noun: str, take: Callable[[EntryPoint], None]) -> None:
    """Call `take` with each entry point of `group`.

    An entry point that cannot be taken is left out, with a warning that names the package and the reason: a broken
    plugin must not keep kv_hf from being imported. `noun` says in the warning what the entry points name.
    """
    for point in entry_points(group=group):
        try:
            take(point)
        # whatever another package raises when it is imported, also where it would end the program
        except (Exception, SystemExit) as error:
            package = point.dist.name if point.dist is not None else "?"
            warn_once(
                f"{group} {point.name}",
                f"The {noun} {point.name!r} of package {package!r} is left out: {type(error).__name__}: "
                f"{first_line(error)}",
            )
