from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pannier.planner import Distribution


@given(st.lists(st.integers(0, 50), min_size=1, max_size=300))
@settings(deadline=None)
def test_values_and_their_counts_have_one_distribution(values: list[int]) -> None:
    """A percentile is a value, the smallest that so many of all don't exceed."""
    found = Distribution.of(array("d", values))
    counted = Distribution.of_counts(Counter(values))
    assert counted == found
    assert found.mean == pytest.approx(sum(values) / len(values))
    for share, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert sum(each <= value for each in values) * 100 >= share * len(values)
        assert sum(each < value for each in values) * 100 < share * len(values)


def test_no_values_are_no_error() -> None:
    """Nothing happened, so everything is 0."""
    assert Distribution.of(array("d")) == Distribution.of_counts({}) == Distribution()
