"""The caches that no other beats: the Pareto front of loss against cost, and the comparison with peers.

Knows numbers and names only; what cost and loss are is the caller's business.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

AIM = 0.25  # at a peer's bytes, our loss over its loss


@dataclass(frozen=True)
class Point:
    """A cache as two numbers, of which less is better.

    Attributes:
        cost: e.g. stored bits per element, or bytes per token.
        loss: e.g. mean KL in nats; 0 is exact.
    """

    name: str
    cost: float
    loss: float


@dataclass(frozen=True)
class PeerRatio:
    """The best of ours at a peer's cost.

    Attributes:
        best: the one of ours with the least loss among those that cost no more than the peer; None if none does.
        ratio: best.loss / peer.loss; None without `best`, or where the peer loses nothing.
        passed: the ratio is at most the limit, or neither loses anything.
    """

    peer: Point
    best: Point | None
    ratio: float | None
    passed: bool


def pareto_front(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other point dominates, by rising cost.

    A point dominates another when it is no worse in cost and in loss, and better in one of them. So equal points stay
    on the front together.

    Raises: ValueError naming a point whose cost or loss is not finite.
    """
    front: list[Point] = []
    for point in sorted(_checked(points), key=lambda point: (point.cost, point.loss, point.name)):
        last = front[-1] if front else None
        if last is None or point.loss < last.loss or _same(point, last):
            front.append(point)
    return front


def dominated_by(point: Point, points: Iterable[Point]) -> list[Point]:
    """Return those of `points` that dominate `point`, the one with the least loss first.

    Raises: ValueError naming a point whose cost or loss is not finite.
    """
    _checked([point])
    better = [
        other
        for other in _checked(points)
        if other.cost <= point.cost and other.loss <= point.loss and not _same(other, point)
    ]
    return sorted(better, key=lambda other: (other.loss, other.cost, other.name))


def peer_ratio(
    ours: Sequence[Point], peers: Sequence[Point], limit: float = AIM
) -> list[PeerRatio]:
    """Compare each peer with the best of ours that costs at most as much; peers by rising cost.

    Raises: ValueError naming a point whose cost or loss is not finite, or whose loss is negative.
    """
    for point in _checked([*ours, *peers]):
        if point.loss < 0:
            raise ValueError(f"loss of {point.name!r} must be 0 or more, got {point.loss}")
    found = []
    for peer in sorted(peers, key=lambda peer: (peer.cost, peer.name)):
        fits = [point for point in ours if point.cost <= peer.cost]
        best = min(fits, key=lambda point: (point.loss, point.cost, point.name), default=None)
        ratio = best.loss / peer.loss if best is not None and peer.loss else None
        exact = best is not None and best.loss == peer.loss == 0
        found.append(PeerRatio(peer, best, ratio, exact or (ratio is not None and ratio <= limit)))
    return found


def _same(one: Point, other: Point) -> bool:
    return one.cost == other.cost and one.loss == other.loss


def _checked(points: Iterable[Point]) -> list[Point]:
    checked = list(points)
    for point in checked:
        for name in ("cost", "loss"):
            value = getattr(point, name)
            if not math.isfinite(value):
                raise ValueError(f"{name} of {point.name!r} must be a finite number, got {value}")
    return checked
