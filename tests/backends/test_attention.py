"""Attention over pages by every backend of a CPU, against an fp64 softmax over tokens that were decoded and laid out by `paged_inputs`.

CASES is one table for the reference and for the C kernel in every instruction set, of keys and values and of latents.
"""

from dataclasses import fields as fields_of
from dataclasses import replace
from functools import partial
from itertools import islice, product

import paged_inputs
import pytest
import torch
from allocations import guarded
from harness import slow_but
from paged_inputs import (
    DTYPES,
    ISAS,
    LATENTS,
    PAIRS,
    SINKS,
    latent_spec,
    make_kv,
    make_latents,
    make_query,
    needs_library,
    row_alone,
    tokens_of,
)
from rounding import Rounding

from kv_hf.backends import dispatch
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu import decode
from kv_hf.backends.cpu import unsupported as unsupported_in_c
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.reference.pages import TILE_TOKENS
from kv_hf.errors import CacheMismatchError
from kv_hf.spec import LANES, PageFields
from kv_hf.spec import ROWS as ROWS_LAYOUT

FP32, BF16, FP16 = DTYPES["fp32"], DTYPES["bf16"], DTYPES["fp16"]
GROUPED = [
    ("plain4", "plain2"),
    ("plain2", "plain4"),
    ("int3", "int2"),
    ("int4", "plain4"),
]


def guarded_fields(thing):
    """Return copies of the tensors of a dataclass, each with nothing behind it."""
    found = {}
    for field in fields_of(thing):
        value = getattr(thing, field.name)
        if isinstance(value, torch.Tensor) and value.is_contiguous():
            found[field.name] = guarded(value)
        elif field.name in ("key_pages", "value_pages"):
            found[field.name] = {name: guarded(tensor) for name, tensor in value.items()}
    return found


class Kernel:
    """The reference, or the C kernel in one instruction set or in all."""

    def __init__(self, monkeypatch, *isas):
        self.is_c = bool(isas)
        self.layout = LANES if self.is_c else ROWS_LAYOUT
        self.all = [partial(self.in_c, monkeypatch, isa) for isa in isas]
        self.all = self.all or [reference.paged_attention]
        self.attend = self.all[-1]

    def in_c(self, monkeypatch, isa, call):
        """Attend with a forbidden page of memory behind every tensor, or as they lie where these are parts of others."""
        monkeypatch.setattr(decode, "isa", lambda: isa)
        kv = replace(call.kv, **guarded_fields(call.kv))
        return decode.paged_attention(replace(call, kv=kv, **guarded_fields(call)))

    def check(self, query, kv, **options):
        """Compare with fp64: no error beyond what rounding in this kernel explains."""
        name = "c" if self.is_c else "reference"
        integers = self.is_c and not kv.spec.is_latent
        rounding = Rounding.of(name, query.dtype, integers=integers)
        paged_inputs.check(query, kv, self.all, rounding, **options)


ALL_ISAS = [isa for one in ISAS for isa in one.values]


@pytest.fixture(
    params=[pytest.param((), id="reference"), pytest.param(ALL_ISAS, id="c", marks=needs_library)]
)
def kernels(request, monkeypatch):
    return Kernel(monkeypatch, *request.param)


@pytest.fixture(params=[pytest.param(None, id="reference"), *ISAS])
def kernel(request, monkeypatch):
    return Kernel(monkeypatch, *(() if request.param is None else [request.param]))


@pytest.fixture(params=ISAS)
def c_kernel(request, monkeypatch):
    return Kernel(monkeypatch, request.param)


# -- the table: name -> what yields (pages, query, options) for a layout -----------------------------------------------


def pairs(layout, pairs=PAIRS, dtypes=(FP32, BF16), q_len=3, group=2, **sizes):
    """Every format of keys and of values, in pages of which all fill whole words."""
    for (keys, values), dtype in product(pairs, dtypes):
        sizes = {"page": 32, "slots": 44, "shuffle": 1, "poison": True, **sizes}
        kv = make_kv(keys, values, dtype=dtype, layout=layout, **sizes)
        yield kv, make_query(kv, q_len, group, dtype), {}


def queries_in_float64(layout):
    """They are the reference's alone."""
    for some in (pairs, latents_in_every_format) if layout == ROWS_LAYOUT else ():
        for kv, query, options in some(layout):
            yield kv, query.double(), options


