"""The C kernel on pages of latents, in every instruction set, against the reference in float64; and its sealing."""

from dataclasses import replace
from functools import partial

import paged_inputs
import pytest
import torch
from paged_inputs import DTYPES
from rounding import Rounding

from kv_hf.backends import cpu, dispatch, registry
from kv_hf.backends.base import AttentionCall, PagedKV
from kv_hf.backends.cpu import decode, library, write
from kv_hf.backends.reference.pages import seal_pages
from kv_hf.formats import format_names, k_rope_scheme, latent_scheme
from kv_hf.spec import LANES, PageSpec
from kv_hf.spec import ROWS as ROWS_LAYOUT

pytestmark = pytest.mark.skipif(bool(library.missing()), reason=str(library.missing()))
ISAS = range(1 if library.missing() else library.isa() + 1)
SINKS = 4
# pages and exact tokens of each row: pages and tail, many tokens, less than the sinks, one page, nothing
ROWS = [(3, 11), (9, 20), (0, 3), (1, 4), (0, 0)]
FORMATS = [
    (latent, k_rope) for latent in format_names("latent") for k_rope in format_names("k_rope")
]


@pytest.fixture(params=ISAS, ids=lambda isa: library.ISA_NAMES[isa])
def isa(request, monkeypatch):
    for module in (decode, write):
        monkeypatch.setattr(module, "isa", lambda: request.param)
    return request.param


def make_spec(
    latent="int8", k_rope="exact", *, rank=64, rope=16, page=16, dtype=torch.float32, group=None
):
    return PageSpec.build_latent(
        latent_scheme(latent, group, None if group is None else page // 2),
        k_rope_scheme(k_rope, rope),
        rank=rank,
        rope_dim=rope,
        page_size=page,
        dtype=dtype,
        layout=LANES,
    )


def make_kv(*formats, rows=ROWS, slots=24, poison=True, seed=0, more_padding=0, outlier=1, **sizes):
    """Random latents, sealed by the reference; with `poison`, nan wherever no token lies."""
    spec = make_spec(*formats, **sizes)
    page, dtype = spec.keys.page_size, spec.keys.dtype
    numbers = torch.Generator().manual_seed(seed)
    held = sum(pages for pages, _ in rows)
    order = torch.randperm(held + 2, generator=numbers)
    exact_lens = torch.tensor([exact for _, exact in rows], dtype=torch.int32)
    unused = torch.arange(slots) >= exact_lens[:, None]
    stored, windows = [], []
    for side in spec.sides:
        run = torch.randn(held, 1, page, side.head_dim, generator=numbers)
        run = run * (0.2 + torch.rand(side.head_dim, generator=numbers))
        run[..., 5:6] *= outlier
        run = run.to(dtype)
        fields = {}
        for name, (shape, kind) in side.fields.items():
            fields[name] = torch.zeros(held + 2, *shape, dtype=kind)
            if poison:
                filler = float("nan") if kind.is_floating_point else 0x7FC07FC0
                fields[name].fill_(filler)
        jobs = [(at, 0, int(order[at])) for at in range(held)]
        seal_pages(run, torch.tensor(jobs, dtype=torch.int32).view(-1, 3), fields, side)
        stored.append(fields)
        window = torch.randn(len(rows), 1, slots, side.head_dim, generator=numbers).to(dtype)
        if poison:
            window[unused[:, None]] = float("nan")
        windows.append(window)
    table = order[-1].repeat(len(rows), max(pages for pages, _ in rows)).to(torch.int32)
    first = 0
    for row, (pages, _) in enumerate(rows):
        table[row, :pages] = order[first : first + pages]
        first += pages
    tokens = [pages * page + exact for pages, exact in rows]
    seen = max(tokens) + more_padding
    return PagedKV(
        key_pages=stored[0],
        value_pages=stored[1],
        spec=spec,
        block_table=table,
        num_pages=torch.tensor([pages for pages, _ in rows], dtype=torch.int32),
        residual_keys=windows[0],
        residual_values=windows[1],
        exact_lens=exact_lens,
        padding=torch.tensor([seen - count for count in tokens], dtype=torch.int32),
        seen=seen,
        sink_tokens=SINKS,
    )


def make_query(kv, heads=5, q_len=1, dtype=None, seed=1):
    shape = (kv.rows, heads, q_len, kv.spec.query_dim)
    query = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return query.to(dtype or kv.spec.keys.dtype)


def check(query, kv, **options):
    """Compare with fp64: no error beyond what rounding in this kernel explains."""
    rounding = Rounding.of("c", query.dtype)
    return paged_inputs.check(query, kv, decode.paged_attention, rounding, **options)


# -- decode ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("latent", "k_rope"), FORMATS)
def test_latent_kernel_reads_every_format(isa, latent, k_rope, dtype):
    rank = 128 if latent == "fp8_ds_mla" else 64
    kv = make_kv(latent, k_rope, rank=rank, dtype=dtype)
    check(make_query(kv, q_len=2), kv)
    check(make_query(kv, dtype=torch.float32), kv)


@pytest.mark.parametrize(
    ("rank", "group"), [(16, None), (60, None), (60, 12), (240, None), (256, 32)]
)
@pytest.mark.parametrize("latent", ["exact", "int8", "fp8", "int4", "int2"])
def test_latent_kernel_takes_every_rank_and_group(isa, latent, rank, group):
    for rope in (0, 8):
        kv = make_kv(latent, "int8", rank=rank, rope=rope, group=group, dtype=torch.bfloat16)
        check(make_query(kv, 4, dtype=torch.float32), kv)


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (128, 144), (60, 36)])
def test_latent_kernel_takes_every_rope_dim(isa, rank, rope):
    for latent, k_rope in (("exact", "exact"), ("int4", "int8")):
        kv = make_kv(latent, k_rope, rank=rank, rope=rope)
        check(make_query(kv, 3), kv)


