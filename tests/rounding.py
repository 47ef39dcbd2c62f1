"""How far rounding may move results: from the number of terms, their size and the dtype, not from a processor's figures.

A whole softmax in fp64 over the tokens of one row, and how far rounding may move a kernel's result from it.

The bound follows from the numbers and from where a kernel rounds. What a processor, a library or a draw happens to
give has no part in it: another order of the same sums is within the bound, a wrong number is not.

Codes of quantized pages are no such sums: a number that rounds otherwise may get the next code, and everything behind it differs by
a step of the format. Results are compared where the pages hold the same bytes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from kv_hf.quant.codec import block, rotate
from kv_hf.spec import SideSpec

WALK = 2.0  # roundings of n terms add up to at most WALK * sqrt(n) of them, or n
EXP_ROUNDINGS = (
    6.0  # of a weight beside its exponent: exp2 itself, the sum's share, the merge of two parts
)
SUM_ROUNDINGS = 8.0  # of a sum beside its terms': decoding, scaling, rescaling, the division by the weights' sum
LOWEST = -1e30  # a float mask of less hides a token, unless all are hidden so: then all weigh alike
INTEGER_STEPS = 16383.0  # of coefficients that the C kernel rounds to integers of 15 bits


@dataclass(frozen=True)
class Rounding:
    """Where a kernel rounds.

    Attributes:
        result: dtype of the result.
        operands: dtype that queries, keys, values and weights are rounded to before they are multiplied.
        sums: dtype that products are added up in.
        apart: codes and offsets are summed apart, so that terms may be larger than the numbers.
        integers: coefficients of codes are rounded to integers of 15 bits of the largest one.
    """

    result: torch.dtype
    operands: torch.dtype = torch.float32
    sums: torch.dtype = torch.float32
    apart: bool = True
    integers: bool = False

    @classmethod
    def of(cls, kernel: str, dtype: torch.dtype, integers: bool = False) -> "Rounding":
        """Return where the kernel of that name (see dispatch.py) rounds for queries of `dtype`.

        Args:
            integers: the C kernel rounds coefficients of codes to integers where queries have 16 bits; pages of latents are decoded.
        """
        if kernel == "c":
            return cls(dtype, integers=integers and dtype != torch.float32)
        if kernel == "reference":
            own = torch.promote_types(dtype, torch.float32)  # fp32 at least
            return cls(dtype, operands=own, sums=own, apart=False)
        return cls(dtype, operands=dtype)  # Triton's


@dataclass(frozen=True)
class Tokens:
    """Keys or values of one row in order, as they were decoded.

    Attributes:
        numbers: [.., tokens, head_dim], code * scale + offset.
        codes: the same shape, code * scale: kernels may sum it apart from the offsets.
        rotated: whether codes stand for rotated numbers, which kernels may sum before they rotate them back.
    """

    numbers: torch.Tensor
    codes: torch.Tensor
    rotated: bool = False

    @property
    def offsets(self) -> torch.Tensor:
        """Return what is added to the codes: [.., tokens, head_dim]."""
        return self.numbers - self.codes

    def sizes(self, apart: bool) -> torch.Tensor:
        """Return the size of the terms that a kernel sums, [.., tokens, head_dim]: |code * scale| + |offset|, or of their sum."""
        return self.codes.abs() + self.offsets.abs() if apart else self.numbers.abs()

    def double(self, head: int) -> "Tokens":
        """Return the tokens of one head in fp64."""
        return Tokens(self.numbers[head].double(), self.codes[head].double(), self.rotated)

    def as_stored(self) -> "Tokens":
        """Return rotated tokens as they were before they were rotated back."""
        return Tokens(rotate(self.numbers), rotate(self.codes))

    def beside(self, others: "Tokens") -> "Tokens":
        """Return the channels of these and of `others` side by side."""
        numbers = torch.cat((self.numbers, others.numbers), -1)
        return Tokens(numbers, torch.cat((self.codes, others.codes), -1))


def without_offsets(
    fields: Mapping[str, torch.Tensor], side: SideSpec
) -> tuple[dict[str, torch.Tensor], SideSpec]:
    """Return fields of pages and a spec that decode to `Tokens.codes`: to code * scale alone.

    Unsigned codes around 0 have no offset in their pages, and kernels sum them as the whole numbers from 0 on that they are.

    Args:
        fields: tensors of side.fields with a leading [pages].
    """
    scheme, stored = side.scheme, dict(fields)
    if "offset" in stored:
        stored["offset"] = torch.zeros_like(stored["offset"])
    elif scheme.code == "unsigned":
        stored["offset"] = torch.zeros_like(stored["scale"])
        side = replace(side, scheme=replace(scheme, offset_group=scheme.scale_group))
    return stored, side


def unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to `dtype`."""
    return torch.finfo(dtype).eps / 2


