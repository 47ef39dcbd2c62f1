"""Queries and keys of a converted layer, fitted to the original's attention: weighted least squares on scores.

To second order, the divergence of two softmaxes is half the variance of the scores' difference under the probabilities. So
E_t w_t Var_p(s'_t - s_t) is made small, in the weights of all queries (keys given) or of all keys (queries given): linear
problems, solved by conjugate gradients without ever forming their matrices.
"""

from dataclasses import dataclass

import torch

from .refit_outputs import conjugate_gradients
from .rotary import Rotary
from .taps import Tap


@dataclass
class ScoreData:
    """The data that scores are fitted on, window by window.

    Attributes:
        inputs: [windows, tokens, inputs] of the projections, with a last one of ones where they have biases.
        taps: of the original, one per window.
        importance: [windows, heads, tokens], the cost of an error in a token's probabilities.
        kv_of, group_of: [heads], the original and the new kv head of each query head.
        rotary: of the layer.
    """

    inputs: torch.Tensor
    taps: list[Tap]
    importance: torch.Tensor
    kv_of: torch.Tensor
    group_of: torch.Tensor
    rotary: Rotary

    def project(self, window: int, weight: torch.Tensor, kind: str) -> torch.Tensor:
        """Return [heads, tokens, dim] of weights [heads, dim, inputs], behind the rotation."""
        return self.rotary.rotate(torch.einsum("ti,hdi->htd", self.inputs[window], weight), kind)

    def collect(self, window: int, grad: torch.Tensor, kind: str) -> torch.Tensor:
        """Return the adjoint of `project`: [heads, dim, inputs] of gradients [heads, tokens, dim]."""
        back = self.rotary.rotate(grad, kind, back=True)
        return torch.einsum("htd,ti->hdi", back, self.inputs[window])

    def curve(self, window: int, scores: torch.Tensor) -> torch.Tensor:
        """Return half the gradient of the weighted variance of score differences [heads, tokens, tokens]."""
        p = self.taps[window].weights[0]
        centred = scores - (p * scores).sum(-1, keepdim=True)
        return p * centred * (self.taps[window].scaling ** 2 * self.importance[window][..., None])

    def target(self, window: int) -> torch.Tensor:
        """Return the original's scores without their scale: [heads, tokens, tokens]."""
        return self.taps[window].query[0] @ self.taps[window].key[0][self.kv_of].mT


def fit_queries(
    data: ScoreData,
    query: torch.Tensor,
    key: torch.Tensor,
    ridge: float,
    steps: int,
    unbiased: bool = False,
) -> torch.Tensor:
    """Return query weights [heads, dim, inputs] that fit better, given key weights [groups, dim, inputs]."""
    windows = range(len(data.inputs))
    keys = [data.project(w, key, "key")[data.group_of] for w in windows]

    def grad(scores: torch.Tensor, w: int) -> torch.Tensor:
        return data.collect(w, data.curve(w, scores) @ keys[w], "query")

    def apply(x: torch.Tensor) -> torch.Tensor:
        found = sum(grad(data.project(w, x, "query") @ keys[w].mT, w) for w in windows)
        return found + pull * x

    width = torch.zeros(query.shape[:2])
    for w in windows:
        tap = data.taps[w]
        mean = tap.weights[0] @ keys[w].square() - (tap.weights[0] @ keys[w]).square()
        width += tap.scaling**2 * (mean.clamp(min=0) * data.importance[w][..., None]).mean(1)
    pull, precondition = _precondition(data, width, ridge)
    rest = sum(
        grad(data.target(w) - data.project(w, query, "query") @ keys[w].mT, w) for w in windows
    )
    return conjugate_gradients(apply, rest, query, precondition, steps, unbiased)


def fit_keys(
    data: ScoreData,
    query: torch.Tensor,
    key: torch.Tensor,
    ridge: float,
    steps: int,
    unbiased: bool = False,
) -> torch.Tensor:
    """Return key weights [groups, dim, inputs] that fit better, given query weights [heads, dim, inputs]."""
    windows = range(len(data.inputs))
    queries = [data.project(w, query, "query") for w in windows]

    def grad(scores: torch.Tensor, w: int) -> torch.Tensor:
        each = data.curve(w, scores).mT @ queries[w]
        group = torch.zeros(len(key), *each.shape[1:]).index_add_(0, data.group_of, each)
        return data.collect(w, group, "key")

    def apply(x: torch.Tensor) -> torch.Tensor:
        found = sum(
            grad(queries[w] @ data.project(w, x, "key")[data.group_of].mT, w) for w in windows
        )
        return found + pull * x

    width = torch.zeros(key.shape[:2])
    for w in windows:
        size = data.taps[w].scaling ** 2 * (
            queries[w].square() * data.importance[w][..., None]
        ).mean(1)
        width.index_add_(0, data.group_of, size)
    pull, precondition = _precondition(data, width, ridge)
    rest = sum(
        grad(data.target(w) - queries[w] @ data.project(w, key, "key")[data.group_of].mT, w)
        for w in windows
    )
    return conjugate_gradients(apply, rest, key, precondition, steps, unbiased)


def _precondition(data: ScoreData, width: torch.Tensor, ridge: float):  # type: ignore[no-untyped-def]
    """Return the pull to the start [heads, 1, 1] and an inverse of (width x inputs' moments + pull), roughly."""
    flat = data.inputs.flatten(0, 1)
    square = flat.T @ flat
    for a, b in data.rotary.planes.tolist():
        width[:, a] = width[:, b] = (width[:, a] + width[:, b]) / 2
    size = width.mean(1, keepdim=True)
    width = width.clamp(min=1e-2 * float(size.mean()) + 1e-20)
    level = float(square.diagonal().mean())
    pull = (ridge * size * level)[..., None]
    values, vectors = torch.linalg.eigh(square.double())
    values, vectors = values.clamp(min=0).float(), vectors.float()
    scale = width[..., None] * values + pull + 1e-4 * width[..., None] * level

    def precondition(rest: torch.Tensor) -> torch.Tensor:
        return (rest @ vectors / scale) @ vectors.T

    return pull, precondition


def score_loss(data: ScoreData, query: torch.Tensor, key: torch.Tensor) -> float:
    """Return the weighted variance of the scores' differences, per token and head.

    Args:
        query: weights [heads, dim, inputs]; key: weights [groups, dim, inputs].
    """
    total, count = 0.0, 0
    for w in range(len(data.inputs)):
        scores = data.project(w, query, "query") @ data.project(w, key, "key")[data.group_of].mT
        difference = scores - data.target(w)
        total += float((difference * data.curve(w, difference)).sum())
        count += data.importance[w].numel()
    return total / count
