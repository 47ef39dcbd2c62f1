"""Pages that mkdocs adds to docs/: README, CONTRIBUTING, CHANGELOG, notebooks, the API reference, the help of the command line.

mkdocs.yml names this file as a hook. Links between pages stay as GitHub reads them: a link to another file of the repository
(results/, a folder of plots) brings that file into the site.
"""

import io
import json
import os
import posixpath
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel

from kv_hf_cli import COMMANDS, main

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGE = ROOT / "kv_hf"
# pages of the repository's top folder, and their names in the site
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# one page each: the package and what it holds, down to its last module
PACKAGES = ("evaluation", "gqa", "planner")
LINK = re.compile(r"(?<!\\)(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Append the generated pages to the navigation."""
    pages = [{"kv_hf": "reference/kv_hf.md"}, {"Options of a cache": "reference/options.md"}]
    pages += [{"Command line": "reference/command_line.md"}]
    pages += [{f"kv_hf.{name}": f"reference/{name}.md"} for name in PACKAGES]
    config.nav.append({"API reference": pages})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and every file of the repository that a page links to."""
    made = {target: relocated((ROOT / name).read_text(), "") for name, target in TOP.items()}
    made["reference/kv_hf.md"] = names_page()
    made["reference/options.md"] = "# Options of a cache\n\n::: kv_hf.CacheConfig\n"
    made["reference/command_line.md"] = command_line_page()
    made |= {f"reference/{name}.md": package_page(name) for name in PACKAGES}
    for notebook in sorted(DOCS.glob("*.ipynb")):
        text = notebook_page(json.loads(notebook.read_text("utf-8")))
        made[f"{notebook.stem}.md"] = relocated(text, "docs")
    texts = [
        *made.values(),
        *(relocated(page.content_string, folder_of(page)) for page in files.documentation_pages()),
    ]
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    for path in sorted({path for text in texts for path in repository_files(text)}):
        if (ROOT / path).is_dir():
            listing = File.generated(
                config,
                f"{path}/index.md",
                content=folder_page(path),
                inclusion=InclusionLevel.NOT_IN_NAV,
            )
            files.append(listing)
            for entry in sorted((ROOT / path).iterdir()):
                files.append(
                    File.generated(config, f"{path}/{entry.name}", abs_src_path=str(entry))
                )
        elif (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let a page of docs/ link to pages and files outside of docs/."""
    if page.file.generated_by is not None:
        return markdown
    return relocated(markdown, folder_of(page.file), posixpath.dirname(page.file.src_uri))


def folder_of(file: Any) -> str:
    """Return the folder of the repository in which a page of docs/ lies."""
    return posixpath.dirname(f"docs/{file.src_uri}")


def relocated(text: str, folder: str, place: str = "") -> str:
    """Return a page of a folder of the repository with its links as the site has them.

    Args:
        folder: of the repository.
        place: folder of the site that the links shall be relative to; "" for its root.
    """

    def moved(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in TOP:
            path = TOP[path]
        elif path.startswith("docs/"):
            path = re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
        elif (ROOT / path).is_dir():
            path += "/index.md"
        return f"{opening}{posixpath.relpath(path, place or '.')}{anchor or ''}{closing}"

    return outside_code(LINK, moved, text)


def outside_code(pattern: re.Pattern[str], change: Any, text: str) -> str:
    """Replace a pattern everywhere but in fenced code."""
    parts: list[str] = []
    start = 0
    for fence in FENCE.finditer(text):
        parts += [pattern.sub(change, text[start : fence.start()]), fence[0]]
        start = fence.end()
    return "".join([*parts, pattern.sub(change, text[start:])])


def repository_files(text: str) -> Iterator[str]:
    """Yield the files and folders outside of docs/ that a relocated page links to."""
    for _, target, _, _ in LINK.findall(FENCE.sub("", text)):
        path = target.removesuffix("/index.md")
        if not target.startswith("http") and not (ROOT / "docs" / target).exists():
            yield path


def folder_page(path: str) -> str:
    """Return a page that lists the files of a folder."""
    names = sorted(entry.name for entry in (ROOT / path).iterdir())
    return "\n".join([f"# {path}", "", *(f"- [{name}]({name})" for name in names), ""])


def notebook_page(notebook: dict[str, Any]) -> str:
    """Return a notebook as a page: its text, its code, and what the code printed."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fenced("python", source))
        printed = "".join(map(printed_by, cell.get("outputs", ())))
        if printed:
            parts.append(fenced("text", printed.rstrip("\n")))
    return "\n\n".join(parts) + "\n"


def printed_by(output: dict[str, Any]) -> str:
    """Return the text of one output of a cell."""
    return "".join(output["text"] if "text" in output else output["data"]["text/plain"])


def fenced(language: str, text: str) -> str:
    """Return a block of code, with a fence that the text does not hold."""
    fence = "```" if "```" not in text else "~~~~"
    return f"{fence}{language}\n{text}\n{fence}"


def names_page() -> str:
    """Return the page of kv_hf.__all__, read from the source: one entry per name."""
    import kv_hf

    names = [name for name in kv_hf.__all__ if name not in ("__version__", "CacheConfig")]
    return "\n".join(["# kv_hf", "", *(f"::: kv_hf.{name}\n" for name in names)])


def package_page(name: str) -> str:
    """Return the page of one package: its docstring and its modules."""
    lines = [f"# kv_hf.{name}", ""]
    for source in sorted((PACKAGE / name).rglob("*.py")):
        parts = source.relative_to(ROOT).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        lines += [f"::: {module}", ""]
    return "\n".join(lines)


def command_line_page() -> str:
    """Return the help of `kv-hf` and of each of its commands."""
    lines = ["# kv-hf", "", "```text", help_of(), "```", ""]
    for command in COMMANDS:
        lines += [f"## kv-hf {command}", ""]
        if command == "lm-eval":
            lines += ["Takes the arguments of lm-eval itself: see [lm-eval](../lm_eval.md).", ""]
        else:
            lines += ["```text", help_of(command), "```", ""]
    return "\n".join(lines)


def help_of(*command: str) -> str:
    """Return what `kv-hf COMMAND --help` prints, 88 columns wide."""
    os.environ["COLUMNS"] = "88"
    with redirect_stdout(io.StringIO()) as printed, suppress(SystemExit):
        main([*command, "--help"])
    if not printed.getvalue():
        raise PluginError(f"kv-hf {' '.join(command)} --help prints nothing")
    return printed.getvalue().rstrip()
