"""The kernels that run on a CPU against the fp64 oracle: the C library in every instruction set."""

import ctypes
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import paged_inputs
import pytest
import rounding
import tiny_models
import torch
from paged_inputs import DTYPES, ROWS, make_kv, make_query, row_alone
from rounding import Rounding

import kv_hf
from kv_hf.backends import dispatch, registry
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu import decode, library, write
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.reference.pages import append_tokens, seal_pages
from kv_hf.errors import CacheOptionError
from kv_hf.formats import format_names, key_scheme, value_scheme
from kv_hf.spec import LANES, PageFields, PageSpec

needs_library = pytest.mark.skipif(bool(library.missing()), reason=str(library.missing()))
ISAS = range(1 if library.missing() else library.isa() + 1)
KERNELS = [pytest.param(isa, id=library.ISA_NAMES[isa], marks=needs_library) for isa in ISAS]


@pytest.fixture(params=KERNELS)
def attend(request, monkeypatch):
    monkeypatch.setattr(decode, "isa", lambda: request.param)
    return decode.paged_attention


@pytest.fixture(params=["torch", "own"])
def threads_of(request):
    """The kernels run on torch's OpenMP threads, or on a pool of their own where there is none."""
    if library.missing():
        pytest.skip(str(library.missing()))
    if request.param == "own":
        library.library().kv_hf_use_openmp(None)
    elif library._torch_openmp() is None:
        pytest.skip("torch has no OpenMP here")
    yield request.param
    library.library().kv_hf_use_openmp(library._torch_openmp())


def check(attend, query, kv, **options):
    """Compare with fp64: no error beyond what rounding in this kernel explains."""
    integers = library.ISA_NAMES[decode.isa()] == "AVX-512 VNNI"
    rounding = Rounding.of("c", query.dtype, integers=integers)
    return paged_inputs.check(query, kv, attend, rounding, **options)


@pytest.mark.parametrize("values", format_names("keys", "values"))
@pytest.mark.parametrize("keys", format_names("keys", "values"))
def test_kernel_reads_every_pair_of_formats(attend, keys, values):
    kv = make_kv(keys, values, layout=LANES, poison=True)
    check(attend, make_query(kv, 3, 3, torch.float32), kv)


@needs_library
def test_kernel_of_another_step_uses_nothing_of_the_last():
    """The packed arguments stay between calls; everything that they were packed from changes here, one by one."""
    launches = {}
    kv = make_kv("int4", layout=LANES)
    query = make_query(kv, 2, 2, torch.float32)
    mask = torch.rand(kv.rows, 1, 2, kv.seen, generator=torch.Generator().manual_seed(3)) > 0.3
    apart = query.transpose(1, 2).contiguous().transpose(1, 2)
    whole = {"key_pages": PageFields(kv.key_pages), "value_pages": PageFields(kv.value_pages)}
    wide = replace(kv, residual_keys=kv.residual_keys.repeat(1, 1, 2, 1))
    steps = [
        (query, kv, {}),
        (apart, kv, {}),
        (query, replace(kv, **whole), {}),
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
        (make_query(kv, 2, 3, torch.float32), kv, {}),
        (query, make_kv("int4", layout=LANES, seed=1, shuffle=1), {}),
        (query, make_kv("int4", "int8", layout=LANES), {}),
        (query, kv, {}),
    ]
    for query, kv, options in steps:
        expected = decode.paged_attention(
            AttentionCall(query, replace(kv, launches={}), 0.1, **options)
        )
        shared = replace(kv, launches=launches)
        assert torch.equal(
            decode.paged_attention(AttentionCall(query, shared, 0.1, **options)), expected
        )
    assert list(launches) == ["c attend"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_kernel_errs_no_more_than_torch_in_every_precision(attend, name, dtype):
    kv = make_kv(name, dtype=dtype, key_dim=128, layout=LANES, page=64, slots=80)
    check(attend, make_query(kv, 1, 4, dtype), kv)


ONE_SIDED = [
    ("int2_mixed", "int3_rotated"),
    ("int4_mixed", "int2_rotated"),
    ("int4", "int4_rotated"),
]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("keys", "values"), ONE_SIDED, ids="+".join)
def test_kernel_reads_formats_of_one_side_in_every_precision(attend, keys, values, dtype):
    """Lanes that fill vectors and lanes that do not, blocks of queries that are full and not, groups of tokens and channels."""
    for dim, page, group, shape in (
        (128, 64, {}, (1, 4)),
        (256, 32, {}, (1, 3)),
        (80, 32, {"value_group": 80}, (2, 3)),
        (24, 64, {"value_group": 8, "key_group": 32}, (1, 5)),
        (64, 64, {"value_group": 32, "key_group": 16}, (3, 2)),
    ):
        kv = make_kv(keys, values, dtype=dtype, key_dim=dim, page=page, layout=LANES, slots=80, poison=True, **group)  # fmt: skip
        q_len, heads = shape
        check(attend, make_query(kv, q_len, heads, dtype), kv)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("q_len", [1, 2, 16])
