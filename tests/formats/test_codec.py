"""Encoding against fp64 arithmetic that reads the documented bytes by itself."""

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_inputs import page_spec

from kv_hf.backends.reference import pages as reference
from kv_hf.errors import CacheOptionError
from kv_hf.formats import (
    RangeFormat,
    SignedFormat,
    key_scheme,
    per_channel,
    per_token,
    register_format,
)
from kv_hf.quant.codec import (
    block,
    decode,
    encode,
    restore,
    rotate,
    unrotate,
    wide_first,
)
from kv_hf.spec import LANES, ROWS

PAGE, HEADS, DIM = 32, 2, 64
ENCODED = ("fp8", "int8", "plain4", "plain2")
SIDES = ("keys", "values")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODE_BITS = {"fp8": 8, "int8": 8, "plain4": 4, "plain2": 2}
ALL = [(name, side) for name in ENCODED for side in SIDES]
IDS = [f"{name}-{side}" for name, side in ALL]
every_format = pytest.mark.parametrize(("name", "side"), ALL, ids=IDS)


@functools.cache
def side_spec(name, side, dtype=torch.float32, page_size=PAGE, dim=DIM):
    spec = page_spec(name, heads=HEADS, key_dim=dim, page_size=page_size, dtype=dtype)
    return getattr(spec, side)


def random_pages(pages, seed=0, scale=1.0, dtype=torch.float32, dim=DIM):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(pages, HEADS, PAGE, dim, generator=generator)).to(dtype)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("side", SIDES)
def test_numbers_at_the_end_of_float16_decode_to_finite_ones(name, side):
    """A scale that was rounded up makes more of the largest code."""
    spec = side_spec(name, side, torch.float16)
    pages = random_pages(4, scale=3e4).clamp(-65000, 65504)
    pages[:, :, 0] = 65504
    fields, damaged = encode(pages.half(), spec)
    assert not damaged and decode(fields, spec, torch.float32).max() > 65519  # inf in float16
    assert decode(fields, spec, torch.float16).max() == 65504


def fresh(name, side, x):
    return encode(x, side_spec(name, side, x.dtype, dim=x.shape[-1]))


# -- the oracle --------------------------------------------------------------------------------------------


# the numbers behind all bytes of e4m3
E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()


