"""Paged attention by the compiled CPU kernel; `reference.paged_attention` defines the result."""

import torch

from ..inputs import PagedKV
from .arguments import DECODE_BLOCK, DTYPES, capacity_of, raise_for, side_fields
from .library import isa, library


def paged_attention(
    query: torch.Tensor,
    kv: PagedKV,
    *,
    softmax_scale: float,
    mask: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attend to pages in layout "lanes" without writing any of them out; see `reference.paged_attention`.

    Sums are kept in fp32. For bf16 and fp16 queries a processor with AVX-512 VNNI multiplies 4- and 8-bit codes as
    integers, with queries and probabilities rounded to 16 bits of the largest number of a head (page), where the error
    of that is bounded by the rounding of the output. Pages of latents are written out as fp32, a few dozen tokens at a
    time, and multiplied as such.

    Args:
        query: [rows, num_heads, q_len, query_dim], fp32, bf16 or fp16.
    Returns: [rows, num_heads, q_len, out_dim], a view of a [rows, q_len, num_heads, out_dim] tensor.
    Raises: CacheMismatchError where a page that is read does not exist; MemoryError.
    """
    rows, num_heads, q_len, _ = query.shape
    heads = kv.spec.keys.num_kv_heads
    if query.stride(3) != 1:
        query = query.contiguous()
    out = query.new_empty((rows, q_len, num_heads, kv.spec.out_dim)).transpose(1, 2)
    if sink_logits is not None:
        sink_logits = sink_logits.float().contiguous()
    mask_fields = (0, 0, 0, 0, 0, 0)
    if mask is not None:
        if mask.dtype not in (torch.bool, *DTYPES):
            mask = mask.float()
        if mask.stride(3) != 1:
            mask = mask.contiguous()
        is_bool = mask.dtype == torch.bool
        row, head, at, _ = (
            0 if size == 1 else stride
            for size, stride in zip(mask.shape, mask.stride(), strict=True)
        )
        dtype = 0 if is_bool else DTYPES[mask.dtype]
        mask_fields = (mask.data_ptr(), 1 if is_bool else 2, dtype, row, head, at)
    keys, values = (
        dict(kv.key_pages),
        dict(kv.value_pages),
    )  # asked for once: staged pages are fetched then
    table, capacity = kv.block_table, capacity_of(keys, values)
    block = DECODE_BLOCK.pack(
        *side_fields(kv.spec.keys, keys, kv.window_keys),
        *side_fields(kv.spec.values, values, kv.window_values),
        rows,
        heads,
        num_heads // heads,
        q_len,
        kv.page_size,
        kv.sink_tokens,
        table.data_ptr(),
        table.stride(0),
        kv.num_pages.data_ptr(),
        kv.exact_lens.data_ptr(),
        kv.padding.data_ptr(),
        capacity,
        query.data_ptr(),
        DTYPES[query.dtype],
        query.stride(0),
        query.stride(1),
        query.stride(2),
        out.data_ptr(),
        out.stride(0),
        out.stride(1),
        out.stride(2),
        0 if sink_logits is None else sink_logits.data_ptr(),
        sliding_window or 0,
        *mask_fields,
        torch.get_num_threads(),
        isa(),
        softmax_scale,
        softcap or 0.0,
    )
    decode = library().kv_hf_decode_latent if kv.spec.is_latent else library().kv_hf_decode
    raise_for(decode(block), "block_table", capacity)
    return out
