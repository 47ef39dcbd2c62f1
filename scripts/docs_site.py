"""Pages that mkdocs adds to docs/: README, CONTRIBUTING, CHANGELOG, the API reference, and the help of the command line.

mkdocs.yml names this file as a hook. Links between pages stay as GitHub reads them: a link to another file of the repository
(results/) brings that file into the site. It prepares docstrings for mkdocstrings, too.
"""

import io
import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from kv_hf_cli import COMMANDS, main

ROOT = Path(__file__).parent.parent
# pages of the repository's top folder, and their names in the site
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# one page each: the package and what it holds, down to its last module
PACKAGES = ("evaluation", "gqa", "planner")
# a block of code, which stays as it is, or a link
LINK = re.compile(r"^```.*?^```|(?<!\\)(\]\()([^)\s#]+)(#[^)\s]*)?(\))", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Append the generated pages to the navigation."""
    names = ("kv_hf", "options", "command_line", *PACKAGES)
    config.nav.append({"API reference": [f"reference/{name}.md" for name in names]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and every file of the repository that a page links to."""
    made = {target: relocated((ROOT / name).read_text(), "") for name, target in TOP.items()}
    made["reference/kv_hf.md"] = names_page()
    made["reference/options.md"] = "# Options of a cache\n\n::: kv_hf.CacheConfig\n"
    made["reference/command_line.md"] = command_line_page()
    made |= {f"reference/{name}.md": package_page(name) for name in PACKAGES}
    pages = [relocated(page.content_string, "docs") for page in files.documentation_pages()]
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    for path in sorted({path for text in [*made.values(), *pages] for path in linked(text)}):
        if (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let a page of docs/ link to files outside of docs/."""
    return markdown if page.file.generated_by is not None else relocated(markdown, "docs")


def relocated(text: str, folder: str) -> str:
    """Return a page of a folder of the repository with its links as the site, whose root is docs/, has them."""

    def moved(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if target is None or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        path = TOP.get(path) or path.removeprefix("docs/")
        return f"{opening}{path}{anchor or ''}{closing}"

    return LINK.sub(moved, text)


def linked(text: str) -> Iterator[str]:
    """Yield the files outside of docs/ that a relocated page links to."""
    for match in LINK.finditer(text):
        target = match[2] or "http"
        if not target.startswith("http") and not (ROOT / "docs" / target).exists():
            yield target


def names_page() -> str:
    """Return the page of the names of kv_hf, read from the source: one entry per name."""
    import kv_hf

    lines = ["# kv_hf", ""]
    for name in sorted({*kv_hf.__all__, *kv_hf._LATER} - {"__version__", "CacheConfig", "texts"}):
        lines.append(f"::: kv_hf.{name}\n")
    return "\n".join(lines)


def package_page(name: str) -> str:
    """Return the page of one package: its docstring and its modules."""
    lines = [f"# kv_hf.{name}", ""]
    for source in sorted((ROOT / "kv_hf" / name).rglob("*.py")):
        module = ".".join(source.relative_to(ROOT).with_suffix("").parts)
        lines += [f"::: {module.removesuffix('.__init__')}", ""]
    return "\n".join(lines)


def command_line_page() -> str:
    """Return the help of `kv-hf` and of each of its commands."""
    lines = ["# kv-hf", "", "```text", help_of(), "```", ""]
    for command in COMMANDS:
        lines += [f"## kv-hf {command}", "", "```text", help_of(command), "```", ""]
    return "\n".join(lines)


def help_of(*command: str) -> str:
    """Return what `kv-hf COMMAND --help` prints, 88 columns wide."""
    os.environ["COLUMNS"] = "88"
    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        main([*command, "--help"])
    if not printed.getvalue():
        raise PluginError(f"kv-hf {' '.join(command)} --help prints nothing")
    return printed.getvalue().rstrip()


# a section whose text stands on the line of its name, as in "Returns: [tokens], int64"
SHORT = re.compile(r"^(Returns|Raises|Source|Sources|Oracle|Yields): (?=\S)", re.MULTILINE)


class ShortSections(griffe.Extension):
    """Make a paragraph of each short section, its name in bold; griffe reads sections of several lines itself."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object in place."""
        if obj.docstring is not None:
            obj.docstring.value = SHORT.sub(r"\n**\1:** ", obj.docstring.value)
