"""Metrics of functions as values: what comes of several subtasks, and of one micro-batch behind the other."""

from __future__ import annotations

import sys

import pytest

from flinkish_spark.protocol.user_metrics import (
    MOST_USER_METRICS,
    UserMetric,
    UserMetricKind,
    merge_subtasks,
    update_metrics,
)

COUNTER, METER = UserMetricKind.COUNTER, UserMetricKind.METER
GAUGE, DISTRIBUTION = UserMetricKind.GAUGE, UserMetricKind.DISTRIBUTION


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_are_finite(number: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        UserMetric(GAUGE, 1, number)
    for count in (1.5, True):
        with pytest.raises(ValueError, match="count"):
            UserMetric(COUNTER, count)  # type: ignore[arg-type]
    huge = UserMetric(DISTRIBUTION, 1, sys.float_info.max)
    assert huge.merge(huge) == UserMetric(DISTRIBUTION, 2, sys.float_info.max)


def test_subtasks_together() -> None:
    one, other = UserMetric(GAUGE, 1, 3.0, 3.0, 3.0), UserMetric(GAUGE, 1, 5.0, 5.0, 5.0)
    nothing = UserMetric(DISTRIBUTION, 0)
    found = merge_subtasks(
        [
            ("a", "size", one),
            ("a", "size", other),
            ("a", "n", UserMetric(COUNTER, -2)),
            ("a", "n", UserMetric(METER, 9)),
            ("b", "n", nothing),
            ("b", "n", nothing),
        ]
    )
    assert found["a"]["size"] == UserMetric(GAUGE, 2, 8.0, 3.0, 5.0) and found["a"]["size"].mean == 4.0
    # Of two kinds by one name the first is kept.
    assert found["a"]["n"] == UserMetric(COUNTER, -2)
    assert found["b"]["n"].mean is None


def test_a_counter_goes_on_and_a_gauge_begins_anew() -> None:
    before = {"a": {"n": UserMetric(COUNTER, 2), "size": UserMetric(GAUGE, 2, 8.0, 3.0, 5.0)}}
    batch = {"a": {"n": UserMetric(COUNTER, 1), "size": UserMetric(GAUGE, 1, 1.0, 1.0, 1.0)}}
    found = update_metrics(before, batch)
    assert found == {"a": {"n": UserMetric(COUNTER, 3), "size": UserMetric(GAUGE, 1, 1.0, 1.0, 1.0)}}
    assert before["a"]["n"].count == 2
    # A program that was changed may have another kind by the same name.
    assert update_metrics(before, {"a": {"n": UserMetric(METER, 7)}})["a"]["n"] == UserMetric(METER, 7)


def test_names_made_of_data_have_an_end() -> None:
    one = UserMetric(COUNTER, 1)
    full = update_metrics({}, {"a": {f"user {n}": one for n in range(MOST_USER_METRICS + 20)}})
    assert len(full["a"]) == MOST_USER_METRICS
    again = update_metrics(full, {"a": {"user 0": one}, "b": {"new": one}})
    assert again["a"]["user 0"].count == 2 and "b" not in again
