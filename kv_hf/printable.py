"""Text of strangers (names in configs, files, arguments) as a terminal may show it.

A terminal obeys control characters: an escape sequence in a model's name could clear the screen, set the window's title
or answer on the user's behalf. They are shown as Python writes them ("\\x1b") and do nothing.
"""

import sys
import unicodedata

MOST = 10_000  # characters of a message that are shown
_MOST_PRINTED = 1 << 24
# control characters, invisible ones that reorder or hide text, halves of surrogate pairs, separators of lines
_OBEYED = ("Cc", "Cf", "Cs", "Zl", "Zp")


def printable(text: str, *, keep: str = "", most: int = MOST) -> str:
    """Return `text` with each control character written out, and cut off behind `most` characters.

    Args:
        keep: control characters that stay as they are, such as "\\n" in a message of several lines.
    """
    if not text.isprintable():
        text = "".join(_escaped(sign) if sign not in keep else sign for sign in text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 3]}..."


def tell(text: str, *, to_errors: bool = False, flush: bool = False) -> None:
    """Print lines of text, control characters and what the terminal's encoding lacks written out.

    Args:
        to_errors: print to standard error, for messages beside a result.
    """
    stream = sys.stderr if to_errors else sys.stdout
    safe = printable(text, keep="\n", most=_MOST_PRINTED)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    print(safe.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=flush)


def tell_error(command: str, error: BaseException) -> None:
    """Print why a command failed, to standard error."""
    tell(f"{command}: error: {str(error) or type(error).__name__}", to_errors=True)


def in_a_line(error: BaseException, most: int = 300) -> str:
    """Return an error's message on one line, for a sentence about it; its class where it has none."""
    return printable(" ".join(str(error).split()) or type(error).__name__, most=most)


def short(value: object, most: int = 120) -> str:
    """Return `value` for a message, as Python writes it: what a hostile file says may be long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes out no number of more than 4,300 digits
        text = f"a number of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _escaped(sign: str) -> str:
    if unicodedata.category(sign) in _OBEYED:
        return sign.encode("unicode_escape").decode("ascii")
    return sign
