"""Rotated values in the Triton kernels: in the interpreter against an fp64 softmax over decoded tokens, and compiled."""

from functools import partial

import pytest
import torch
from interpreter import attend, attend_with_ptx, call, dense, needs_interpreter
from paged_inputs import check, make_kv, make_query
from rounding import Rounding

from kv_hf.backends.reference.pages import dense_side

FEW = [(3, 5), (0, 2)]  # pages and exact tokens of each row
FP32 = torch.float32
ROTATED = ("int2_rotated", "int3_rotated", "int4_rotated")


def check_kernel(query, kv, kernel=attend, **options):

    def called(*args, **given):
        return call(kernel, *args, **given)

    return check(query, kv, called, Rounding.of("triton", query.dtype), **options)


@needs_interpreter
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, pytest.param(256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("values", ROTATED)
def test_decode_reads_rotated_values(values, dim):
    """Blocks of 16 to 128 channels, which at 80 and 96 lie across the runs of a byte."""
    kv = make_kv("int4", values, key_dim=dim, rows=FEW, heads=1, value_group=dim)
    check_kernel(make_query(kv, 1, dtype=FP32), kv)


@needs_interpreter
@pytest.mark.parametrize("group", [16, 8, 40])
@pytest.mark.parametrize("values", ROTATED)
def test_decode_reads_rotated_values_in_groups(values, group):
    dim = 80 if group == 40 else 64
    kv = make_kv("exact", values, key_dim=dim, rows=FEW, heads=1, value_group=group)
    check_kernel(make_query(kv, 3, dtype=FP32), kv)


@needs_interpreter
@pytest.mark.parametrize("values", ROTATED)
def test_decode_with_ptx_reads_rotated_values(values):
    kv = make_kv(
        "int4", values, heads=1, dtype=torch.float16, rows=[(5, 0), (2, 0), (3, 2)], sinks=0, value_group=64
    )  # fmt: skip
    query = make_query(kv, 3, dtype=torch.float16)
    check_kernel(query, kv, partial(attend_with_ptx, isa=90))


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, FP32], ids=str)
@pytest.mark.parametrize("values", ROTATED)
def test_dense_writes_the_bits_of_the_definition(values, dtype):
    options = {
        "rows": [(2, 11), (0, 3)],
        "heads": 1,
        "poison": True,
        "more_padding": 5,
        "dtype": dtype,
    }
    check_dense(make_kv("exact", values, key_dim=32, value_group=32, **options))


@needs_interpreter
@pytest.mark.parametrize(("dim", "group"), [(96, 96), (80, 40), (256, 64)])
@pytest.mark.parametrize("values", ROTATED)
def test_dense_takes_every_size_of_rotated_values(values, dim, group):
    check_dense(
        make_kv(
            "exact", values, key_dim=16, value_dim=dim, value_group=group, rows=[(1, 2)], heads=1
        )
    )


def check_dense(kv, side="values"):
    expected, got = dense_side(kv, side), call(dense, kv, side)
    assert torch.equal(got.contiguous().view(torch.uint8), expected.view(torch.uint8))
