"""The C kernel stays inside of its arguments: forbidden memory behind every tensor, and page ids that do not exist."""

import os
import signal
import subprocess
import sys
from dataclasses import fields as fields_of
from dataclasses import replace
from itertools import product

import pytest
import torch
from allocations import guarded
from paged_inputs import (
    ISAS,
    LATENTS,
    PAIRS,
    latent_spec,
    make_kv,
    make_latents,
    make_query,
    needs_library,
)
from paths import TESTS

from kv_hf.backends.base import AttentionCall
from kv_hf.backends.cpu import decode, write
from kv_hf.errors import CacheMismatchError
from kv_hf.formats import format_names
from kv_hf.spec import LANES, PageWrite

pytestmark = needs_library
# head_dim, page_size and value group, and rank, RoPE dim and page_size: lanes that fill vectors, and lanes that do not
SIZES = [(64, 32, None), (80, 16, 16)], [(64, 16, 16), (60, 0, 16)]
MORE_SIZES = (
    [
        (16, 16, 16),
        (128, 64, None),
        (48, 32, 16),
        (96, 128, None),
        (256, 16, None),
        (192, 512, None),
    ],
    [(512, 64, 64), (16, 8, 32), (240, 36, 128)],
)


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    for module in (decode, write):
        monkeypatch.setattr(module, "isa", lambda: request.param)
    return request.param


