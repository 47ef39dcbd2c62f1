"""The choice of the pages that a step reads, in readable torch, fp32: what the kernels' choices are compared with."""

import torch

from ...page_summary import RANGED_PAGES, Summary, spread, summary_of
from ...quant.codec import decode
from ...quant.page_parts import channels_of, middles, with_all_words, words_to_read
from ...read_budget import NEWEST_PAGES, ReadBudget
from ..base import AttentionCall, PagedKV

Choice = tuple[torch.Tensor, torch.Tensor]


def choose_pages(call: AttentionCall) -> Choice:
    """Return the pages of each row that its newest tokens read, by the budget of `call.kv`.

    Each query head spreads its attention over the pages and the exact window, as far as the pages' summaries tell; the
    pages with the most mass over all heads and queries are read, in their order, the newest always.

    Args:
        call: without a mask and a sliding window; all of its queries stand behind all pages.
    Returns: a block table [rows, kv.budget.width(..)] and the pages of each row [rows], both int32; entries past a row's
        last page are 0.
    """
    return choose_by_mass(page_mass(call), call.kv)


def page_mass(call: AttentionCall, *, whole_keys: bool = False) -> torch.Tensor:
    """Return the attention mass of each page, summed over query heads and queries; the window has the rest.

    Args:
        whole_keys: take the pages' keys as they are stored, not what stands for them: the true masses.
    Returns: [rows, columns of the block table], fp32; the sum over a row is at most num_heads * q_len.
    """
    query, kv = call.query, call.kv
    rows, num_heads, q_len, _ = query.shape
    heads = kv.spec.keys.num_kv_heads
    q = query.float().reshape(rows, heads, -1, query.shape[3]) * call.softmax_scale
    pages = _page_scores(q, kv, call.softcap, whole_keys)  # [rows, heads, queries, pages]
    window = _window_scores(q, kv, call.softcap, q_len)
    rest = torch.logsumexp(window, -1, keepdim=True)
    if call.sink_logits is not None:
        logits = call.sink_logits.float().reshape(1, heads, num_heads // heads, 1)
        logits = logits.expand(rows, -1, -1, q_len).reshape(rows, heads, -1, 1)
        rest = torch.logaddexp(rest, logits)
    whole = torch.logaddexp(torch.logsumexp(pages, -1, keepdim=True), rest)
    whole = whole.masked_fill(whole == float("-inf"), 0.0)
    return (pages - whole).exp().sum((1, 2))


def choose_by_mass(mass: torch.Tensor, kv: PagedKV) -> Choice:
    """Return the choice that masses of pages lead to; see `choose_pages`.

    Args:
        mass: [rows, columns of the block table], fp32.
    """
    budget = kv.budget
    assert budget is not None
    columns = kv.block_table.shape[1]
    width = budget.width(columns, kv.page_size)
    table = torch.zeros(kv.rows, width, dtype=torch.int32, device="cpu")
    counts = kv.num_pages.tolist()
    chosen = []
    for row, (pages, exact) in enumerate(zip(counts, kv.exact_lens.tolist(), strict=True)):
        places = list(range(pages))
        if pages * kv.page_size + exact >= budget.from_tokens:
            places = _best(mass[row, :pages].tolist(), budget)
        chosen.append(len(places))
        table[row, : len(places)] = kv.block_table[row].cpu()[places]
    device = kv.block_table.device
    return table.to(device), torch.tensor(chosen, dtype=torch.int32, device=device)


def _best(mass: list[float], budget: ReadBudget) -> list[int]:
    """Return the places of the pages to read of one row, in order: the newest, then those of most mass, the first of equals."""
    pages = len(mass)
    newest = range(max(0, pages - NEWEST_PAGES), pages)
    order = [*newest, *sorted(range(pages - len(newest)), key=lambda page: -mass[page])]
    return sorted(order[: budget.most(pages)])


def _page_scores(
    q: torch.Tensor, kv: PagedKV, softcap: float | None, whole_keys: bool
) -> torch.Tensor:
    """Return the log of each page's summed weights [rows, heads, queries, pages]; -inf where a row has no such page.

    Args:
        q: [rows, heads, queries, head_dim], fp32, times the softmax scale.
    """
    rows, heads, queries, _ = q.shape
    spec = kv.spec.keys
    found = q.new_full((rows, heads, queries, kv.block_table.shape[1]), float("-inf"))
    for row, pages in enumerate(kv.num_pages.tolist()):
        if not pages:
            continue
        ids = kv.block_table[row, :pages].long()
        fields = {name: tensor[ids] for name, tensor in kv.key_pages.items()}
        read = _read_channels(fields, kv)
        whole = with_all_words(fields, kv.words, spec)
        keys = decode(whole, spec, torch.float32)  # [pages, heads, page_size, head_dim]
        summed = keys
        if not whole_keys:
            summed = torch.where(read[:, :, None], keys, middles(fields, keys, spec))
        scores = torch.einsum("hnd,phtd->hnpt", q[row], summed)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        found[row, :, :, :pages] = torch.logsumexp(scores, -1)
    return found


def _read_channels(fields: dict[str, torch.Tensor], kv: PagedKV) -> torch.Tensor:
    """Return which channels are read token by token: bool [pages or 1, heads, head_dim].

    Args:
        fields: of a row's pages, whole or the part of them that kv.words names.
    """
    spec = kv.spec.keys
    kind = summary_of(spec)
    if kind == Summary.ALL_CHANNELS:
        return torch.ones(1, spec.num_kv_heads, spec.head_dim, dtype=torch.bool, device=kv.device)
    if kind == Summary.ORDER:
        wide = fields["order"][..., : spec.scheme.wide[0][1]].long()
        read = torch.zeros(*wide.shape[:2], spec.head_dim, dtype=torch.bool, device=kv.device)
        return read.scatter(-1, wide, True)
    words = kv.words
    if words is None:
        sample = spread(RANGED_PAGES, len(fields["codes"]))
        words = words_to_read({name: one[sample] for name, one in fields.items()}, spec)
    return channels_of(words, spec)[None]


def _window_scores(q: torch.Tensor, kv: PagedKV, softcap: float | None, q_len: int) -> torch.Tensor:
    """Return the scores of the exact tokens [rows, heads, queries, slots], -inf where a query sees no such token."""
    device = q.device
    keys = kv.residual_keys.float()
    slots = torch.arange(keys.shape[2], device=device)
    held = slots < kv.exact_lens.long()[:, None]
    keys = keys.masked_fill(~held[:, None, :, None], 0.0)
    scores = q @ keys.transpose(-1, -2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # the last q_len tokens of a row are the queries' own: the newest slots
    own = kv.exact_lens.long()[:, None] - q_len + torch.arange(q_len, device=device)
    visible = slots <= own[:, :, None]  # [rows, q_len, slots]
    group = q.shape[2] // q_len
    visible = visible[:, None, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    return scores.masked_fill(~(visible & held[:, None, None]), float("-inf"))
