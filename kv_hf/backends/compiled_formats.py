"""The formats that compiled kernels read: those with a number in the header that C and Python share."""

from ..checks import listed
from ..spec import PageSpec


def unread_formats(spec: PageSpec) -> str | None:
    """Return which formats of the pages no compiled kernel reads, as a sentence, or None."""
    unread = [side for side in spec.sides if side.scheme.format.native_number is None]
    if not unread:
        return None
    formats = dict.fromkeys(side.scheme.name for side in unread)
    return (
        f"no compiled kernel reads the format {listed(repr(one) for one in formats)} of "
        f"{listed(side.side for side in unread)}"
    )
