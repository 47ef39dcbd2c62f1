"""One call of the C kernel that appends and seals both sides: the bytes and windows of the reference, or nothing at all."""

import copy
import pickle
from itertools import product

import pytest
import torch
from allocations import guarded
from harness import at_once
from paged_inputs import (
    DTYPES,
    ISAS,
    LATENTS,
    PAIRS,
    check_seals,
    latent_spec,
    needs_library,
    page_spec,
)

from kv_hf.backends.cpu import decode, unsupported, write
from kv_hf.backends.reference.pages import append_tokens, seal_pages
from kv_hf.errors import CacheMismatchError
from kv_hf.spec import LANES, PageFields, PageWrite

pytestmark = needs_library
PAGE, SLOTS, PAGES = 16, 44, 6
# first slot to write and padding of each row: some tokens, all columns, padding alone, up to the last slot
STARTS, SKIPS = (5, 0, 30, 40), (1, 0, 5, 1)
JOBS = [(0, 4, 2, -5), (1, 0, 4, 1), (2, 20, -1, -1), (3, 28, 0, -13), (3, 12, 5, -13)]


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    monkeypatch.setattr(write, "isa", lambda: request.param)
    return request.param


def make_spec(
    keys="int4", values="int4", dtype=torch.float32, dims=(64, 64), page=PAGE, group=None, layout=LANES
):  # fmt: skip
    sizes = {"key_dim": dims[0], "value_dim": dims[1], "page_size": page, "groups": (None, group)}
    return page_spec(keys, values, **sizes, dtype=dtype, layout=layout)


class Inputs:
    """Everything that a step writes: windows, new tokens, and storage with pages that nobody may touch."""

    def __init__(self, spec, seed=0, place=torch.clone, q_len=5):
        numbers = torch.Generator(torch.get_default_device()).manual_seed(seed)
        rows, self.spec = len(STARTS), spec
        assert spec.keys.layout != LANES or unsupported(spec) is None

        def tokens(side, count):
            shape = (rows, side.num_kv_heads, count, side.head_dim)
            return place(torch.randn(shape, generator=numbers).to(side.dtype))

        self.windows = tuple(tokens(side, SLOTS) for side in spec.sides)
        self.new = tuple(tokens(side, q_len) for side in spec.sides)
        self.starts, self.skips = (place(torch.tensor(x).int()) for x in (STARTS, SKIPS))
        self.jobs = place(torch.tensor(JOBS).int())
        self.fields = tuple(
            PageFields(
                {
                    name: place(torch.full((PAGES, *shape), 3, dtype=kind))
                    for name, (shape, kind) in side.fields.items()
                }
            )
            for side in spec.sides
        )
        self.damaged = place(torch.zeros((), dtype=torch.uint8))
        self.launches = {}

    def by_reference(self):
        """Do the step's work by the reference."""
        sides = zip(self.windows, self.new, self.fields, self.spec.sides, strict=True)
        for window, new, fields, side in sides:
            append_tokens(window, new, self.starts, self.skips)
            self.damaged |= seal_pages(window, self.jobs, fields, side)
        return self

    def asked(self, jobs=True):
        """Return the work of one call."""
        given = (self.windows, self.fields, self.spec, self.damaged, self.launches)
        jobs = self.jobs if jobs else None
        return PageWrite(*given, jobs, self.new, self.starts, self.skips)

    def by_pair(self, jobs=True):
        """Do it by one call."""
        write.write(self.asked(jobs))
        return self

    @property
    def written(self):
        """All bytes that the step may write."""
        stored = [tensor for fields in self.fields for tensor in fields.values()]
        return [one.contiguous().view(torch.uint8) for one in (*self.windows, *stored)]


def assert_equal(one, other):
    assert bool(one.damaged) == bool(other.damaged)
    for mine, wanted in zip(one.written, other.written, strict=True):
        assert torch.equal(mine, wanted)


def specs(dtype, layout=LANES):
    """Pages of every format of keys, values and latents; third bits fill no words of 16 tokens, as lanes have them."""
    own = {"dtype": dtype, "layout": layout}
    for pair in PAIRS:
        if pair[1] != "int3" or layout != LANES:
            yield make_spec(*pair, **own)
    yield make_spec("int4", "int8", dims=(128, 64), **own)
    for latent, k_rope in LATENTS:
        for rope in (16, 0):
            yield latent_spec(latent, k_rope, rank=128, rope=rope, page=PAGE, **own)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_write_pair_leaves_what_the_reference_leaves(isa, dtype):
    """With a forbidden page of memory behind every tensor."""
    for spec in specs(dtype):
        assert_equal(Inputs(spec, place=guarded).by_pair(), Inputs(spec).by_reference())


def test_write_pair_of_another_step_uses_nothing_of_the_last(isa):
    """The packed arguments stay; everything that they were packed from changes."""
    spec = make_spec()
    launches = {}
    for seed, q_len in ((0, 5), (1, 5), (2, 5), (3, 1), (4, 5)):
        one, other = Inputs(spec, seed, q_len=q_len), Inputs(spec, seed, q_len=q_len)
        for inputs in (one, other):
            inputs.skips.clamp_(max=q_len)
            if seed == 2:  # another order in memory
                inputs.new = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in one.new)
                inputs.windows = tuple(
                    x.repeat_interleave(2, 1)[:, ::2].transpose(0, 1).contiguous().transpose(0, 1)
                    for x in inputs.windows
                )
        one.launches = launches
        assert_equal(one.by_pair(), other.by_reference())
    assert list(launches) == ["c write"]


