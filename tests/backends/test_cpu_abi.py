"""What C and Python agree on: names, orders and numbers of the header, and blocks packed in its order."""

import re
import zlib

import pytest
import torch

from kv_hf.backends.cpu import abi, library
from kv_hf.formats.base import NATIVE_NUMBERS
from kv_hf.page_summary import Summary

HEADER = library.FOLDER / "native" / "abi.h"


@pytest.fixture(scope="module")
def header():
    if not HEADER.is_file():
        pytest.skip("an installed package carries no C sources")
    return HEADER.read_text(encoding="utf-8")


def defined(header, name):
    """Return the text of a #define."""
    return re.search(rf"^#define {name} (.*?)(?: /\*.*)?$", header, re.M)[1]


def numbers_of(header, name):
    """Return the numbers of an enum by name."""
    members = re.search(rf"^enum {name} {{ (.*) }};$", header, re.M)[1]
    return {one: int(number) for one, number in (m.split(" = ") for m in members.split(", "))}


def fields_of(header, struct):
    """Return (name, type) of each field of a block, those of blocks within one by one."""
    body = re.search(rf"typedef struct {{([^}}]*)}} {struct};", header)[1]
    found = []
    for kind, names, many in re.findall(r"^ +(\w+) ([\w, ]+)(\[MOST_WIDE\])?;", body, re.M):
        for name in [f"{names}.{i}" for i in range(abi.MOST_WIDE)] if many else names.split(", "):
            inner = [("", kind)] if kind in ("int64_t", "double") else fields_of(header, kind)
            found += [(f"{name}.{one}" if one else name, type_) for one, type_ in inner]
    return found


def test_number_of_the_header_is_a_digest_of_its_text(header):
    """A library that was built from other declarations is not loaded; comments say what a field means, and count."""
    text = "".join(
        line for line in header.splitlines(True) if not line.startswith("#define KV_HF_ABI ")
    )
    digest = zlib.crc32(text.encode()) & 0x7FFFFFFF
    assert defined(header, "KV_HF_ABI") == str(digest), f"abi.h and abi.py: the number is {digest}"
    assert digest == abi.ABI


@pytest.mark.parametrize("name", ["Side", "Decode", "New", "Write", "Choose"])
def test_blocks_are_those_of_the_header(header, name):
    block = getattr(abi, name.upper())
    fields = fields_of(header, name)
    assert block.whole.names == tuple(field for field, _ in fields)
    doubles = {field for field, kind in fields if kind == "double"}
    assert {field for field in block.whole.names if field.split(".")[-1] in abi.DOUBLES} == doubles
    assert sum(part.size for part in block.parts.values()) == block.whole.size == 8 * block.count
    assert f"_Static_assert(sizeof({name}) == {block.whole.size}, " in header


def test_numbers_are_those_of_the_header(header):
    for kind in (abi.MaskKind, abi.Isa, abi.Status, Summary):
        listed = {one.name: one.value for one in kind}
        count = {"NUM_ISAS": len(listed)} if kind is abi.Isa else {}
        assert numbers_of(header, kind.__name__) == listed | count
    formats = numbers_of(header, "Format")
    dtypes = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
    codes = {"signed": "INT", "unsigned": "UINT", "float8": "FLOAT"}
    expected = {dtypes[one]: number for one, number in abi.DTYPES.items()}
    bits = {number: 8 * one.itemsize for one, number in abi.DTYPES.items()}
    for (code, width), number in NATIVE_NUMBERS.items():
        if width:
            expected[f"{codes[code]}{width}"], bits[number] = number, width
    assert formats == expected | {"NUM_FORMATS": len(expected)}
    assert (
        defined(header, "FORMAT_BITS") == f"{{{', '.join(str(bits[at]) for at in sorted(bits))}}}"
    )
