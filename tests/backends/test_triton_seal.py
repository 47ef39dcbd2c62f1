"""The kernels that append and seal: the bytes of the codec and the windows of the reference, for every format; in the interpreter."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from paged_inputs import DTYPES, latent_spec
from test_cpu_write import SLOTS, Inputs, assert_equal, make_spec, specs
from triton_machine import call, compiled_pairs, not_emulated, runs_kernels, seal, write_pair

from kv_hf.backends.reference.pages import seal_pages
from kv_hf.formats import (
    format_names,
    k_rope_scheme,
    key_scheme,
    latent_scheme,
    value_scheme,
)
from kv_hf.formats.base import SIDES
from kv_hf.spec import ROWS, PageSpec, PageWrite, SideSpec

pytestmark = runs_kernels

EVERY = [(name, side) for side in SIDES for name in format_names(side)]
CODED = [one for one in EVERY if one[0] != "exact"]
# (channels, tokens of a page, size of a group): powers of two, and groups whose lanes are padded in all ways
SIZES = {
    "keys": [(64, 16, None), (80, 32, None), (96, 32, 16), (128, 64, 8), (256, 256, None)],
    "values": [(64, 16, 16), (80, 32, 40), (96, 16, 96), (96, 16, 32), (128, 64, None), (256, 256, 8)],
    "latent": [(128, 16, None), (240, 32, 8), (256, 64, 16), (512, 128, None)],
    "k_rope": [(16, 16, None), (64, 64, None), (192, 32, None)],
}  # fmt: skip
SIZED = [
    pytest.param(
        name, side, *size, marks=[pytest.mark.slow] * (max(size[:2]) > 240 or size[1] > 64)
    )
    for name, side in EVERY
    for size in SIZES[side]
    if (name, size[0]) != ("fp8_ds_mla", 240)
]
PAD = 7  # tokens in front of a row's page, less its number


def side_of(name, side="keys", dim=64, page=16, group=None, dtype=torch.float32, heads=2):
    dim = 128 if name == "fp8_ds_mla" and dim == 64 else dim
    scheme = {
        "keys": lambda: key_scheme(name, group),
        "values": lambda: value_scheme(name, group),
        "latent": lambda: latent_scheme(name, group),
        "k_rope": lambda: k_rope_scheme(name, dim),
    }[side]()
    heads = 1 if side in ("latent", "k_rope") else heads
    return SideSpec(side, scheme.resolve(page, dim, side), heads, dim, page, dtype)


HARD = (
    lambda x: x,
    lambda x: x.zero_(),
    lambda x: x.zero_().neg_()[..., ::2, ::3].zero_(),  # zeros of both signs
    lambda x: x.fill_(3.25),
    lambda x: x.copy_(x[:, :1].expand_as(x).clone()),  # constant channels
    lambda x: x[:, 5].zero_(),
    lambda x: x.mul_(1e-6),
    lambda x: x.mul_(1e4).clamp_(-65504, 65504),
    lambda x: x[..., 5].fill_(65504.0),
    lambda x: x.copy_((x * 2).round() / 2),  # half steps, and channels of equal ranges
)
JOBS = torch.tensor([(row, PAD - row % PAD, (row * 7 + 3) % len(HARD)) for row in range(len(HARD))])


def numbers(spec):
    """Return tokens of one row for each of HARD."""
    shape = (len(HARD), spec.num_kv_heads, spec.page_size + PAD, spec.head_dim)
    x = 2 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    x[..., 3] += 40  # a channel with a large common offset, as some models' keys have
    for row, change in zip(x, HARD, strict=True):
        change(row)
    return x.to(spec.dtype)


def check_bytes(tokens, spec, jobs=JOBS):
    """Compare every byte of all pages, and what is said of the numbers; return that."""
    got = {n: torch.full((len(HARD), *s), 1, dtype=d) for n, (s, d) in spec.fields.items()}
    expected = {name: tensor.clone() for name, tensor in got.items()}
    real = jobs[jobs[:, 2] >= 0].int()
    damaged = len(real) > 0 and bool(seal_pages(tokens, real, expected, spec))
    got, said = call(seal, tokens, jobs.int(), got, spec)
    for name, tensor in expected.items():
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert (said.dtype, said.shape, bool(said)) == (torch.bool, (), damaged)
    return damaged


@pytest.mark.parametrize(("name", "side"), EVERY)
def test_seal_writes_the_codecs_bytes_for_hard_numbers(name, side):
    spec = side_of(name, side, heads=1)
    assert not check_bytes(numbers(spec), spec)


@pytest.mark.parametrize(("name", "side", "dim", "page", "group"), SIZED)
def test_seal_takes_every_size(name, side, dim, page, group):
    spec = side_of(name, side, dim, page, group)
    assert not check_bytes(numbers(spec), spec, JOBS[:4:3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "side"), EVERY)
def test_seal_reads_every_dtype_in_any_strides(name, side, dtype):
    spec = side_of(name, side, dtype=dtype, heads=3)
    tokens = numbers(spec).transpose(1, 2).contiguous().transpose(1, 2)
    assert not check_bytes(tokens, spec, JOBS[:4:3])


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 7e4], ids=str)
@pytest.mark.parametrize(("name", "side"), CODED)
def test_seal_makes_numbers_finite_and_says_so(name, side, bad):
    spec = side_of(name, side)
    tokens = numbers(spec)
    tokens[0, -1, PAD + 4, 9] = bad
    assert check_bytes(tokens, spec, JOBS[:1])


def test_seal_copies_exact_numbers_bit_by_bit():
    spec = side_of("exact", dtype=torch.bfloat16)
    tokens = numbers(spec)
    tokens.view(torch.int16)[1, 1, PAD + 4, 9] = 0x7FA5  # a nan with a payload
    assert not check_bytes(tokens, spec)


@pytest.mark.parametrize("jobs", [[], [[0, 7, -1], [1, 0, 1], [2, 3, -1]]], ids=["none", "some"])
@pytest.mark.parametrize("name", ["exact", "int4", "int2_mixed"])
def test_seal_skips_jobs_without_a_page(name, jobs):
    spec = side_of(name)
    tokens = numbers(spec)
    tokens[0] = float("nan")  # of a job that is skipped: nothing to report
    assert not check_bytes(tokens, spec, torch.tensor(jobs).view(-1, 3))


def seal_far_apart(tokens, jobs, spec):
    """Seal heads that lie 2^30 numbers apart; memory of a CPU that nothing touches takes no room."""
    storage = tokens.new_empty(2**31 + 2**20)
    far = storage.as_strided(tokens.shape, (2**16, 2**30, spec.head_dim, 1)).copy_(tokens)
    fields = {n: tokens.new_zeros(len(HARD), *s, dtype=d) for n, (s, d) in spec.fields.items()}
    expected = {name: tensor.clone() for name, tensor in fields.items()}
    seal_pages(tokens, jobs, expected, spec)
    got, _ = seal(far, jobs, fields, spec)
    return all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_seal_reads_heads_that_lie_far_apart():
    not_emulated("what is noted of 2^31 numbers takes more memory than there is")
    spec = side_of("int8", dtype=torch.bfloat16, heads=3)
    assert call(seal_far_apart, numbers(spec), JOBS.int(), spec)


# -- both sides of a layer at once -----------------------------------------------------------------------------------


class Written(Inputs):
    """What a step writes, written by the kernels in the worker."""

    def by_pair(self, jobs=True):
        given = (self.windows, self.new, self.starts, self.skips, self.jobs if jobs else None)
        self.windows, self.fields, self.damaged = call(
            write_pair, *given, self.fields, self.spec, self.damaged
        )
        return self


def compared(change=lambda inputs: None, *, jobs=True, q_len=5, **options):
    """Let the kernels and the reference do a step that `change` has changed; return what the kernels wrote."""
    spec = options.pop("spec", None) or make_spec(layout=ROWS, **options)
    one, other = Written(spec, q_len=q_len), Inputs(spec, q_len=q_len)
    for inputs in (one, other):
        change(inputs)
        inputs.jobs = inputs.jobs if jobs else inputs.jobs[:0]
    assert_equal(one.by_pair(jobs), other.by_reference())
    return one


def test_write_pair_leaves_what_the_reference_leaves():
    for spec in specs(torch.float32, ROWS):
        compared(spec=spec)


@pytest.mark.compiled
@pytest.mark.parametrize(("keys", "values"), compiled_pairs())
def test_compiled_kernels_write_what_the_reference_writes(keys, values):
    compared(spec=make_spec(keys, values, layout=ROWS))


@pytest.mark.compiled
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.slow] * (n not in ("int4", "fp8_ds_mla")))
        for n in format_names("latent")
    ],
)
def test_compiled_kernels_write_the_latents_that_the_reference_writes(name):
    compared(spec=latent_spec(name, rank=128, layout=ROWS))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_write_pair_takes_sides_of_different_dtypes(dtype):
    """Autocast makes values of another dtype than keys."""
    keys, values = make_spec(dtype=dtype, layout=ROWS).sides
    compared(spec=PageSpec(keys, replace(values, dtype=torch.float16)))


@pytest.mark.parametrize("dims", [(64, 64), (80, 64)], ids=str)
@pytest.mark.parametrize("q_len", [1, 3, 20])
def test_write_pair_appends_without_jobs(q_len, dims):
    def fit(inputs):
        inputs.starts.clamp_(max=SLOTS - q_len)
        inputs.skips.clamp_(max=q_len)

    def turn(inputs):
        fit(inputs)
        inputs.new = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs.new)

    for change in (fit, turn):
        compared(change, jobs=False, q_len=q_len, keys="int8", values="int8", dims=dims)


def test_write_pair_never_writes_past_the_windows():
    """What C refuses, a GPU cannot look at: it leaves out what has no slot."""
    one = Written(make_spec("exact", "exact", layout=ROWS))
    before = [window.clone() for window in one.windows]
    one.starts[3] = SLOTS - 2
    one.by_pair(jobs=False)
    for window, new, old in zip(one.windows, one.new, before, strict=True):
        assert torch.equal(window[3, :, -2:], new[3, :, 1:3])
        assert torch.equal(window[3, :, :-2], old[3, :, :-2])


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 7e4], ids=str)
def test_write_pair_says_that_it_made_numbers_finite(bad, side):
    """`damaged` is set once and read when the step is over: a launch that finds nothing leaves it as it is."""

    def spoil(inputs):
        inputs.new[side][1, 1, 2, 3] = bad

    assert compared(spoil).damaged == 1
    assert compared(lambda inputs: inputs.damaged.fill_(1)).damaged == 1


# -- launches ------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu():
    from fake_driver import pretend_gpu

    with pretend_gpu() as fake:
        yield fake


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "spec",
    [
        make_spec(layout=ROWS),
        latent_spec("int8", "int8", layout=ROWS),
        latent_spec("int4", rope=0, layout=ROWS),
    ],
    ids=["int4", "latents", "no-rope"],
)
def test_write_pair_launches_once_and_once_more_to_seal(gpu, spec):
    """Chunks of all lengths above 1 share a variant, and so do windows of all sizes."""
    from kv_hf.backends.triton import seal as kernels

    launches = {}
    for q_len in range(1, 17):
        one = Inputs(spec, q_len=q_len)
        for jobs in (None, one.jobs, one.jobs[:0], one.jobs[1:]):
            given = jobs, one.new, one.starts, one.skips
            kernels.write(PageWrite(one.windows, one.fields, spec, one.damaged, launches, *given))
    append, seal = "append_pair_kernel", "seal_pair_kernel"
    assert gpu.names() == 16 * [append, append, seal, append, append, seal]
    assert gpu.variants == {append: 2, seal: 1}
