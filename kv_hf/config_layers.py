"""The option `layers`: formats of single layers or ranges, such as {"0-1": "int8", "5": {"keys": "int8"}}."""

import re
from collections.abc import Mapping
from typing import Any

from .checks import check_choice
from .errors import CacheOptionError
from .formats import check_format

LayerOverride = tuple[int, int, dict[str, str]]  # first layer, last layer, {side: format}


def parse_layers(layers: Any) -> list[LayerOverride]:
    """Return `layers` as (first layer, last layer, {side: format}); empty for None.

    Raises: CacheOptionError naming the entry and what is wrong with it.
    """
    if layers is None:
        return []
    if not isinstance(layers, Mapping):
        raise CacheOptionError(
            f"layers must map layer numbers or ranges to formats, got {layers!r}"
        )
    return [_parse_entry(span, formats) for span, formats in layers.items()]


def _parse_entry(span: Any, formats: Any) -> LayerOverride:
    numbers = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", str(span))
    if numbers is None:
        raise CacheOptionError(
            f"layers: a key must be a layer number or a range like '0-3', got {span!r}"
        )
    low, high = int(numbers[1]), int(numbers[2] or numbers[1])
    if high < low:
        raise CacheOptionError(f"layers: range {span!r} ends before it begins")
    sides = {"keys": formats, "values": formats} if isinstance(formats, str) else formats
    if not isinstance(sides, Mapping):
        raise CacheOptionError(
            f"layers: {span!r} must give a format or {{'keys': .., 'values': ..}}, got {formats!r}"
        )
    for side, name in sides.items():
        check_choice(f"layers[{span!r}]", side, ("keys", "values"))
        check_format(f"layers[{span!r}][{side!r}]", name, side)
    return low, high, dict(sides)