@pytest.mark.parametrize("page", [16, 32, 128, 256])
def test_latent_kernel_takes_every_page_size(isa, page):
    rows = [(2, 21), (0, 5), (5, 4)]
    for latent in ("exact", "int8", "int4", "int2"):
        kv = make_kv(latent, "int8", page=page, rows=rows, dtype=torch.bfloat16)
        check(make_query(kv, 3, 2), kv)


@pytest.mark.parametrize(
    ("heads", "q_len"), [(1, 1), (4, 1), (6, 3), (66, 1), (128, 1), (20, 16), (3, 70)]
)
def test_latent_kernel_takes_every_number_of_queries(isa, heads, q_len):
    kv = make_kv("int8", rows=[(9, 20), (2, 5)])
    check(make_query(kv, heads, q_len), kv)


@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 6), (5, 6)])
def test_latent_kernel_applies_every_option(isa, shape):
    kv = make_kv("int8", more_padding=5)
    query = make_query(kv, 6, 3)
    numbers = torch.Generator().manual_seed(4)
    logits = torch.randn(6, generator=numbers)
    mask = torch.rand(*shape, 3, kv.seen + 3, generator=numbers) > 0.4
    floats = torch.randn(*shape, 3, kv.seen, generator=numbers)
    check(query, kv, mask=mask)
    check(query, kv, mask=mask, sink_logits=logits, sliding_window=40)
    check(query, kv, mask=mask.transpose(2, 3).contiguous().transpose(2, 3))
    check(query, kv, mask=floats.masked_fill(~mask[..., : kv.seen], float("-inf")).bfloat16())
    check(query, kv, mask=floats.masked_fill(~mask[..., : kv.seen], torch.finfo(torch.float32).min))
    check(query, kv, softcap=3.0)


@pytest.mark.parametrize("q_len", [1, 3])
def test_latent_kernel_slides_and_sinks(isa, q_len):
    kv = make_kv("int4", rows=[(9, 20), (3, 6), (0, 0)], more_padding=2)
    query = make_query(kv, 6, q_len)
    logits = torch.randn(6, generator=torch.Generator().manual_seed(4))
    for window in (1, 2, 7, 30, 100, 1000):
        check(query, kv, sliding_window=window)
    check(query, kv, sink_logits=logits)
    check(query, kv, sink_logits=torch.full((6,), float("-inf")), sliding_window=9)


