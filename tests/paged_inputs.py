"""Random pages and windows for kernel tests, and an fp64 softmax over their decoded tokens as the oracle."""

import hashlib
from collections import OrderedDict
from dataclasses import fields, replace
from itertools import product, zip_longest

import pytest
import torch
from rounding import Rounding, Tokens, attend_exactly, without_offsets

from kv_hf.backends.base import AttentionCall, PagedKV
from kv_hf.backends.cpu import library
from kv_hf.backends.cpu import write as c_write
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.reference import pages as reference_pages
from kv_hf.formats import (
    format_names,
    k_rope_name,
    k_rope_scheme,
    key_scheme,
    latent_scheme,
    value_scheme,
)
from kv_hf.geometry import place_of
from kv_hf.quant.codec import decode, encode
from kv_hf.spec import LANES, LATENT_SIDES, PageSpec, PageWrite
from kv_hf.spec import ROWS as ROWS_LAYOUT

# tests of the C kernel, and the instruction sets that this processor has
needs_library = pytest.mark.skipif(bool(library.missing()), reason=str(library.missing()))
ISAS = [
    pytest.param(isa, id=library.ISA_NAMES[isa], marks=needs_library)
    for isa in range(1 if library.missing() else library.isa() + 1)
]
PAGE, SINKS, SLOTS = 16, 4, 40
# pages and exact tokens of each row: pages and tail, a full window, less than the sinks, one page, nothing
ROWS = [(5, 11), (2, 20), (0, 3), (1, 4), (0, 0)]
LATENT_ROWS = [(3, 11), (9, 20), (0, 3), (1, 4), (0, 0)]
# every format of keys and every format of values, each at least once
PAIRS = tuple(zip_longest(format_names("keys"), reversed(format_names("values")), fillvalue="int4"))
LATENTS = tuple(product(format_names("latent"), format_names("k_rope")))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def page_spec(
    keys,
    values=None,
    *,
    heads=2,
    key_dim=64,
    value_dim=None,
    page_size=64,
    dtype=torch.float32,
    layout=ROWS_LAYOUT,
    groups=(None, None),
):
    """Return pages of keys and values in shipped or registered formats."""
    return PageSpec.build(
        key_scheme(keys, groups[0]),
        value_scheme(values or keys, groups[1]),
        num_kv_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim or key_dim,
        page_size=page_size,
        dtype=dtype,
        layout=layout,
    )


def make_kv(
    keys="int8",
    values=None,
    *,
    heads=2,
    key_dim=64,
    value_dim=None,
    dtype=torch.float32,
    page=PAGE,
    layout=ROWS_LAYOUT,
    key_group=None,
    value_group=None,
    **held,
):
    """Random pages and windows of keys and values; `held` as `filled` takes it."""
    value_dim = value_dim or key_dim
    # dimensions that a default group does not divide need a group of their own
    group = value_group or (16 if value_dim % 32 else None)
    sizes = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim, "page_size": page}
    kinds = {"dtype": dtype, "layout": layout, "groups": (key_group, group)}
    return filled(page_spec(keys, values, **sizes, **kinds), **held)


