"""Random pages and windows for kernel tests, and an fp64 softmax over their decoded tokens as the oracle."""

from dataclasses import replace

import torch

from kv_hf.formats import key_scheme, value_scheme
from kv_hf.kernels import reference
from kv_hf.kernels.inputs import PagedKV
from kv_hf.quant.codec import decode, encode
from kv_hf.spec import ROWS as ROWS_LAYOUT
from kv_hf.spec import PageSpec

PAGE, SINKS, SLOTS = 16, 4, 40
# pages and exact tokens of each row: pages and tail, a full window, less than the sinks, one page, nothing
ROWS = [(5, 11), (2, 20), (0, 3), (1, 4), (0, 0)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_kv(
    keys="int8",
    values=None,
    *,
    rows=ROWS,
    heads=2,
    key_dim=64,
    value_dim=None,
    dtype=torch.float32,
    seed=0,
    shuffle=0,
    poison=False,
    more_padding=0,
    sinks=SINKS,
    page=PAGE,
    slots=SLOTS,
    layout=ROWS_LAYOUT,
    key_group=None,
    value_group=None,
):
    """Random pages and windows.

    `shuffle` permutes the page ids; `poison` fills pages that no row holds and slots that hold no token
    with nan; the numbers of held tokens depend on `seed` alone.
    """
    value_dim = value_dim or key_dim
    # dimensions that a default group does not divide need a group of their own
    group = value_group or (16 if value_dim % 32 else None)
    spec = PageSpec.build(
        key_scheme(keys, key_group),
        value_scheme(values or keys, group),
        num_kv_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        page_size=page,
        dtype=dtype,
        layout=layout,
    )
    numbers = torch.Generator().manual_seed(seed)
    held = sum(pages for pages, _ in rows)
    unused = 3
    order = torch.randperm(held + unused, generator=torch.Generator().manual_seed(shuffle))
    if not shuffle:
        order = torch.arange(held + unused)
    stored = []
    for side in spec.sides:
        x = torch.randn(held, heads, page, side.head_dim, generator=numbers).to(dtype)
        encoded, _ = encode(x, side)
        fields = {}
        for name, (shape, field_dtype) in side.fields.items():
            pages = torch.zeros(held + unused, *shape, dtype=field_dtype)
            if poison:
                pages = (
                    torch.full_like(pages, float("nan"))
                    if field_dtype.is_floating_point
                    else pages + 127
                )
            pages[order[:held]] = encoded[name]
            fields[name] = pages
        stored.append(fields)
    exact_lens = torch.tensor([exact for _, exact in rows], dtype=torch.int32)
    windows = []
    for side in spec.sides:
        window = torch.randn(len(rows), heads, slots, side.head_dim, generator=numbers).to(dtype)
        if poison:
            window[(torch.arange(slots) >= exact_lens[:, None])[:, None].expand(-1, heads, -1)] = (
                float("nan")
            )
        windows.append(window)
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
        window_keys=windows[0],
        window_values=windows[1],
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
        window_keys=kv.window_keys[only],
        window_values=kv.window_values[only],
        exact_lens=kv.exact_lens[only],
        padding=torch.zeros(1, dtype=torch.int32),
        seen=kv.seen - int(kv.padding[row]),
    )


def make_query(kv, q_len=1, group=2, dtype=torch.float64, seed=1):
    heads = kv.spec.keys.num_kv_heads * group
    shape = (kv.rows, heads, q_len, kv.spec.keys.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- the oracle --------------------------------------------------------------------------------------------


def tokens_of(kv, side, row, dtype=torch.float32):
    """The tokens of a row in order: sinks, pages, tail; [num_kv_heads, tokens, head_dim]."""
    spec = getattr(kv.spec, side)
    fields = kv.key_pages if side == "keys" else kv.value_pages
    window = (kv.window_keys if side == "keys" else kv.window_values)[row]
    exact, sinks = int(kv.exact_lens[row]), kv.sink_tokens
    parts = [window[:, : min(sinks, exact)].to(dtype)]
    for page in kv.block_table[row, : int(kv.num_pages[row])].tolist():
        page_fields = {name: tensor[page : page + 1] for name, tensor in fields.items()}
        parts.append(decode(page_fields, spec, dtype)[0])
    if exact > sinks:
        parts.append(window[:, sinks:exact].to(dtype))
    return torch.cat(parts, 1)


def dense_attention(
    query,
    kv,
    scale,
    *,
    mask=None,
    softcap=None,
    sink_logits=None,
    sliding_window=None,
    compute=torch.float64,
):
    """A whole softmax per row and head, in `compute` from the first product on."""
    rows, heads, q_len, _ = query.shape
    group = heads // kv.spec.keys.num_kv_heads
    out = torch.zeros(rows, heads, q_len, kv.spec.values.head_dim, dtype=compute)
    for row in range(rows):
        keys = tokens_of(kv, "keys", row).to(compute)
        values = tokens_of(kv, "values", row).to(compute)
        count = keys.shape[1]
        columns = torch.arange(count) + int(kv.padding[row])
        for head in range(heads):
            scores = query[row, head].to(compute) @ keys[head // group].T * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            query_at = torch.arange(count - q_len, count)[:, None]
            if sliding_window is not None:
                far = torch.arange(count) <= query_at - sliding_window
                scores = scores.masked_fill(far, float("-inf"))
            if mask is None:
                late = torch.arange(count) > query_at
                scores = scores.masked_fill(late, float("-inf"))
            else:
                chosen = mask[row % mask.shape[0], head % mask.shape[1]].expand(q_len, -1)[
                    :, columns
                ]
                if mask.dtype == torch.bool:
                    scores = scores.masked_fill(~chosen, float("-inf"))
                else:
                    scores = scores + chosen.to(compute)
            if sink_logits is not None:
                sink = sink_logits[head].to(compute).expand(q_len, 1)
                scores = torch.cat([scores, sink], -1)
            sees = (
                (scores > float("-inf")).any(-1) if scores.shape[1] else torch.zeros(q_len).bool()
            )
            weights = torch.softmax(scores[sees], -1)[:, :count]
            out[row, head, sees] = weights @ values[head // group]
    return out


def budget(query, kv, scale, expected, options):
    """Twice what the same-precision torch path errs by, plus an ulp of the largest result."""
    size = float(expected.abs().max())
    if (
        query.dtype == torch.float64
    ):  # the path is the oracle itself: only the order of sums may differ
        return 1e-12 * size
    path = dense_attention(query, kv, scale, compute=query.dtype, **options)
    path_error = float((path.double() - expected).abs().max())
    return 2 * (path_error + torch.finfo(query.dtype).eps * size)


def check(query, kv, attend=reference.paged_attention, **options):
    """Compare with the oracle and return the result."""
    scale = query.shape[-1] ** -0.5
    expected = dense_attention(query, kv, scale, **options)
    out = attend(query, kv, softmax_scale=scale, **options)
    assert out.dtype == query.dtype
    assert out.shape == expected.shape
    error = float((out.double() - expected).abs().max())
    assert error <= budget(query, kv, scale, expected, options)
    return out