def test_latent_kernel_gives_zeros_where_nothing_is_seen(isa):
    kv = make_kv("int8")
    query = make_query(kv, 6, 3)
    mask = torch.rand(1, 6, 3, kv.seen, generator=torch.Generator().manual_seed(4)) > 0.4
    mask[:, 2] = False
    mask[:, :, 1] = False
    out = check(query, kv, mask=mask)
    assert not bool(out[:, 2].any())
    assert not bool(out[:, :, 1].any())
    assert ROWS[4] == (0, 0)
    assert not bool(out[4].any())
    assert not bool(decode.paged_attention(AttentionCall(query, kv, 1.0, mask=mask & False)).any())


def test_latent_kernel_gathers_the_few_tokens_that_a_sparse_mask_shows(isa):
    """Sparse attention shows some thousand columns of many: tokens of many pages share a tile."""
    kv = make_kv("int8", "int8", rows=[(60, 20), (31, 9)], page=32)
    numbers = torch.Generator().manual_seed(4)
    for share in (0.002, 0.03, 0.3, 0.9):
        for shape in ((2, 1, 1), (2, 1, 3), (1, 5, 3)):
            mask = torch.rand(*shape, kv.seen, generator=numbers) < share
            check(make_query(kv, 5, shape[2]), kv, mask=mask)
    chosen = torch.zeros(2, 1, 1, kv.seen, dtype=torch.bool)
    chosen[..., 1000] = True  # a page of the first row; the second has one token there as well
    check(make_query(kv, 5), kv, mask=chosen)


def test_latent_kernel_opens_no_page_that_the_mask_hides(isa):
    kv = make_kv("int8", rows=[(9, 20)])
    visible = SINKS + 4 * 16 + torch.arange(16)
    mask = torch.zeros(1, 1, 1, kv.seen, dtype=torch.bool)
    mask[..., visible] = True
    query = make_query(kv, 5)
    expected = decode.paged_attention(AttentionCall(query, kv, 0.1, mask=mask))
    gone = kv.block_table.clone()
    gone[:, [0, 1, 2, 3, 5, 6, 7, 8]] = 1 << 30  # reading there would end the process
    out = decode.paged_attention(
        AttentionCall(query, replace(kv, block_table=gone), 0.1, mask=mask)
    )
    assert torch.equal(out, expected)


def test_latent_kernel_splits_long_rows_and_windows(isa):
    kv = make_kv("int8", rows=[(40, 9), (3, 700), (600, 6)], slots=704)
    check(make_query(kv, 3, 2), kv)
    check(make_query(kv, 100), kv)


def test_latent_kernel_never_reads_unused_slots_and_pages(isa):
    for latent, k_rope in FORMATS[2:]:
        rank = 128 if latent == "fp8_ds_mla" else 60
        clean, poisoned = (make_kv(latent, k_rope, rank=rank, poison=p) for p in (False, True))
        query = make_query(clean, 3)
        outs = [decode.paged_attention(AttentionCall(query, kv, 0.125)) for kv in (clean, poisoned)]
        assert bool(outs[1].isfinite().all())
        assert torch.equal(*outs)


def test_latent_kernel_result_depends_on_neither_threads_nor_batch(isa):
    kv = make_kv("int8", rows=[(90, 9), (3, 20), (0, 2)], dtype=torch.bfloat16)
    query = make_query(kv, 70)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs.append(decode.paged_attention(AttentionCall(query, kv, 0.1)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])
    for row in range(kv.rows):
        only = slice(row, row + 1)
        alone = replace(
            kv,
            block_table=kv.block_table[only, : int(kv.num_pages[row])],
            num_pages=kv.num_pages[only],
            residual_keys=kv.residual_keys[only],
            residual_values=kv.residual_values[only],
            exact_lens=kv.exact_lens[only],
            padding=torch.zeros(1, dtype=torch.int32),
            seen=kv.seen - int(kv.padding[row]),
        )
        out = decode.paged_attention(AttentionCall(query[only], alone, 0.1))
        assert torch.equal(out, outs[0][only])


def test_latent_kernel_takes_strided_queries_and_windows(isa):
    kv = make_kv("int8")
    query = make_query(kv, 6, 3)
    expected = decode.paged_attention(AttentionCall(query, kv, 0.1))
    longer = replace(
        kv,
        residual_keys=torch.cat([kv.residual_keys] * 2, 2)[:, :, : kv.residual_keys.shape[2]],
        residual_values=torch.cat([kv.residual_values] * 2, 3)[..., : kv.spec.values.head_dim],
    )
    strided = query.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(decode.paged_attention(AttentionCall(strided, longer, 0.1)), expected)


