"""docs/troubleshooting.md quotes messages that the source has, and all notices that it gives."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import doc_snippets
import pytest
from paths import ROOT

from kv_hf import errors

PAGE = ROOT / "docs" / "troubleshooting.md"
FOREIGN = "## From Python, torch and transformers"
SOURCES = [ROOT / "kv_hf_cli.py", *sorted((ROOT / "kv_hf").rglob("*.py"))]
# how much of a quote has to be the source's own words, and how many characters; names, numbers and lists are the rest
SHARE, LEAST = 0.25, 20
# notices that are made of a variable alone -> why the page quotes none
VARIABLE = {
    "kv_hf: {}": "the verdict of kv_hf.recommend",
    "kv_hf: {}: {}": "a note that the plan prints too",
}


def constants(node: ast.AST) -> list[str] | None:
    """Return the fixed parts of a string, between which something is filled in; None for what is no string."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [""]
        for value in node.values:
            if isinstance(value, ast.Constant):
                parts[-1] += str(value.value)
            else:
                parts.append("")
        return parts
    return None


def literals() -> Iterator[tuple[str, ...]]:
    """Yield the fixed parts of every string of the package."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            found = constants(node)
            # format() fills in as f-strings do
            for parts in [re.split(r"\{\w+\}", found[0]) if found and len(found) == 1 else found]:
                if parts and sum(map(len, parts)) >= LEAST:
                    yield tuple(parts)


def notices() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the fixed parts of what `warn_once` and `say_once` are given."""
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "warn_once",
                "say_once",
            ):
                yield source, tuple(constants(node.args[1]) or [""])


def says(quote: str, parts: tuple[str, ...]) -> bool:
    """Say whether a quote holds the fixed parts of a string, in their order."""
    return (
        all(part in quote for part in parts)
        and re.search(".*".join(map(re.escape, parts)), quote) is not None
    )


def quotes(page: str) -> list[str]:
    own = page.partition(FOREIGN)[0]
    return [
        " ".join(found[2].split())
        for found in doc_snippets.FENCE.finditer(own)
        if found[1] == "text"
    ]


QUOTES = quotes(PAGE.read_text("utf-8"))
LITERALS = sorted(set(literals()))


def in_source(quote: str) -> bool:
    """Say whether some string of the package makes up enough of a quote."""
    return any(
        sum(map(len, parts)) >= SHARE * len(quote) and says(quote, parts) for parts in LITERALS
    )


@pytest.mark.parametrize("quote", QUOTES, ids=[quote[:40] for quote in QUOTES])
def test_quoted_messages_occur_in_the_source(quote):
    assert in_source(quote)


def test_in_source_refuses_messages_of_other_words():
    assert in_source("page_size must be a power of two of at least 16, got 24")
    assert not in_source("page_size should be a power of two of at least 16, got 24")
    assert not in_source("kv_hf: this was never said by anyone")


def test_every_notice_is_quoted():
    found = list(notices())
    assert len(found) > 25 and ("",) not in [parts for _, parts in found]
    missing = [
        (str(source.relative_to(ROOT)), parts)
        for source, parts in found
        if "{}".join(parts) not in VARIABLE and not any(says(quote, parts) for quote in QUOTES)
    ]
    assert not missing


def test_every_class_of_errors_and_warnings_is_named():
    text = PAGE.read_text("utf-8")
    for name, one in inspect.getmembers(errors, inspect.isclass):
        if one.__module__ == errors.__name__:
            assert f"`{name}`" in text, name