def test_write_pair_without_jobs_touches_no_page(isa):
    one, other = Inputs(make_spec()), Inputs(make_spec())
    other.jobs = other.jobs[:0]
    assert_equal(one.by_pair(jobs=False), other.by_reference())
    assert_equal(one.by_pair(jobs=False), other)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), 7e4])
def test_write_pair_says_that_numbers_were_made_finite(isa, bad, side):
    one, other = Inputs(make_spec()), Inputs(make_spec())
    for inputs in (one, other):
        inputs.new[side][1, 1, 2, 3] = bad
    assert_equal(one.by_pair(), other.by_reference())
    assert one.damaged == 1
    clean = Inputs(make_spec())
    one.new, one.windows = clean.new, clean.windows
    assert one.by_pair().damaged == 1, "it is never cleared"


SIZES = [(16, 32, 16), (24, 64, 24), (48, 32, 16), (64, 64, None), (80, 32, 40), (96, 64, None), (128, 32, None), (256, 128, None)]  # fmt: skip
LATENT_SIZES = [(16, 0, 16, None), (60, 8, 32, 12), (240, 64, 64, None), (256, 144, 16, 64), (512, 64, 64, None)]  # fmt: skip


def specs_of_every_size(dtype, layout, most=512):
    """Pages of every format, of at most so many channels."""
    own = {"dtype": dtype, "layout": layout}
    for dim, page, group in SIZES:
        for pair in PAIRS if dim <= most else ():
            if dim != 24 or pair[0] not in ("plain2", "int6"):  # 24 are no whole words
                yield make_spec(*pair, dims=(dim, dim), page=page, group=group, **own)
    for names, (rank, rope, page, group) in product(LATENTS, LATENT_SIZES):
        if rank <= most and (names[0] != "fp8_ds_mla" or rank % 128 == 0):
            yield latent_spec(*names, rank=rank, rope=rope, page=page, group=group, **own)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_seal_pair_writes_the_bytes_of_the_codec(isa, dtype):
    """With a forbidden page of memory behind every tensor."""
    for spec in specs_of_every_size(dtype, LANES):
        check_seals(spec, write.write, guarded)
    check_seals(spec, write.write, apart=True)


def put(name, at, value):
    """Let a number of a tensor be another one."""

    def change(inputs):
        changed = getattr(inputs, name).clone()
        changed[at] = value
        return {name: changed}

    return change


def cut(side, field):
    """Let storage have stopped growing between two fields."""

    def change(inputs):
        fields = list(inputs.fields)
        fields[side] = PageFields({**fields[side], field: fields[side][field][:5]})
        return {"fields": tuple(fields)}

    return change


REFUSED = [
    *((put(*given), "0 to 43") for given in (
        ("starts", 3, 41), ("starts", 0, -1), ("skips", 0, 6), ("skips", 2, -1), ("jobs", (4, 0), 4), ("jobs", (4, 0), -1),
        ("jobs", (4, 1), 29), ("jobs", (4, 1), -1),
    )),
    (put("jobs", (4, 2), PAGES), "jobs must name pages .* 0 to 5"),
    *((cut(0, field), "0 to 4, and names a page outside") for field in ("codes", "scale", "offset", "order")),
    *((cut(1, field), "0 to 4, and names a page outside") for field in ("codes", "scale", "offset")),
    (lambda x: {"new": (x.new[0], x.new[1].half())}, "new values must be torch.float32"),
    (lambda x: {"new": (x.new[0][:, :1], x.new[1])}, r"new keys must be .* \[4, 2, 5, 64\]"),
    (lambda x: {"new": (x.new[0], x.new[1][:, :, 1:])}, r"new values .* \[4, 2, 5, 64\]"),
    (lambda x: {"starts": x.starts.long()}, r"starts must be torch.int32 \[4\]"),
    (lambda x: {"skips": x.skips[:3]}, r"skips must be torch.int32 \[4\]"),
    (lambda x: {"windows": (x.windows[0].double(), x.windows[1])}, "windows of keys must hold contiguous"),
]  # fmt: skip


def test_write_pair_refuses_what_does_not_fit_before_it_writes(isa):
    spec = make_spec("int3", "plain4")
    one, untouched = Inputs(spec), Inputs(spec)
    good = dict(vars(one))
    for change, says in REFUSED:
        vars(one).update(change(one))
        with pytest.raises(CacheMismatchError, match=says):
            one.by_pair()
        vars(one).update(good)
        assert_equal(one, untouched)
    assert_equal(one.by_pair(), untouched.by_reference())


def test_packed_arguments_do_not_follow_a_copy():
    """A copied cache has tensors of its own: the addresses of the original are none of its."""
    one = Inputs(make_spec()).by_pair()
    kept = one.launches["c write"]
    for again in (copy.deepcopy(one.launches), pickle.loads(pickle.dumps(one.launches))):
        block = again["c write"]
        assert not block.key
        assert block.address != kept.address
        assert not any(block.memory)
        other, wanted = Inputs(make_spec(), 7), Inputs(make_spec(), 7)
        other.launches = again
        assert_equal(other.by_pair(), wanted.by_reference())


def test_threads_that_share_packed_arguments_do_not_mix_them():
    spec = make_spec()
    launches = {}
    wanted = [Inputs(spec, seed).by_reference() for seed in range(4)]

    def work(seed):
        for _ in range(50):
            one = Inputs(spec, seed)
            one.launches = launches
            assert_equal(one.by_pair(), wanted[seed])

    assert at_once(work, 4) == [None] * 4
    assert set(launches) == {write._NAME} != {decode._ATTEND}
