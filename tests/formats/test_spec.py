"""Bytes: what PageSpec states and what storage allocates are one number."""

from functools import partial

import pytest
import torch
from paged_inputs import page_spec

from kv_hf.errors import CacheOptionError
from kv_hf.formats import format_names
from kv_hf.pages.storage import PageStorage
from kv_hf.quant.codec import encode
from kv_hf.row_pages import page_capacity
from kv_hf.spec import LANES, ROWS

F16 = torch.float16
make_spec = partial(page_spec, key_dim=128, dtype=F16)


@pytest.mark.parametrize("key_dim", [64, 128])
@pytest.mark.parametrize("values", format_names("keys", "values"))
@pytest.mark.parametrize("keys", format_names("keys", "values"))
def test_page_bytes_equal_allocated_bytes(keys, values, key_dim):
    spec = make_spec(keys, values, key_dim=key_dim, value_dim=64, page_size=32, dtype=torch.float32)
    storage = PageStorage(spec, torch.device("cpu"), None)
    assert sum(sum(side.nbytes.values()) for side in storage.sides) == 0
    storage.grow(3)
    for side_spec, side in zip(spec.sides, storage.sides, strict=True):
        allocated = {name: t.untyped_storage().nbytes() for name, t in side.fields.items()}
        assert side.nbytes == allocated
        assert 3 * side_spec.payload_bytes == allocated.pop("codes")
        assert 3 * side_spec.scale_bytes == sum(allocated.values())
    total = sum(t.nbytes for side in storage.sides for t in side.fields.values())
    assert 3 * spec.page_bytes == total
    assert spec.bits_per_element == 8 * total / (3 * 2 * 32 * (key_dim + 64))


# formats of keys and values, head_dim -> bits of a key and of a value: codes, and 16 bits for each scale and each offset
BITS = {
    ("exact", "exact", 128): (16, 16),
    # keys: one scale per page and head, one offset per channel; values: one scale per token
    ("int8", "fp8", 128): (8 + 16 / 8192 + 16 / 64, 8 + 16 / 128),
    # scale and offset of keys per channel of 64 tokens; of values per token
    ("int6", "int6", 128): (6.5, 6.25),
    # and the order of the channels of a page; values around 0 have no offset
    ("int4", "int4", 64): (4.625, 4.25),
    ("int2", "int2", 64): (3.125, 2.5),
    ("int3", "int2", 128): (3.375, 2.25),
    ("int4", "int3", 128): (4.625, 3.125),
}


def test_bits_per_element_is_what_the_readme_states():
    for (keys, values, dim), bits in BITS.items():
        spec = make_spec(keys, values, key_dim=dim)
        assert (spec.keys.bits_per_element, spec.values.bits_per_element) == bits
        assert spec.bits_per_element == sum(bits) / 2


@pytest.mark.parametrize(
    ("names", "dims", "says"),
    [
        (("int4", "int4"), (65, 64), "keys .*'int4'.* multiple of 2, got 65.*int8"),
        (("int4", "int4"), (64, 31), "values .*'int4'.* multiple of 2, got 31"),
        (("plain2", "int2"), (66, 64), "keys .*'plain2'.* multiple of 4, got 66"),
        (("int4", "int3"), (64, 12), "'int3'.* multiple of 8, got 12"),
    ],
)
def test_build_refuses_head_dims_that_do_not_pack(names, dims, says):
    with pytest.raises(CacheOptionError, match=says):
        make_spec(*names, key_dim=dims[0], value_dim=dims[1])


@pytest.mark.parametrize("name", ["exact", "fp8", "int8"])
def test_build_takes_any_head_dim_where_a_code_is_a_byte(name):
    spec = make_spec(name, key_dim=65, value_dim=7)
    assert (spec.keys.fields["codes"][0][-1], spec.values.head_dim) == (65, 7)


@pytest.mark.parametrize(
    ("page_size", "head_dim", "tokens", "channels"),
    [(64, 128, 32, 32), (32, 64, 32, 32), (16, 128, 16, 32), (64, 80, 32, 20), (64, 16, 32, 16)],
)
def test_build_fits_default_groups_to_page_and_head(page_size, head_dim, tokens, channels):
    spec = make_spec("plain2", key_dim=head_dim, page_size=page_size)
    assert (spec.keys.scheme.scale_group, spec.keys.scheme.offset_group) == ((tokens, 1),) * 2
    assert (spec.values.scheme.scale_group, spec.values.scheme.offset_group) == ((1, channels),) * 2


# -- capacity ----------------------------------------------------------------------------------------------


def test_page_capacity_wastes_little_and_never_falls():
    capacities = [page_capacity(n) for n in range(3000)]
    assert capacities[:257] == list(range(257))
    assert capacities == sorted(capacities)
    assert all(0 <= (c - n) * 128 < max(n, 1) for n, c in enumerate(capacities))
    # growing copies a layer once per step: steps must become few, or a long decode copies all the time
    assert len(set(capacities[1025:2049])) == 128
    for n in (2**24 - 1, 2**24, 2**24 + 1):
        assert n <= page_capacity(n) == page_capacity(page_capacity(n)) < n * (1 + 1 / 64)


@pytest.mark.parametrize("page_size", [16, 32])
def test_build_lays_codes_out_in_words_only_where_these_are_whole(page_size):
    """Keys pack channels and values tokens: 16 tokens of 3 bits are a word and a half, and the prefill raised."""
    spec = make_spec("int4", "int3", page_size=page_size, layout=LANES)
    assert {side.layout for side in spec.sides} == {LANES if page_size == 32 else ROWS}
    for side in spec.sides:
        fields, _ = encode(torch.randn(3, 2, page_size, 128).half(), side)
        assert {name: (t.shape[1:], t.dtype) for name, t in fields.items()} == side.fields
