"""The documentation holds together: its links, files and formats exist, and quoted messages are what the source says."""

import ast
import inspect
import re

import pytest
from harness import ROOT
from test_snippets import FENCE

from kv_hf import errors
from kv_hf.formats import named

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TOP_PAGES = sorted(ROOT.glob("*.md"))
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def prose(page):
    return FENCE.sub("", page.read_text("utf-8"))


def anchors(page):
    """Return the anchors that GitHub makes of a page's headings."""
    titles = [LINK.sub("]", heading).lower() for heading in HEADING.findall(prose(page))]
    kept = ["".join(sign for sign in one if sign.isalnum() or sign in " -_") for one in titles]
    return {one.replace(" ", "-") for one in kept}


def leads_somewhere(page, link):
    target, _, anchor = link.partition("#")
    if "://" in target or target.startswith("mailto:"):
        return True
    path = page.parent / target if target else page
    return path.exists() and (not anchor or path.suffix != ".md" or anchor in anchors(path))


@pytest.mark.parametrize("page", [*TOP_PAGES, *PAGES], ids=lambda page: page.name)
def test_pages_link_to_files_and_headings_that_exist(page):
    links = LINK.findall(CODE.sub("", prose(page)))
    assert not [link for link in links if not leads_somewhere(page, link)]


FOLDERS = [ROOT / name for name in ("kv_hf", "scripts", "tests", "docs")]
FILES = [one for folder in FOLDERS for one in folder.rglob("*") if one.is_file()]
NAME = r"[\w-]+\.(?:py|c|h|inc)"


def test_sources_and_pages_name_files_that_exist():
    """With their folders; and without one, as `rows.py`, on pages."""
    there = {one.name for one in [*FILES, *ROOT.iterdir()]}
    wrong = []
    for source in [*TOP_PAGES, *FILES]:
        if source.suffix not in (".py", ".md") or source.name == "CHANGELOG.md":
            continue
        text = source.read_text("utf-8")
        asked = re.findall(r"\b(docs/[\w/-]+\.md)\b", text)
        named = re.findall(rf"`({NAME})`", text) if source.suffix == ".md" else []
        if source.suffix == ".md":
            asked += re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|c|h|inc|yaml|html))`", text)
        bases = (ROOT, ROOT / "kv_hf")
        wrong += [(source.name, n) for n in asked if not any((b / n).exists() for b in bases)]
        wrong += [(source.name, name) for name in named if name not in there]
    assert not wrong


def test_options_lists_the_formats_of_every_cache_name_that_is_shipped():
    rows = re.findall(
        r"^\| `(paged_\w+)` \|.*?(?:`(\w+)`, `(\w+)` \|)?$",
        (DOCS / "options.md").read_text("utf-8"),
        re.MULTILINE,
    )
    shipped = {
        (name, named._caches[name]["keys"], named._caches[name]["values"])
        for name in named._shipped
    }
    # a row may lead to another one, and then names no formats
    assert {row for row in rows if row[1]} == shipped
    assert {name for name, _, _ in rows} == {name for name, _, _ in shipped}


# -- docs/troubleshooting.md ---------------------------------------------------------------------------------

TROUBLE = (DOCS / "troubleshooting.md").read_text("utf-8")
OWN = TROUBLE.partition("## From Python, torch and transformers")[0]
QUOTES = [" ".join(found[2].split()) for found in FENCE.finditer(OWN) if found[1] == "text"]
SOURCES = [ROOT / "kv_hf_cli.py", *sorted((ROOT / "kv_hf").rglob("*.py"))]
NODES = [node for source in SOURCES for node in ast.walk(ast.parse(source.read_text("utf-8")))]
# how much of a quote has to be the source's own words, and how many characters; names, numbers and lists are the rest
SHARE, LEAST = 0.25, 20


def constants(node):
    """Return the fixed parts of a string, between which something is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return tuple(re.split(r"\{\w+\}", node.value))  # format() fills in as f-strings do
    values = node.values if isinstance(node, ast.JoinedStr) else []
    filled = (str(one.value) if isinstance(one, ast.Constant) else "\0" for one in values)
    return tuple("".join(filled).split("\0"))


def says(quote, parts, least=LEAST):
    """Say whether a quote holds the fixed parts of a string in their order, of `least` characters together."""
    at = 0
    for part in parts:
        at = quote.find(part, at) + len(part)
        if at < len(part):
            return False
    return len("".join(parts)) >= least


def test_quoted_messages_occur_in_the_source():
    literals = {constants(node) for node in NODES}
    assert len(QUOTES) > 20
    for quote in QUOTES:
        least = max(LEAST, SHARE * len(quote))
        assert any(says(quote, parts, least) for parts in literals), quote


def test_every_notice_is_quoted():
    calls = (node for node in NODES if isinstance(node, ast.Call))
    given = [c.args[1] for c in calls if getattr(c.func, "id", "") in ("warn_once", "say_once")]
    notices = [parts for parts in map(constants, given) if len("".join(parts)) >= LEAST]
    assert len(notices) > 20  # the rest is made of variables alone
    assert not [parts for parts in notices if not any(says(quote, parts) for quote in QUOTES)]


def test_every_class_of_errors_and_warnings_is_named():
    for name, one in inspect.getmembers(errors, inspect.isclass):
        if one.__module__ == errors.__name__:
            assert f"`{name}`" in TROUBLE, name
