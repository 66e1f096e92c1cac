"""Timers of both clocks over a savepoint: each fires once, in whatever number of partitions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import KeyedProcessFunction, MemorySink, RestoreSettings, TimeDomain, WatermarkStrategy
from flinkish_spark.sources import SplitSource
from tests.support.jobs import await_that, environment
from tests.support.savepoint_support import started, stop, stop_with

pytestmark = pytest.mark.timeout(600)
USERS = 60
READING = "user STRING, at LONG"
#: Far enough behind the start that the savepoint comes first: on a quiet machine, or else on any.
CALLS_AFTER_MS = (10_000, 60_000, 240_000)


class Appended(SplitSource):
    """Lines of one file, which grows."""

    schema = READING

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def splits(self) -> list[str]:
        return ["all"]

    def latest(self, split: str, start: int, limit: int | None) -> int:
        return len(self._lines())

    def read(self, split: str, start: int, end: int) -> Iterator[tuple[str, int]]:
        for line in self._lines()[start:end]:
            user, at = line.split(" ")
            yield user, int(at)

    def add(self, *readings: tuple[str, int]) -> None:
        with Path(self.path).open("a") as file:
            file.write("".join(f"{user} {at}\n" for user, at in readings))

    def _lines(self) -> list[str]:
        return Path(self.path).read_text().split("\n")[:-1]


class Both(KeyedProcessFunction):
    """Sets a timer of each clock, twice, and one more that it deletes."""

    def __init__(self, call_after_ms: int) -> None:
        self.call_after_ms = call_after_ms

    def process_element(self, reading: Any, ctx: Any) -> Iterator[Any]:
        timers = ctx.timer_service()
        call_ms = timers.current_processing_time() + self.call_after_ms
        for _ in range(2):
            timers.register_event_time_timer(reading.at + 1_000)
            timers.register_processing_time_timer(call_ms)
        timers.register_event_time_timer(reading.at + 500)
        timers.register_processing_time_timer(call_ms - 1)
        timers.delete_event_time_timer(reading.at + 500)
        timers.delete_processing_time_timer(call_ms - 1)
        yield reading.user, "seen", reading.at, timers.current_processing_time()

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        what = "event" if ctx.time_domain() is TimeDomain.EVENT_TIME else "call"
        yield ctx.get_current_key(), what, time_ms, ctx.timer_service().current_processing_time()


def job(spark: Any, tmp_path: Path, name: str, call_after_ms: int) -> tuple[Any, MemorySink]:
    env = environment(spark, tmp_path / name, trigger_interval_ms=50)
    strategy = WatermarkStrategy.for_bounded_out_of_orderness(0).with_timestamp_assigner("at")
    stream = env.from_source(Appended(tmp_path / "input"), uid="readings")
    by_user = stream.assign_timestamps_and_watermarks(strategy).key_by("user")
    sink = MemorySink(f"{tmp_path}/{name}")
    output = "user STRING, what STRING, due LONG, now LONG"
    by_user.process(Both(call_after_ms), output=output, uid="both").sink_to(sink, uid="out")
    return env, sink


def counted(sink: MemorySink, *what: str) -> Counter[tuple[str, str]]:
    return Counter((row["user"], row["what"]) for row in sink.rows() if row["what"] in what)


@pytest.mark.nightly(by_day="tests/integration/spark/test_golden.py")
def test_timers_fire_once_behind_a_savepoint_with_other_partitions(spark: Any, tmp_path: Path) -> None:
    """Behaviours 161, 164: in a new job, which is stopped and rescaled once more."""
    for call_after_ms in CALLS_AFTER_MS:
        (tmp_path / str(call_after_ms)).mkdir()
        if is_called_behind_the_savepoint(spark, tmp_path / str(call_after_ms), call_after_ms):
            return
    raise AssertionError("no savepoint came before the calls")


def is_called_behind_the_savepoint(spark: Any, tmp_path: Path, call_after_ms: int) -> bool:
    """Return False if the machine was so slow that the calls came before the savepoint."""
    source, savepoint = Appended(tmp_path / "input"), tmp_path / "savepoint"
    users = [f"u{n}" for n in range(USERS)]
    source.add(*((user, 10_000 + n) for n, user in enumerate(users)))
    env, first = job(spark, tmp_path, "one", call_after_ms)
    with started(env) as client:
        await_that(lambda: counted(first, "seen").total() == USERS, client)
        stop_with(client, savepoint)
    # The watermark is below all of them.
    assert counted(first, "event") == Counter()
    if counted(first, "call"):
        return False
    seen_ms = max(row["now"] for row in first.rows())

    env, second = job(spark, tmp_path, "two", call_after_ms)
    with started(env, RestoreSettings(str(savepoint)), partitions=3) as client:
        # Half of the event-time timers; nobody waits for the reading's own.
        source.add(("last", 11_000 + USERS // 2))
        await_that(lambda: counted(second, "event").total() == USERS // 2, client)
        stop(client)
    assert counted(second, "event") == Counter((user, "event") for user in users[: USERS // 2])

    env, second = job(spark, tmp_path, "two", call_after_ms)
    with started(env, partitions=2) as client:
        source.add(("last", 1_000_000))
        await_that(lambda: counted(second, "event").total() >= USERS + 1, client)
        await_that(lambda: counted(second, "call").total() >= USERS + 2, client)
        # Whatever else there might be, it would have come by then.
        time.sleep(2)
        stop(client)
    assert counted(second, "event") == Counter((user, "event") for user in [*users, "last"])
    assert counted(second, "call") == Counter((user, "call") for user in [*users, "last", "last"])
    called = [row for row in second.rows() if row["what"] == "call"]
    assert all(row["now"] >= row["due"] for row in called)
    assert {row["due"] for row in called if row["user"] != "last"} == {
        row["now"] + call_after_ms for row in first.rows()
    }
    assert max(row["due"] for row in called) >= seen_ms + call_after_ms
    return True
