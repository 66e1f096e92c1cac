"""Kafka -> watermarks -> timers of both clocks by key -> sessions -> Kafka, as a process that can be shot.

Beside them windows that fire once more for each late reading, and count windows over what these emit; and a
pattern, with what it finds and what is timed out.

What goes wrong is said by the environment variables of `tests/crash/app.py`. What comes out does not depend
on how the input falls into micro-batches, so it can be recomputed; of a timer by the wall clock that holds
for the number that it was set for, not for when it fires.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import functions as F

from flinkish_spark import (
    CheckpointConfig,
    FixedDelay,
    Json,
    KafkaSink,
    KafkaSource,
    KeyedProcessFunction,
    MapStateDescriptor,
    OutputTag,
    StreamExecutionEnvironment,
    WatermarkStrategy,
)
from flinkish_spark.cep import CEP, Pattern, PatternProcessFunction
from flinkish_spark.core.elements import TimeDomain
from flinkish_spark.windows import EventTimeSessionWindows, ProcessWindowFunction, TumblingEventTimeWindows
from tests.crash.app import FIND_DEAD_VARIABLE, find_dead_once
from tests.crash.light_session import light_session
from tests.support.killing import observer_from

READING = "user STRING, n LONG, at LONG"
SESSION = "user STRING, begin_ms LONG, end_ms LONG, numbers ARRAY<LONG>"


class Topics(NamedTuple):
    """What the job reads, and what it writes."""

    readings: str
    sessions: str
    calls: str
    updates: str
    patterns: str

    @classmethod
    def of(cls, prefix: str) -> Topics:
        """Return those of a run, which is not alone on its broker."""
        return cls(*(f"{prefix}.{name}" for name in cls._fields))


#: A call of a timer of the wall clock: of whom, for which reading, for when, and what the clocks said.
CALL = OutputTag("calls", "kind STRING, user STRING, n LONG, due LONG, now LONG, watermark LONG")
#: A firing of a window, and the one of the same user before it.
UPDATE = f"{SESSION}, begin_before LONG, numbers_before ARRAY<LONG>"
#: User of the last reading of each partition: event time goes beyond all others, nobody waits for its own.
LAST = "last"
OUT_OF_ORDER_MS, ALARM_MS, GAP_MS = 500, 700, 1_500
WINDOW_MS, LATENESS_MS = 2_000, 3_600_000
#: One reading in so many is told that much too early to the windows that fire again: its user was there then,
#: and its window has fired, unless a micro-batch takes longer than this.
LATE_ONE_IN, LATE_BY_MS = 40, 24_000


class Timers(KeyedProcessFunction):
    """Says each reading's number twice: a while of event time later, and a while of the wall clock later.

    All times that count are even. Beside each timer one at the odd time behind it is set and deleted again.
    """

    def open(self, context: Any) -> None:
        self.alarms = context.get_map_state(MapStateDescriptor("alarms", "LONG", "ARRAY<LONG>"))
        self.calls = context.get_map_state(MapStateDescriptor("calls", "LONG", "ARRAY<LONG>"))

    def process_element(self, reading: Any, ctx: Any) -> None:
        timers = ctx.timer_service()
        alarm_ms = reading.at + ALARM_MS
        self.alarms[alarm_ms] = [*self.alarms.get(alarm_ms, []), reading.n]
        timers.register_event_time_timer(alarm_ms)
        timers.register_event_time_timer(alarm_ms + 1)
        timers.register_event_time_timer(alarm_ms)
        timers.delete_event_time_timer(alarm_ms + 1)
        call_ms = (timers.current_processing_time() // 2) * 2 + 100 * (1 + reading.n % 20)
        self.calls[call_ms] = [*self.calls.get(call_ms, []), reading.n]
        timers.register_processing_time_timer(call_ms)
        timers.register_processing_time_timer(call_ms + 1)
        timers.register_processing_time_timer(call_ms)
        timers.delete_processing_time_timer(call_ms + 1)

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        timers = ctx.timer_service()
        is_alarm = ctx.time_domain() is TimeDomain.EVENT_TIME
        waiting = self.alarms if is_alarm else self.calls
        clocks = (time_ms, timers.current_processing_time(), timers.current_watermark())
        if time_ms not in waiting:
            ctx.output(CALL, ("stray", ctx.get_current_key(), -1, *clocks))
            return
        numbers = waiting[time_ms]
        del waiting[time_ms]
        for number in numbers:
            if not is_alarm:
                ctx.output(CALL, ("call", ctx.get_current_key(), number, *clocks))
            elif time_ms > timers.current_watermark():
                ctx.output(CALL, ("early", ctx.get_current_key(), number, *clocks))
            else:
                yield ctx.get_current_key(), number


class Numbers(ProcessWindowFunction):
    """A session and the numbers in it."""

    def process(self, key: Any, context: Any, elements: Any) -> Iterator[Any]:
        yield key, *context.window, sorted(element.n for element in elements)


class WithTheOneBefore(ProcessWindowFunction):
    """The last of a window's elements, with what the one before it says; nulls behind the first."""

    def process(self, key: Any, context: Any, elements: Any) -> Iterator[Any]:
        *before, last = elements
        yield (*last, *((before[0].begin_ms, before[0].numbers) if before else (None, None)))


