"""Append new tokens of both sides to the exact windows of all rows, in one launch."""

import triton
import triton.language as tl


@triton.jit
def _copy(
    window, window_row, window_head, window_slot, new, new_row, new_head, new_token, starts, skips, slots, q_len,
    block, DIM: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Copy block `block` of TOKENS tokens of one (row, head)."""
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    token = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
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


@triton.jit(
    do_not_specialize=["slots", "value_slots", "q_len"],
    do_not_specialize_on_alignment=["starts", "skips"],
)
def append_pair_kernel(
    window,  # [rows, heads, slots, DIM]
    new,  # [rows, heads, q_len, DIM]
    value_window,  # [rows, heads, value_slots, VALUE_DIM]
    new_value,  # [rows, heads, q_len, VALUE_DIM]
    starts,
    skips,
    window_row,
    window_head,
    window_slot,
    new_row,
    new_head,
    new_token,
    value_row,
    value_head,
    value_slot,
    new_value_row,
    new_value_head,
    new_value_token,
    slots,
    value_slots,
    q_len,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Append both sides. Grid: (rows, heads, 2 * blocks of tokens), or half as many where VALUE_DIM is 0."""
    SIDES: tl.constexpr = 2 if VALUE_DIM > 0 else 1
    block = tl.program_id(2) // SIDES
    if tl.program_id(2) % SIDES == 0:
        _copy(
            window, window_row, window_head, window_slot, new, new_row, new_head, new_token, starts, skips, slots,
            q_len, block, DIM, WIDE, TOKENS,
        )  # fmt: skip
    elif VALUE_DIM > 0:
        _copy(
            value_window, value_row, value_head, value_slot, new_value, new_value_row, new_value_head,
            new_value_token, starts, skips, value_slots, q_len, block, VALUE_DIM, VALUE_WIDE, TOKENS,
        )  # fmt: skip
