"""The seal kernel against the bytes that quant/codec.py gives; in the interpreter."""

import pytest
import torch
from interpreter import call, needs_interpreter, seal
from paged_inputs import DTYPES

from kv_hf.backends.reference.pages import seal_pages
from kv_hf.formats import format_names, key_scheme, value_scheme
from kv_hf.spec import PageSpec

pytestmark = needs_interpreter

SIZES = [(16, 16), (80, 32), (96, 16), (128, 64), pytest.param(256, 256, marks=pytest.mark.slow)]
JOBS = torch.tensor([[0, 7, 3], [1, 0, 0], [2, 3, 4]], dtype=torch.int32)


def side_of(name, side, dim=64, page=16, dtype=torch.float32, key_group=None, value_group=None):
    spec = PageSpec.build(
        key_scheme(name, key_group),
        value_scheme(name, value_group or (16 if dim % 32 else None)),
        num_kv_heads=2,
        key_dim=dim,
        value_dim=dim,
        page_size=page,
        dtype=dtype,
    )
    return getattr(spec, side)


def numbers(spec, seed=0):
    shape = (3, spec.num_kv_heads, spec.page_size + 7, spec.head_dim)
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[..., 3] += 40  # a channel with a large common offset, as some models' keys have
    return x.to(spec.dtype)


def check_bytes(tokens, spec):
    """Compare every stored byte."""
    empty = {
        name: torch.full((5, *shape), 1, dtype=dtype)
        for name, (shape, dtype) in spec.fields.items()
    }
    expected = {name: tensor.clone() for name, tensor in empty.items()}
    damaged = seal_pages(tokens, JOBS, expected, spec)
    got, got_damaged = call(seal, tokens, JOBS, empty, spec)
    for name, tensor in expected.items():
        view = [t.contiguous().view(torch.uint8) for t in (tensor, got[name])]
        assert torch.equal(*view), name
    assert got_damaged.dtype == torch.bool
    assert got_damaged.shape == ()
    assert bool(got_damaged) == bool(damaged)
    return bool(damaged)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_seal_writes_the_codecs_bytes(name, side, dtype):
    spec = side_of(name, side, dtype=dtype)
    assert not check_bytes(numbers(spec), spec)


@pytest.mark.parametrize(("dim", "page"), SIZES)
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_seal_takes_every_size(name, side, dim, page):
    spec = side_of(name, side, dim, page)
    check_bytes(numbers(spec), spec)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", ["int4", "int2"])
def test_seal_takes_every_group_size(name, side):
    for group in (8, 16, 32):
        spec = side_of(name, side, 64, 32, key_group=group, value_group=group)
        check_bytes(numbers(spec), spec)


HARD = {
    "zeros": lambda x: x.zero_(),
    "zeros of both signs": lambda x: x.zero_().neg_()[:, :, ::2, ::3].zero_(),
    "constant": lambda x: x.fill_(3.25),
    "constant-channels": lambda x: x.copy_(x[:, :, :1].expand_as(x).clone()),
    "tiny": lambda x: x.mul_(1e-6),
    "large": lambda x: x.mul_(1e4).clamp_(-65504, 65504),
    "largest": lambda x: x[..., 5].fill_(65504.0),
    "half-steps": lambda x: x.copy_((x * 2).round() / 2),
}


@pytest.mark.parametrize("what", HARD)
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_seal_writes_the_codecs_bytes_for_hard_numbers(name, side, what):
    spec = side_of(name, side)
    tokens = numbers(spec)
    HARD[what](tokens)
    assert not check_bytes(tokens, spec)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 7e4], ids=str)
@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4", "int2"])
def test_seal_makes_numbers_finite_and_says_so(name, side, bad):
    spec = side_of(name, side)
    tokens = numbers(spec)
    tokens[1, 1, 4, 9] = bad
    assert check_bytes(tokens, spec)


def test_seal_copies_exact_numbers_bit_by_bit():
    spec = side_of("exact", "keys", dtype=torch.bfloat16)
    tokens = numbers(spec)
    tokens.view(torch.int16)[1, 1, 4, 9] = 0x7FA5  # a nan with a payload
    assert not check_bytes(tokens, spec)


def test_seal_reads_tokens_of_any_strides():
    spec = side_of("int4", "values")
    tokens = numbers(spec).transpose(1, 2).contiguous().transpose(1, 2)
    assert not tokens.is_contiguous()
    check_bytes(tokens, spec)


def test_seal_without_jobs_writes_nothing():
    spec = side_of("int4", "keys")
    fields = {name: torch.full((2, *s), 1, dtype=d) for name, (s, d) in spec.fields.items()}
    got, damaged = call(seal, numbers(spec), JOBS[:0], fields, spec)
    assert not bool(damaged)
    assert all(torch.equal(got[name], tensor) for name, tensor in fields.items())


@pytest.mark.parametrize("name", ["exact", "int4"])
def test_seal_skips_jobs_without_a_page(name):
    spec = side_of(name, "keys")
    tokens, jobs = numbers(spec), torch.tensor([[0, 7, -1], [1, 0, 1], [2, 3, -1]])
    tokens[0] = float("nan")  # of a job that is skipped: nothing to report
    fields = {n: torch.full((2, *s), 1, dtype=d) for n, (s, d) in spec.fields.items()}
    expected = {n: tensor.clone() for n, tensor in fields.items()}
    seal_pages(tokens, jobs[1:2], expected, spec)
    got, damaged = call(seal, tokens, jobs.int(), fields, spec)
    assert not bool(damaged)
    assert all(torch.equal(got[n], tensor) for n, tensor in expected.items())
