"""The Pareto front and the comparison with peers, against brute force."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_hf.evaluation.report.frontier import Point, dominated_by, pareto_front, peer_ratio

# few values, so that ties and equal points are common
NUMBERS = st.integers(0, 5).map(float)
POINTS = st.lists(st.builds(Point, st.sampled_from("abcdef"), NUMBERS, NUMBERS), max_size=9)


def dominates(one, other):
    no_worse = one.cost <= other.cost and one.loss <= other.loss
    return no_worse and (one.cost < other.cost or one.loss < other.loss)


@given(POINTS)
def test_pareto_front_is_what_nothing_dominates(points):
    wanted = [p for p in points if not any(dominates(other, p) for other in points)]
    front = pareto_front(points)
    assert sorted(front, key=str) == sorted(wanted, key=str)
    assert [p.cost for p in front] == sorted(p.cost for p in front)


@given(POINTS, st.randoms())
def test_pareto_front_does_not_depend_on_the_order(points, random):
    shuffled = list(points)
    random.shuffle(shuffled)
    assert pareto_front(shuffled) == pareto_front(points)


@given(POINTS)
def test_dominated_by_names_all_that_dominate_and_the_least_loss_first(points):
    front = pareto_front(points)
    for point in points:
        found = dominated_by(point, points)
        assert sorted(found, key=str) == sorted((p for p in points if dominates(p, point)), key=str)
        assert (found == []) == (point in front)
        assert [p.loss for p in found] == sorted(p.loss for p in found)


def test_pareto_front_keeps_equal_points_together():
    twins = [Point("a", 4.0, 0.1), Point("b", 4.0, 0.1)]
    assert pareto_front([*twins, Point("c", 4.0, 0.2), Point("d", 5.0, 0.1)]) == twins


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["cost", "loss"])
def test_points_that_are_not_finite_are_refused_by_name(field, value):
    good = Point("good", 1.0, 1.0)
    bad = Point("bad", **{"cost": 1.0, "loss": 1.0, field: value})
    for call in (
        lambda: pareto_front([good, bad]),
        lambda: dominated_by(good, [bad]),
        lambda: dominated_by(bad, [good]),
        lambda: peer_ratio([good], [bad]),
        lambda: peer_ratio([bad], [good]),
    ):
        with pytest.raises(ValueError, match=f"{field} of 'bad' must be a finite number"):
            call()


@given(POINTS, POINTS, st.sampled_from([0.25, 0.5, 1.0]))
def test_peer_ratio_takes_the_least_loss_of_those_that_cost_no_more(ours, peers, limit):
    found = peer_ratio(ours, peers, limit)
    assert sorted((each.peer for each in found), key=str) == sorted(peers, key=str)
    for each in found:
        fits = [point for point in ours if point.cost <= each.peer.cost]
        if not fits:
            assert (each.best, each.ratio, each.passed) == (None, None, False)
            continue
        assert each.best in fits
        least = min(point.loss for point in fits)
        assert each.best.loss == least
        assert each.passed == (least <= limit * each.peer.loss)
        assert each.ratio == (least / each.peer.loss if each.peer.loss else None)


def test_peer_ratio_refuses_a_negative_loss():
    with pytest.raises(ValueError, match="loss of 'odd' must be 0 or more, got -1.0"):
        peer_ratio([Point("odd", 1.0, -1.0)], [])
