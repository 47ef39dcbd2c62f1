"""What C and Python agree on: one definition, and the committed header written from it."""

import pytest
import torch

from kv_hf.backends.cpu import abi, library
from kv_hf.formats import format_names, get_format

HEADER = library.FOLDER / "native" / "abi.h"


@pytest.mark.skipif(not HEADER.is_file(), reason="an installed package carries no C sources")
def test_header_is_current():
    assert HEADER.read_text(encoding="utf-8") == abi.header(), "run scripts/write_abi.py"


@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_format_numbers_are_those_of_the_formats(name):
    one = get_format(name).scheme("keys")
    numbers = dict(abi.format_numbers().values())
    if one.is_exact:
        assert one.native_number == abi.DTYPES[torch.float32]
    else:
        assert numbers[one.native_number] == one.bits


def test_pack_names_takes_all_fields_and_no_others():
    part = abi.NEW.whole
    memory = bytearray(part.size)
    numbers = {name: at for at, name in enumerate(reversed(part.names))}
    part.pack_names(memory, numbers)
    assert part.read(memory) == numbers
    with pytest.raises(TypeError, match="clip"):
        part.pack_names(memory, {name: 0 for name in part.names if name != "clip"})
    with pytest.raises(TypeError, match="other"):
        part.pack_names(memory, {**numbers, "other": 0})


def test_header_holds_the_digest_and_every_block():
    assert abi.ABI != 0 and f"#define KV_HF_ABI {abi.ABI}\n" in abi.header()
    for struct in abi.STRUCTS:
        assert struct.text() in abi.BODY
        assert sum(part.size for part in struct.parts.values()) == struct.whole.size
        assert len(set(struct.whole.names)) == struct.count
