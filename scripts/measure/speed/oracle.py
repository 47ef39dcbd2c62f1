"""Correctness gates of the benchmarks: nothing is measured, let alone recorded, before its result is right."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kv_hf.backends.error_bound import Rounding, Tokens, attend_exactly, without_offsets
from kv_hf.backends.inputs import PagedKV
from kv_hf.backends.reference.attention import decode_tile


@dataclass(frozen=True)
class Verdict:
    """The largest absolute error of a result, and what is allowed."""

    error: float
    budget: float

    @property
    def ok(self) -> bool:
        """True when the error is within the budget (nan is not)."""
        return self.error <= self.budget


def decoded_tokens(kv: PagedKV, side: str, row: int) -> torch.Tensor:
    """Return a row's keys or values in order, sinks, pages, tail: [num_kv_heads, tokens, head_dim], fp32.

    Unlike `reference.dense` nothing is rounded to the model's dtype: kernels do not round decoded numbers either.
    """
    spec = getattr(kv.spec, side)
    fields = kv.key_pages if side == "keys" else kv.value_pages
    window = (kv.residual_keys if side == "keys" else kv.residual_values)[row]
    exact, count = int(kv.exact_lens[row]), int(kv.num_pages[row])
    sinks = min(kv.sink_tokens, exact)
    pages = decode_tile(fields, spec, kv.block_table[row : row + 1, :count].long(), torch.float32)
    return torch.cat([window[:, :sinks].float(), pages[0], window[:, sinks:exact].float()], 1)


def softmax_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attend one query token per head to all tokens, with a whole softmax in fp64.

    Args:
        query: [num_heads, head_dim].
        keys, values: [num_kv_heads, tokens, head_dim].
    Returns: [num_heads, head_dim], fp64; the heads of one kv head at a time, to bound the temporaries.
    """
    outs = []
    for group, k, v in zip(query.chunk(keys.shape[0]), keys, values, strict=True):
        scores = group.double() @ k.double().T * scale
        outs.append(torch.softmax(scores, -1) @ v.double())
    return torch.cat(outs)


def judge(
    out: torch.Tensor, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> Verdict:
    """Compare a result with the fp64 softmax over the same tokens.

    The budget is twice what torch's SDPA errs by in the query's own precision, plus an ulp of the largest
    result: no kernel has to be better than the plain torch path.

    Args:
        out, query: [num_heads, head_dim] of one row.
        keys, values: [num_kv_heads, tokens, head_dim] of that row, as they are stored.
    """
    expected = softmax_attention(query, keys, values, scale)
    all_keys, all_values = (
        t[None].to(query.dtype).repeat_interleave(len(query) // len(t), 1) for t in (keys, values)
    )
    plain = F.scaled_dot_product_attention(query[None, :, None], all_keys, all_values, scale=scale)[
        0, :, 0
    ]
    size = float(expected.abs().max())
    plain_error = float((plain.double() - expected).abs().max())
    budget = 2 * (plain_error + torch.finfo(query.dtype).eps * size)
    return Verdict(float((out.double() - expected).abs().max()), budget)


def judge_pages(out: torch.Tensor, query: torch.Tensor, kv: PagedKV, scale: float) -> Verdict:
    """Return the worst verdict over the rows of a paged attention's result.

    Kernels sum codes and offsets apart, which plain torch does not. A result beyond `judge`'s budget is therefore
    right as long as each number is as near as `backends.error_bound` derives for such sums; the budget is then its error.

    Args:
        out, query: [rows, num_heads, head_dim].
    """
    return worst([_judge_row(out[row], query[row], kv, row, scale) for row in range(kv.rows)])


def _judge_row(
    out: torch.Tensor, query: torch.Tensor, kv: PagedKV, row: int, scale: float
) -> Verdict:
    keys, values = (decoded_tokens(kv, side, row) for side in ("keys", "values"))
    verdict = judge(out, query, keys, values, scale)
    if verdict.ok or verdict.error != verdict.error:
        return verdict
    key_pages, key_side = without_offsets(kv.key_pages, kv.spec.keys)
    value_pages, value_side = without_offsets(kv.value_pages, kv.spec.values)
    spec = replace(kv.spec, keys=key_side, values=value_side)
    without = replace(kv, key_pages=key_pages, value_pages=value_pages, spec=spec)
    codes = [decoded_tokens(without, side, row) for side in ("keys", "values")]
    terms = Tokens(keys, codes[0]), Tokens(values, codes[1], value_side.scheme.rotated)
    rounding = Rounding.of("triton", query.dtype)
    expected, bound = attend_exactly(query[:, None], *terms, scale, rounding)
    near = ((out.double() - expected[:, 0]).abs() <= bound[:, 0]).all()
    return Verdict(verdict.error, verdict.error) if bool(near) else verdict


def worst(verdicts: list[Verdict]) -> Verdict:
    """Return the verdict that is furthest over (or least under) its budget; one with nan comes first."""
    return max(verdicts, key=lambda v: v.error / v.budget if v.error == v.error else float("inf"))