def latent_spec(
    latent="int8", k_rope="exact", *, rank=64, rope=16, page=PAGE, dtype=torch.float32, group=None, layout=LANES
):  # fmt: skip
    """Return pages of latents; groups of `group` channels (or of half a page's tokens, as the format groups them).

    k_rope: None: what goes with the format of the latents.
    """
    scheme = latent_scheme(latent, page // 2 if group and latent in ("int4", "int2") else group)
    return PageSpec.build(
        scheme,
        k_rope_scheme(k_rope_name(k_rope, scheme), rope),
        key_dim=rank,
        value_dim=rope,
        page_size=page,
        dtype=dtype,
        layout=layout,
        num_kv_heads=1,
        sides=LATENT_SIDES,
    )


def make_latents(spec, outlier=1, **held):
    """Random pages and windows of latents whose channels have sizes of their own; one is `outlier` times as large."""
    numbers = torch.Generator().manual_seed(3)

    def unlike(x, side):
        x = x * (0.2 + torch.rand(side.head_dim, generator=numbers))
        x[..., 5:6] *= outlier
        return x

    given = {"rows": LATENT_ROWS, "slots": 24, "shuffle": 1, "poison": True, **held}
    return filled(spec, change=unlike, **given)


def filled(
    spec, *, rows=ROWS, seed=0, shuffle=0, poison=False, more_padding=0, sinks=SINKS, slots=SLOTS, change=None
):  # fmt: skip
    """Return random pages and windows.

    `shuffle` permutes the page ids; `poison` fills pages that no row holds and slots that hold no token
    with nan; the numbers of held tokens depend on `seed` alone, and on `change`, which gets those of pages and their side.
    """
    numbers = torch.Generator().manual_seed(seed)
    page, dtype = spec.keys.page_size, spec.keys.dtype
    held = sum(pages for pages, _ in rows)
    unused = 3
    order = torch.randperm(held + unused, generator=torch.Generator().manual_seed(shuffle))
    if not shuffle:
        order = torch.arange(held + unused)
    stored = []
    for side in spec.sides:
        x = torch.randn(held, side.num_kv_heads, page, side.head_dim, generator=numbers)
        encoded, _ = encode((x if change is None else change(x, side)).to(dtype), side)
        fields = {}
        for name, (shape, field_dtype) in side.fields.items():
            pages = torch.zeros(held + unused, *shape, dtype=field_dtype)
            if poison and name != "order":  # which nobody may read where it names no channel
                pages = (
                    torch.full_like(pages, float("nan"))
                    if field_dtype.is_floating_point
                    else pages + 127
                )
            pages[order[:held]] = encoded[name]
            fields[name] = pages
        stored.append(fields)
    exact_lens = torch.tensor([exact for _, exact in rows], dtype=torch.int32)
    empty = (torch.arange(slots) >= exact_lens[:, None])[:, None]
    windows = []
    for side in spec.sides:
        shape = (len(rows), side.num_kv_heads, slots, side.head_dim)
        window = torch.randn(shape, generator=numbers).to(dtype)
        windows.append(window.masked_fill(empty[..., None], float("nan")) if poison else window)
    width = max(pages for pages, _ in rows)
    # past a row's last page the table may hold any allocated id: one that nobody holds
    table = order[-1].repeat(len(rows), width).to(torch.int32)
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
        sink_tokens=sinks,
    )


def row_alone(kv, row):
    """The same row as a batch of one, without its padding."""
    only = slice(row, row + 1)
    return replace(
        kv,
        block_table=kv.block_table[only, : int(kv.num_pages[row])],
        num_pages=kv.num_pages[only],
        residual_keys=kv.residual_keys[only],
        residual_values=kv.residual_values[only],
        exact_lens=kv.exact_lens[only],
        padding=torch.zeros(1, dtype=torch.int32),
        seen=kv.seen - int(kv.padding[row]),
    )


def make_query(kv, q_len=1, group=2, dtype=torch.float64, seed=1):
    heads = kv.spec.keys.num_kv_heads * group
    shape = (kv.rows, heads, q_len, kv.spec.query_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_seals_as_torch(tokens, jobs, spec, pages=6):
    """Seal pages of both sides by the C kernel and in torch: the same bytes. Returns whether a number was made finite."""
    written = []
    for writer in (reference_pages, c_write):
        fields = tuple(
            {
                name: torch.zeros(pages, *shape, dtype=kind)
                for name, (shape, kind) in side.fields.items()
            }
            for side in spec.sides
        )
        damaged = torch.zeros((), dtype=torch.uint8)
        writer.write(PageWrite(tokens, fields, spec, damaged, {}, jobs))
        written.append((fields, int(damaged)))
    (ours, ours_damaged), (theirs, theirs_damaged) = written
    assert ours_damaged == theirs_damaged
    for one, other in zip(ours, theirs, strict=True):
        for name in one:
            assert torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)), name
    return bool(ours_damaged)


# -- the oracle --------------------------------------------------------------------------------------------


FIELDS = {"keys": "key_pages", "values": "value_pages"}


def tokens_of(kv, side, row, dtype=torch.float32):
    """The tokens of a row in order, each found where geometry.place_of says; [num_kv_heads, tokens, head_dim]."""
    return stored_tokens(kv, side, row, getattr(kv, FIELDS[side]), getattr(kv.spec, side), dtype)


def stored_tokens(kv, side, row, fields, spec, dtype=torch.float32):
    """`tokens_of` with the pages of `fields`, decoded as `spec` says."""
    window = (kv.residual_keys if side == "keys" else kv.residual_values)[row]
    exact = int(kv.exact_lens[row])
    pages = kv.block_table[row, : int(kv.num_pages[row])].long()
    paged = decode({name: tensor[pages] for name, tensor in fields.items()}, spec, dtype)
    paged = paged.transpose(0, 1).flatten(1, 2)
    both = torch.cat([window[:, :exact].to(dtype), paged], 1)
    places = (
        place_of(token, len(pages), page_size=kv.page_size, sink_tokens=kv.sink_tokens)
        for token in range(both.shape[1])
    )
    order = [
        place.slot if place.page is None else exact + place.page * kv.page_size + place.slot
        for place in places
    ]
    return both[:, order]


