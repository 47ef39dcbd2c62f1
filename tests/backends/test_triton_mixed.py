"""Keys of two widths in the Triton kernels: in the interpreter against an fp64 softmax over decoded tokens, and compiled."""

from functools import partial

import pytest
import torch
from interpreter import attend, attend_with_ptx, call, dense, needs_interpreter
from paged_inputs import check, make_kv, make_query
from rounding import Rounding

from kv_hf.backends.reference.pages import dense_side

FEW = [(3, 5), (0, 2)]  # pages and exact tokens of each row
FP32 = torch.float32
MIXED = ("int2_mixed", "int4_mixed")


def check_kernel(query, kv, kernel=attend, **options):

    def called(*args, **given):
        return call(kernel, *args, **given)

    return check(query, kv, called, Rounding.of("triton", query.dtype), **options)


@needs_interpreter
@pytest.mark.parametrize("dim", [16, 64, 80, 128, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("keys", MIXED)
def test_decode_reads_mixed_keys(keys, dim):
    kv = make_kv(keys, "exact", key_dim=dim, rows=FEW, heads=2, shuffle=1, poison=True)
    check_kernel(make_query(kv, 1, dtype=FP32), kv)


@needs_interpreter
@pytest.mark.parametrize("group", [8, 16])
@pytest.mark.parametrize("keys", MIXED)
def test_decode_reads_mixed_keys_in_groups_of_tokens(keys, group):
    kv = make_kv(keys, "exact", rows=FEW, heads=1, page=32, slots=50, key_group=group)
    check_kernel(make_query(kv, 3, dtype=FP32), kv)


@needs_interpreter
@pytest.mark.parametrize("keys", MIXED)
def test_decode_with_ptx_reads_mixed_keys(keys):
    kv = make_kv(keys, "int4", heads=1, dtype=torch.float16, rows=[(5, 0), (2, 0), (3, 2)], sinks=0)
    query = make_query(kv, 3, dtype=torch.float16)
    check_kernel(query, kv, partial(attend_with_ptx, isa=90))


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FP32], ids=str)
@pytest.mark.parametrize("keys", MIXED)
def test_dense_writes_mixed_keys_in_the_order_of_the_model(keys, dtype):
    options = {"rows": [(2, 11), (0, 3)], "poison": True, "more_padding": 5, "dtype": dtype}
    check_dense(make_kv(keys, "exact", key_dim=32, **options))


@needs_interpreter
@pytest.mark.parametrize(("dim", "group"), [(96, None), (80, 16), (256, 8)])
@pytest.mark.parametrize("keys", MIXED)
def test_dense_takes_every_size_of_mixed_keys(keys, dim, group):
    check_dense(
        make_kv(
            keys,
            "exact",
            key_dim=dim,
            value_dim=16,
            key_group=group,
            page=32,
            rows=[(1, 2)],
            heads=1,
        )
    )


def check_dense(kv):
    expected, got = dense_side(kv, "keys"), call(dense, kv, "keys")
    assert torch.equal(got.contiguous().view(torch.uint8), expected.view(torch.uint8))
