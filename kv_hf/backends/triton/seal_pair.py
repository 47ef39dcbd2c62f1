"""Encode full pages of both sides in one launch: keys and values, or latents and their RoPE keys."""

import triton
import triton.language as tl

from .latent_seal import seal_latent_page
from .seal import seal_page


@triton.constexpr_function
def item(SIDE, i):
    """Return compile-time argument `i`."""
    return SIDE[i]


@triton.jit
def _seal_side(
    tokens,
    row_stride,
    head_stride,
    slot_stride,
    jobs,
    codes,
    scale,
    offset,
    damaged,
    SIDE: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Encode the page of one (job, head); SIDE: the compile-time arguments of seal_page, or where WORDS of seal_latent_page."""
    job = jobs + tl.program_id(0) * 3
    head = tl.program_id(1)
    row, first, page = tl.load(job).to(tl.int64), tl.load(job + 1).to(tl.int64), tl.load(job + 2)
    if page >= 0:
        source = tokens + row * row_stride + head * head_stride + first * slot_stride
        if WORDS:
            seal_latent_page(
                source, slot_stride, page, codes, scale, offset, damaged, item(SIDE, 0), item(SIDE, 1),
                item(SIDE, 2), item(SIDE, 3), item(SIDE, 4), item(SIDE, 5), item(SIDE, 6), item(SIDE, 7),
                item(SIDE, 8), item(SIDE, 9), item(SIDE, 10), item(SIDE, 11),
            )  # fmt: skip
        else:
            seal_page(
                source, slot_stride, page, head, codes, scale, offset, damaged, item(SIDE, 0), item(SIDE, 1),
                item(SIDE, 2), item(SIDE, 3), item(SIDE, 4), item(SIDE, 5), item(SIDE, 6), item(SIDE, 7),
                item(SIDE, 8), item(SIDE, 9), item(SIDE, 10), item(SIDE, 11), item(SIDE, 12), item(SIDE, 13),
                item(SIDE, 14), item(SIDE, 15), item(SIDE, 16),
            )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=["jobs", "damaged"])
def seal_pair_kernel(
    tokens,  # [rows, heads, slots, dim]
    row_stride,
    head_stride,
    slot_stride,
    codes,
    scale,
    offset,
    value_tokens,  # [rows, heads, slots, value dim]
    value_row,
    value_head,
    value_slot,
    value_codes,
    value_scale,
    value_offset,
    jobs,  # [n, 3]: row, first slot, page; a negative page: nothing to do
    damaged,  # [] uint8, only ever set
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Encode the pages of the jobs. Grid: (jobs, heads, 2), or (jobs, heads, 1) where VALUES is empty.

    WORDS: whether the first side is latents in words of several tokens.
    """
    if tl.program_id(2) == 0:
        _seal_side(
            tokens, row_stride, head_stride, slot_stride, jobs, codes, scale, offset, damaged, KEYS, WORDS
        )  # fmt: skip
    elif len(VALUES) > 0:
        _seal_side(
            value_tokens, value_row, value_head, value_slot, jobs, value_codes, value_scale, value_offset, damaged,
            VALUES, False,
        )  # fmt: skip
