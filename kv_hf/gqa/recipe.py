"""The settings of a calibrated method: its solutions, the fits behind them, and their strength."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """Settings of a calibrated merge; the ablations of docs/gqa_methods.md change one at a time.

    Attributes:
        keys, values: "mean", "align" (turned, then the mean) or "svd" (the best of one head's size).
        score_sweeps: rounds of fitting queries and keys in turn to the original's scores; 0 for none.
        score_steps: steps of conjugate gradients of each fit.
        score_ridge: weight of the pull to the merged queries and keys.
        importance: weigh a token's scores by what they can change in the layer's output.
        output_sweeps: rounds of fitting outputs and values in turn to the original's output; 0 fits outputs only.
        refit: fit outputs at all.
        ridge: weight of the pull to the merged outputs and values.
        regroup: merge heads that lose little by it, not neighbours.
        carry: have outputs make up for the distance between the streams.
        level: count every token alike, whatever the size of its hidden state (the next norm divides by it).
    """

    keys: str
    values: str
    score_sweeps: int = 1
    score_steps: int = 4
    score_ridge: float = 0.01
    importance: bool = True
    output_sweeps: int = 2
    refit: bool = True
    ridge: float = 0.01
    carry: bool = True
    regroup: bool = True
    level: bool = True


RECIPES = {
    "align": Recipe("align", "align", score_sweeps=0, output_sweeps=0, refit=False, regroup=False),
    "svd": Recipe("svd", "svd"),
}
