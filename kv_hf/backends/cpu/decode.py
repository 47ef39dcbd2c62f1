"""Paged attention and the choice of the pages that a step reads, by the compiled CPU kernel.

`reference.paged_attention` and `reference.selection` define the results.
"""

from functools import cache
from typing import Any
from weakref import ref

import torch

from ...page_summary import summary_of, summary_words, turned_by
from ...spec import PageFields, PageSpec
from ..base import AttentionCall, empty_output, mask_strides
from .abi import CHOOSE, DECODE, DTYPES, MaskKind
from .library import Block, isa, library, pack_sides, raise_for, take_block, with_room

_SIDES, _SHAPES, _POINTERS = DECODE.parts["sides"], DECODE.parts["shapes"], DECODE.parts["pointers"]
_PACK_POINTERS, _AT_POINTERS = _POINTERS.pack_into, _POINTERS.at
_BUDGET, _INDEX, _CHOICE = (CHOOSE.parts[name] for name in ("budget", "index", "choice"))
_ATTEND, _CHOOSE, _CHOOSE_BY_INDEX = "c attend", "c choose", "c choose by index"


def paged_attention(call: AttentionCall) -> torch.Tensor:
    """Attend to pages in layout "lanes" without writing any of them out; see `reference.paged_attention`.

    Codes are multiplied as integers. Queries of bf16 and fp16 are rounded to 16 bits of the largest number of a head, where the
    error of a score is then within the rounding of the output, elsewhere to 31 bits. Their probabilities, times the scales of a
    page, are rounded to 16 bits of the page's largest: beside a token or channel that stretches its group's scale, others of the
    group keep fewer digits. In fp32 all are rounded to 31 bits. Exact numbers and fp8 are multiplied and summed in fp32. Pages of
    latents are written out as fp32, a few dozen tokens at a time, and multiplied as such.

    Args:
        call: with a query in fp32, bf16 or fp16; `call.kv.launches` keep the packed arguments for the next call.
    Returns: [rows, num_heads, q_len, out_dim], a view of a [rows, q_len, num_heads, out_dim] tensor.
    Raises: CacheMismatchError where a page that is read does not exist; MemoryError.
    """
    kv, mask = call.kv, call.mask
    mask_layout = None
    if mask is not None:
        mask = _readable_mask(mask)
        mask_layout = mask.shape, mask.stride(), mask.dtype
    query = _readable_query(call.query)
    out = empty_output(query, kv)
    block = take_block(kv.launches, _ATTEND, DECODE.count)
    pages = with_room((kv.key_pages, kv.value_pages))
    function = "kv_hf_decode_latent" if kv.spec.is_latent else "kv_hf_decode"
    _pack(block, function, call, query, pages, out, mask, (call.sliding_window, mask_layout))
    _run(block, call, query, pages, out, mask)
    kv.launches[_ATTEND] = block
    return out


