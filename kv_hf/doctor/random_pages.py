"""Random tokens of a few rows, their pages sealed, and an fp64 softmax over the decoded tokens as the oracle."""

from dataclasses import dataclass, replace

import torch

from ..backends.error_bound import Rounding, Tokens, attend_exactly, without_offsets
from ..backends.inputs import PagedKV
from ..backends.reference import attention as reference
from ..quant.codec import decode
from ..spec import PageSpec, SideSpec

SINKS = 4
KV_HEADS, GROUP = 2, 4
QUERIES = 2  # the second sees a token more than the first
# (pages, exact tokens) of each row: pages and a tail, sinks and a tail only, a page and the sinks
ROWS = ((3, 11), (0, 7), (1, 4))
UNUSED = 1  # pages that nobody holds, full of nan and nonsense


@dataclass(frozen=True)
class Case:
    """The data that one format is tested on, all of it on the CPU.

    Attributes:
        tokens: of each side, the tokens whose pages are sealed: [1, num_kv_heads, pages * page_size, head_dim].
        jobs: [pages, 3], as `seal_pages` takes them.
        kv: the pages that the reference sealed, with windows.
        query: [rows, heads, QUERIES, query_dim], the model's dtype.
    """

    tokens: tuple[torch.Tensor, torch.Tensor]
    jobs: torch.Tensor
    kv: PagedKV
    query: torch.Tensor


def make_case(spec: PageSpec, seed: int = 0) -> Case:
    """Return random tokens, pages and queries for pages like `spec`; the same for the same seed."""
    numbers = torch.Generator().manual_seed(seed)
    page, dtype = spec.keys.page_size, spec.keys.dtype
    held = sum(pages for pages, _ in ROWS)
    order = torch.randperm(held + UNUSED, generator=numbers)
    jobs = torch.tensor([(0, at * page, int(order[at])) for at in range(held)], dtype=torch.int32)
    slots = max(exact for _, exact in ROWS) + 2
    tokens, windows, stored = [], [], []
    for side in spec.sides:
        run = torch.randn(1, side.num_kv_heads, held * page, side.head_dim, generator=numbers)
        run = (run * (0.5 + torch.rand(side.head_dim, generator=numbers))).to(side.dtype)
        fields = empty_fields(side, held + UNUSED)
        reference.seal_pages(run, jobs, fields, side)
        window = torch.randn(
            len(ROWS), side.num_kv_heads, slots, side.head_dim, generator=numbers
        ).to(side.dtype)
        for row, (_, exact) in enumerate(ROWS):
            window[row, :, exact:] = float("nan")
        tokens.append(run)
        windows.append(window)
        stored.append(fields)
    width = max(pages for pages, _ in ROWS)
    table = order[-1].repeat(len(ROWS), width).to(torch.int32)
    first = 0
    for row, (pages, _) in enumerate(ROWS):
        table[row, :pages] = order[first : first + pages]
        first += pages
    counts = [pages * page + exact for pages, exact in ROWS]
    seen = max(counts)
    kv = PagedKV(
        key_pages=stored[0],
        value_pages=stored[1],
        spec=spec,
        block_table=table,
        num_pages=torch.tensor([pages for pages, _ in ROWS], dtype=torch.int32),
        residual_keys=windows[0],
        residual_values=windows[1],
        exact_lens=torch.tensor([exact for _, exact in ROWS], dtype=torch.int32),
        padding=torch.tensor([seen - count for count in counts], dtype=torch.int32),
        seen=seen,
        sink_tokens=SINKS,
    )
    heads = spec.keys.num_kv_heads * GROUP
    query = torch.randn(len(ROWS), heads, QUERIES, spec.query_dim, generator=numbers).to(dtype)
    return Case((tokens[0], tokens[1]), jobs, kv, query)


def empty_fields(side: SideSpec, pages: int) -> dict[str, torch.Tensor]:
    """Return storage of a side [pages, *shape of the field in a page] on the CPU, full of what no kernel may read.

    An order of channels names each channel in every page: kernels in torch read the pages that nobody holds, and hide them.
    """
    fields = {}
    for name, (shape, dtype) in side.fields.items():
        if name == "order":
            places = torch.arange(shape[-1], dtype=dtype)
            fields[name] = places.expand(pages, *shape).contiguous()
            continue
        filler = float("nan") if dtype.is_floating_point else 0x7F
        fields[name] = torch.full((pages, *shape), filler, dtype=dtype)
    return fields


def moved(kv: PagedKV, device: torch.device) -> PagedKV:
    """Return the same pages and windows on `device`."""
    return replace(
        kv,
        key_pages={name: tensor.to(device) for name, tensor in kv.key_pages.items()},
        value_pages={name: tensor.to(device) for name, tensor in kv.value_pages.items()},
        block_table=kv.block_table.to(device),
        num_pages=kv.num_pages.to(device),
        residual_keys=kv.residual_keys.to(device),
        residual_values=kv.residual_values.to(device),
        exact_lens=kv.exact_lens.to(device),
        padding=kv.padding.to(device),
    )


def attended(case: Case, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a whole softmax in fp64 per row over decoded tokens, walking no table, and the error that rounding explains.

    Returns: (result, largest error), both [rows, heads, QUERIES, out_dim], fp64.
    """
    kv, scale = case.kv, case.kv.spec.query_dim**-0.5
    outs, bounds = [], []
    for row in range(kv.rows):
        keys, values = (_tokens_of(kv, side, row) for side in ("keys", "values"))
        if kv.spec.is_latent:
            keys, values = keys.beside(values), keys
        count = keys.numbers.shape[1]
        late = torch.ones(1, QUERIES, count, dtype=torch.bool).triu(count - QUERIES + 1)
        bias = torch.zeros(late.shape).masked_fill(late, float("-inf"))
        out, bound = attend_exactly(case.query[row], keys, values, scale, rounding, bias=bias)
        outs.append(out)
        bounds.append(bound)
    return torch.stack(outs), torch.stack(bounds)


def _tokens_of(kv: PagedKV, name: str, row: int) -> Tokens:
    """Return the tokens of a row in order, fp32: [num_kv_heads, tokens, head_dim]."""
    side: SideSpec = getattr(kv.spec, name)
    stored = kv.key_pages if name == "keys" else kv.value_pages
    window = (kv.residual_keys if name == "keys" else kv.residual_values)[row].float()
    exact, pages = int(kv.exact_lens[row]), kv.block_table[row, : int(kv.num_pages[row])].long()
    sinks = min(kv.sink_tokens, exact)
    fields = {field: tensor[pages] for field, tensor in stored.items()}

    def in_order(fields: dict[str, torch.Tensor], side: SideSpec) -> torch.Tensor:
        paged = decode(fields, side, torch.float32).transpose(0, 1).flatten(1, 2)
        return torch.cat([window[:, :sinks], paged, window[:, sinks:exact]], 1)

    codes = in_order(*without_offsets(fields, side))
    return Tokens(in_order(fields, side), codes, side.scheme.rotated)