def test_latent_kernel_lets_a_nan_in_the_query_through(isa):
    kv = make_kv("int8")
    query = make_query(kv, 6)
    query[0, 1, 0, 3] = float("nan")
    out = decode.paged_attention(AttentionCall(query, kv, 0.1))
    assert bool(out[0, 1].isnan().all())
    assert bool(out[0, 2:].isfinite().all())
    assert bool(out[1:].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_latent_kernel_keeps_its_digits_beside_an_outlier_channel(isa, dtype):
    for outlier in (10, 100, 1_000, 10_000):
        for latent, k_rope in (("int4", "int8"), ("int8", "exact"), ("int2", "int8")):
            kv = make_kv(latent, k_rope, dtype=dtype, rows=[(9, 20)], outlier=outlier)
            check(make_query(kv, 6), kv)


def test_operations_slice_long_chunks_of_latents():
    kv = make_kv("int4", rows=[(3, 50), (2, 60)], slots=64)
    query = make_query(kv, 3, 40)
    rounding = Rounding.of("c", torch.float32)
    paged_inputs.check(query, kv, partial(dispatch.paged_attention, kernel="c"), rounding)


# -- sealing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("latent", "k_rope"), FORMATS)
def test_latent_seal_writes_the_bytes_of_the_codec(isa, latent, k_rope, dtype):
    sizes = [
        (16, 0, 16, None),
        (60, 8, 32, 12),
        (240, 64, 64, None),
        (256, 144, 16, 64),
        (512, 64, 64, None),
    ]
    for rank, rope, page, group in sizes:
        if latent == "fp8_ds_mla" and rank % 128:
            continue
        spec = make_spec(latent, k_rope, rank=rank, rope=rope, page=page, dtype=dtype, group=group)
        numbers = torch.Generator().manual_seed(rank)
        both = []
        for side in spec.sides:
            size = torch.tensor([1e-6, 1.0, 3e3])[:, None, None, None]
            tokens = torch.randn(3, 1, 5 + 2 * page, side.head_dim, generator=numbers) * size
            tokens[1, 0, :9] = 0
            tokens[1, 0, 12, : side.head_dim // 2] = 5
            tokens[0, 0, 5:9] *= -0.0
            if side.head_dim:
                tokens[2, 0, 7, 3] = float("inf")
                tokens[2, 0, 9, 1] = float("nan")
            both.append(tokens.to(dtype))
        jobs = torch.tensor([(0, 0, 1), (1, 3, 4), (2, 5 + page, -1), (2, 2, 3)]).int()
        for some in (jobs, jobs[:2]):
            damaged = paged_inputs.check_seals_as_torch(tuple(both), some, spec)
            encoded = any(side.head_dim and not side.scheme.is_exact for side in spec.sides)
            assert damaged == (len(some) == 4 and encoded)


# -- choice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("latent", "k_rope"), FORMATS)
def test_choose_takes_the_c_kernel_for_latents(latent, k_rope):
    spec = make_spec(latent, k_rope, rank=128)
    assert registry.choose("auto", torch.device("cpu"), spec).name == "c"


def test_c_kernel_says_which_latents_it_does_not_know():
    def reason(side, **changes):
        spec = make_spec("int8", "int8")
        return cpu.unsupported(replace(spec, **{side: replace(getattr(spec, side), **changes)}))

    scheme = make_spec("int8", "int8").values.scheme
    assert "latent lie in the layout of another" in reason("keys", layout=ROWS_LAYOUT)
    assert "latent of torch.float64" in reason("keys", dtype=torch.float64)
    per_page = replace(scheme, scale_group=(16, 64), offset_group=None)
    assert (
        "latent in format 'int8': signed codes of 8 bits with a scale (16, 64) and no offset"
        in reason("keys", scheme=per_page)
    )
    per_token = replace(scheme, scale_group=(1, 16))
    assert "k_rope in format 'int8': signed codes of 8 bits with a scale (1, 16)" in reason(
        "values", scheme=per_token
    )
