"""The kernels that append and seal: the bytes of the codec and the windows of the reference, for every format; in the interpreter."""

from dataclasses import replace

import pytest
import torch
from harness import slow_but
from paged_inputs import DTYPES, check_seals, latent_spec, page_spec
from test_cpu_write import SLOTS, Inputs, assert_equal, make_spec, specs, specs_of_every_size
from triton_machine import call, compiled_pairs, runs_kernels, skip_where, write

from kv_hf.backends.reference import pages as reference
from kv_hf.formats import format_names
from kv_hf.spec import ROWS, PageSpec, PageWrite

pytestmark = runs_kernels


def written(asked):
    """What the kernels write, in the worker."""
    return call(write, asked)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_seal_writes_the_bytes_of_the_codec(dtype):
    for spec in specs(dtype, ROWS):
        check_seals(spec, written)
    check_seals(spec, written, apart=True)


@pytest.mark.parametrize("most", slow_but([128], [128, 512]))
def test_seal_takes_every_size(most):
    for spec in specs_of_every_size(torch.float32, ROWS, most):
        check_seals(spec, written)


def seal_far_apart(windows, spec):
    """Seal heads that lie 2^30 numbers apart; memory of a CPU that nothing touches takes no room."""
    storage = windows.new_empty(2**31 + 2**20)
    far = storage.as_strided(windows.shape, (2**16, 2**30, windows.shape[3], 1)).copy_(windows)
    one, other = Inputs(spec), Inputs(spec)
    asked = [
        replace(inputs.asked(), windows=(tokens, tokens), new=None)
        for inputs, tokens in ((one, far), (other, windows))
    ]
    write(asked[0])
    reference.write(asked[1])
    return all(
        torch.equal(mine[name], wanted[name])
        for mine, wanted in zip(one.fields, other.fields, strict=True)
        for name in mine
    )


def test_seal_reads_heads_that_lie_far_apart():
    skip_where(True, "what is noted of 2^31 numbers takes more memory than there is")
    spec = page_spec("int8", heads=3, page_size=16, dtype=torch.bfloat16)
    numbers = torch.Generator().manual_seed(1)
    windows = torch.randn(4, 3, SLOTS, 64, generator=numbers).bfloat16()
    assert call(seal_far_apart, windows, spec)


# -- both sides of a layer at once -----------------------------------------------------------------------------------


class Written(Inputs):
    """What a step writes, written by the kernels in the worker."""

    def by_pair(self, jobs=True):
        done = written(self.asked(jobs))
        self.windows, self.fields, self.damaged = done.windows, done.fields, done.damaged
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
@pytest.mark.parametrize("name", slow_but(("int4", "fp8_ds_mla"), format_names("latent")))
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
    from kv_hf.backends.triton import pages as kernels

    launches = {}
    for q_len in range(1, 17):
        one = Inputs(spec, q_len=q_len)
        for jobs in (None, one.jobs, one.jobs[:0], one.jobs[1:]):
            given = jobs, one.new, one.starts, one.skips
            kernels.write(PageWrite(one.windows, one.fields, spec, one.damaged, launches, *given))
    append, seal = "append_pair_kernel", "seal_pair_kernel"
    assert gpu.names() == 16 * [append, append, seal, append, append, seal]
    assert gpu.variants == {append: 2, seal: 1}