def head_dims(layout):
    for dim, page in ((16, 32), (24, 64), (48, 32), (80, 32), (96, 32), (192, 32), (256, 32)):
        # 24 are no whole words
        some = [pair for pair in PAIRS if dim != 24 or pair[0] not in ("plain2", "int6")]
        group = dim if dim % 16 else 16
        dtypes = [BF16 if dim % 64 else FP32]
        yield from pairs(layout, some, dtypes, key_dim=dim, page=page, value_group=group)


def sides_of_different_dims(layout):
    for dims in ((128, 64), (64, 128), (80, 32)):
        yield from pairs(layout, dtypes=[FP32], key_dim=dims[0], value_dim=dims[1])


def page_sizes(layout):
    for page in (32, 128, 512):
        rows = [(2, 11), (1, 40), (0, 3)]
        yield from pairs(layout, rows=rows, page=page, slots=page + 40)


def group_sizes(layout):
    for key_group, value_group in ((4, 8), (8, 16), (16, 64), (32, 32)):
        groups = {"key_group": key_group, "value_group": value_group}
        yield from pairs(layout, GROUPED, group=3, **groups)


def lanes_that_fill_no_vector(layout):
    for dim, page in ((24, 4096), (40, 2048), (8, 1024), (72, 64)):
        sizes = {"key_dim": dim, "page": page, "slots": 24, "rows": [(1, 9), (0, 3)]}
        yield from pairs(layout, [("int8", "fp8"), ("exact", "exact")], [FP32], 2, **sizes)


def numbers_of_queries(layout):
    for group, q_len in product((1, 2, 3, 4, 5, 7, 8), (1, 2, 16)):
        yield from pairs(layout, [("int4", "int4")], q_len=q_len, group=group)


def masks_of(kv, heads, q_len):
    """Masks that models make: bool and floats, shared or not by rows and heads, wider than what was seen."""
    numbers = torch.Generator().manual_seed(7)
    for rows, own in product((1, kv.rows), (1, heads)):
        chosen = torch.rand(rows, own, q_len, kv.seen, generator=numbers)
        floats = torch.randn(chosen.shape, generator=numbers)
        yield chosen > 0.4
        yield torch.cat([chosen > 0.7, torch.zeros(rows, own, q_len, 3).bool()], -1)
        yield floats.masked_fill(chosen < 0.2, float("-inf"))
        yield floats.bfloat16()
    yield (chosen > 0.4).transpose(2, 3).contiguous().transpose(2, 3)
    hides = chosen > 0.4
    hides[:, :, 1] = False  # a query that sees nothing
    yield hides
    yield torch.zeros(chosen.shape).masked_fill(~hides, float("-inf"))
    yield torch.full((1, 1, q_len, kv.seen), torch.finfo(FP32).min)  # all alike


def options_of(kv, query):
    """Masks, softcap, sink logits and windows, alone and together."""
    heads, q_len = query.shape[1], query.shape[2]
    logits = torch.linspace(-2, 2, heads)
    for mask in masks_of(kv, heads, q_len):
        yield {"mask": mask}
        yield {"mask": mask, "softcap": 3.0, "sink_logits": logits, "sliding_window": 40}
    for window in (1, 2, 7, 16, 30, 90, 1000):
        yield {"sliding_window": window}
    for cap in (0.5, 3.0, 50.0):
        yield {"softcap": cap}
    for size in (1.0, 30.0, -30.0, float("-inf")):
        yield {"sink_logits": size * torch.linspace(0.5, 1.5, heads)}


def every_option(layout):
    for name, dtype in (("exact", FP32), ("int4", FP32), ("int8", BF16)):
        kv = make_kv(name, dtype=dtype, layout=layout, more_padding=5, poison=True)
        query = make_query(kv, 3, 2, dtype)
        yield from ((kv, query, options) for options in options_of(kv, query))


