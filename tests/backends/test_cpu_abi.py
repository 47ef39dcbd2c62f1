"""What C and Python agree on: names, orders and numbers of the header, and blocks packed in its order."""

import re
import zlib

import pytest
import torch
from paged_inputs import make_kv, make_query
from test_cpu_write import Inputs, make_spec

from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu import abi, decode, library, write
from kv_hf.formats.base import NATIVE_NUMBERS
from kv_hf.formats.linear import SCALE_MAX, Float8Format, SignedFormat
from kv_hf.page_summary import MIDDLE_TOKENS, MOST_CHANNELS, PART, RANGED_PAGES, Summary
from kv_hf.read_budget import NEWEST_PAGES
from kv_hf.spec import LANES

needs_library = pytest.mark.skipif(bool(library.missing()), reason=str(library.missing()))
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
    for kind, names in re.findall(r"^ +(\w+) ([\w, ]+);", body, re.M):
        for name in names.split(", "):
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


def test_constants_are_those_of_the_header(header):
    bias, mantissa = Float8Format.exponent_bias, Float8Format.mantissa_bits
    assert {
        name: float.fromhex(text) if "0x" in text else float(text)
        for name, text in (
            (name, defined(header, name).rstrip("f"))
            for name in re.findall(r"^#define (\w+) ", header, re.M)
            if name not in ("KV_HF_ABI", "FORMAT_BITS")
        )
    } == {
        "SCALE_MAX": SCALE_MAX, "SIGNED_TOP": SignedFormat.top, "FLOAT8_TOP": Float8Format.top,
        "FLOAT8_MANTISSA": mantissa, "FLOAT8_BIAS": bias, "FLOAT8_LEAST_NORMAL": 2.0 ** (1 - bias),
        "FLOAT8_LIFT": 2.0 ** (127 - bias), "FLOAT8_ROUNDER": 2.0 ** (24 - bias - mantissa),
        "MOST_CHANNELS": MOST_CHANNELS, "MOST_WORDS": MOST_CHANNELS // PART, "RANGED_PAGES": RANGED_PAGES,
        "MIDDLE_TOKENS": MIDDLE_TOKENS, "NEWEST_PAGES": NEWEST_PAGES,
    }  # fmt: skip


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


def check_side(numbers, prefix, spec, fields, window):
    """Compare the numbers of a block of one side with its tensors."""
    got = {field: numbers[f"{prefix}.{field}"] for field in abi.SIDE.whole.names}
    row, head, slot, _ = window.stride()
    strides = {f"{name}_stride": fields[name].stride(1) if name in fields else 0 for name in NAMES}
    pointers = {name: fields[name].data_ptr() if name in fields else 0 for name in NAMES}
    tokens, channels = spec.scheme.scale_group or (0, 1)
    assert got == {
        "format": spec.scheme.native_number, "dim": spec.head_dim, "rotated": 0, "wide": 0, "wide_format": 0, "order": 0, "order_stride": 0, "group_tokens": tokens,
        "scale_channels": channels, "scale_dtype": abi.DTYPES[spec.scale_dtype], "window_dtype": abi.DTYPES[spec.dtype],
        "window_row": row, "window_head": head, "window_slot": slot, "window": window.data_ptr(), **strides, **pointers,
    }  # fmt: skip


NAMES = ("codes", "scale", "offset")