def test_kernel_takes_every_group_and_chunk(attend, group, q_len):
    for dtype in (torch.float32, torch.bfloat16):
        kv = make_kv("int4", dtype=dtype, layout=LANES)
        check(attend, make_query(kv, q_len, group, dtype), kv)


@pytest.mark.parametrize("head_dim", [16, 48, 80, 96, 192, 256])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_kernel_takes_every_head_dim(attend, name, head_dim):
    for dtype in (torch.float32, torch.bfloat16):
        kv = make_kv(name, key_dim=head_dim, dtype=dtype, layout=LANES)
        check(attend, make_query(kv, 3, 2, dtype), kv)


@pytest.mark.parametrize("page", [16, 32, 128, 512])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_kernel_takes_every_page_size(attend, name, page):
    for dtype in (torch.float32, torch.bfloat16):
        kv = make_kv(name, dtype=dtype, layout=LANES, page=page, slots=4 + 2 * page)
        check(attend, make_query(kv, 3, 2, dtype), kv)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 64), (64, 128), (80, 32)])
@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_kernel_takes_keys_and_values_of_different_dims(attend, name, key_dim, value_dim):
    kv = make_kv(name, key_dim=key_dim, value_dim=value_dim, layout=LANES)
    check(attend, make_query(kv, 3, 2, torch.float32), kv)


@pytest.mark.parametrize(("key_group", "value_group"), [(4, 8), (8, 16), (16, 64), (32, 32)])
@pytest.mark.parametrize("name", ["int4", "int2"])
def test_kernel_takes_every_group_size(attend, name, key_group, value_group):
    for dtype in (torch.float32, torch.bfloat16):
        kv = grouped_kv(name, key_group, value_group, dtype)
        check(attend, make_query(kv, 2, 3, dtype), kv)


def grouped_kv(name, key_group, value_group, dtype):
    spec = PageSpec.build(
        key_scheme(name, key_group),
        value_scheme(name, value_group),
        num_kv_heads=2,
        key_dim=64,
        value_dim=64,
        page_size=32,
        dtype=dtype,
        layout=LANES,
    )
    kv = make_kv("exact", dtype=dtype, layout=LANES, page=32, slots=64)
    stored = []
    for side in spec.sides:
        fields = {
            field: torch.zeros(12, *shape, dtype=kind)
            for field, (shape, kind) in side.fields.items()
        }
        run = torch.randn(12, 2, 32, 64, generator=torch.Generator().manual_seed(9)).to(dtype)
        jobs = torch.tensor([(page, 0, page) for page in range(12)], dtype=torch.int32)
        seal_pages(run, jobs, fields, side)
        stored.append(fields)
    return replace(kv, spec=spec, key_pages=stored[0], value_pages=stored[1])