def rows_of_all_lengths(layout):
    """Many splits, windows longer than pages, more queries than tokens, and no sinks."""
    for rows, how in (
        ([(300, 9), (33, 20), (0, 2), (0, 0)], {"shuffle": 1}),
        ([(3, 700), (0, 513), (2, 4)], {"slots": 704}),
        ([(TILE_TOKENS // 8, 9), (33, 20), (0, 2)], {}),
        ([(3, 30), (2, 21), (0, 5)], {"sinks": 0}),
        ([(3, 30), (2, 21), (0, 5)], {"sinks": 20}),
    ):
        for kv, query, options in pairs(layout, [("int8", "int8")], [FP32], rows=rows, **how):
            yield kv, query, options
            yield kv, make_query(kv, 16, 2, FP32), options


def scores_that_overflow_exp(layout):
    for kv, query, options in pairs(layout, [("exact", "exact")], [FP32]):
        yield kv, 400 * query, options


def strided_tensors(layout):
    """A query is a view of [batch, q_len, heads, dim] in transformers; windows are slices of longer ones."""
    for kv in (make_kv("int8", layout=layout), make_latents(latent_spec(layout=layout))):
        query = make_query(kv, 3, 4, FP32)
        wide = torch.zeros(*query.shape[:3], 2 * query.shape[3])[..., ::2]
        longer = replace(
            kv,
            residual_keys=torch.cat([kv.residual_keys] * 2, 2)[:, :, : kv.residual_keys.shape[2]],
            residual_values=torch.cat([kv.residual_values] * 2, 3)[
                ..., : kv.residual_values.shape[3]
            ],
        )
        for one in (query.transpose(1, 2).contiguous().transpose(1, 2), wide.copy_(query)):
            yield longer, one, {}


def latents(layout, names=LATENTS, heads=5, q_len=1, dtypes=(FP32,), sizes=({},), **held):
    for (latent, k_rope), dtype, size in product(names, dtypes, sizes):
        kv = make_latents(latent_spec(latent, k_rope, dtype=dtype, layout=layout, **size), **held)
        yield kv, make_query(kv, q_len, heads, dtype), {}


SOME = [(name, "int8") for name in ("exact", "int8", "fp8", "int4", "int2")]


def latents_in_every_format(layout):
    yield from latents(layout, dtypes=DTYPES.values(), q_len=2)


def latents_of_every_size(layout):
    ranks = ((16, None), (60, None), (60, 12), (240, None), (256, 32))
    sizes = [{"rank": rank, "rope": rope, "group": g} for (rank, g), rope in product(ranks, (0, 8))]
    sizes += [{"rank": rank, "rope": rope} for rank, rope in ((512, 64), (128, 144), (60, 36))]
    yield from latents(layout, SOME, 4, dtypes=[BF16], sizes=sizes)
    sizes = [{"page": page} for page in (32, 128, 256)]
    yield from latents(layout, SOME, 3, 2, sizes=sizes, rows=[(2, 21), (0, 5), (5, 4)])


def latents_of_every_number_of_queries(layout):
    shapes = ((1, 1), (4, 1), (6, 3), (66, 1), (128, 1), (20, 16), (3, 70))
    for heads, q_len in shapes:
        yield from latents(layout, [("int8", "exact")], heads, q_len, rows=[(9, 20), (2, 5)])
    rows = [(40, 9), (3, 700), (600, 6)]
    yield from latents(layout, [("int8", "exact")], 100, 2, rows=rows, slots=704)


def latents_with_every_option(layout):
    for kv, query, _ in latents(
        layout, [("int8", "exact"), ("int4", "int8")], 6, 3, more_padding=5
    ):
        yield from ((kv, query, options) for options in options_of(kv, query))


def latents_of_few_tokens(layout):
    """Sparse attention shows some thousand columns of many: tokens of many pages share a tile."""
    long = {"rows": [(60, 20), (31, 9)], "sizes": [{"page": 32}]}
    (kv, query, _), *_ = latents(layout, [("int8", "int8")], 5, 3, **long)
    numbers = torch.Generator().manual_seed(4)
    for share, shape in product((0.002, 0.03, 0.3, 0.9), ((2, 1, 3), (1, 5, 3))):
        yield kv, query, {"mask": torch.rand(*shape, kv.seen, generator=numbers) < share}
    chosen = torch.zeros(2, 1, 3, kv.seen, dtype=torch.bool)
    chosen[..., 1000] = True  # a page of the first row; the second has one token there as well
    yield kv, query, {"mask": chosen}


def latents_beside_an_outlier_channel(layout):
    some = (("int4", "int8"), ("int8", "exact"), ("int2", "int8"))
    for outlier in (10, 1_000, 10_000):
        yield from latents(layout, some, 6, dtypes=DTYPES.values(), rows=[(9, 20)], outlier=outlier)


CASES = (
    pairs, queries_in_float64, head_dims, sides_of_different_dims, page_sizes, group_sizes, lanes_that_fill_no_vector, numbers_of_queries,
    every_option, rows_of_all_lengths, scores_that_overflow_exp, strided_tensors, latents_in_every_format,
    latents_of_every_size, latents_of_every_number_of_queries, latents_with_every_option, latents_of_few_tokens,
    latents_beside_an_outlier_channel,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("nth", slow_but([3], [3, 1]), ids=["every third", "all"])
def test_backends_attend_as_the_definition(case, kernels, nth):
    for kv, query, options in islice(case(kernels.layout), 0, None, nth):
        assert not kernels.is_c or unsupported_in_c(kv.spec) is None
        kernels.check(query, kv, **options)


# -- what a result does not depend on ------------------------------------------------------------------------------------


def some_of_each(layout, **held):
    """Two formats of keys and values, and latents."""
    for name in ("exact", "int4"):
        yield make_kv(name, layout=layout, **held)
    yield make_latents(latent_spec("int8", layout=layout), **held)


def test_result_of_a_row_depends_on_neither_batch_nor_threads(kernel):
    before = torch.get_num_threads()
    for kv in some_of_each(kernel.layout, rows=[(90, 9), (3, 20), (0, 2)], slots=24):
        query = make_query(kv, 1, 70 if kv.spec.is_latent else 3, FP32)
        outs = []
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                outs.append(kernel.attend(AttentionCall(query, kv, 0.1)))
        finally:
            torch.set_num_threads(before)
        if kernel.is_c:
            assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        for row in range(kv.rows):
            only, alone = slice(row, row + 1), row_alone(kv, row)
            out = kernel.attend(AttentionCall(query[only], alone, 0.1))
            # torch picks the order of sums by the batch's size
            assert torch.equal(out, outs[0][only]) if kernel.is_c else True
            kernel.check(query[only], alone)


def test_a_nan_in_the_query_goes_through(kernel):
    for kv in some_of_each(kernel.layout):
        query = make_query(kv, 1, 4 // kv.spec.keys.num_kv_heads, FP32)
        query[0, 1, 0, 3] = float("nan")
        out = kernel.attend(AttentionCall(query, kv, 0.1))
        assert bool(out[0, 1].isnan().all())
        assert bool(out[0, 2:].isfinite().all()) and bool(out[1:].isfinite().all())


def test_latents_of_pages_that_the_mask_hides_are_not_opened(c_kernel):
    kv = make_latents(latent_spec(), rows=[(9, 20)])
    mask = torch.zeros(1, 1, 1, kv.seen, dtype=torch.bool)
    mask[..., SINKS + 4 * 16 + torch.arange(16)] = True
    query = make_query(kv, group=5, dtype=FP32)
    expected = c_kernel.attend(AttentionCall(query, kv, 0.1, mask=mask))
    gone = kv.block_table.clone()
    gone[:, [0, 1, 2, 3, 5, 6, 7, 8]] = 1 << 30  # reading there would end the process
    kv = replace(kv, block_table=gone)
    assert torch.equal(c_kernel.attend(AttentionCall(query, kv, 0.1, mask=mask)), expected)


@needs_library
def test_kernel_of_another_step_uses_nothing_of_the_last():
    """The packed arguments stay between calls; everything that they were packed from changes here, one by one."""
    launches = {}

    def kept(kv):  # without a mark, pages are packed at every call
        pages = {name: PageFields(getattr(kv, name)) for name in ("key_pages", "value_pages")}
        return replace(kv, **pages)

    kv = kept(make_kv("int4", layout=LANES))
    query = make_query(kv, 2, 2, FP32)
    mask = torch.rand(kv.rows, 1, 2, kv.seen, generator=torch.Generator().manual_seed(3)) > 0.3
    apart = query.transpose(1, 2).contiguous().transpose(1, 2)
    other = kept(make_kv("int4", layout=LANES, seed=1, shuffle=1))
    wide = replace(kv, residual_keys=kv.residual_keys.repeat(1, 1, 2, 1))
    steps = [
        (query, kv, {}),
        (query, replace(kv, value_pages=other.value_pages), {}),
        (query, kv, {}),
        (apart, kv, {}),
        (query, replace(kv, key_pages=other.key_pages), {}),
        (query, wide, {}),
        (query, replace(kv, sink_tokens=2), {}),
        (query, kv, {"softcap": 3.0}),
        (query, kv, {"sliding_window": 20}),
        (query, kv, {"mask": mask}),
        (query, kv, {"mask": mask[:1]}),
        (query, kv, {"mask": mask.half()}),
        (query, kv, {"sink_logits": torch.ones(4)}),
        (query.bfloat16(), kv, {}),
        (query[:, :, :1], kv, {}),
        (make_query(kv, 2, 3, FP32), kv, {}),
        (query, other, {}),
        (query, kept(make_kv("int4", "int8", layout=LANES)), {}),
        (query, make_kv("int4", "int8", layout=LANES), {}),
        (query, kv, {}),
    ]
    for query, kv, options in steps:
        expected = decode.paged_attention(
            AttentionCall(query, replace(kv, launches={}), 0.1, **options)
        )
        shared = replace(kv, launches=launches)
        found = decode.paged_attention(AttentionCall(query, shared, 0.1, **options))
        assert torch.equal(found, expected)
    assert list(launches) == ["c attend"]


@pytest.mark.parametrize("name", ["reference", pytest.param("c", marks=needs_library)])
def test_kernels_keep_their_precision_under_autocast(name):
    kv = make_kv("int8", layout=LANES)
    call = AttentionCall(make_query(kv, 1, 2, FP32), kv, 0.1)
    kernel = dispatch.load(name)
    expected = kernel.attend(call)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(kernel.attend(call), expected)


# -- channels that are far larger than the others ------------------------------------------------------------------------

# the largest relative error of the output's own rounding: the budget of a score (attend.inc)
BUDGET = {FP32: 2.0**-24, FP16: 2.0**-11, BF16: 2.0**-8}
CHANNELS = [7, 40]


def planted_kv(name, dtype, size, side):
    """Random pages whose `side` has two channels `size` times larger than the others."""

    def plant(x, spec):
        if spec.side == side:
            x[..., CHANNELS] *= size
        return x

    values = "int4" if name.endswith("_mixed") else None
    sizes = {"key_dim": 128, "page": 64, "slots": 8, "rows": [(12, 6)]}
    return make_kv(name, values, dtype=dtype, layout=LANES, change=plant, **sizes)


def exact_and_allowed(query, kv, scale, integers):
    """Return the result in float64, and for each element six standard deviations of what may be wrong with it."""
    budget, fp32 = BUDGET[query.dtype], 2.0**-24
    keys, values = (tokens_of(kv, side, 0, torch.float64) for side in ("keys", "values"))
    q = query[0].double().view(keys.shape[0], -1, keys.shape[2])  # [kv heads, queries, dim]
    weights = torch.softmax(q @ keys.transpose(1, 2) * scale, -1)
    out = weights @ values
    # fp32 sums of codes apart from their offsets: terms as large as a channel's range
    score = 8 * fp32 * scale * (q.abs() @ (2 * keys.abs().amax(1))[..., None])
    ranges = 2 * values.abs().amax(-1)[:, None]  # at least as wide as that of any group of channels
    total = fp32 * 8 * (weights * ranges).sum(-1, keepdim=True)
    if integers:
        score = score + 6 * budget
        products = (weights * ranges).square().sum(-1, keepdim=True).sqrt()
        total = total + 6 * products * (kv.page_size / 12) ** 0.5 / 32767
    own = weights.square().sum(-1, keepdim=True).sqrt()
    spread = (weights.square() @ values.square()).sqrt() + out.abs() * own
    allowed = budget * out.abs() + score * spread + total
    shape = (query.shape[1], query.shape[2], values.shape[2])
    return out.view(shape), allowed.view(shape)


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", ["int8", "plain4", "plain2", "int4", "int3"])
def test_kernel_keeps_its_digits_beside_outlier_channels(c_kernel, side, dtype, name):
    """int4 keys with a channel of 1,000 times and fp16 queries were once wrong by 3 %: coefficients were rounded
    to 15 bits of the largest, whatever that left of the others."""
    for size in (1, 100, 1_000, 10_000):
        kv = planted_kv(name, dtype, size, side)
        query, scale = make_query(kv, 1, 4, dtype, size), kv.spec.keys.head_dim**-0.5
        expected, allowed = exact_and_allowed(query, kv, scale, dtype != FP32)
        out = c_kernel.attend(AttentionCall(query, kv, scale))[0].double()
        assert float(((out - expected).abs() / allowed).max()) <= 1, size


@pytest.mark.parametrize("name", ["plain4", "int4"])
def test_kernel_rounds_each_query_by_itself(c_kernel, name):
    """Of the queries of a kv head some become one integer for each coefficient and others two: the same bits as alone."""
    kv = planted_kv(name, FP16, 1_000, "keys")
    query = make_query(kv, 1, 7, FP16)
    for head in (1, 2, 5, 9):
        query[:, head, :, CHANNELS] = 0
    together = c_kernel.attend(AttentionCall(query, kv, 0.1))
    for head in range(14):
        only = query.clone()
        only[:, torch.arange(14) != head] = 0
        out = c_kernel.attend(AttentionCall(only, kv, 0.1))
        assert torch.equal(out[:, head], together[:, head])


# -- page ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [-1, 11, 1 << 30, -(1 << 31)])
def test_kernel_refuses_a_page_that_does_not_exist(c_kernel, page):
    held = {"rows": [(5, 11), (3, 2)]}
    for kv in (
        make_kv("int4", layout=LANES, **held),
        make_latents(latent_spec("int8", "int8"), **held),
    ):
        query = make_query(kv, dtype=FP32)
        assert kv.key_pages["codes"].shape[0] == 11
        expected = c_kernel.attend(AttentionCall(query, kv, 0.1))
        for at in (0, 1, 4):
            table = kv.block_table.clone()
            table[0, at] = page
            with pytest.raises(CacheMismatchError, match=r"block_table must name pages .* 0 to 10"):
                c_kernel.attend(AttentionCall(query, replace(kv, block_table=table), 0.1))
        kv.block_table[1, 3:] = page  # which the row does not hold
        assert torch.equal(c_kernel.attend(AttentionCall(query, kv, 0.1)), expected)


def test_kernel_takes_the_least_room_of_all_fields(c_kernel):
    """Storage that stopped growing between keys and values: the next page would lie behind the values."""
    kv = make_kv("int4", layout=LANES, rows=[(5, 11)])
    fields = [("key_pages", name) for name in kv.key_pages]  # the order of channels too
    for side, field in fields + [("value_pages", name) for name in kv.value_pages]:
        cut = {**getattr(kv, side), field: getattr(kv, side)[field][:4]}
        short = AttentionCall(make_query(kv, dtype=FP32), replace(kv, **{side: cut}), 0.1)
        with pytest.raises(CacheMismatchError, match="0 to 3, and names a page outside"):
            c_kernel.attend(short)


# -- dispatch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [3, 40])
@pytest.mark.parametrize("name", ["reference", pytest.param("c", marks=needs_library)])
def test_dispatch_applies_every_option_also_in_slices(name, q_len):
    kernel = dispatch.load(name)
    sliced = replace(kernel, max_queries=17)

    def attend(call):
        return dispatch.paged_attention(call, sliced)

    held = {"rows": [(3, 50), (0, 60), (0, 3)], "slots": 64}
    for kv in (make_kv("int4", layout=LANES, **held), make_latents(latent_spec("int4"), **held)):
        query = make_query(kv, q_len, 2, FP32)
        rounding = Rounding.of(name, FP32)
        for options in islice(options_of(kv, query), 0, None, 3):
            paged_inputs.check(query, kv, attend, rounding, **options)
            if "mask" in options and options["mask"].shape[1] == 1:  # of one query for all
                options = {**options, "mask": options["mask"][:, :, :1]}
                paged_inputs.check(query, kv, attend, rounding, **options)


def ask(**changes):
    """Call dispatch with arguments that fit, except for `changes`; the kv has 5 rows, 2 kv heads of 64."""
    kv = make_kv()
    arguments = {"query": make_query(kv, 3), "kv": kv, "softmax_scale": 0.125, **changes}
    kernel = arguments.pop("kernel", "auto")
    return dispatch.paged_attention(AttentionCall(**arguments), kernel)


BAD = [
    *(({"query": torch.zeros(shape)}, rf"query must be \[5, a multiple of 2, q_len, 64\].*{shape[0]}, {shape[1]}")
      for shape in ((4, 4, 3, 64), (5, 4, 3, 32), (5, 3, 3, 64), (5, 4, 64))),
    *(({"mask": torch.ones(shape).bool()}, rf"mask must broadcast to \(5, 4, 3, 91\), got \({shape[0]}, {shape[1]}")
      for shape in ((4, 1, 3, 91), (1, 3, 3, 91), (1, 1, 2, 91), (5, 91))),
    ({"mask": torch.ones(1, 1, 3, 90).bool()}, "mask must have at least 91 columns, got 90"),
    ({"mask": torch.ones(1, 1, 3, 91, dtype=torch.int64)}, "mask must be bool, or numbers.*got torch.int64"),
    *(({"sink_logits": torch.zeros(shape)}, "sink_logits") for shape in ((3,), (2,), (1, 8))),
    ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "says"), BAD)
def test_dispatch_refuses_what_does_not_fit(changes, says):
    assert ask().shape == (5, 4, 3, 64)
    with pytest.raises(CacheMismatchError, match=says):
        ask(**changes)