@needs_library
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_paged_attention_packs_every_field_under_its_name(masked):
    kv = make_kv("int8", "int4", layout=LANES)
    query = make_query(kv, 3, 2, torch.float32)
    options = {"softmax_scale": 0.25, "softcap": 30.0, "sliding_window": 70}
    if masked:
        options["mask"] = torch.ones(kv.rows, 1, 3, kv.seen, dtype=torch.bool).tril(kv.seen - 3)
        options["sink_logits"] = torch.randn(query.shape[1])
    out = decode.paged_attention(AttentionCall(query, kv, **options))
    numbers = abi.DECODE.whole.read(kv.launches["c attend"].memory)
    for prefix, spec, fields, window in zip(
        ("keys", "values"),
        kv.spec.sides,
        (kv.key_pages, kv.value_pages),
        (kv.residual_keys, kv.residual_values),
        strict=True,
    ):
        check_side(numbers, prefix, spec, fields, window)
    got = {name: number for name, number in numbers.items() if "." not in name}
    shown = options.get("mask")
    rows, heads, q_len, _ = query.shape
    assert got == {
        "rows": rows, "heads": 2, "group": 2, "q_len": q_len, "page_size": kv.page_size, "sink_tokens": kv.sink_tokens,
        "query_dtype": abi.DTYPES[query.dtype], "query_row": query.stride(0), "query_head": query.stride(1),
        "query_at": query.stride(2), "out_row": out.stride(0), "out_head": out.stride(1), "out_at": out.stride(2),
        "sliding_window": 70, "mask_kind": abi.MaskKind.MASK_BOOL if masked else abi.MaskKind.MASK_NONE,
        "mask_dtype": 0, "mask_row": shown.stride(0) if masked else 0, "mask_head": 0,
        "mask_at": shown.stride(2) if masked else 0, "isa": library.isa(), "softmax_scale": 0.25, "softcap": 30.0,
        "table": kv.block_table.data_ptr(), "table_width": kv.block_table.stride(0),
        "num_pages": kv.num_pages.data_ptr(), "exact_lens": kv.exact_lens.data_ptr(), "padding": kv.padding.data_ptr(),
        "capacity": len(kv.key_pages["codes"]), "query": query.data_ptr(), "out": out.data_ptr(),
        "mask": shown.data_ptr() if masked else 0,
        "sink_logits": options["sink_logits"].data_ptr() if masked else 0, "threads": torch.get_num_threads(),
    }  # fmt: skip


@needs_library
@pytest.mark.parametrize("seals", [False, True], ids=["append", "append-and-seal"])
def test_write_pair_packs_every_field_under_its_name(seals):
    inputs, launches = Inputs(make_spec("int4", "int8")), {}
    write.write_pair(
        inputs.windows, inputs.new, inputs.starts, inputs.skips, inputs.jobs if seals else None, inputs.fields,
        inputs.spec, inputs.damaged, launches,
    )  # fmt: skip
    numbers = abi.WRITE.whole.read(launches["c write"].memory)
    for prefix, spec, fields, window, new in zip(
        ("keys", "values"),
        inputs.spec.sides,
        inputs.fields,
        inputs.windows,
        inputs.new,
        strict=True,
    ):
        check_side(numbers, prefix, spec, fields, window)
        row, head, at, _ = new.stride()
        got = {field: numbers[f"new_{prefix}.{field}"] for field in abi.NEW.whole.names}
        assert got == {
            "is_keys": prefix == "keys", "row": row, "head": head, "at": at, "clip": spec.scheme.clip,
        }  # fmt: skip
    rows, heads, slots, _ = inputs.windows[0].shape
    jobs = inputs.jobs
    sealing = {
        "jobs": jobs.data_ptr(),
        "num_jobs": len(jobs),
        "capacity": len(inputs.fields[0]["codes"]),
    }
    sealing["damaged"] = inputs.damaged.data_ptr()
    assert {name: number for name, number in numbers.items() if "." not in name} == {
        "rows": rows, "heads": heads, "q_len": inputs.new[0].shape[2], "slots": slots,
        "page_size": inputs.spec.keys.page_size, "isa": library.isa(), "keys_from": inputs.new[0].data_ptr(),
        "values_from": inputs.new[1].data_ptr(), "starts": inputs.starts.data_ptr(), "skips": inputs.skips.data_ptr(),
        "threads": torch.get_num_threads(), **(sealing if seals else dict.fromkeys(sealing, 0)),
    }  # fmt: skip