def guard(kv):
    """Every tensor of `kv` in memory of its own, with nothing behind it."""
    changes = {}
    for field in fields_of(kv):
        value = getattr(kv, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = guarded(value)
        elif field.name in ("key_pages", "value_pages"):
            changes[field.name] = {name: guarded(tensor) for name, tensor in value.items()}
    return replace(kv, **changes)


def check_decode(kv, queries):
    safe = guard(kv)
    mask = torch.rand(1, 1, 1, kv.seen, generator=torch.Generator().manual_seed(3)) > 0.3
    for query in queries:
        for options in ({}, {"mask": mask.expand(1, 1, query.shape[2], -1)}):
            expected = decode.paged_attention(AttentionCall(query, kv, 0.1, **options))
            options = {name: guarded(value) for name, value in options.items()}
            out = decode.paged_attention(AttentionCall(guarded(query), safe, 0.1, **options))
            assert torch.equal(out, expected)


def check_seal(spec, windows, pages):
    """All of windows that are as long as their pages, into fields that hold exactly them."""
    jobs = torch.tensor([(0, page * spec.keys.page_size, page) for page in range(pages)]).int()
    written = []
    for place in (torch.clone, guarded):
        fields = empty_fields(spec, pages, place)
        damaged = place(torch.zeros(1, dtype=torch.uint8))
        tokens = tuple(place(window) for window in windows)
        write.write(PageWrite(tokens, fields, spec, damaged, {}, place(jobs)))
        written.append(fields)
    for stored, others in zip(*written, strict=True):
        for name in stored:
            assert torch.equal(stored[name].view(torch.uint8), others[name].view(torch.uint8))


def empty_fields(spec, pages, place=torch.clone):
    return tuple(
        {
            name: place(torch.zeros(pages, *shape, dtype=kind))
            for name, (shape, kind) in side.fields.items()
        }
        for side in spec.sides
    )


def every_kv(dtype, sizes, latent_sizes):
    """Pages in every format, of which the first that is read has nothing behind it."""
    held = {"rows": [(2, 11), (0, 3), (1, 4), (0, 0)], "slots": 11, "shuffle": 1}
    for (dim, page, group), (keys, values) in product(sizes, PAIRS):
        if values != "int3_rotated" or page > 16:  # whose third bits fill no words of 16 tokens
            own = {"key_dim": dim, "page": page, "value_group": group, "layout": LANES}
            yield make_kv(keys, values, dtype=dtype, **own, **held)
    for (rank, rope, page), (latent, k_rope) in product(latent_sizes, LATENTS):
        rank = 128 if latent == "fp8_ds_mla" else rank
        spec = latent_spec(latent, k_rope, rank=rank, rope=rope, page=page, dtype=dtype)
        yield make_latents(spec, poison=False, **held)


@pytest.mark.parametrize(
    "sizes",
    [SIZES, pytest.param(MORE_SIZES, marks=pytest.mark.slow)],
    ids=["some", "more"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernel_stays_inside_of_its_arguments(isa, dtype, sizes):
    for kv in every_kv(dtype, *sizes):
        kv.block_table[0, 0] = kv.key_pages["codes"].shape[0] - 1
        check_decode(kv, [make_query(kv, q_len, group, dtype) for q_len, group in ((1, 1), (3, 5))])
        tokens = []
        for side in kv.spec.sides:
            shape = (1, side.num_kv_heads, 2 * side.page_size, side.head_dim)
            tokens.append(torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype))
        check_seal(kv.spec, tokens, 2)


# -- page ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [-1, 11, 1 << 30, -(1 << 31)])
@pytest.mark.parametrize("at", [0, 1, 4])
def test_decode_refuses_a_page_that_does_not_exist(isa, at, page):
    plain = make_kv("int4", layout=LANES, rows=[(5, 11), (3, 2)])
    latent = make_latents(latent_spec("int8", "int8"), rows=[(5, 11), (3, 2)])
    for kv in (plain, latent):
        query = make_query(kv, dtype=torch.float32)
        assert kv.key_pages["codes"].shape[0] == 11
        expected = decode.paged_attention(AttentionCall(query, kv, 0.1))
        table = kv.block_table.clone()
        table[0, at] = page
        with pytest.raises(CacheMismatchError, match=r"block_table must name pages .* 0 to 10"):
            decode.paged_attention(AttentionCall(query, replace(kv, block_table=table), 0.1))
        assert torch.equal(decode.paged_attention(AttentionCall(query, kv, 0.1)), expected)


@pytest.mark.parametrize("field", ["codes", "scale", "offset"])
@pytest.mark.parametrize("side", ["key_pages", "value_pages"])
def test_decode_takes_the_least_room_of_all_fields(isa, side, field):
    """Storage that stopped growing between keys and values: the next page would lie behind the values."""
    kv = make_kv("int4", layout=LANES, rows=[(5, 11)])
    cut = {**getattr(kv, side), field: getattr(kv, side)[field][:4]}
    with pytest.raises(CacheMismatchError, match="0 to 3, and names a page outside"):
        decode.paged_attention(
            AttentionCall(make_query(kv, dtype=torch.float32), replace(kv, **{side: cut}), 0.1)
        )


def test_decode_reads_no_page_that_a_row_does_not_hold(isa):
    kv = make_kv("int4", layout=LANES, rows=[(5, 11), (2, 3)])
    query = make_query(kv, dtype=torch.float32)
    expected = decode.paged_attention(AttentionCall(query, kv, 0.1))
    kv.block_table[1, 2:] = 1 << 30
    assert torch.equal(decode.paged_attention(AttentionCall(query, kv, 0.1)), expected)


@pytest.mark.parametrize("name", format_names("keys", "values"))
def test_seal_refuses_a_page_that_does_not_exist_before_it_writes(isa, name):
    spec = make_kv(name, layout=LANES).spec
    tokens = tuple(torch.randn(2, 1, 2, 64, 64))
    fields, damaged = empty_fields(spec, 4), torch.zeros((), dtype=torch.uint8)
    jobs = torch.tensor([(0, 0, 0), (0, 16, -1), (0, 32, 3)]).int()
    for side in range(2):
        for field, tensor in fields[side].items():
            less = [dict(one) for one in fields]
            less[side][field] = tensor[:3]
            with pytest.raises(CacheMismatchError, match="jobs must name pages .* 0 to 2"):
                write.write(PageWrite(tokens, tuple(less), spec, damaged, {}, jobs))
            stored = [one for each in fields for one in each.values()]
            assert not any(bool(one.view(torch.uint8).any()) for one in stored)
    write.write(PageWrite(tokens, fields, spec, damaged, {}, jobs))
    for each in fields:
        assert bool(each["codes"][3].view(torch.uint8).any())
        assert not bool(each["codes"][1].view(torch.uint8).any())


def test_guarded_memory_ends_the_process_that_reads_on():
    """Without that the tests above could not fail."""
    code = "import torch, allocations, ctypes; t = allocations.guarded(torch.ones(5)); ctypes.string_at(t.data_ptr(), 21)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == -signal.SIGSEGV, done.stderr
