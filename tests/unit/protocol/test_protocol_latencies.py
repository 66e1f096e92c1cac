"""Histograms of latencies, and how measurements are found among what tasks report."""

from __future__ import annotations

import json
import math
import random

import pytest

from flinkish_spark.protocol.latency import (
    FIRST_OPERATOR_REPORTER,
    SINK_REPORTER,
    SUBTASK_MASK,
    Latencies,
    LatencyGranularity,
    LatencyHistogram,
    MeasuredAt,
    Measurement,
    _find_bucket,
    _find_highest_ms,
    _find_lowest_ms,
    drop_latencies,
    find_measurements,
    place_of,
    replace_subtask,
)
from flinkish_spark.protocol.limits import MOST_MS
from flinkish_spark.protocol.records import SinkAck, TaskAck, TimeReport
from tests.support.effort import seeds

UIDS = ["sums", "tops", "orders", "clicks"]


def of(*latencies_ms: int) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for latency_ms in latencies_ms:
        histogram = histogram.add(latency_ms)
    return histogram


def test_an_empty_histogram_knows_nothing() -> None:
    nothing = LatencyHistogram()
    assert nothing.to_json() == {
        "count": 0,
        "min_ms": None,
        "mean_ms": None,
        "p50_ms": None,
        "p95_ms": None,
        "p99_ms": None,
        "max_ms": None,
    }
    assert nothing.merge(nothing) == nothing == nothing.subtract(nothing)


def test_buckets_leave_no_gap_and_are_narrow() -> None:
    begin = 0
    for number in range(1_000):
        assert _find_lowest_ms(number) == begin
        assert _find_bucket(begin) == _find_bucket(_find_highest_ms(number)) == number
        assert (_find_highest_ms(number) - begin) * 32 <= begin or begin < 64
        begin = _find_highest_ms(number) + 1
    assert begin > MOST_MS


@pytest.mark.parametrize("seed", seeds(5))
def test_quantiles_are_those_of_the_sorted_latencies_to_a_32nd(seed: int) -> None:
    chance = random.Random(seed)
    found = [int(chance.lognormvariate(6, 1.5)) for _ in range(700)]
    histogram, ordered = of(*found), sorted(found)
    assert (histogram.count, histogram.sum_ms) == (700, sum(found))
    assert (histogram.min_ms, histogram.max_ms) == (ordered[0], ordered[-1])
    assert histogram.mean_ms == pytest.approx(sum(found) / 700)
    for share in (0, 0.01, 0.5, 0.95, 0.99, 1):
        true_ms = ordered[max(1, math.ceil(share * 700)) - 1]
        told_ms = histogram.quantile_ms(share)
        assert told_ms is not None and true_ms <= told_ms <= true_ms * 33 / 32


def test_a_clock_that_is_behind_counts_as_no_latency_and_one_far_ahead_as_a_year() -> None:
    histogram = of(-5_000, MOST_MS * 10)
    assert (histogram.min_ms, histogram.max_ms, histogram.sum_ms) == (0, MOST_MS, MOST_MS)
    assert max(histogram.buckets) < 1_000


def test_merging_is_as_if_all_had_come_to_one() -> None:
    assert of(5, 900).merge(of(5, 70_000)) == of(5, 900, 5, 70_000)


def test_what_came_since_an_earlier_look_can_be_told() -> None:
    before = of(5, 900, 3_000)
    since = before.merge(of(50, 1_000)).subtract(before)
    assert (since.count, since.sum_ms, since.min_ms) == (2, 1_050, 50)
    assert since.max_ms is not None and 1_000 <= since.max_ms <= 1_032
    with pytest.raises(ValueError, match="earlier"):
        before.subtract(of(5, 5))


@pytest.mark.parametrize("share", [-0.1, 1.1, True, "0.5", float("nan")])
def test_a_share_that_is_none_is_refused(share: object) -> None:
    with pytest.raises(ValueError, match="share must be a number from 0 to 1"):
        of(5).quantile_ms(share)  # type: ignore[arg-type]


# -- by place ------------------------------------------------------------------------------------------


def measured(operator: str, latency_ms: int, source: str = "orders", subtask: int = 0) -> Measurement:
    return Measurement(MeasuredAt(operator, source, subtask), 1_000, 1_000 + latency_ms)


SEEN = Latencies().add(
    [
        measured("sums", 10),
        measured("sums", 20, subtask=1),
        measured("sums", 40, source="clicks"),
        measured("out", 60),
    ]
)


def test_each_source_operator_and_subtask_has_a_histogram() -> None:
    assert [(at.operator, at.source, at.subtask) for at in SEEN] == [
        ("out", "orders", 0),
        ("sums", "clicks", 0),
        ("sums", "orders", 0),
        ("sums", "orders", 1),
    ]
    assert SEEN[MeasuredAt("sums", "orders", 1)] == of(20)
    assert len(SEEN) == 4 and not Latencies()


