"""The choice of the pages that a step reads, by the compiled CPU kernel; `reference.selection` defines it."""

from functools import cache

import torch

from ...page_summary import summary_of, summary_words, turned_by
from ...spec import PageFields, PageSpec
from ..base import AttentionCall
from .abi import CHOOSE, DECODE
from .decode import pack_shapes
from .library import library, pack_sides, raise_for, take_block

_BUDGET, _INDEX, _CHOICE = (CHOOSE.parts[name] for name in ("budget", "index", "choice"))
_SIDES, _POINTERS = DECODE.parts["sides"], DECODE.parts["pointers"]
_FIELDS = CHOOSE.count
_NAME, _BY_INDEX = "c choose", "c choose by index"


def choose_pages(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pages of each row that its newest tokens read; see `reference.selection.choose_pages`.

    Of two pages whose masses differ by less than the rounding of fp32, either may be read.

    Args:
        call: with a query in fp32, bf16 or fp16, over pages in layout "lanes", without mask and sliding window. Its keys
            may be an index (PagedKV.words).
    Returns: block table [rows, kv.budget.width(..)] and pages of each row [rows], int32.
    Raises: CacheMismatchError where a page that is read does not exist; MemoryError.
    """
    query, kv, sink_logits, budget = call.query, call.kv, call.sink_logits, call.kv.budget
    assert budget is not None
    keys, values = kv.key_pages, kv.value_pages
    if type(keys) is not PageFields or type(values) is not PageFields:
        keys, values = PageFields(keys), PageFields(values)
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    if query.stride()[3] != 1:
        query = query.contiguous()
    windows = kv.residual_keys, kv.residual_values
    name = _NAME if kv.words is None else _BY_INDEX
    block = take_block(kv.launches, name, _FIELDS)
    kept = keys.mark, values.mark, *windows, kv.spec, kv.words
    options = call.softmax_scale, call.softcap, budget
    key = (*map(id, kept), query.shape, query.stride(), query.dtype, options)
    if block.key != key:
        block.key = ()
        block.call = library().kv_hf_choose_pages
        pack_sides(block, _SIDES, kv.spec, (keys, values), windows)
        pack_shapes(block, call, query, None, None)
        _BUDGET.pack_into(
            block.memory,
            _BUDGET.at,
            *_summary(kv.spec),
            budget.pages or 0,
            budget.from_tokens,
            budget.share or 0.0,
            budget.top_p or 0.0,
        )
        middle = keys.get("middle")
        _INDEX.pack_into(
            block.memory,
            _INDEX.at,
            0 if kv.words is None else kv.words.data_ptr(),
            0 if middle is None else middle.data_ptr(),
        )
        block.key, block.kept = key, kept
    table = kv.block_table
    rows, columns = table.shape
    width = budget.width(columns, kv.page_size)
    chosen = torch.empty((rows, width), dtype=torch.int32)
    counts = torch.empty(rows, dtype=torch.int32)
    capacity = keys.room
    _POINTERS.pack_into(
        block.memory,
        _POINTERS.at,
        table.data_ptr(),
        table.stride()[0],
        kv.num_pages.data_ptr(),
        kv.exact_lens.data_ptr(),
        kv.padding.data_ptr(),
        capacity,
        query.data_ptr(),
        0,
        0,
        0 if sink_logits is None else sink_logits.data_ptr(),
        torch.get_num_threads(),
    )
    _CHOICE.pack_into(block.memory, _CHOICE.at, chosen.data_ptr(), width, counts.data_ptr())
    status = block.call(block.address)
    if status:
        raise_for(status, "block_table", capacity)
    kv.launches[name] = block
    return chosen, counts


@cache
def _summary(spec: PageSpec) -> tuple[int, int, int]:
    """Return how C sums up the keys of these pages, how many words of a token's codes it reads, and `turned_by`."""
    return summary_of(spec.keys), summary_words(spec.keys), turned_by(spec.keys)
