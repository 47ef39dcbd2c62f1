"""The formats that a recipe may choose from: every registered one that fits the model, less those that another beats.

Holds no list of formats: what there is follows from the registry, what it costs from the byte formula.
"""

from collections.abc import Callable, Mapping, Sequence

from ...errors import CacheOptionError
from ...formats import format_names, readers_of
from .sensitivity import SIDES, Formats

Asked = Sequence[str] | Mapping[str, Sequence[str]] | None

# Formats of fewer bits are measured layer by layer. Above it all layers are measured at once: what a single layer
# loses there is hardly more than the noise of a run.
TOGETHER_BITS = 6.0


def per_side(argument: str, asked: Asked) -> Formats | None:
    """Return {side: formats} of an argument that names formats for both sides, or for each; None for None.

    A plain sequence gives each side the formats that it may have.

    Raises: ValueError naming the argument, for formats that keys and values cannot have, and other sides.
    """
    if asked is None:
        return None
    known = {side: [name for name in format_names(side) if name != "exact"] for side in SIDES}
    if not isinstance(asked, Mapping):
        either = list(dict.fromkeys([*known["keys"], *known["values"]]))
        for name in asked:
            if name not in either:
                raise ValueError(f"{argument} must be some of {', '.join(either)}, got {name!r}")
        return {side: tuple(name for name in asked if name in known[side]) for side in SIDES}
    for side, names in asked.items():
        if side not in SIDES:
            raise ValueError(f"{argument} must name sides of {', '.join(SIDES)}, got {side!r}")
        for name in names:
            if name not in known[side]:
                raise ValueError(
                    f"{argument} of {side} must be some of {', '.join(known[side])}, got {name!r}"
                )
    return {side: tuple(asked.get(side, ())) for side in SIDES}


def fitting(cost: Callable[[str, str], int], options: Mapping[str, object]) -> Formats:
    """Return the formats of each side that the layers can have, the largest first; exact is none of them.

    Args:
        cost: (side, format) -> bytes of all layers; raises CacheOptionError where a layer cannot have the format.
        options: of the cache. A format that reads one of them and does not fit is an error, since the option is at fault.
    Raises: CacheOptionError likewise.
    """
    found: dict[str, tuple[str, ...]] = {}
    for side in SIDES:
        bytes_of = {}
        for name in format_names(side):
            try:
                bytes_of[name] = cost(side, name)
            except CacheOptionError:
                if any(name in readers_of(option) for option in options):
                    raise
        bytes_of.pop("exact", None)
        found[side] = tuple(sorted(bytes_of, key=lambda name: -bytes_of[name]))
    return found


def unbeaten(names: Sequence[str], sizes: Mapping[str, int], losses: Mapping[str, float]) -> list[str]:  # fmt: skip
    """Return the names that no other beats in bytes and in loss, the largest first."""
    kept: list[str] = []
    for name in sorted(names, key=lambda one: (sizes[one], losses[one])):
        if not kept or losses[name] < losses[kept[-1]]:
            kept.append(name)
    return kept[::-1]
