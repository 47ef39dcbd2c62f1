"""Sums over contexts that are never formed: from probabilities and values, window by window.

A context is C_h = P_h V, with P_h [tokens, tokens] of a window and V the stacked old values of the head's group. With m heads
that become one, C has m times as many numbers as an output, and sums of C C^T (m times a layer's width) squared; P and V stay
as they are. Products are in float32 within a window, their sums over windows in float64.
"""

import torch


class OutputFactors:
    """The sums of refit_outputs.Sums, computed from P and V.

    Args:
        heads: query heads; wide: numbers of a head's context.
    """

    def __init__(self, heads: int, wide: int) -> None:
        self.heads, self.wide, self.count = heads, wide, 0
        self.windows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.energy = 0.0

    def add(self, weights: torch.Tensor, values: torch.Tensor, target: torch.Tensor) -> None:
        """Add a window: P [heads, tokens, tokens], V [groups, tokens, wide] and targets [tokens, out], in float32."""
        self.windows.append((weights, values, target))
        self.energy += float(target.double().square().sum())
        self.count += len(target)

    def squares(self, group_of: torch.Tensor, groups: int) -> torch.Tensor:
        """Return the sums [groups, wide, wide] of Sums.squares."""
        found = torch.zeros(groups, self.wide, self.wide, dtype=torch.float64)
        for weights, values, _ in self.windows:
            for group in range(groups):
                reads = torch.zeros_like(weights[0])
                for h in members(group_of, group):
                    reads += weights[h].T @ weights[h]
                found[group] += values[group].T @ (reads @ values[group])
        return found

    def merged(
        self, down: torch.Tensor, group_of: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums [heads * dim, heads * dim] and [heads * dim, out] of Sums.merged; `down` is [groups, dim, wide]."""
        size = self.heads * down.shape[1]
        square = torch.zeros(size, size, dtype=torch.float64)
        cross = torch.zeros(size, self.windows[0][2].shape[1], dtype=torch.float64)
        for weights, values, target in self.windows:
            flat = _contexts(weights, values, down, group_of)
            square += flat.T @ flat
            cross += flat.T @ target
        return square, cross

    def spread(
        self, down: torch.Tensor, gram: torch.Tensor, group_of: torch.Tensor
    ) -> torch.Tensor:
        """Return the sums [groups, dim, wide] of Sums.spread; `gram` is [heads * dim, heads * dim]."""
        found = torch.zeros_like(down)
        for weights, values, _ in self.windows:
            flat = _contexts(weights, values, down, group_of)
            self._collect(found, flat @ gram.to(flat.dtype), weights, values, group_of)
        return found

    def goal(self, output: torch.Tensor, group_of: torch.Tensor, groups: int) -> torch.Tensor:
        """Return the sums [groups, dim, wide] of Sums.goal; `output` is [out, heads * dim]."""
        dim = output.shape[1] // self.heads
        found = torch.zeros(groups, dim, self.wide, dtype=torch.float64)
        for weights, values, target in self.windows:
            self._collect(found, target @ output.to(target.dtype), weights, values, group_of)
        return found

    def _collect(
        self, found: torch.Tensor, flat: torch.Tensor, weights: torch.Tensor, values: torch.Tensor,
        group_of: torch.Tensor,
    ) -> None:  # fmt: skip
        """Add (flat_h)^T C_h to the group of each head; flat is [tokens, heads * dim]."""
        each = flat.unflatten(1, (self.heads, -1))
        for group in range(len(found)):
            back = torch.zeros_like(each[:, 0])
            for h in members(group_of, group):
                back += weights[h].T @ each[:, h]
            found[group] += back.T @ values[group]


def members(group_of: torch.Tensor, group: int) -> list[int]:
    """Return the query heads of a group; `group_of` is [heads]."""
    return [h for h, of in enumerate(group_of.tolist()) if of == group]


def _contexts(
    weights: torch.Tensor, values: torch.Tensor, down: torch.Tensor, group_of: torch.Tensor
) -> torch.Tensor:
    """Return X_h = A_g C_h of all heads, [tokens, heads * dim]."""
    new = values @ down.mT.to(values.dtype)  # [groups, tokens, dim]
    return torch.cat([p @ new[g] for p, g in zip(weights, group_of.tolist(), strict=True)], 1)
