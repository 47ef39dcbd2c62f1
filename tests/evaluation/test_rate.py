"""Rates of few questions: the interval is Wilson's, and never empty."""

import math

import pytest

from kv_hf.evaluation.retrieval.rate import Rate


@pytest.mark.parametrize(
    ("found", "asked", "low", "high"),
    [
        # of tables of Wilson's interval, three digits
        (20, 20, 0.839, 1.0),
        (0, 20, 0.0, 0.161),
        (10, 20, 0.299, 0.701),
        (81, 263, 0.255, 0.366),
    ],
)
def test_interval_is_wilsons(found, asked, low, high):
    assert Rate(found, asked).interval() == pytest.approx((low, high), abs=6e-4)


def test_interval_ends_where_the_share_is_just_credible():
    """Wilson's ends are the shares p with |found / asked - p| = 1.96 standard errors of p."""
    rate = Rate(13, 20)
    for end in rate.interval():
        error = math.sqrt(end * (1 - end) / rate.asked)
        assert abs(rate.share - end) / error == pytest.approx(1.959964, rel=1e-9)


def test_rate_counts_whole_answers_alone():
    assert Rate.of([1.0, 0.5, 0.0, 1.0]) == Rate(2, 4)
