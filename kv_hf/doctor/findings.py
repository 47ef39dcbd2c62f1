"""One thing that was looked at, and how it stands."""

from dataclasses import dataclass

OK = "ok"
NOTE = "note"  # absent or left out, which is no fault
WARNING = "warning"  # may work, but nobody has tried
BROKEN = "broken"

SYMBOLS = {OK: "[ok]", NOTE: "[--]", WARNING: "[!!]", BROKEN: "[XX]"}


@dataclass(frozen=True)
class Finding:
    """The finding about one seam or requirement.

    Attributes:
        name: the thing.
        status: OK, NOTE, WARNING or BROKEN.
        detail: what was found, in words; where something is wrong also what it is needed for or what to do.
    """

    name: str
    status: str
    detail: str

    def as_dict(self) -> dict[str, str]:
        """Return the fields, for JSON."""
        return {"name": self.name, "status": self.status, "detail": self.detail}