_known = OrderedDict()


def exact_attention(query, kv, scale, rounding, **options):
    """(result in fp64, the largest error that rounding explains in each number of it).

    Kept for a while by what the tensors hold: several kernels are tried on the same numbers.
    """
    key = _digest(query, kv, scale, rounding, options)
    if key not in _known:
        _known[key] = _exact_attention(query, kv, scale, rounding, **options)
        if len(_known) > 512:
            _known.popitem(last=False)
    return _known[key]


def _digest(*parts):
    """A hash of everything that the parts hold."""
    found = hashlib.sha1()
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.update(str((part.shape, part.dtype)).encode())
            found.update(part.contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(part, PagedKV):
            held = (field.name for field in fields(part) if field.name not in ("hold", "launches"))
            found.update(_digest({name: getattr(part, name) for name in held}))
        elif isinstance(part, dict):
            found.update(_digest(*part, *part.values()))
        else:
            found.update(repr(part).encode())
    return found.digest()


def _exact_attention(query, kv, scale, rounding, *, sliding_window=None, mask=None, **options):
    rows = []
    for row in range(kv.rows):
        keys, values = (terms_of(kv, side, row) for side in FIELDS)
        if kv.spec.is_latent:
            keys, values = keys.beside(values), keys
        bias = bias_of(kv, row, query.shape[2], mask, sliding_window)
        rows.append(attend_exactly(query[row], keys, values, scale, rounding, bias=bias, **options))
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


def terms_of(kv, side, row):
    """A row's keys or values, and what their codes alone stand for."""
    spec = getattr(kv.spec, side)
    codes = stored_tokens(kv, side, row, *without_offsets(getattr(kv, FIELDS[side]), spec))
    return Tokens(tokens_of(kv, side, row), codes, spec.scheme.rotated)


def bias_of(kv, row, q_len, mask, sliding_window):
    """What is added to a row's scores; [heads or 1, q_len, tokens], fp64."""
    count = int(kv.num_pages[row]) * kv.page_size + int(kv.exact_lens[row])
    query_at = torch.arange(count - q_len, count)[:, None]
    if mask is None:
        hidden = torch.arange(count) > query_at
        bias = torch.zeros(1, q_len, count, dtype=torch.float64)
    else:
        columns = torch.arange(count) + int(kv.padding[row])
        chosen = mask[row % mask.shape[0]].expand(-1, q_len, -1)[..., columns]
        hidden = ~chosen if mask.dtype == torch.bool else torch.zeros(q_len, count).bool()
        bias = chosen.double() if mask.is_floating_point() else torch.zeros(chosen.shape).double()
    if sliding_window is not None:
        hidden = hidden | (torch.arange(count) <= query_at - sliding_window)
    return bias.masked_fill(hidden, float("-inf"))


def check(query, kv, attend=reference.paged_attention, rounding=None, **options):
    """Compare with the oracle and return the result; `rounding` is the reference's unless given."""
    scale = kv.spec.query_dim**-0.5
    rounding = rounding or Rounding.of("reference", query.dtype)
    expected, bound = exact_attention(query, kv, scale, rounding, **options)
    out = attend(AttentionCall(query, kv, scale, **options))
    assert out.dtype == query.dtype
    assert_within(out, expected, bound)
    return out


def assert_within(out, expected, bound):
    """No number of `out` is further from the exact result than rounding explains."""
    assert out.shape == expected.shape
    times = excess(out, expected, bound)
    worst = int(times.argmax())
    at = [int(index) for index in torch.unravel_index(torch.tensor(worst), times.shape)]
    found, wanted, allowed = (float(x.flatten()[worst]) for x in (out, expected, bound))
    assert float(times.max()) <= 1, (
        f"{found} instead of {wanted} at {at}: {float(times.max()):.3g} times the error of "
        f"{allowed:.3g} that rounding explains"
    )


def excess(out, expected, bound):
    """How many times the bound each number is off; inf for nan, and for an error where none is allowed."""
    errors = (out.double() - expected).abs()
    return torch.where(errors == 0, 0.0, errors / bound).nan_to_num(nan=float("inf"))