def choose_pages(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of each row that its newest tokens read; see `reference.selection.choose_pages`.

    Of two pages whose masses differ by less than the rounding of fp32, either may be read.

    Args:
        call: with a query in fp32, bf16 or fp16, over pages in layout "lanes", without mask and sliding window. Its keys
            may be an index (PagedKV.words).
    Returns: block table [rows, kv.budget.width(..)] and pages of each row [rows], int32.
    Raises: CacheMismatchError where a page that is read does not exist; MemoryError.
    """
    kv, budget = call.kv, call.kv.budget
    assert budget is not None
    query = _readable_query(call.query)
    name = _CHOOSE if kv.words is None else _CHOOSE_BY_INDEX
    block = take_block(kv.launches, name, CHOOSE.count)
    pages = with_room((kv.key_pages, kv.value_pages))
    if _pack(block, "kv_hf_choose_pages", call, query, pages, None, None, budget):
        of_budget = budget.pages or 0, budget.from_tokens, budget.share or 0.0
        _BUDGET.pack_into(block.memory, _BUDGET.at, *_summary(kv.spec), *of_budget)
        index = kv.words, pages[0].get("middle")
        pointers = [0 if one is None else one.data_ptr() for one in index]
        _INDEX.pack_into(block.memory, _INDEX.at, *pointers)
    rows, columns = kv.block_table.shape
    width = budget.width(columns, kv.page_size)
    chosen = torch.empty((rows, width), dtype=torch.int32, device="cpu")
    counts = torch.empty(rows, dtype=torch.int32, device="cpu")
    _CHOICE.pack_into(block.memory, _CHOICE.at, chosen.data_ptr(), width, counts.data_ptr())
    _run(block, call, query, pages, None, None)
    kv.launches[name] = block
    return chosen, counts


@cache
def _summary(spec: PageSpec) -> tuple[int, int, int]:
    """Return how C sums up the keys of these pages, how many words of a token's codes it reads, and `turned_by`."""
    return summary_of(spec.keys), summary_words(spec.keys), turned_by(spec.keys)


def _readable_query(query: torch.Tensor) -> torch.Tensor:
    """Return queries [.., query_dim] as the kernel takes them, with contiguous channels."""
    return query if query.stride()[3] == 1 else query.contiguous()


def _readable_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as the kernel takes it: bool or of a known dtype, with contiguous columns."""
    if mask.dtype not in (torch.bool, *DTYPES):
        mask = mask.float()
    return mask if mask.stride(3) == 1 else mask.contiguous()


# -- blocks ------------------------------------------------------------------------------------------------------------


def _pack(
    block: Block,
    function: str,
    call: AttentionCall,
    query: torch.Tensor,
    pages: tuple[PageFields, PageFields],
    out: torch.Tensor | None,
    mask: torch.Tensor | None,
    options: Any,
) -> bool:
    """Pack what pages, shapes, strides and options decide, where it is not what the block holds; return whether it was not.

    Args:
        function: the library's, that the block is for.
        query, out: [rows, num_heads, q_len, ..]; no `out` where nothing is written there.
        mask: [rows or 1, num_heads or 1, q_len, columns], or None.
        options: what else the block depends on.
    """
    kv = call.kv
    windows = kv.residual_keys, kv.residual_values
    held = pages[0].mark, pages[1].mark, kv.spec, kv.words
    asked = query.shape, query.stride(), query.dtype, call.softmax_scale, call.softcap, options
    key = (*map(id, windows), *map(id, held), *asked)
    # a chunk's windows are its own, and go with it
    if block.key == key and block.kept[0]() is windows[0] and block.kept[1]() is windows[1]:
        return False
    block.key = ()
    block.call = getattr(library(), function)
    pack_sides(block, _SIDES, kv.spec, pages, windows)
    rows, num_heads, q_len, _ = query.shape
    heads = kv.spec.keys.num_kv_heads
    query_row, query_head, query_at, _ = query.stride()
    out_row, out_head, out_at = (0, 0, 0) if out is None else out.stride()[:3]
    numbers = {
        "rows": rows, "heads": heads, "group": num_heads // heads, "q_len": q_len,
        "page_size": kv.page_size, "sink_tokens": kv.sink_tokens,
        "query_dtype": DTYPES[query.dtype],
        "query_row": query_row, "query_head": query_head, "query_at": query_at,
        "out_row": out_row, "out_head": out_head, "out_at": out_at,
        "sliding_window": call.sliding_window or 0, "isa": isa(),
        "softmax_scale": call.softmax_scale, "softcap": call.softcap or 0.0,
    }  # fmt: skip
    _SHAPES.pack_names(block.memory, {**numbers, **_mask_fields(mask)})
    block.key, block.kept = key, (ref(windows[0]), ref(windows[1]), *held)
    return True


def _mask_fields(mask: torch.Tensor | None) -> dict[str, int]:
    """Return kind, dtype and strides of a mask; strides of dimensions that it repeats are 0."""
    kind, dtype, strides = MaskKind.MASK_NONE, 0, (0, 0, 0)
    if mask is not None:
        strides = mask_strides(mask)
        if mask.dtype == torch.bool:
            kind = MaskKind.MASK_BOOL
        else:
            kind, dtype = MaskKind.MASK_FLOAT, DTYPES[mask.dtype]
    row, head, at = strides
    return {
        "mask_kind": kind, "mask_dtype": dtype, "mask_row": row, "mask_head": head, "mask_at": at,
    }  # fmt: skip


def _run(
    block: Block,
    call: AttentionCall,
    query: torch.Tensor,
    pages: tuple[PageFields, PageFields],
    out: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    """Pack what changes from call to call, and call the library; arguments as of `_pack`."""
    kv, sink_logits = call.kv, call.sink_logits
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    table, room, other = kv.block_table, pages[0].room, pages[1].room
    capacity = room if room < other or out is None else other
    _PACK_POINTERS(
        block.memory, _AT_POINTERS, table.data_ptr(), table.stride()[0], kv.num_pages.data_ptr(),
        kv.exact_lens.data_ptr(), kv.padding.data_ptr(), capacity, query.data_ptr(),
        0 if out is None else out.data_ptr(), 0 if mask is None else mask.data_ptr(),
        0 if sink_logits is None else sink_logits.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    status = block.call(block.address)
    if status:
        raise_for(status, "block_table", capacity)