def oracle_codes(codes, name, side, dim):
    """Numbers behind the stored codes, [.., tokens, channels] in fp64, read as the layout is documented."""
    if side == "values":
        codes = codes.mT  # token-contiguous
    if name == "fp8":
        return E4M3[codes.long()]
    if name == "int8":
        return codes.double()
    bits = CODE_BITS[name]
    run = dim * bits // 8  # bytes of a head: byte i holds channels i, i + run, ..
    channels = [
        (codes[..., channel % run].long() >> (bits * (channel // run))) % (1 << bits)
        for channel in range(dim)
    ]
    return torch.stack(channels, -1).double()


def oracle_decode(fields, name, side, dim=DIM):
    return scaled(oracle_codes(fields["codes"], name, side, dim), fields)


def scaled(codes, fields):
    """code * scale + offset for codes [.., tokens, channels]."""
    *_, tokens, channels = codes.shape

    def spread(field):
        groups = field.double()
        groups = groups.repeat_interleave(tokens // groups.shape[-2], -2)
        return groups.repeat_interleave(channels // groups.shape[-1], -1)

    x = codes * spread(fields["scale"])
    return x + spread(fields["offset"]) if "offset" in fields else x


# -- layout and arithmetic of decode -------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_decode_reads_bytes_as_documented(name, side, dim):
    spec = side_spec(name, side, dim=dim)
    generator = torch.Generator().manual_seed(dim)
    fields = {}
    for field, (shape, dtype) in spec.fields.items():
        if field == "codes":
            codes = torch.randint(0, 256, (3, *shape), generator=generator, dtype=torch.uint8)
            if name == "fp8":
                codes[codes % 128 == 127] = 3  # encode never writes the two nans of e4m3
            fields[field] = codes.view(dtype)
        else:
            fields[field] = torch.randn(3, *shape, generator=generator).to(dtype)
    decoded = decode(fields, spec, torch.float32)
    expected = oracle_decode(fields, name, side, dim)
    assert decoded.shape == (3, HEADS, PAGE, dim)
    # code * scale is exact in fp32, so that the sum is rounded once
    assert torch.equal(decoded, expected.float())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("side", SIDES)
def test_encode_keeps_exact_pages_bit_for_bit(side, dtype):
    x = random_pages(2, dtype=dtype)
    x[0, 0, 0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    spec = side_spec("exact", side, dtype)
    fields, damaged = encode(x.mT.contiguous().mT, spec)
    assert list(fields) == ["codes"]
    assert not bool(damaged)  # nothing had to be changed
    decoded = decode(fields, spec, dtype)
    assert torch.equal(decoded.view(torch.uint8), x.view(torch.uint8))


# -- round trip ----------------------------------------------------------------------------------------------


def codes_of(name):
    """All numbers that a code may stand for."""
    if name == "fp8":
        return E4M3[~E4M3.isnan()]
    lowest, highest = (-127, 127) if name == "int8" else (0, 2 ** CODE_BITS[name] - 1)
    return torch.arange(lowest, highest + 1, dtype=torch.float64)


def assert_nearest(fields, x, name, side):
    """No other code is nearer to any number of `x`, with the scale and offset that are stored, not those before they were rounded."""
    decoded = oracle_decode(fields, name, side)
    chosen = (decoded - x.double()).abs()
    best = chosen.clone()
    for code in codes_of(name).tolist():
        error = (scaled(torch.full_like(chosen, code), fields) - x.double()).abs()
        best = torch.minimum(best, error)
    # encode computes in fp32: of two that are as near it may take either
    assert float((chosen - best - 2.0**-20 * (x.double().abs() + decoded.abs())).max()) <= 0


@every_format
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(max_examples=10)
@given(st.integers(0, 1 << 30), st.floats(-45.0, 3.5), st.sampled_from([0.0, 1.0, 30.0]))
def test_encode_takes_the_nearest_code(name, side, dtype, seed, log_scale, common):
    """Numbers of any size, with a common offset per channel that is up to 30 times their spread.

    Scales below fp16's smallest number round to 0, fp32 denormals may be flushed: both are no damage.
    """
    generator = torch.Generator().manual_seed(seed)
    x = random_pages(1, seed) + common * torch.randn(HEADS, 1, DIM, generator=generator)
    x = (x * 10.0**log_scale).clamp(-6e4, 6e4).to(dtype)
    fields, damaged = fresh(name, side, x)
    assert_nearest(fields, x, name, side)
    assert not bool(damaged)


# -- storage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["exact", *ENCODED])
def test_seal_pages_takes_slots_and_rows_from_its_jobs(monkeypatch, name):
    monkeypatch.setattr(reference, "SEAL_PAGES", 2)
    run = torch.randn(2, HEADS, 5 + 2 * PAGE, DIM)
    jobs = torch.tensor([(1, 3, 6, -4), (0, 5, 2, -6), (1, 3 + PAGE, 0, -1)], dtype=torch.int32)
    for side in SIDES:
        spec = side_spec(name, side)
        fields = {n: torch.zeros(8, *shape, dtype=kind) for n, (shape, kind) in spec.fields.items()}
        reference.seal_pages(run, jobs, fields, spec)
        for row, first, page, _ in jobs.tolist():
            alone = encode(run[None, row, :, first : first + PAGE], spec)[0]
            assert all(torch.equal(fields[n][page], one[0]) for n, one in alone.items())


# -- keys of several widths and rotated values ------------------------------------------------------------------

MIXED = ("int4", "int3", "int2")
WIDE = ((6, 0.5), (4, 0.5))


def numbers(*shape, seed=0):
    """Random numbers whose channels have different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(shape[-1], generator=generator) * 4
    return torch.randn(shape, generator=generator) * sizes


@pytest.mark.parametrize("dim", [8, 12, 64, 80, 96, 128, 256])
def test_rotate_is_the_hadamard_matrix_over_its_size(dim):
    size = block(dim)
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]
    matrix = torch.block_diag(*[torch.tensor(signs, dtype=torch.float64)] * (dim // size))
    x = numbers(5, dim)
    torch.testing.assert_close(
        rotate(x).double(), x.double() @ matrix.T / size, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(unrotate(rotate(x)), x, rtol=1e-5, atol=1e-5)
    assert rotate(x).abs().max() <= x.abs().max()  # within the range that scales can hold


def test_choose_puts_the_widest_pairs_first_and_keeps_the_order_of_channels():
    x = torch.zeros(1, 2, 4, 8)
    x[0, 0, 1] = torch.tensor([1.0, 5, 2, 0, 4, 0, 3, 0])  # pairs (0, 4), (1, 5), (2, 6), (3, 7)
    x[0, 1, 1] = 3.0  # all alike: the first ones
    alike = [0, 1, 2, 3, 4, 5, 6, 7]
    assert wide_first(x, [4]).tolist() == [[[0, 1, 4, 5, 2, 3, 6, 7], alike]]
    assert wide_first(x, [2, 4]).tolist() == [[[1, 5, 0, 2, 4, 6, 3, 7], alike]]


@pytest.mark.parametrize("layout", [ROWS, LANES])
@pytest.mark.parametrize("dim", [24, 48, 64, 80, 128, 320])
@pytest.mark.parametrize("name", MIXED)
def test_pages_hold_what_the_formats_say(name, dim, layout):
    """Bytes as spec.fields promises, errors within half a step of each channel or rotated token."""
    x = numbers(3, 2, 64, dim)
    for side in page_spec(name, key_dim=dim, layout=layout).sides:
        assert side.layout == layout
        fields, damaged = encode(x, side)
        assert not damaged
        held = {name: (tuple(one.shape[1:]), one.dtype) for name, one in fields.items()}
        assert held == side.fields
        error = decode(fields, side, torch.float32) - x
        if side.side == "values":
            error = rotate(error)
            step = fields["scale"].float()  # of all channels of a token
        else:
            scale = fields["scale"].float()
            step = restore(scale, fields["order"]) if "order" in fields else scale
        bits = 3 if side.scheme.clip < 1 else 1  # numbers beyond a clipped range saturate
        assert (error.abs() <= 0.51 * bits * step + 1e-4).all()


@pytest.mark.parametrize(
    ("name", "dim", "runs"),
    [
        ("int4", 20, ((6, 4), (4, 8), (3, 8))),
        ("int4", 32, ((4, 32),)),
        ("int4", 64, ((6, 16), (4, 16), (3, 32))),
        ("int4", 128, ((6, 32), (4, 32), (3, 64))),
        ("int3", 16, ((4, 16),)),
        ("int3", 128, ((4, 48), (2, 80))),
    ],
)
def test_widths_fill_words_and_come_closest_to_their_parts(name, dim, runs):
    """Where all channels get one width, pages hold no order."""
    keys = page_spec(name, key_dim=dim).keys
    assert keys.runs == runs
    assert ("order" in keys.fields) == (len(runs) > 1)


@pytest.mark.parametrize(
    "widths",
    [
        ((4, 0.5), (6, 0.5)),
        ((8, 0.2), (6, 0.2), (4, 0.2), (2, 0.4)),
        ((4, 1.5), (2, -0.5)),
        "4",
    ],
    ids=str,
)
def test_bad_widths_are_refused(widths):
    with pytest.raises(
        CacheOptionError, match="widths must be up to three .bits, part., of falling"
    ):
        replace(key_scheme("int4"), widths=widths)


@pytest.mark.parametrize(
    ("format", "groups", "says"),
    [
        (RangeFormat, {"values": per_channel(widths=WIDE)}, "widths are for keys, not for values"),
        (RangeFormat, {"keys": per_token(widths=WIDE)}, "of single channels"),
        (SignedFormat, {"keys": per_channel(widths=WIDE)}, "codes must be below 2.6"),
    ],
)
def test_rows_with_widths_that_cannot_be_are_refused(format, groups, says):
    """C once wrote past its scratch memory for values of two widths."""
    with pytest.raises(CacheOptionError, match=says):
        register_format(format("wrong", 8 if format is SignedFormat else 4, groups))
