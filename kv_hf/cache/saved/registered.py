"""Formats of other packages in a saved cache: their names and versions, which the program that loads it must know."""

import json
from collections.abc import Iterable, Mapping

from ...errors import CacheOptionError
from ...formats import is_shipped
from ...formats.base import FORMATS
from ...printable import short
from ...spec import PageSpec
from .container import RefusedError, parse_json

ENTRY = "formats"  # of the metadata; a file of shipped formats has none


def registered_formats(specs: Iterable[PageSpec]) -> dict[str, str]:
    """Return the metadata that say which registered formats pages of `specs` have; none for shipped ones.

    Raises: CacheOptionError where another format is registered under the name of one of them.
    """
    found = {side.scheme.format for spec in specs for side in spec.sides}
    for one in found:
        if FORMATS.get(one.name) != one:
            raise CacheOptionError(
                f"format {one.name!r} of this cache's pages is not the one that is registered now under this name: "
                "unregister that one and register the cache's own again, then save"
            )
    versions = {one.name: one.version for one in found if not is_shipped(one.name)}
    return {ENTRY: json.dumps(versions, sort_keys=True)} if versions else {}


def check_registered(metadata: Mapping[str, str]) -> None:
    """Raise RefusedError unless the formats that a file claims are registered here, in the same versions."""
    claimed = parse_json(metadata.get(ENTRY, "{}"), "its list of formats")
    if not isinstance(claimed, dict):
        raise RefusedError(f"its list of formats is none: {short(claimed)}")
    for name, version in claimed.items():
        if name not in FORMATS:
            raise RefusedError(
                f"its pages are in the format {short(name)}, which is not registered here; import the package that has it, "
                "or call kv_hf.register_format first"
            )
        if FORMATS[name].version != version:
            raise RefusedError(
                f"its pages are in version {short(version)} of format {short(name)}, and version {FORMATS[name].version} is "
                "registered here"
            )
