"""Append new tokens to the exact windows of all rows in one launch."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["slots", "q_len"])
def append_kernel(
    window,  # [rows, heads, slots, DIM]
    window_row,
    window_head,
    window_slot,
    new,  # [rows, heads, q_len, DIM]
    new_row,
    new_head,
    new_token,
    starts,
    skips,
    slots,
    q_len,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Copy TOKENS tokens of one (row, head). Grid: (rows, heads, blocks of tokens)."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    skip = tl.load(skips + row)
    slot = tl.load(starts + row) + token - skip
    channel = tl.arange(0, WIDE)
    # a slot outside of the window is the caller's mistake: it must not become a write into another row
    held = (token >= skip) & (token < q_len) & (slot >= 0) & (slot < slots)
    held = held[:, None] & (channel < DIM)[None, :]
    source = new + row.to(tl.int64) * new_row + head * new_head
    target = window + row.to(tl.int64) * window_row + head * window_head
    x = tl.load(source + token[:, None] * new_token + channel[None, :], mask=held, other=0.0)
    tl.store(target + slot[:, None] * window_slot + channel[None, :], x, mask=held)
