"""docs/troubleshooting.md quotes messages that the source has, and all notices that it gives."""

import ast
import inspect
import re

import doc_snippets
from paths import ROOT

from kv_hf import errors

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
OWN = PAGE.partition("## From Python, torch and transformers")[0]
QUOTES = [
    " ".join(found[2].split()) for found in doc_snippets.FENCE.finditer(OWN) if found[1] == "text"
]
SOURCES = [ROOT / "kv_hf_cli.py", *sorted((ROOT / "kv_hf").rglob("*.py"))]
NODES = [node for source in SOURCES for node in ast.walk(ast.parse(source.read_text("utf-8")))]
# how much of a quote has to be the source's own words, and how many characters; names, numbers and lists are the rest
SHARE, LEAST = 0.25, 20


def constants(node):
    """Return the fixed parts of a string, between which something is filled in; [] for what is no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.split(r"\{\w+\}", node.value)  # format() fills in as f-strings do
    parts = [""]
    for value in getattr(node, "values", []) if isinstance(node, ast.JoinedStr) else []:
        if isinstance(value, ast.Constant):
            parts[-1] += str(value.value)
        else:
            parts.append("")
    return parts


LITERALS = {tuple(parts) for parts in map(constants, NODES) if sum(map(len, parts)) >= LEAST}


def says(quote, parts):
    """Say whether a quote holds the fixed parts of a string, in their order."""
    return re.search(".*".join(map(re.escape, parts)), quote) is not None


def in_source(quote):
    """Say whether some string of the package makes up enough of a quote."""
    return any(
        all(part in quote for part in parts) and says(quote, parts)
        for parts in LITERALS
        if sum(map(len, parts)) >= SHARE * len(quote)
    )


def test_quoted_messages_occur_in_the_source():
    assert len(QUOTES) > 20
    assert not [quote for quote in QUOTES if not in_source(quote)]


def test_in_source_refuses_messages_of_other_words():
    assert in_source("page_size must be a power of two of at least 16, got 24")
    assert not in_source("page_size should be a power of two of at least 16, got 24")


def test_every_notice_is_quoted():
    calls = (node for node in NODES if isinstance(node, ast.Call))
    given = [c.args[1] for c in calls if getattr(c.func, "id", "") in ("warn_once", "say_once")]
    notices = [parts for parts in map(constants, given) if sum(map(len, parts)) >= LEAST]
    assert len(notices) > 20  # the rest is made of variables alone
    assert not [parts for parts in notices if not any(says(quote, parts) for quote in QUOTES)]


def test_every_class_of_errors_and_warnings_is_named():
    for name, one in inspect.getmembers(errors, inspect.isclass):
        if one.__module__ == errors.__name__:
            assert f"`{name}`" in PAGE, name
