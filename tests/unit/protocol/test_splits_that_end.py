"""Sources whose splits end while others are still to come: in between they have no channel."""

from __future__ import annotations

import json

from flinkish_spark.protocol.event_time import (
    Alignment,
    AssignerInput,
    AssignerRules,
    BatchTimes,
    BoundedOutOfOrderness,
    ChannelReport,
    TimerReport,
)
from flinkish_spark.protocol.watermarks import EventTime, find_channels_to_hold, next_micro_batch_ms, step

BOUND = BoundedOutOfOrderness(0)
MINUTE_MS = 60_000


class Days:
    """A source with a split for each day, beside one that never ends."""

    def __init__(self, idleness_ms: int | None = None, alignment: Alignment | None = None) -> None:
        self.rules = {
            "days": AssignerRules(BOUND, idleness_ms, alignment),
            "clicks": AssignerRules(BOUND, None, alignment),
        }
        self.state = EventTime()

    def batch(self, now_ms: int, days: dict[int, int], clicks: int, going_on: set[int]) -> int:
        """Run a micro-batch behind which these splits of the days may bring more; return the watermark."""
        reports = [ChannelReport("days", split, time_ms) for split, time_ms in days.items()]
        inputs = (AssignerInput("days", frozenset(going_on)), AssignerInput("clicks", frozenset({0})))
        times = BatchTimes(now_ms, (*reports, ChannelReport("clicks", 0, clicks)), inputs)
        self.state = step(self.rules, self.state, times)
        # As it comes back from a checkpoint.
        self.state = EventTime.from_json(json.loads(json.dumps(self.state.to_json())))
        return self.state.watermark_ms


def test_a_split_that_ends_in_an_old_job_makes_its_source_not_idle_at_once() -> None:
    """It is silent for as long as an idleness before nobody waits for its next split."""
    job = Days(idleness_ms=MINUTE_MS)
    assert job.batch(0, {0: 1_000}, 900_000, {0}) == 999
    assert job.batch(100 * MINUTE_MS, {0: 2_000}, 900_000, set()) == 1_999
    assert job.batch(101 * MINUTE_MS - 1, {1: 3_000}, 900_000, set()) == 2_999
    assert job.batch(102 * MINUTE_MS - 2, {}, 900_000, set()) == 2_999
    assert job.batch(102 * MINUTE_MS - 1, {}, 900_000, set()) == 899_999


def test_a_channel_that_goes_was_silent_since_its_last_record() -> None:
    job = Days(idleness_ms=MINUTE_MS)
    job.batch(0, {0: 1_000, 1: 2_000}, 900_000, {0, 1})
    job.batch(10, {0: 1_500}, 900_000, {0, 1})
    assert job.batch(40_000, {}, 900_000, set()) < 899_999
    waiting = (TimerReport("sums", 0, 900_000, None),)
    job.state = step(job.rules, job.state, BatchTimes(40_001, timers=waiting))
    assert next_micro_batch_ms(job.rules, job.state) == MINUTE_MS + 10
    assert job.batch(MINUTE_MS + 9, {}, 900_000, set()) < 899_999
    assert job.batch(MINUTE_MS + 10, {}, 900_000, set()) == 899_999


def test_a_source_between_two_splits_holds_back_only_who_is_ahead_of_where_it_stands() -> None:
    job = Days(alignment=Alignment("shop", 600_000))
    assert job.batch(0, {0: 500_000}, 600_000, set()) == 499_999
    assert find_channels_to_hold(job.rules, job.state) == frozenset()
    job.batch(1, {}, 1_100_001, set())
    assert find_channels_to_hold(job.rules, job.state) == {("clicks", 0)}
