"""What a build makes: wheels with the C kernel or without it, and editable installs."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from harness import ROOT

PAGE = "https://example.org/owner/name"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of what a build reads, in a folder called kv_hf; compiled files are left out."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("parent") / "kv_hf"
    left = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "kv_hf", folder / "kv_hf", ignore=left)
    for name in ("pyproject.toml", "setup.py", "kv_hf_cli.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(clone, out, hook="build_wheel", **variables):
    """Run a hook of the build backend, as pip does; return (wheel or None, what was printed)."""
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.{hook}({str(out)!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    own = {name: value for name, value in os.environ.items() if not name.startswith("KV_HF_")}
    done = subprocess.run(
        command, cwd=clone, env={**own, **variables}, capture_output=True, text=True, timeout=300
    )
    shutil.rmtree(clone / "build", ignore_errors=True)
    return (None if done.returncode else next(out.iterdir())), done.stderr


def names_in(wheel):
    with zipfile.ZipFile(wheel) as opened:
        return set(opened.namelist())


def read(wheel, end):
    (name,) = (name for name in names_in(wheel) if name.endswith(end))
    with zipfile.ZipFile(wheel) as opened:
        return opened.read(name).decode()


def test_a_wheel_without_the_kernel_holds_what_runs_and_links_that_work(clone, tmp_path):
    """Built without a compiler, the wheel was called as the fast one is; a file of an earlier build does not count."""
    made = f"lib.{sysconfig.get_platform()}-cpython-{sys.version_info[0]}{sys.version_info[1]}"
    left = clone / "build" / made / "kv_hf" / "backends" / "cpu" / "_native.abi3.so"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"of an earlier build")
    os.utime(left, (0, 0))
    variables = {"CC": "/bin/false", "KV_HF_REPOSITORY": f"{PAGE}/"}
    wheel, printed = build(clone, tmp_path / "out", **variables)
    assert wheel.name.endswith("-py3-none-any.whl"), printed
    assert "the C kernel was not compiled" in printed
    assert "Root-Is-Purelib: true" in read(wheel, ".dist-info/WHEEL")
    names = names_in(wheel)
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "kv_hf").rglob("*.py")}
    assert {*sources, "kv_hf_cli.py"} <= names
    assert not [name for name in names if name.endswith((".so", ".c", ".h", ".inc"))]
    text = read(wheel, ".dist-info/METADATA")
    for name, path in runpy.run_path(str(ROOT / "setup.py"), run_name="setup_file")[
        "PAGES"
    ].items():
        assert f"Project-URL: {name}, {PAGE}{path}\n" in text
    targets = re.findall(r"\]\(([^)\s]+)\)", text.partition("\n\n")[2])
    assert f"{PAGE}/blob/HEAD/CHANGELOG.md" in targets
    assert all(target.startswith(("https://", "http://", "#")) for target in targets)


def test_a_build_that_must_have_the_kernel_fails_without_it(clone, tmp_path):
    variables = {"KV_HF_BUILD_KERNEL": "required", "CC": "/bin/false"}
    wheel, printed = build(clone, tmp_path / "out", **variables)
    assert wheel is None and "the C kernel cannot be compiled" in printed.splitlines()[-1]


def test_files_beside_the_sources_are_named_for_a_build():
    """setuptools packs what is named: a new file that is not makes an sdist without a source, a wheel without its data."""
    (extension,) = SETTINGS["tool"]["setuptools"]["ext-modules"]
    native = ROOT / "kv_hf" / "backends" / "cpu" / "native"
    named = {ROOT / name for name in (*extension["sources"], *extension["depends"])}
    assert named == {path for path in native.iterdir() if path.is_file()}
    data = {
        path
        for pattern in SETTINGS["tool"]["setuptools"]["package-data"]["kv_hf"]
        for path in (ROOT / "kv_hf").glob(pattern)
    }
    listed = subprocess.run(["git", "ls-files", "kv_hf"], cwd=ROOT, capture_output=True, text=True)
    there = {ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    assert {path for path in there - data - named if path.suffix != ".py"} == set()


def test_a_wheel_with_the_kernel_names_the_platform(clone, tmp_path):
    """A compiler that writes empty files is enough for that; each installation compiles the true ones."""
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; : > "$2"\n')
    compiler.chmod(0o755)
    variables = {"KV_HF_BUILD_KERNEL": "required", "CC": str(compiler), "LDSHARED": str(compiler)}
    wheel, printed = build(clone, tmp_path / "out", **variables)
    assert wheel is not None and re.search(r"-cp311-abi3-\w+\.whl$", wheel.name), printed
    assert len([name for name in names_in(wheel) if name.endswith(".so")]) == 1


def test_an_editable_install_is_found_from_the_clones_parent_folder(clone, tmp_path):
    """A clone named kv_hf was imported there as an empty namespace package, in place of the installed one."""
    wheel, printed = build(clone, tmp_path / "out", "build_editable", KV_HF_BUILD_KERNEL="none")
    assert wheel is not None, printed
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site")
    code = "import importlib.util, site, sys; site.addsitedir(sys.argv[1]); print(importlib.util.find_spec('kv_hf').origin)"
    command = [sys.executable, "-S", "-c", code, str(tmp_path / "site")]
    done = subprocess.run(command, cwd=clone.parent, capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == clone / "kv_hf" / "__init__.py"