@pytest.mark.parametrize("name", ["exact", "int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_applies_every_option(attend, name, dtype):
    kv = make_kv(name, dtype=dtype, layout=LANES, more_padding=5)
    query = make_query(kv, 3, 2, dtype)
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(4, generator=generator)
    check(attend, query, kv, sink_logits=logits)
    check(attend, query, kv, sink_logits=torch.full((4,), float("-inf")))
    check(attend, query, kv, softcap=3.0)
    for window in (1, 2, 7, 30, 1000):
        check(attend, query, kv, sliding_window=window)
    for shape in ((1, 1, 3), (5, 1, 3), (1, 4, 3), (5, 4, 3)):
        mask = torch.rand(*shape, kv.seen + 3, generator=generator) > 0.4
        check(attend, query, kv, mask=mask)
        check(attend, query, kv, mask=mask, softcap=3.0, sink_logits=logits, sliding_window=40)
        check(attend, query, kv, mask=torch.randn(*shape, kv.seen, generator=generator).to(dtype))
    hidden = torch.zeros(1, 1, 3, kv.seen).masked_fill(mask[:1, :1, :, : kv.seen], float("-inf"))
    check(attend, query, kv, mask=hidden)


def test_kernel_merges_many_splits(attend):
    kv = make_kv("int8", rows=[(300, 9), (33, 20), (0, 2), (0, 0)], layout=LANES, shuffle=1)
    check(attend, make_query(kv, 2, 3, torch.float32), kv)


def test_kernel_splits_a_long_window(attend):
    """recent_tokens and chunks of a prefill make windows longer than a page."""
    kv = make_kv("int8", rows=[(3, 700), (0, 513), (2, 4)], layout=LANES, slots=704)
    check(attend, make_query(kv, 3, 2, torch.float32), kv)


def test_kernel_survives_scores_that_overflow_exp(attend):
    kv = make_kv("exact", layout=LANES)
    out = check(attend, make_query(kv, 3, dtype=torch.float32) * 400, kv)
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("name", format_names("keys", "values"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_never_reads_unused_slots_and_pages(attend, name, dtype):
    clean, poisoned = (make_kv(name, dtype=dtype, layout=LANES, poison=p) for p in (False, True))
    query = make_query(clean, 3, dtype=dtype)
    outs = [attend(AttentionCall(query, kv, 0.125)) for kv in (clean, poisoned)]
    assert bool(outs[1].isfinite().all())
    assert torch.equal(*outs)
    assert ROWS[4] == (0, 0)
    assert torch.equal(outs[1][4], torch.zeros_like(outs[1][4]))


@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_kernel_result_of_a_row_does_not_depend_on_its_batch(attend, name):
    kv = make_kv(name, layout=LANES, rows=[(20, 9), (3, 20), (0, 2)])
    query = make_query(kv, 1, 3, torch.float32)
    together = attend(AttentionCall(query, kv, 0.1))
    for row in range(kv.rows):
        only = slice(row, row + 1)
        alone = row_alone(kv, row)
        assert torch.equal(attend(AttentionCall(query[only], alone, 0.1)), together[only])


@pytest.mark.parametrize("name", ["exact", "int4"])
def test_kernel_result_does_not_depend_on_the_number_of_threads(attend, name, threads_of):
    kv = make_kv(name, rows=[(90, 9), (3, 20)], layout=LANES)
    query = make_query(kv, 2, 3, torch.float32)
    before = torch.get_num_threads()
    try:
        outs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            outs.append(attend(AttentionCall(query, kv, 0.1)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_kernel_takes_strided_queries_and_windows(attend):
    """A query is a view of [batch, q_len, heads, dim] in transformers; windows are slices of longer ones."""
    kv = make_kv("int8", layout=LANES)
    query = make_query(kv, 3, 2, torch.float32)
    strided = query.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(*query.shape[:3], 2 * query.shape[3])[..., ::2]
    wide.copy_(query)
    longer = replace(
        kv,
        residual_keys=torch.cat([kv.residual_keys] * 2, 2)[:, :, : kv.residual_keys.shape[2]],
        residual_values=torch.cat([kv.residual_values] * 2, 3)[..., :64],
    )
    for q in (strided, wide):
        check(attend, q, longer)


@pytest.mark.parametrize("name", ["exact", "int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_lets_a_nan_in_the_query_through(attend, name, dtype):
    kv = make_kv(name, dtype=dtype, layout=LANES)
    query = make_query(kv, 1, 2, dtype)
    query[0, 1, 0, 3] = float("nan")
    out = attend(AttentionCall(query, kv, 0.1))
    assert bool(out[0, 1].isnan().all())
    assert bool(out[1:].isfinite().all())


# -- the C library -----------------------------------------------------------------------------------------


@needs_library
def test_decode_serves_several_threads_of_python_at_once(threads_of):
    kv = make_kv("int4", rows=[(200, 9)], layout=LANES)
    queries = [make_query(kv, 1, 3, torch.float32, seed=i) for i in range(4)]
    expected = [decode.paged_attention(AttentionCall(q, kv, 0.1)) for q in queries]
    wrong = []

    def work(query, right):
        torch.set_num_threads(2)
        for _ in range(50):
            if not torch.equal(decode.paged_attention(AttentionCall(query, kv, 0.1)), right):
                wrong.append(1)

    threads = [
        threading.Thread(target=work, args=pair, daemon=True)
        for pair in zip(queries, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


@needs_library
@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_decode_works_in_forked_processes():
    """Threads do not survive a fork, and a child that waited for its parent's would wait without end.

    The first child loads the library itself, behind a parent that used torch's OpenMP threads; the parent of the second
    ran the kernel with threads too. Both children must start their own.
    """
    code = """
import os, signal, torch, sys
sys.path[:0] = ["tests", "tests/tools"]
from paged_inputs import make_kv, make_query
from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu.decode import paged_attention
from kv_hf.spec import LANES
torch.set_num_threads(2)
kv = make_kv("int4", rows=[(200, 9)], layout=LANES)
query = make_query(kv, 1, 3, torch.float32)
def attend():
    return paged_attention(AttentionCall(query, kv, 0.1))
def forked(right):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        os._exit(0 if right(attend()) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
torch.relu(torch.randn(1000, 1000))
late = forked(lambda out: bool(out.isfinite().all()))
expected = attend().tolist()
print(late, forked(lambda out: out.tolist() == expected))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=240, capture_output=True, text=True)
    assert done.stdout.split() == ["0", "0"], done.stdout + done.stderr


@needs_library
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", format_names("keys", "values"))
@pytest.mark.parametrize("isa", ISAS)
def test_seal_writes_the_bytes_of_the_codec(monkeypatch, isa, name, dtype):
    monkeypatch.setattr(write, "isa", lambda: isa)
    for head_dim, page in ((64, 64), (80, 16), (128, 32), (256, 128)):
        spec = PageSpec.build(
            key_scheme(name),
            value_scheme(name, 16 if head_dim == 80 else None),
            num_kv_heads=2,
            key_dim=head_dim,
            value_dim=head_dim,
            page_size=page,
            dtype=dtype,
            layout=LANES,
        )
        generator = torch.Generator().manual_seed(head_dim)
        size = torch.tensor([1e-6, 1.0, 3e3])[:, None, None, None]
        tokens = torch.randn(3, 2, 5 + 2 * page, head_dim, generator=generator) * size
        tokens[1, 0, :9] = 0
        tokens[1, 1] = 5
        tokens[0, 0, 5:9] *= -0.0
        tokens[2, 0, 7, 3] = float("inf")
        tokens[2, 1, 9, 1] = float("nan")
        jobs = torch.tensor([(0, 0, 1), (1, 3, 4), (2, 5 + page, 0), (2, 2, 3)], dtype=torch.int32)
        both = tokens.to(dtype), tokens.to(dtype)
        for some in (jobs, jobs[:2]):
            damaged = paged_inputs.check_seals_as_torch(both, some, spec)
            assert damaged == (len(some) == 4 and name != "exact")


@pytest.mark.parametrize("q_len", [1, 4])
def test_append_tokens_writes_each_row_at_its_place(q_len):
    window = torch.zeros(3, 2, 9, 4)
    new = torch.randn(3, 2, q_len, 4)
    for skips in ([0, 0, 0], [0, 1, q_len - 1]):
        starts = [5, 0, 2]
        append_tokens(window.zero_(), new, torch.tensor(starts).int(), torch.tensor(skips).int())
        for row, (start, skip) in enumerate(zip(starts, skips, strict=True)):
            count = q_len - skip
            assert torch.equal(window[row, :, start : start + count], new[row, :, skip:])
            assert not bool(window[row, :, :start].any())
            assert not bool(window[row, :, start + count :].any())


# -- choice ------------------------------------------------------------------------------------------------


def spec_of(**changes):
    sizes = {"num_kv_heads": 2, "key_dim": 64, "value_dim": 64, "page_size": 32, "layout": LANES}
    options = {**sizes, "dtype": torch.float32, **changes}
    return PageSpec.build(key_scheme("int4"), value_scheme("int4"), **options)


@needs_library
def test_choose_takes_the_c_kernel_on_a_cpu():
    assert registry.choose("auto", torch.device("cpu"), spec_of()).name == "c"


def test_choose_takes_what_was_asked_for():
    assert registry.choose("reference", torch.device("cpu"), spec_of()).name == "reference"


def test_choose_refuses_what_cannot_run(monkeypatch):
    with pytest.raises(CacheOptionError, match=r"kernel='triton' cannot run here: .+"):
        registry.choose("triton", torch.device("cpu"), spec_of())
    monkeypatch.setattr(library, "_loaded", lambda: (None, "no compiler was there"))
    with pytest.raises(CacheOptionError, match="kernel='c' cannot run here: no compiler was there"):
        registry.choose("c", torch.device("cpu"), spec_of())


def test_choose_says_once_why_it_takes_a_slower_one(monkeypatch, recwarn):
    kv_hf.uninstall()
    kv_hf.install()
    monkeypatch.setattr(library, "_loaded", lambda: (None, "no compiler was there"))
    for _ in range(2):
        assert registry.choose("auto", torch.device("cpu"), spec_of()).name == "reference"
    said = [str(warning.message) for warning in recwarn if warning.category is kv_hf.KVCacheWarning]
    assert len(said) == 1
    assert "'reference'" in said[0]
    assert "no compiler was there" in said[0]


def test_float64_is_read_by_the_reference():
    """fp64 is for checking: no kernel keeps that many digits."""
    spec = spec_of(dtype=torch.float64)
    assert registry.choose("auto", torch.device("cpu"), spec).name == "reference"
    kv = make_kv("int8", layout=LANES)
    query = make_query(kv, 1)
    assert query.dtype == torch.float64
    out = dispatch.paged_attention(AttentionCall(query, kv, 0.1))
    assert torch.equal(out, reference.paged_attention(AttentionCall(query, kv, 0.1)))


@needs_library
@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("9", r"KV_HF_ISA must be one of portable \(0\)"),
        ("x", "got 'x'"),
        ("none", "turns the C kernel off"),
    ],
)
def test_isa_variable_is_checked_before_a_kernel_is_chosen(monkeypatch, value, says):
    monkeypatch.setenv(library.ISA_VARIABLE, value)
    library._loaded.cache_clear()
    try:
        with pytest.raises(CacheOptionError, match=f"kernel='c' cannot run here: .*{says}"):
            registry.choose("c", torch.device("cpu"), spec_of())
        with pytest.warns(kv_hf.KVCacheWarning, match=says):
            assert registry.choose("auto", torch.device("cpu"), spec_of()).name == "reference"
    finally:
        library._loaded.cache_clear()


@needs_library
def test_library_older_than_its_sources_is_refused(monkeypatch, tmp_path):
    built = min(library.FOLDER.glob("_native*.so"))
    folder = tmp_path / "kv_hf" / "backends" / "cpu"
    (folder / "native").mkdir(parents=True)
    source = folder / "native" / "seal.c"
    source.write_text("")
    (folder / built.name).write_bytes(built.read_bytes())
    monkeypatch.setattr(library, "FOLDER", folder)
    for changed, checkout, refused in ((0, True, False), (4e9, False, False), (4e9, True, True)):
        os.utime(source, (changed, changed))
        if checkout:
            (tmp_path / "pyproject.toml").write_text("")
        else:
            (tmp_path / "pyproject.toml").unlink(missing_ok=True)
        library._loaded.cache_clear()
        try:
            assert ("older than its sources" in str(library.missing())) == refused
        finally:
            library._loaded.cache_clear()


@needs_library
def test_threads_that_end_give_their_memory_back():
    """generate() in a thread per request is how streaming servers work."""
    kv = make_kv("int8", rows=[(500, 9)], heads=8, key_dim=128, layout=LANES)
    query = make_query(kv, 16, 8, torch.float32)
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        pytest.skip("needs /proc")

    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)

    def resident():
        trim(
            0
        )  # what was freed, glibc may keep in an arena per thread, after other tests above all
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def in_threads(count):
        for _ in range(count):
            thread = threading.Thread(
                target=decode.paged_attention, args=(AttentionCall(query, kv, 0.1),)
            )
            thread.start()
            thread.join()

    before_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        in_threads(5)
        before = resident()
        in_threads(30)
        grown = resident() - before
    finally:
        torch.set_num_threads(before_threads)
    partials = 32 * 8 * 128 * (128 + 2) * 4  # splits, kv heads, queries, floats: what a call keeps
    assert grown < 5 * partials, f"30 threads left {grown} bytes"


def test_pickled_cache_chooses_its_kernel_where_it_is_read(monkeypatch):
    model = tiny_models.make_model("llama", num_hidden_layers=1)
    cache = kv_hf.PagedCache(model.config, keys="int4", page_size=16)
    ids = tiny_models.tokens(1, 50)
    model(ids, past_key_values=cache)
    pickled = pickle.dumps(cache)
    with torch.no_grad():
        expected = model(ids[:, :1], past_key_values=cache).logits
        monkeypatch.setattr(library, "_loaded", lambda: (None, "no compiler was there"))
        again = pickle.loads(pickled)
        assert again.layers[0].store.kernel.name == "reference"
        got = model(ids[:, :1], past_key_values=again).logits
    rounding.assert_close(got, expected)


@pytest.mark.parametrize("name", ["reference", pytest.param("c", marks=needs_library)])
def test_kernels_keep_their_precision_under_autocast(name):
    kv = make_kv("int8", layout=LANES)
    query = make_query(kv, 1, 2, torch.float32)
    kernel = registry.load(name)
    expected = kernel.attend(AttentionCall(query, kv, 0.1))
    with torch.autocast("cpu", torch.bfloat16):
        out = kernel.attend(AttentionCall(query, kv, 0.1))
    assert torch.equal(out, expected)


def test_kernel_of_a_query_that_sees_only_the_lowest_numbers_attends_to_all_tokens_alike(attend):
    kv = make_kv("exact", layout=LANES, rows=[(20, 8)])
    mask = torch.full((1, 1, 1, kv.seen), torch.finfo(torch.float32).min)
    check(attend, make_query(kv, 1, 2, torch.float32), kv, mask=mask)


@pytest.mark.parametrize(("head_dim", "page"), [(24, 4096), (40, 2048), (8, 1024), (72, 64)])
@pytest.mark.parametrize("name", ["exact", "int8", "fp8"])
def test_kernel_takes_lanes_that_fill_no_vector(attend, name, head_dim, page):
    kv = make_kv(name, key_dim=head_dim, layout=LANES, page=page, slots=24, rows=[(1, 9), (0, 3)])
    check(attend, make_query(kv, 2, 2, torch.float32), kv)


@needs_library
@pytest.mark.parametrize("learns", [False, True])
def test_ops_say_why_they_take_the_reference(learns):
    kv = make_kv("int8", layout=LANES)
    query = make_query(kv, 1, 2, torch.float32 if learns else torch.float64).requires_grad_(learns)
    with pytest.warns(kv_hf.KVCacheWarning, match="backward" if learns else "float64"):
        dispatch.paged_attention(AttentionCall(query, kv, 0.1), kernel="c")
