"""The documentation holds together: links lead to files and headings that exist, and the site lists every page."""

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

from kv_hf.formats import named

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TOP_PAGES = sorted(ROOT.glob("*.md"))
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def links(text: str) -> list[str]:
    """Return the targets of a page's links that stand in its prose."""
    return LINK.findall(CODE.sub("", FENCE.sub("", text)))


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = LINK.sub("]", heading).lower()
        slug = "".join(
            mark for mark in unicodedata.normalize("NFC", shown) if mark.isalnum() or mark in " -_"
        ).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


def broken_links(page: Path) -> Iterator[str]:
    """Yield the relative links of a page that lead nowhere."""
    text = page.read_text("utf-8")
    for link in links(text):
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        path = page.parent / target if target else page
        if not path.exists() or (
            anchor and path.suffix == ".md" and anchor not in anchors(path.read_text("utf-8"))
        ):
            yield link


@pytest.mark.parametrize("page", [*TOP_PAGES, *PAGES], ids=lambda page: page.name)
def test_pages_link_to_files_and_headings_that_exist(page: Path) -> None:
    assert not list(broken_links(page))


def test_broken_links_finds_missing_files_and_headings(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One `word`: two!\n\n```sh\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#one-word-two) [c](#here) [d](https://example.org/x)\n"
        "[e](gone.md) [f](other.md#no-heading) [g](#there) `[h](gone.md)`\n"
    )
    assert list(broken_links(page)) == ["gone.md", "other.md#no-heading", "#there"]


def test_site_lists_every_page_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    listed = re.findall(r"- (?:[\w ]+: )?([\w/-]+\.md)$", navigation, re.MULTILINE)
    made = ["index.md", "contributing.md", "changelog.md"]
    pages = [page.relative_to(DOCS).as_posix() for page in PAGES]
    assert sorted(listed) == sorted([*made, *pages])


def test_sources_name_pages_that_exist() -> None:
    named = {
        name
        for folder in ("kv_hf", "scripts", "tests", "docs")
        for source in (ROOT / folder).rglob("*")
        if source.suffix in (".py", ".md", ".c", ".h", ".inc", ".js", ".html")
        for name in re.findall(r"\bdocs/([\w/-]+\.md)\b", source.read_text("utf-8"))
    }
    assert named
    assert named <= {page.relative_to(DOCS).as_posix() for page in PAGES}


def test_pages_name_files_that_exist() -> None:
    named = {
        (page.name, name)
        for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for name in re.findall(
            r"`([\w./-]+/[\w.-]+\.(?:py|c|h|inc|js|yaml|html))`", page.read_text("utf-8")
        )
    }
    bases = [ROOT, ROOT / "kv_hf"]
    assert len(named) > 20
    assert not [one for one in named if not any((base / one[1]).exists() for base in bases)]


def test_options_lists_every_cache_name_that_is_shipped() -> None:
    listed = re.findall(
        r"^\| `(paged_\w+)` \|", (ROOT / "docs/options.md").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(name for name, one in named._caches.items() if one.shipped)


def test_options_has_the_formats_of_every_cache_name() -> None:
    text = (ROOT / "docs/options.md").read_text("utf-8")
    listed = re.findall(r"^\| `(paged_\w+)` \|.*\| `(\w+)`, `(\w+)` \|$", text, re.MULTILINE)
    assert {name: sides for name, *sides in listed} == {
        name: [one.options["keys"], one.options["values"]]
        for name, one in named._caches.items()
        if one.shipped
    }


def test_pages_install_extras_from_the_clone() -> None:
    """The package is in no index, so `pip install kv_hf` with an extra in brackets finds nothing."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    files = [*pages, *ROOT.glob("kv_hf/**/*.py"), ROOT / "kv_hf_cli.py"]
    wrong = re.compile(r"kv_hf\[[a-z]+\]")
    assert len(files) > 200
    assert not [str(one) for one in files if wrong.search(one.read_text("utf-8"))]
