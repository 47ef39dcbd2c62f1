"""The kernel that writes a layer out densely, against its definition bit for bit; in the interpreter, and compiled."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from harness import slow_but
from paged_inputs import DTYPES, PLAIN, latent_spec, make_kv, make_latents
from triton_machine import call, compiled_pairs, dense, runs_kernels

from kv_hf.backends.reference.pages import dense_side
from kv_hf.formats import format_names
from kv_hf.spec import ROWS


def check(kv):
    """Every bit of both sides is that of the definition."""
    for side in ("keys", "values"):
        expected, got = dense_side(kv, side), call(dense, kv, side)
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert torch.equal(got.contiguous().view(torch.uint8), expected.view(torch.uint8)), side


MIXED = ("int3", "int4")  # keys of several widths
ROTATED = ("int2", "int3", "int4")  # values
RAGGED = [(2, 11), (0, 3), (1, 4), (0, 0)]  # pages and exact tokens of each row


def pages_of(keys, values, dtype=torch.float32, **options):
    sizes = {"key_dim": 64, "rows": RAGGED, "shuffle": 1, "poison": True, "more_padding": 5}
    return make_kv(keys, values, dtype=dtype, **{**sizes, **options})


def latents_of(name, **options):
    spec = latent_spec(name, None, **{"dtype": torch.bfloat16, "layout": ROWS, **options})
    return make_latents(spec, rows=RAGGED[:3], more_padding=3)


def formats(dtype):
    for name in (*format_names("keys", "values"), *PLAIN):
        yield pages_of(name, name, dtype)


GROUPS = [
    {"page": 32, "slots": 44, "key_group": 16},
    {"key_group": 8},
    {"value_group": 16},
    {"value_group": 8},
    {"key_dim": 80, "value_group": 20},
    {"key_dim": 24, "value_group": 24},
    {"key_dim": 256},
    {"page": 128, "rows": [(1, 30)]},
]


def sizes_and_groups():
    for name, options in product(PLAIN, GROUPS):
        yield pages_of(name, name, **{"rows": [(2, 7), (1, 2)], "heads": 1, **options})
    few = {"rows": [(1, 2)], "heads": 1}
    for keys, (dim, group) in product(MIXED, ((48, None), (96, None), (80, 16), (256, 8))):
        sizes = {"key_dim": dim, "value_dim": 16, "key_group": group, "page": 32}
        yield pages_of(keys, "exact", **few, **sizes)
    for values, (dim, group) in product((*ROTATED, "around0"), ((96, 96), (80, 40), (256, 64))):
        yield pages_of("exact", values, key_dim=16, value_dim=dim, value_group=group, **few)


def latents():
    for name in format_names("latent"):
        yield latents_of(name)
    yield latents_of("int4", rope=0, page=32, tokens=16, rank=48)


def columns_and_strides():
    """A preallocated cache shows columns that hold no token yet, which are zeros."""
    kv = pages_of("int8", "int8")
    yield replace(kv, seen=kv.seen + 37)
    by_slot = kv.residual_keys.transpose(1, 2).contiguous().transpose(1, 2)
    by_channel = kv.residual_values.transpose(2, 3).contiguous().transpose(2, 3)
    yield replace(kv, residual_keys=by_slot, residual_values=by_channel)


def numbers_beyond_float16():
    """A scale rounded up may push the largest code past float16's range: it is cut."""
    kv = pages_of("int8", "int8", torch.float16)
    kv.key_pages["scale"].fill_(600.0)
    assert float(dense_side(kv, "keys").nan_to_num().max()) == 65504.0
    yield kv


CASES = {name: partial(formats, dtype) for name, dtype in DTYPES.items()}
CASES |= {
    made.__name__: made
    for made in (sizes_and_groups, latents, columns_and_strides, numbers_beyond_float16)
}


@runs_kernels
@pytest.mark.parametrize("case", CASES)
def test_dense_kernel_writes_the_bits_of_the_definition(case):
    for kv in CASES[case]():
        check(kv)


@runs_kernels
@pytest.mark.compiled
@pytest.mark.parametrize(("keys", "values"), compiled_pairs())
def test_compiled_dense_kernel_writes_the_bits_of_the_definition(keys, values):
    check(pages_of(keys, values, torch.bfloat16, rows=RAGGED[:2]))


@runs_kernels
@pytest.mark.compiled
@pytest.mark.parametrize("name", slow_but(("int4", "fp8_ds_mla"), format_names("latent")))
def test_compiled_dense_kernel_writes_latents(name):
    check(latents_of(name))


# -- what a chunk launches -------------------------------------------------------------------------------------------


def test_dense_kernel_is_compiled_once_for_tables_anywhere(gpu):
    """Block tables and lengths of other batches begin elsewhere, and texts have other lengths."""
    from kv_hf.backends.triton.pages import dense_side as by_kernel

    def shifted(tensor, by):
        return torch.cat([tensor.new_zeros(by), tensor.flatten()])[by:].view(tensor.shape)

    for by, rows in enumerate([[(3, 5)], [(8, 1), (0, 3), (1, 1)]]):
        kv = make_kv("int4", rows=rows, dtype=torch.bfloat16)
        names = ("block_table", "num_pages", "exact_lens", "padding")
        moved = {name: shifted(getattr(kv, name), by) for name in names}
        by_kernel(replace(kv, **moved), "keys")
    assert gpu.variants == {"dense_kernel": 1}
