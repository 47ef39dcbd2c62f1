"""Prepare kv_hf's docstrings for mkdocstrings: sections of one line become paragraphs of their own."""

import re
from typing import Any

import griffe

# a section whose text stands on the line of its name, as in "Returns: [tokens], int64"
SHORT = re.compile(r"(Returns|Raises|Source|Sources|Oracle|Yields): \S")


class ShortSections(griffe.Extension):
    """Set the names of short sections in bold; griffe reads sections of several lines itself."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object in place."""
        if obj.docstring is not None:
            obj.docstring.value = with_short_sections(obj.docstring.value)


def with_short_sections(text: str) -> str:
    """Return a docstring with each short section as a paragraph behind an empty line."""
    lines: list[str] = []
    short = False
    for line in text.splitlines():
        if SHORT.match(line):
            name, rest = line.split(":", 1)
            lines += ["", f"**{name}:**{rest}"]
            short = True
        elif short and line.startswith("    "):
            # goes on with the paragraph; four spaces would make a code block of it
            lines.append(line.strip())
        else:
            short = False
            lines.append(line)
    return "\n".join(lines)
