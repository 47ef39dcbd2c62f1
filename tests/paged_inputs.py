"""Random pages and windows for kernel tests, and an fp64 softmax over their decoded tokens as the oracle."""

from dataclasses import replace
from itertools import product, zip_longest

import pytest
import torch
from rounding import Rounding, Tokens, attend_exactly, without_offsets

from kv_hf.backends.base import AttentionCall, PagedKV
from kv_hf.backends.cpu import library
from kv_hf.backends.reference import attention as reference
from kv_hf.backends.reference import pages as reference_pages
from kv_hf.formats import (
    WHOLE_HEAD,
    Groups,
    RangeFormat,
    format_names,
    k_rope_name,
    k_rope_scheme,
    key_scheme,
    latent_scheme,
    per_channel,
    per_token,
    value_scheme,
)
from kv_hf.geometry import place_of
from kv_hf.quant.codec import decode, encode, order_of
from kv_hf.spec import LANES, LATENT_SIDES, PageFields, PageSpec, PageWrite
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
PAIRS = (
    *zip_longest(format_names("keys"), reversed(format_names("values")), fillvalue="int4"),
    ("plain4", "plain2"),
    ("plain2", "plain4"),
    ("int4", "int4"),
    ("int8", "around0"),
)
LATENTS = tuple(product(format_names("latent"), format_names("k_rope")))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# codes of one width, neither rotated nor around 0, as other packages may register them
PLAIN = {
    "plain4": RangeFormat("plain4", 4, {"keys": per_channel(), "values": per_token()}),
    "plain2": RangeFormat(
        "plain2", 2, {"keys": per_channel(-32, clip=0.8), "values": per_token(-32, clip=0.9)}
    ),
}
# and values around 0 that are not rotated
OWN = PLAIN | {
    "around0": RangeFormat("around0", 4, {"values": Groups((1, WHOLE_HEAD), axis="channels")})
}


def scheme_of(name, side, group=None):
    """Return the scheme of keys or values in a format of OWN, a shipped or a registered one."""
    if name in OWN:
        return OWN[name].scheme(side, group)
    return {"keys": key_scheme, "values": value_scheme}[side](name, group)


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
    """Return pages of keys and values in formats that `scheme_of` takes."""
    return PageSpec.build(
        scheme_of(keys, "keys", groups[0]),
        scheme_of(values or keys, "values", groups[1]),
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
    latent="int8", k_rope="exact", *, rank=64, rope=16, page=PAGE, dtype=torch.float32, group=None, tokens=None, layout=LANES
):  # fmt: skip
    """Return pages of latents; a record of DeepSeek has at least 128 channels.

    k_rope: None: what goes with the format of the latents.
    group, tokens: channels and tokens of a scale, of which a format reads one; with a group alone half a page's tokens.
    """
    if tokens is None and group is not None:
        tokens = page // 2
    scheme = latent_scheme(latent, tokens if latent in ("int4", "int2") else group)
    return PageSpec.build(
        scheme,
        k_rope_scheme(k_rope_name(k_rope, scheme), rope),
        key_dim=max(rank, 128) if latent == "fp8_ds_mla" else rank,
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
        x = (x if change is None else change(x, side)).to(dtype)
        encoded, _ = encode(x, side, order_of(x[:1], side))
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


def hard_tokens(side, dtype):
    """Four rows of tiny, usual and large numbers: zeros, equal numbers, -0, inf and nan in the third, half steps in the last."""
    numbers = torch.Generator().manual_seed(side.head_dim)
    shape = (4, side.num_kv_heads, 5 + 2 * side.page_size, side.head_dim)
    tokens = torch.randn(shape, generator=numbers)
    tokens *= torch.tensor([1e-6, 1.0, 3e3, 2.0])[:, None, None, None]
    tokens[0, :, side.page_size // 2 :] *= 4  # scales of few bits: codes that have to be cut
    tokens[1, 0, :9] = 0
    tokens[1, -1, 12:, : side.head_dim // 2] = 5
    tokens[0, 0, 5:9] *= -0.0
    tokens[3] = (2 * tokens[3]).round() / 2
    if side.head_dim:
        tokens[3, ..., 3] += 40  # as some models' keys have
        tokens[3, ..., 5] = 65280.0  # of numbers of 16 bits, nearly the largest that is stored
        tokens[2, 0, 7, 3], tokens[2, 0, 8, 4] = float("inf"), float("-inf")
        tokens[2, -1, 9, 1] = float("nan")
    tokens = tokens.to(dtype)
    if side.head_dim and dtype == torch.bfloat16:
        tokens.view(torch.int16)[2, 0, 8, 2] = 0x7FA5  # a nan with a payload
    return tokens


def check_seals(spec, writer, place=torch.clone, apart=False):
    """Seal pages of hard tokens on both sides by a kernel, which `writer` runs, and by the reference: the same bytes.

    A job without a page leaves what it names alone, and says nothing of its numbers. Nothing to do, jobs whose numbers are finite,
    and the one that finds others, are calls of their own.

    Args:
        writer: takes a PageWrite and returns it with what was written.
        place: what the kernel's tensors are made by; apart: channels of a token do not lie together.
    """
    page = spec.keys.page_size
    both = tuple(hard_tokens(side, side.dtype) for side in spec.sides)
    if apart:
        both = tuple(x.transpose(2, 3).contiguous().transpose(2, 3) for x in both)
        place = torch.Tensor.detach
    # in their own order, in that of a page that is there, in that of other tokens
    jobs = [(0, 0, 1, -1), (1, 3, 4, 2), (3, 5 + page, 5, -6), (2, 2, -1, -1), (2, 2, 3, -3)]
    for some in (jobs[:0], jobs[:4], jobs[4:]):
        written = []
        for write, make in ((reference_pages.write, torch.clone), (writer, place)):
            fields = tuple(
                PageFields(
                    {
                        name: make(torch.ones(6, *shape, dtype=kind))
                        for name, (shape, kind) in side.fields.items()
                    }
                )
                for side in spec.sides
            )
            damaged = make(torch.zeros((), dtype=torch.uint8))
            asked = torch.tensor(some).view(-1, 4).int()
            asked = PageWrite(tuple(map(make, both)), fields, spec, damaged, {}, make(asked))
            written.append(write(asked) or asked)
        ours, theirs = written
        encodes = any(side.head_dim and not side.scheme.is_exact for side in spec.sides)
        assert int(ours.damaged) == int(theirs.damaged) == (some == jobs[4:] and encodes)
        for one, other in zip(ours.fields, theirs.fields, strict=True):
            for name in one:
                mine, wanted = (x[name].contiguous().view(torch.uint8) for x in (one, other))
                assert torch.equal(mine, wanted), name


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


def exact_attention(query, kv, scale, rounding, *, sliding_window=None, mask=None, **options):
    """(result in fp64, the largest error that rounding explains in each number of it)."""
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
    """Compare one kernel or several with the oracle; `rounding` is the reference's unless given. Returns the last result."""
    scale = kv.spec.query_dim**-0.5
    rounding = rounding or Rounding.of("reference", query.dtype)
    expected, bound = exact_attention(query, kv, scale, rounding, **options)
    for one in attend if isinstance(attend, list) else [attend]:
        out = one(AttentionCall(query, kv, scale, **options))
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
