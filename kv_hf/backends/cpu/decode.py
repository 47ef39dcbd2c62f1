"""Paged attention by the compiled CPU kernel; `reference.paged_attention` defines the result."""

import torch

from ...spec import PageFields
from ..base import AttentionCall, PagedKV
from .abi import DECODE, DTYPES, MaskKind
from .library import Block, isa, library, pack_sides, raise_for, take_block

_SIDES, _SHAPES, _POINTERS = DECODE.parts["sides"], DECODE.parts["shapes"], DECODE.parts["pointers"]
_PACK_POINTERS, _AT_POINTERS = _POINTERS.pack_into, _POINTERS.at
_FIELDS = DECODE.count
_NAME = "c attend"


def paged_attention(call: AttentionCall) -> torch.Tensor:
    """Attend to pages in layout "lanes" without writing any of them out; see `reference.paged_attention`.

    Sums are kept in fp32. For bf16 and fp16 queries a processor with AVX-512 VNNI multiplies 4- and 8-bit codes as
    integers, with queries and probabilities rounded to 16 bits of the largest number of a head (page), where the error
    of that is bounded by the rounding of the output. Pages of latents are written out as fp32, a few dozen tokens at a
    time, and multiplied as such.

    Args:
        call: with a query in fp32, bf16 or fp16; `call.kv.launches` keep the packed arguments for the next call.
    Returns: [rows, num_heads, q_len, out_dim], a view of a [rows, q_len, num_heads, out_dim] tensor.
    Raises: CacheMismatchError where a page that is read does not exist; MemoryError.
    """
    query, kv, mask, sink_logits = call.query, call.kv, call.mask, call.sink_logits
    keys, values = kv.key_pages, kv.value_pages
    if type(keys) is not PageFields or type(values) is not PageFields:
        # asked for once: staged pages are fetched then; others have no mark, and are packed at every call
        keys, values = PageFields(keys), PageFields(values)
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    shown = None
    if mask is not None:
        mask = _readable_mask(mask)
        shown = mask.shape, mask.stride(), mask.dtype
    if query.stride()[3] != 1:
        query = query.contiguous()
    options = call.softmax_scale, call.softcap, call.sliding_window, shown
    table, num_pages = kv.block_table, kv.num_pages
    room, other = keys.room, values.room
    capacity = room if room < other else other
    out = _empty_output(query, kv)
    block = take_block(kv.launches, _NAME, _FIELDS)
    kept = keys.mark, values.mark, kv.residual_keys, kv.residual_values, kv.spec
    key = (*map(id, kept), query.shape, query.stride(), query.dtype, options)
    if block.key != key:
        block.key = ()
        functions = library()
        block.call = functions.kv_hf_decode_latent if kv.spec.is_latent else functions.kv_hf_decode
        pack_sides(block, _SIDES, kv.spec, (keys, values), (kv.residual_keys, kv.residual_values))
        pack_shapes(block, call, query, out, mask)
        block.key, block.kept = key, kept
    _PACK_POINTERS(
        block.memory,
        _AT_POINTERS,
        table.data_ptr(),
        table.stride()[0],
        num_pages.data_ptr(),
        kv.exact_lens.data_ptr(),
        kv.padding.data_ptr(),
        capacity,
        query.data_ptr(),
        out.data_ptr(),
        0 if mask is None else mask.data_ptr(),
        0 if sink_logits is None else sink_logits.data_ptr(),
        torch.get_num_threads(),
    )
    status = block.call(block.address)
    if status:
        raise_for(status, "block_table", capacity)
    kv.launches[_NAME] = block
    return out


def _empty_output(query: torch.Tensor, kv: PagedKV) -> torch.Tensor:
    """Return room for the result: a [rows, num_heads, q_len, out_dim] view of memory in which q_len comes before num_heads."""
    rows, num_heads, q_len, query_dim = query.shape
    dim = kv.spec.out_dim
    if q_len == 1 and dim == query_dim and query.is_contiguous():
        return torch.empty_like(query)
    strides = (q_len * num_heads * dim, dim, num_heads * dim, 1)
    return query.new_empty_strided((rows, num_heads, q_len, dim), strides)


def _readable_mask(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask as the kernel takes it: bool or of a known dtype, with contiguous columns."""
    if mask.dtype not in (torch.bool, *DTYPES):
        mask = mask.float()
    return mask if mask.stride(3) == 1 else mask.contiguous()


def pack_shapes(
    block: Block,
    call: AttentionCall,
    query: torch.Tensor,
    out: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    """Pack what shapes, strides and options decide.

    Args:
        query, out: [rows, num_heads, q_len, ..]; no `out` where nothing is written there.
        mask: [rows or 1, num_heads or 1, q_len, columns], or None.
    """
    kv = call.kv
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


def _mask_fields(mask: torch.Tensor | None) -> dict[str, int]:
    """Return kind, dtype and strides of a mask; strides of dimensions that it repeats are 0."""
    kind, dtype, strides = MaskKind.MASK_NONE, 0, [0, 0, 0]
    if mask is not None:
        strides = [
            0 if size == 1 else stride
            for size, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True)
        ]
        if mask.dtype == torch.bool:
            kind = MaskKind.MASK_BOOL
        else:
            kind, dtype = MaskKind.MASK_FLOAT, DTYPES[mask.dtype]
    row, head, at = strides
    return {
        "mask_kind": kind, "mask_dtype": dtype, "mask_row": row, "mask_head": head, "mask_at": at,
    }  # fmt: skip
