"""What of a build depends on its environment. Everything else about the package stands in pyproject.toml.

KV_HF_BUILD_KERNEL decides about the C kernel:

    auto       (default) compile it where there is a C compiler; else build on, say so, and name the wheel
               kv_hf-VERSION-py3-none-any.whl, as it holds no compiled code
    required   a kernel that cannot be compiled ends the build with an error
    none       do not compile it

KV_HF_REPOSITORY is the address of the repository's page, such as https://github.com/OWNER/NAME. The package's links (project
URLs, and the README's links to files) lead there; without it there are none, and the README's text stands without them.
"""

import os
import re
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.egg_info import egg_info
from setuptools.errors import BaseError, CCompilerError, SetupError

ROOT = Path(__file__).resolve().parent
REPOSITORY = "KV_HF_REPOSITORY"
PAGES = {
    "Repository": "",
    "Documentation": "/tree/HEAD/docs",
    "Changelog": "/blob/HEAD/CHANGELOG.md",
    "Issues": "/issues",
}
# [text](target) and ![text](target) with a target inside of the repository: no scheme, no anchor of the page itself
RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")
VARIABLE = "KV_HF_BUILD_KERNEL"
CHOICES = ("auto", "required", "none")
SLOW = (
    "kv_hf: the C kernel was not compiled, and decoding on a CPU runs in torch, which is slower. Install a C compiler "
    f"(gcc or clang) and install kv_hf again; {VARIABLE}=required makes this an error, {VARIABLE}=none keeps it quiet."
)


def kernel_choice() -> str:
    """Return what KV_HF_BUILD_KERNEL asks for. Raises SetupError for a value that it cannot have."""
    choice = os.environ.get(VARIABLE) or CHOICES[0]
    if choice not in CHOICES:
        raise SetupError(f"{VARIABLE} must be one of {', '.join(CHOICES)}, got {choice!r}")
    return choice


class BuildKernel(build_ext):
    """Compile the kernel, or say that it is missing."""

    def run(self) -> None:
        """Compile as KV_HF_BUILD_KERNEL asks; with "required" the error of the compiler ends the build."""
        choice = kernel_choice()
        for extension in self.distribution.ext_modules:
            extension.optional = choice == "auto"
        if choice == "none":
            self.extensions: list[Extension] = []
            for extension in self.distribution.ext_modules:
                self._forget(extension)
        try:
            super().run()
        except (BaseError, CCompilerError) as error:
            why = f"{VARIABLE}=required, but the C kernel cannot be compiled: {error}"
            raise SetupError(why) from error
        if choice == "auto" and not self.compiled():
            print(SLOW, file=sys.stderr)

    def build_extension(self, extension: Extension) -> None:
        """Compile one extension; where that fails, the file of an earlier build goes."""
        try:
            super().build_extension(extension)
        except BaseException:
            self._forget(extension)
            raise

    def _forget(self, extension: Extension) -> None:
        Path(self.get_ext_fullpath(extension.name)).unlink(missing_ok=True)

    def compiled(self) -> bool:
        """Return whether every extension's file was written."""
        return all(
            Path(self.get_ext_fullpath(one.name)).is_file() for one in self.distribution.ext_modules
        )


class Wheel(bdist_wheel):
    """A wheel without the kernel holds no compiled code, and its name says so."""

    def run(self) -> None:
        """Build first: only then is it known whether there is a kernel, and so what the wheel is called."""
        if not self.skip_build:
            self.run_command("build")
        if not self.get_finalized_command("build_ext").compiled():
            self.distribution.ext_modules = []
            self.root_is_pure = True
        super().run()


def repository() -> str:
    """Return the address of the repository's page, "" where none is known: KV_HF_REPOSITORY, or what an sdist was made with."""
    made = ROOT / "PKG-INFO"
    told = (
        re.search(r"^Project-URL: Repository, (\S+)$", made.read_text("utf-8"), re.M)
        if made.is_file()
        else None
    )
    return (os.environ.get(REPOSITORY) or (told.group(1) if told else "")).rstrip("/")


def long_description(readme: str, address: str) -> str:
    """Return the README as a package's page shows it: links to files of the repository lead to `address`.

    Args:
        readme: Markdown.
        address: of the repository's page; "" leaves the texts of such links, and no pictures.
    """

    def absolute(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        if not address:
            return "" if picture else text
        return f"{picture}[{text}]({address}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return RELATIVE_LINK.sub(absolute, readme)


class Page(egg_info):
    """What the package's page on an index shows."""

    def run(self) -> None:
        """Give the metadata absolute links before they are written."""
        address, about = repository(), self.distribution.metadata
        about.long_description = long_description((ROOT / "README.md").read_text("utf-8"), address)
        if address:
            about.project_urls = {name: address + path for name, path in PAGES.items()}
        super().run()


if __name__ == "__main__":
    setup(cmdclass={"bdist_wheel": Wheel, "build_ext": BuildKernel, "egg_info": Page})
