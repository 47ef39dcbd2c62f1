"""The documentation holds together: links lead to files and headings that exist, and the site lists every page."""

import re
import unicodedata

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


def anchors(text):
    """Return the anchors that GitHub makes of a page's headings."""
    found = []
    for heading in HEADING.findall(FENCE.sub("", text)):
        shown = unicodedata.normalize("NFC", LINK.sub("]", heading).lower())
        slug = "".join(mark for mark in shown if mark.isalnum() or mark in " -_").replace(" ", "-")
        again = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", one) is not None for one in found)
        found.append(f"{slug}-{again}" if again else slug)
    return set(found)


def broken_links(page):
    """Return the relative links in a page's prose that lead nowhere."""
    text, found = page.read_text("utf-8"), []
    for link in LINK.findall(CODE.sub("", FENCE.sub("", text))):
        target, _, anchor = link.partition("#")
        if "://" in target or target.startswith("mailto:"):
            continue
        path = page.parent / target if target else page
        headed = path.suffix == ".md" and path.is_file()
        if not path.exists() or (
            anchor and headed and anchor not in anchors(path.read_text("utf-8"))
        ):
            found.append(link)
    return found


@pytest.mark.parametrize("page", [*TOP_PAGES, *PAGES], ids=lambda page: page.name)
def test_pages_link_to_files_and_headings_that_exist(page):
    assert not broken_links(page)


def test_broken_links_finds_missing_files_and_headings(tmp_path):
    (tmp_path / "other.md").write_text("# One `word`: two!\n\n```sh\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#one-word-two) [c](#here) [d](https://example.org/x)\n"
        "[e](gone.md) [f](other.md#no-heading) [g](#there) `[h](gone.md)`\n"
    )
    assert broken_links(page) == ["gone.md", "other.md#no-heading", "#there"]


def test_site_lists_every_page_once():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    listed = re.findall(r"- (?:[\w ]+: )?([\w/-]+\.md)$", navigation, re.MULTILINE)
    pages = {page.relative_to(DOCS).as_posix() for page in PAGES}
    made = {"index.md", "contributing.md", "changelog.md", "tutorial.md"}
    assert len(listed) == len(set(listed)) and pages <= set(listed) <= pages | made


def test_sources_and_pages_name_files_that_exist():
    pages, wrong = {page.relative_to(DOCS).as_posix() for page in PAGES}, []
    for folder in ("kv_hf", "scripts", "tests", "docs"):
        for source in (ROOT / folder).rglob("*"):
            if source.suffix in (".py", ".md", ".c", ".h", ".inc"):
                asked = re.findall(r"\bdocs/([\w/-]+\.md)\b", source.read_text("utf-8"))
                wrong += [(source.name, name) for name in asked if name not in pages]
    for page in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        text = page.read_text("utf-8")
        for name in re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|c|h|inc|yaml|html))`", text):
            if not any((base / name).exists() for base in (ROOT, ROOT / "kv_hf")):
                wrong.append((page.name, name))
    assert not wrong


def test_options_lists_the_formats_of_every_cache_name_that_is_shipped():
    text = (ROOT / "docs/options.md").read_text("utf-8")
    rows = re.findall(r"^\| `(paged_\w+)` \|(.*)$", text, re.MULTILINE)
    shipped = {
        name: [one.options["keys"], one.options["values"]]
        for name, one in named._caches.items()
        if one.shipped
    }
    listed = {
        name: sides
        for name, row in rows
        for sides in [re.search(r"\| `(\w+)`, `(\w+)` \|$", row)]
        if sides
    }
    assert {name: list(sides.groups()) for name, sides in listed.items()} == shipped
    assert {name for name, _ in rows} == set(shipped)


def test_pages_install_extras_from_the_clone():
    """The package is in no index, so `pip install kv_hf` with an extra in brackets finds nothing."""
    files = [*TOP_PAGES, *PAGES, *ROOT.glob("kv_hf/**/*.py"), ROOT / "kv_hf_cli.py"]
    wrong = re.compile(r"kv_hf\[[a-z]+\]")
    assert not [str(one) for one in files if wrong.search(one.read_text("utf-8"))]