def test_granularity_merges_subtasks_and_then_sources() -> None:
    assert SEEN.group_by(LatencyGranularity.SUBTASK) == SEEN
    by_operator = SEEN.group_by(LatencyGranularity.OPERATOR)
    assert by_operator[MeasuredAt("sums", "orders")] == of(10, 20)
    assert SEEN.group_by(LatencyGranularity.SINGLE)[MeasuredAt("sums")] == of(10, 20, 40) == SEEN.of("sums")
    assert SEEN.of("nobody").count == 0


def test_latencies_since_an_earlier_look_leave_out_what_stood_still() -> None:
    later = SEEN.add([measured("sums", 30), measured("new", 70)])
    assert later.subtract(SEEN).histograms == {
        MeasuredAt("sums", "orders", 0): of(30),
        MeasuredAt("new", "orders", 0): of(70),
    }
    with pytest.raises(ValueError, match="lack"):
        SEEN.subtract(later)


def test_what_metrics_get_is_json() -> None:
    first, *_ = json.loads(json.dumps(SEEN.to_json()))
    assert first["operator"] == "out" and first["source"] == "orders" and first["p99_ms"] == 60


# -- among reports -------------------------------------------------------------------------------------


def acks(sink: str, *reports: TimeReport) -> SinkAck:
    return SinkAck(sink, (TaskAck(0, 1, 2, reports=reports), TaskAck(1, 1, 2)))


def test_each_operator_counts_once_and_each_sink_for_itself() -> None:
    sums = TimeReport(FIRST_OPERATOR_REPORTER + 0, place_of(2, 5), 1_000, 1_100)
    tops = TimeReport(FIRST_OPERATOR_REPORTER + 1, place_of(3, 5), 1_000, 1_200)
    left = TimeReport(SINK_REPORTER, place_of(2, 5), 1_000, 1_300)
    right = TimeReport(SINK_REPORTER, place_of(2, 5), 1_000, 1_400)
    found = find_measurements([acks("left", sums, tops, left), acks("right", sums, tops, right)], UIDS)
    assert [(one.at, one.latency_ms) for one in found] == [
        (MeasuredAt("left", "orders", 5), 300),
        (MeasuredAt("right", "orders", 5), 400),
        (MeasuredAt("sums", "orders", 5), 100),
        (MeasuredAt("tops", "clicks", 5), 200),
    ]


def test_an_operator_that_runs_in_two_chains_counts_in_both() -> None:
    one = TimeReport(FIRST_OPERATOR_REPORTER, place_of(2, 5), 1_000, 1_100)
    other = TimeReport(FIRST_OPERATOR_REPORTER, place_of(2, 5), 1_000, 1_250)
    assert [m.latency_ms for m in find_measurements([acks("left", one), acks("right", other)], UIDS)] == [
        100,
        250,
    ]


def test_reports_about_time_stay_and_those_about_latency_go() -> None:
    about_time = TimeReport(2, 7, 61_000, 5)
    latency = TimeReport(SINK_REPORTER, place_of(2, 5), 1_000, 1_300)
    assert find_measurements([acks("left", about_time)], UIDS) == []
    assert drop_latencies([acks("left", latency, about_time)]) == (acks("left", about_time),)
    assert drop_latencies([acks("left")]) == (acks("left"),)


def test_a_sink_of_a_union_numbers_the_reporters_of_its_parts_one_after_the_other() -> None:
    of_second_part = TimeReport(FIRST_OPERATOR_REPORTER + len(UIDS) + 1, place_of(3, 5), 1_000, 1_200)
    (found,) = find_measurements([acks("left", of_second_part)], UIDS)
    assert found.at == MeasuredAt("tops", "clicks", 5)


@pytest.mark.parametrize("source", [4, 1 << 30])
def test_a_marker_of_no_source_is_refused(source: int) -> None:
    with pytest.raises(ValueError, match="is not one of 4"):
        find_measurements([acks("left", TimeReport(SINK_REPORTER, place_of(source, 0), 0, 0))], UIDS)


def test_a_marker_keeps_its_source_on_its_way() -> None:
    assert replace_subtask(place_of(2, SUBTASK_MASK), 0) == place_of(2, 0)
    assert replace_subtask(place_of((1 << 32) - 1, 3), SUBTASK_MASK) == (1 << 63) - 1


def test_a_histogram_of_some_is_that_of_one_after_the_other() -> None:
    some = [5, 70, 70, 1_000]
    found = LatencyHistogram()
    for latency_ms in some:
        found = found.add(latency_ms)
    assert LatencyHistogram.of(some) == found and LatencyHistogram.of([]) == LatencyHistogram()
