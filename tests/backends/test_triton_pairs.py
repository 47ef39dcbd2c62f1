"""Writing both sides of a layer at once: the bytes of the codec and the tokens of the reference; in the interpreter."""

from importlib.util import find_spec
from itertools import zip_longest

import pytest
import torch
from interpreter import call, needs_interpreter, write_pair
from paged_inputs import DTYPES

from kv_hf.backends.reference.pages import seal_pages
from kv_hf.formats import (
    format_names,
    k_rope_name,
    k_rope_scheme,
    key_scheme,
    latent_scheme,
    value_scheme,
)
from kv_hf.spec import PageSpec

JOBS = torch.tensor([[0, 7, 3], [1, 0, 0], [2, 1, -1], [2, 3, 4]], dtype=torch.int32)
PAGE = 16
# every format of either side once: a program writes one side, and knows nothing of the other one
PAIRS = tuple(zip_longest(format_names("keys"), format_names("values")[::-1], fillvalue="int4"))


def spec_of(keys, values=None, *, key_dim=64, value_dim=32, dtype=torch.float32, value_dtype=None):
    return PageSpec.build(
        key_scheme(keys), value_scheme(values or keys), num_kv_heads=2, key_dim=key_dim, value_dim=value_dim,
        page_size=PAGE, dtype=dtype, value_dtype=value_dtype,
    )  # fmt: skip


def latent_spec(name, rope_dim=16, dtype=torch.float32):
    scheme = latent_scheme(name)
    rope = k_rope_scheme(k_rope_name(None, scheme), rope_dim)
    return PageSpec.build_latent(
        scheme, rope, rank=128, rope_dim=rope_dim, page_size=PAGE, dtype=dtype
    )


def inputs(spec, q_len=3):
    """Windows, new tokens, starts and skips of three rows; one of them gets nothing new."""
    numbers = torch.Generator().manual_seed(0)
    pairs = []
    for slots in (PAGE + 9, q_len):
        shapes = [(3, side.num_kv_heads, slots, side.head_dim) for side in spec.sides]
        pairs.append(
            tuple(
                (2 * torch.randn(shape, generator=numbers)).to(side.dtype)
                for shape, side in zip(shapes, spec.sides, strict=True)
            )
        )
    starts = torch.tensor([20, 0, 9], dtype=torch.int32)
    return *pairs, starts, torch.tensor([0, 1, q_len], dtype=torch.int32)


def stored(spec):
    return tuple(
        {
            name: torch.full((5, *shape), 1, dtype=dtype)
            for name, (shape, dtype) in side.fields.items()
        }
        for side in spec.sides
    )


def by_reference(windows, new, starts, skips, jobs, fields, spec):
    damaged = False
    windows = tuple(window.clone() for window in windows)
    for window, token in zip(windows, new, strict=True):
        for row in range(window.shape[0]):
            start, skip = int(starts[row]), int(skips[row])
            window[row, :, start : start + token.shape[2] - skip] = token[row, :, skip:]
    if jobs is not None:
        real = jobs[jobs[:, 2] >= 0]
        for window, field, side in zip(windows, fields, spec.sides, strict=True):
            if side.head_dim:
                damaged |= bool(seal_pages(window, real, field, side))
    return windows, fields, damaged


def check(spec, given, jobs=JOBS):
    damaged = torch.zeros((), dtype=torch.uint8)
    windows, fields, harmed = call(write_pair, *given, jobs, stored(spec), spec, damaged)
    wanted, wanted_fields, wanted_harm = by_reference(*given, jobs, stored(spec), spec)
    for got, expected in zip(windows, wanted, strict=True):
        assert torch.equal(got.nan_to_num(), expected.nan_to_num())
    for got, expected in zip(fields, wanted_fields, strict=True):
        for name, tensor in expected.items():
            assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert bool(harmed) == wanted_harm
    return wanted_harm


@needs_interpreter
@pytest.mark.parametrize(("keys", "values"), PAIRS)
def test_write_pair_writes_the_codecs_bytes(keys, values):
    spec = spec_of(keys, values)
    assert not check(spec, inputs(spec))


@needs_interpreter
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_write_pair_takes_sides_of_different_dtypes(dtype):
    """Autocast makes values of another dtype than keys."""
    spec = spec_of("int4", dtype=dtype, value_dtype=torch.float16)
    check(spec, inputs(spec))


@needs_interpreter
@pytest.mark.parametrize("rope_dim", [0, 16])
@pytest.mark.parametrize("name", format_names("latent"))
def test_write_pair_writes_latents_and_rope_keys(name, rope_dim):
    spec = latent_spec(name, rope_dim)
    check(spec, inputs(spec))


@needs_interpreter
@pytest.mark.parametrize("key_dim", [64, 80])
@pytest.mark.parametrize("q_len", [1, 3, 20])
def test_write_pair_appends_without_jobs(q_len, key_dim):
    spec = spec_of("int8", key_dim=key_dim)
    windows, new, _, _ = inputs(spec, q_len)
    starts = torch.tensor([0, 4, 5], dtype=torch.int32)
    skips = torch.tensor([0, min(2, q_len), q_len], dtype=torch.int32)
    turned = tuple(token.transpose(1, 2).contiguous().transpose(1, 2) for token in new)
    for tokens in (new, turned):
        check(spec, (windows, tokens, starts, skips), None)


@needs_interpreter
def test_write_pair_never_writes_past_the_windows():
    spec = spec_of("exact", key_dim=16, value_dim=32)
    windows, new = (
        tuple(make(2, 2, tokens, side.head_dim) for side in spec.sides)
        for make, tokens in ((torch.zeros, 8), (torch.ones, 3))
    )
    starts, skips = torch.tensor([6, 0], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    damaged = torch.zeros((), dtype=torch.uint8)
    windows, *_ = call(write_pair, windows, new, starts, skips, None, stored(spec), spec, damaged)
    for window in windows:
        assert window.mean(3).sum(2).tolist() == [[2.0, 2.0], [3.0, 3.0]]


@needs_interpreter
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 7e4], ids=str)
def test_write_pair_says_that_it_made_numbers_finite(bad, side):
    spec = spec_of("int4")
    given = inputs(spec)
    given[0][side][1, 1, 4, 9] = bad
    assert check(spec, given)


@needs_interpreter
def test_write_pair_never_takes_damage_back():
    """`damaged` is set once and read when the step is over: a launch that finds nothing leaves it as it is."""
    spec = spec_of("int4")
    *_, damaged = call(
        write_pair, *inputs(spec), JOBS, stored(spec), spec, torch.ones((), dtype=torch.uint8)
    )
    assert bool(damaged)


# -- launches ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu():
    from fake_driver import pretend_gpu

    with pretend_gpu() as fake:
        yield fake


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "spec",
    [spec_of("int4"), latent_spec("int8"), latent_spec("int4", 0)],
    ids=["int4", "latents", "no-rope"],
)
def test_write_pair_launches_once_and_once_more_to_seal(gpu, spec):
    """Chunks of all lengths above 1 share a variant, and so do windows of all sizes."""
    from kv_hf.backends.triton import seal as kernels

    launches = {}
    damaged = torch.zeros((), dtype=torch.uint8)
    for q_len in range(1, 17):
        given = inputs(spec, q_len)
        for jobs in (None, JOBS, JOBS[:0], JOBS[1:]):
            kernels.write_pair(*given, jobs, stored(spec), spec, damaged, launches)
    append, seal = "append_pair_kernel", "seal_pair_kernel"
    assert gpu.names() == 16 * [append, append, seal, append, append, seal]
    assert gpu.variants == {append: 2, seal: 1}
