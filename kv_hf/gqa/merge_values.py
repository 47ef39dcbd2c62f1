"""Merging a layer's values, and the outputs that read them: solved group by group, then fitted together."""

from collections.abc import Callable

import torch

from .recipe import Recipe
from .refit_factors import OutputFactors
from .refit_outputs import OutputMoments, fit_outputs, fit_values, mean_squares, output_loss
from .shared_rank import best_common, procrustes_mean
from .taps import Tap

Run = Callable[[int], tuple[Tap, torch.Tensor, torch.Tensor]]


def holds_factors(heads: int, wide: int, windows: int, tokens: int) -> bool:
    """Return whether probabilities of `windows` of `tokens` take less memory than sums of C C^T (refit_factors.py)."""
    return heads * windows * tokens**2 * 4 < (heads * wide) ** 2 * 8


def merge_values(
    run: Run,
    count: int,
    readers: torch.Tensor,
    outputs: torch.Tensor,
    kv_of: torch.Tensor,
    new_of: torch.Tensor,
    recipe: Recipe,
    figures: dict[str, float],
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the values' maps [groups, dim, merged * dim] and the outputs [out, heads * dim] that go with them.

    Args:
        run: index of a window -> attention with the new keys and all old values: (what it saw, targets [tokens, out], what
            each token's rows are multiplied by [tokens]).
        count: windows.
        readers: [kv heads, dim, dim], O^T O of the query heads of each.
        outputs: [out, heads, dim], the old ones.
        kv_of, new_of: old kv head of each query head, new one of each old one.
        figures: gets what the merge and the fits miss.
    Returns: None where there is nothing to fit: no values, or nothing that reads them.
    """
    found = sum_windows(run, count, kv_of, new_of)
    group_of = new_of[kv_of]
    groups = int(new_of.max()) + 1
    m = len(new_of) // groups
    grams = mean_squares(found, group_of, groups)
    if not readers.any() or not grams.any():
        return None
    solve = best_common if recipe.values == "svd" else procrustes_mean
    solved = [solve(grams[g], readers[g * m : (g + 1) * m]) for g in range(groups)]
    del grams
    down = torch.stack([down for down, _ in solved])
    up = torch.cat([up for _, up in solved])[kv_of]
    output = torch.einsum("ohd,hde->ohe", outputs, up).flatten(1)
    figures["output_loss_merged"] = output_loss(found, down, output, group_of)
    if recipe.refit:
        for _ in range(recipe.output_sweeps):
            output = fit_outputs(found, down, output, group_of, recipe.ridge)
            down = fit_values(found, down, output, group_of, recipe.ridge)
        output = fit_outputs(found, down, output, group_of, recipe.ridge)
        figures["output_loss"] = output_loss(found, down, output, group_of)
    return down, output


def sum_windows(
    run: Run, count: int, kv_of: torch.Tensor, new_of: torch.Tensor
) -> OutputMoments | OutputFactors:
    """Return the sums over all tokens, in the form that takes less memory; kv_of [heads] and new_of [kv heads] as of `merge_values`."""
    heads, groups = len(kv_of), int(new_of.max()) + 1
    group_of = new_of[kv_of]
    found: OutputMoments | OutputFactors | None = None
    for i in range(count):
        tap, target, level = run(i)
        value = tap.value[0].unflatten(0, (groups, -1)).transpose(1, 2).flatten(2)
        weights, target = tap.weights[0] * level[:, None], target * level[:, None]
        if found is None:
            tokens, wide = value.shape[1:]
            if holds_factors(heads, wide, count, tokens):
                found = OutputFactors(heads, wide)
            else:
                found = OutputMoments(heads, wide, target.shape[1])
        if isinstance(found, OutputFactors):
            found.add(weights, value.contiguous(), target)
        else:
            contexts = (tap.weights[0] @ value[group_of]).transpose(0, 1)
            found.add(contexts * level[:, None, None], target)
    assert found is not None
    return found
