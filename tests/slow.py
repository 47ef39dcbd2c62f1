"""Parameters of tests, of which some run in `make test-all` only."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(quick: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases for parametrize, those that are not in `quick` with the slow marker; a tuple is several arguments."""
    quick = list(quick)
    return [one if one in quick else slow(one) for one in cases]


def slow(case: Any) -> Any:
    """Return a case for parametrize with the slow marker; a tuple is several arguments."""
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
