"""Lines over time: what a slot makes of its points, and how long and how large they become."""

from __future__ import annotations

import json

from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.series import (
    HOUR_SLOT_MS,
    HOUR_SLOTS,
    WEEK_SLOT_MS,
    WEEK_SLOTS,
    Series,
    SeriesPoint,
)

NOW_MS = 1_800_000_000_000
MOST = (1 << 63) - 1


def test_points_of_a_slot_are_one() -> None:
    at_ms = NOW_MS - NOW_MS % HOUR_SLOT_MS
    series = Series()
    for point in (
        SeriesPoint(at_ms + 10, 1_000, 100, 50, 7, 4, 300),
        SeriesPoint(at_ms + 20, starts=1),
        SeriesPoint(at_ms + HOUR_SLOT_MS - 1, 3_000, 100, None, 5, 5, 200),
    ):
        series = series.add(point)
    # Counts are summed up; of a lag and of a duration the highest stays.
    assert series.hour == (SeriesPoint(at_ms, 4_000, 200, 50, 7, 5, 300, 1),)
    (point,) = series.hour
    assert point.to_rate(point.read) == 50.0 and point.to_rate(None) is None
    assert SeriesPoint(at_ms, starts=1).to_rate(3) is None
    (week,) = series.week
    assert week.at_ms == at_ms - at_ms % WEEK_SLOT_MS and week.read == 200


def test_an_hour_is_fine_and_a_week_is_coarse_and_both_end() -> None:
    series = Series()
    for step in range(8 * 24 * 60):
        series = series.add(SeriesPoint(NOW_MS + step * 60_000, 60_000, 60))
    assert len(series.hour) == 60 and len(series.week) == WEEK_SLOTS
    assert series.week[-1].at_ms - series.week[0].at_ms < 7 * 24 * 3_600_000
    assert {one.to_rate(one.read) for one in (*series.hour, *series.week)} == {1.0}
    # A job that was down for long begins anew.
    later = series.add(SeriesPoint(NOW_MS + 30 * 24 * 3_600_000, starts=1))
    assert len(later.hour) == len(later.week) == 1


def test_a_clock_that_was_set_back_leaves_no_future() -> None:
    series = (
        Series().add(SeriesPoint(NOW_MS + 10 * 365 * 24 * 3_600_000, 1, 1)).add(SeriesPoint(NOW_MS, 1, 2))
    )
    assert [one.read for one in series.hour] == [one.read for one in series.week] == [2]


def test_the_stored_form_is_bounded() -> None:
    hour, week = (
        tuple(SeriesPoint(MOST - slot, *[MOST] * 7) for slot in range(slots))
        for slots in (HOUR_SLOTS, WEEK_SLOTS)
    )
    assert len(seal("series", Series(hour, week).to_json())) < 200_000
    # As a job of 10,000 rows a second fills it.
    series, week_ms, hour_ms = Series(), 7 * 24 * 3_600_000, 3_600_000
    steps = (*range(0, week_ms - hour_ms, WEEK_SLOT_MS), *range(week_ms - hour_ms, week_ms, HOUR_SLOT_MS))
    for step_ms in steps:
        point = SeriesPoint(NOW_MS + step_ms, 10_000, 100_000, 90_000, 70_000, 9_000, 4_000)
        series = series.add(point)
    text = json.dumps(series.to_json(), separators=(",", ":"))
    assert (len(series.hour), len(series.week)) == (HOUR_SLOTS, WEEK_SLOTS) and len(text) < 70_000
    assert Series.from_json(json.loads(text)) == series