#: Whose pattern: readings of one kind, each with the next one of another kind, in time.
PATTERN_MS = 900
FOUND = "user STRING, first LONG, second LONG"
LOST = OutputTag("lost", FOUND)


class Pairs(PatternProcessFunction):
    """Says which readings were found, and which have waited in vain."""

    def process_match(self, match: Any, ctx: Any) -> Iterator[Any]:
        yield ctx.get_current_key(), match["first"][0].n, match["second"][0].n

    def process_timed_out_match(self, match: Any, ctx: Any) -> None:
        ctx.output(LOST, (ctx.get_current_key(), match["first"][0].n, None))


def is_later(reading: Any, ctx: Any) -> bool:
    return reading.n % 3 == 1 and reading.n > ctx.events_for("first")[0].n


def by_number(one: Any, other: Any) -> int:
    return one.n - other.n


def pairs_beginning(first: Any) -> Pattern:
    """Return the pattern, given the condition of its first reading."""
    begun = Pattern.begin("first").where(first)
    return begun.followed_by("second").where(is_later).within(PATTERN_MS)


def build(spark: Any, args: argparse.Namespace) -> StreamExecutionEnvironment:
    """Return the environment with the whole job in it."""
    env = StreamExecutionEnvironment(
        spark,
        job="event-time",
        job_dir=args.job_dir,
        checkpoint=CheckpointConfig(interval_ms=1_000),
        restart_strategy=FixedDelay(attempts=10, delay_ms=200),
        max_parallelism=16,
        trigger_interval_ms=200,
    )
    servers, topics = args.bootstrap_servers, Topics.of(args.prefix)
    readings = env.from_source(KafkaSource(servers, [topics.readings], value=Json(READING)), uid="readings")
    bounded = WatermarkStrategy.for_bounded_out_of_orderness(OUT_OF_ORDER_MS).with_timestamp_assigner("at")
    by_user = readings.assign_timestamps_and_watermarks(bounded).key_by("user")
    alarms = by_user.process(Timers(), output="user STRING, n LONG", uid="timers")
    sessions = alarms.key_by("user").window(EventTimeSessionWindows(GAP_MS))
    numbers = sessions.process(Numbers(), output=SESSION, uid="sessions")
    numbers.sink_to(KafkaSink(servers, topics.sessions, key="user", value=Json()), uid="sessions-out")
    calls = alarms.get_side_output(CALL)
    calls.sink_to(KafkaSink(servers, topics.calls, key="user", value=Json()), uid="calls-out")
    pair = pairs_beginning(f"n % 3 = 0 AND user <> '{LAST}'")
    pairs = CEP.pattern(by_user, pair, by_number).process(Pairs(), output=FOUND, uid="pairs")
    pairs.sink_to(KafkaSink(servers, topics.patterns, key="user", value=Json()), uid="pairs-out")
    lost = pairs.get_side_output(LOST)
    lost.sink_to(KafkaSink(servers, topics.patterns, key="user", value=Json()), uid="lost-out")
    # Some late, and nothing is waited for: so windows fire, and then again for what comes behind that.
    hasty = WatermarkStrategy.for_monotonous_timestamps().with_timestamp_assigner("at")
    at = F.expr(f"IF(n % {LATE_ONE_IN} = 0 AND user <> '{LAST}', at - {LATE_BY_MS}, at)")
    some_late = readings.transform(lambda df: df.withColumn("at", at))
    late = some_late.assign_timestamps_and_watermarks(hasty).key_by("user")
    windows = late.window(TumblingEventTimeWindows(WINDOW_MS)).allowed_lateness(LATENESS_MS)
    firings = windows.process(Numbers(), output=SESSION, uid="windows").key_by("user")
    updates = firings.count_window(2, slide=1).process(WithTheOneBefore(), output=UPDATE, uid="updates")
    updates.sink_to(KafkaSink(servers, topics.updates, key="user", value=Json()), uid="updates-out")
    return env


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--bootstrap-servers", "--prefix", "--job-dir", "--scratch"):
        parser.add_argument(name, required=True)
    args = parser.parse_args()
    if os.environ.get(FIND_DEAD_VARIABLE):
        find_dead_once()
    env = build(light_session("event-time", Path(args.scratch)), args)
    env.observe(observer_from(os.environ))
    env.execute()


if __name__ == "__main__":
    main()