def roundings(terms: int) -> float:
    """Return how many roundings of the largest partial sum the sum of so many terms may err by.

    Never more than one per term. Roundings have either sign, and so add up to no more than WALK * sqrt(terms) of them
    (Hoeffding's inequality: that is two standard deviations at least even if every partial sum were as large as all
    terms together; partial sums of terms of either sign are smaller by about the root of their number).

    Source: N. Higham and T. Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput.
        41(5), 2019, theorem 2.4.
    """
    return min(float(terms), WALK * math.sqrt(terms))


def attend_exactly(
    query: torch.Tensor,
    keys: Tokens,
    values: Tokens,
    scale: float,
    rounding: Rounding,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend the queries of one row to all its tokens in fp64, and bound what rounding may change in the result.

        score error <= u * (roundings(head_dim) + ..) * scale * sum |q| |k|      u: unit of the sums
        error       <= sum w * (score error) * (|v| + |out|) + u * (roundings(tokens) + ..) * sum w |v| + half an ulp

    with the sizes of terms for |k| and |v|, and the roundings of operands beside those of sums.

    Args:
        query: [num_heads, q_len, key_dim], any dtype.
        keys, values: of num_kv_heads, which divides num_heads; fp32 or fp64.
        scale: factor of the scores.
        bias: [num_heads or 1, q_len, tokens], added to the scores; -inf hides a token.
        softcap: bound of the scores, or None.
        sink_logits: [num_heads], an extra logit in the softmax's denominator, or None.
    Returns: (result, largest error), [num_heads, q_len, value_dim], fp64. A query that sees no token gives zeros, which
        no rounding changes. One kv head at a time is computed, to bound the temporaries.
    """
    heads, kv_heads = query.shape[0], keys.numbers.shape[0]
    group = heads // kv_heads
    outs, bounds = [], []
    for head in range(kv_heads):
        own = slice(head * group, (head + 1) * group)
        row = _Row(
            query[own].double(),
            keys.double(head),
            values.double(head),
            scale,
            rounding,
        )
        some = None if bias is None else (bias if bias.shape[0] == 1 else bias[own]).double()
        sinks = None if sink_logits is None else sink_logits[own].double()
        out, bound = row.attend(some, softcap, sinks)
        outs.append(out)
        bounds.append(bound)
    return torch.cat(outs), torch.cat(bounds)


@dataclass(frozen=True)
class _Row:
    """The queries [group, q_len, key_dim] and tokens [tokens, head_dim] of one kv head, in fp64."""

    query: torch.Tensor
    keys: Tokens
    values: Tokens
    scale: float
    rounding: Rounding

    def attend(
        self,
        bias: torch.Tensor | None,
        softcap: float | None,
        sink_logits: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (result, largest error), [group, q_len, value_dim]."""
        u = unit(self.rounding.sums)
        scores = self.query @ self.keys.numbers.T * self.scale
        errors = self._score_errors()  # [group, q_len, tokens]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
            errors = errors + 4 * u * softcap
        if bias is not None:
            # beside the lowest number of a dtype a score vanishes, here as in every kernel
            errors = errors + unit(self.rounding.operands) * bias.abs()
            errors = errors.masked_fill(bias < LOWEST, 0.0)
            scores = scores + bias
        if sink_logits is not None:
            sink = sink_logits[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, sink], -1)
            errors = torch.cat([errors, torch.zeros_like(sink)], -1)
        count = self.keys.numbers.shape[0]
        best = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True)
        best = torch.where(best == float("-inf"), 0.0, best)
        weights = torch.exp(scores - best)
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total == 0, 1.0, total)
        seen = weights > 0
        # a score and the largest one are rounded before their difference is, in units of log2(e) perhaps
        size = torch.where(best < LOWEST, 0.0, 2 * best.abs())
        reach = torch.where(seen, (scores - best).abs() + size, 0.0)
        errors = torch.expm1(errors + u * (2 * reach + EXP_ROUNDINGS))
        # a weight below the smallest normal number may become nothing
        lost = torch.finfo(self.rounding.sums).smallest_normal
        moved = torch.where(seen, weights * errors + lost, 0.0)
        weights = weights[..., :count]
        out = weights @ self.values.numbers
        bound = moved[..., :count] @ self.values.numbers.abs()
        bound = bound + out.abs() * moved.sum(-1, keepdim=True) + self._sum_errors(weights)
        bound = bound + unit(self.rounding.result) * (out.abs() + bound)
        # below the smallest normal number of a dtype its steps are equal
        kind = torch.finfo(self.rounding.result)
        return out, torch.where(total > 0, bound + kind.smallest_normal * kind.eps, 0.0)

    def _score_errors(self) -> torch.Tensor:
        """Return what products of queries and keys, in sums of head_dim terms, may err by."""
        query, rounding = self.query.abs(), self.rounding
        sizes = self.keys.sizes(rounding.apart)
        dim = query.shape[-1]
        terms = query @ sizes.T  # [group, q_len, tokens]
        errors = unit(rounding.sums) * (roundings(dim) + SUM_ROUNDINGS) * terms
        if rounding.operands != rounding.sums:
            # independent errors of both operands of each product, and of products that have become one
            spread = (query.square() @ sizes.square().T).sqrt()
            errors = errors + 3 * unit(rounding.operands) * torch.minimum(terms, WALK * spread)
        if rounding.integers and sizes.numel():
            largest = (query * sizes.amax(0)).amax(-1, keepdim=True)
            errors = errors + roundings(dim) * largest / (2 * INTEGER_STEPS)
        return errors * abs(self.scale)

    def _sum_errors(self, weights: torch.Tensor) -> torch.Tensor:
        """Return what the sums over values, weighted by `weights` [group, q_len, tokens], may err by."""
        rounding = self.rounding
        sizes = self.values.sizes(rounding.apart)
        count = sizes.shape[0]
        terms = weights @ sizes
        errors = unit(rounding.sums) * (roundings(count) + SUM_ROUNDINGS) * terms
        if rounding.operands != rounding.sums:
            spread = (weights.square() @ sizes.square()).sqrt()
            errors = errors + 3 * unit(rounding.operands) * torch.minimum(terms, WALK * spread)
            errors = errors + unit(rounding.operands) * terms  # of the parts that are merged
        if rounding.integers and sizes.numel():
            largest = weights.amax(-1, keepdim=True) * sizes.amax(0)
            errors = errors + roundings(count) * largest / (2 * INTEGER_STEPS)
        return errors + self._rotation_errors(weights) if self.values.rotated else errors

    def _rotation_errors(self, weights: torch.Tensor) -> torch.Tensor:
        """Return what rotating values back adds to the errors of their sums: before the sum or behind it.

        The roundings of a sum in each rotated channel are independent, and all channels of a block reach each of its
        results with a sign of their own. Each stage of the transform rounds sums that are no larger than all terms together.
        Errors of weights are those of the plain sum, since the transform is linear.
        """
        dim = self.values.numbers.shape[-1]
        size = block(dim)
        u, count = unit(self.rounding.sums), self.values.numbers.shape[0]
        terms = weights @ self.values.as_stored().sizes(True)  # [group, q_len, head_dim]
        blocks = terms.unflatten(-1, (dim // size, size))
        whole = blocks.sum(-1, keepdim=True)
        apart = torch.minimum(whole, WALK * blocks.square().sum(-1, keepdim=True).sqrt())
        errors = u * ((roundings(count) + SUM_ROUNDINGS) * apart + size.bit_length() * whole)
        return errors.expand_as(blocks).flatten(-2)


# in a row on the longest way through a tiny model: 4 layers of 7 products of at most 96 terms, weights of at most 300 tokens, the head
TERMS = 4 * (7 * 96 + 300) + 96


def allowed(expected: torch.Tensor, terms: int = TERMS) -> float:
    """Return how far apart two results may be that add up `terms` numbers in two orders, each as large as the largest result.

    Both err by up to roundings(terms) halves of an ulp. Sums that end small although their terms are large would err by more;
    logits, weights of attention and its results have no such terms.
    """
    numbers = expected.detach()
    finite = numbers[numbers.isfinite() & (numbers.abs() < 1e6)].double()
    size = max(1.0, float(finite.abs().max())) if finite.numel() else 1.0
    largest = max(
        unit(expected.dtype), unit(torch.float32)
    )  # what is compared in fp64 was computed in fp32
    return 2 * roundings(terms) * largest * size


def assert_close(found: torch.Tensor, expected: torch.Tensor, terms: int = TERMS) -> None:
    """Raise AssertionError where two results differ by more than rounding may move both."""
    torch.testing.assert_close(found, expected, rtol=0, atol=allowed(expected, terms))
