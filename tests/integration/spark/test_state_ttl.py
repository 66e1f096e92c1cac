"""Time to live of keyed state in a job: over a restart with other partitions, and of keys that stay away."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import KeyedProcessFunction, ListStateDescriptor, MemorySink, StateTtl
from flinkish_spark.state_processor import read_state
from tests.integration.spark.test_timers import Appended
from tests.support.jobs import await_that, environment
from tests.support.savepoint_support import started, stop, stop_with

pytestmark = pytest.mark.timeout(900)
#: One of them is longer than a restart takes, however many other things the machine does.
TIMES_TO_LIVE_MS = (12_000, 45_000, 150_000)
#: They get one reading at the beginning.
IDLE = [f"idle-{number}" for number in range(8)]


class Moments(KeyedProcessFunction):
    """Remembers when a user's readings came; not for ever."""

    def __init__(self, ttl_ms: int) -> None:
        self.ttl = StateTtl(ttl_ms)

    def open(self, context: Any) -> None:
        self.moments = context.get_list_state(ListStateDescriptor("moments", "LONG", self.ttl))

    def process_element(self, reading: Any, ctx: Any) -> Iterator[Any]:
        now_ms = ctx.timer_service().current_processing_time()
        self.moments.append(now_ms)
        yield reading.user, now_ms, " ".join(map(str, self.moments))


def job(spark: Any, tmp_path: Path, ttl_ms: int) -> tuple[Any, MemorySink]:
    env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
    sink = MemorySink(f"{tmp_path}/out")
    stream = env.from_source(Appended(tmp_path / "input"), uid="readings").key_by("user")
    output = "user STRING, now LONG, moments STRING"
    stream.process(Moments(ttl_ms), output=output, uid="moments").sink_to(sink, uid="out")
    return env, sink


def of_ann(sink: MemorySink) -> list[tuple[int, list[int]]]:
    """When her readings came, and what was remembered then."""
    rows = [row for row in sink.rows() if row["user"] == "ann"]
    return sorted((row["now"], [int(one) for one in row["moments"].split()]) for row in rows)


@pytest.mark.nightly(by_day="tests/unit/state/test_idle_expiry.py")
def test_elements_expire_one_by_one_over_a_restart_and_idle_keys_let_go(spark: Any, tmp_path: Path) -> None:
    for ttl_ms in TIMES_TO_LIVE_MS:
        directory = tmp_path / str(ttl_ms)
        directory.mkdir()
        before, came = readings_over_a_restart(spark, directory, ttl_ms)
        times = [now_ms for now_ms, _ in came]
        for number, (now_ms, remembered) in enumerate(came, start=1):
            assert remembered == [one for one in times[:number] if one + ttl_ms > now_ms]
        assert any(1 < len(remembered) < number for number, (_, remembered) in enumerate(came, start=1))

        (kept,) = read_state(spark, directory / "savepoint", "moments", "moments").collect()
        assert kept.key == "ann" and kept.value == came[-1][1]
        assert [round(one.timestamp() * 1000) for one in kept.each_touched_at] == kept.value
        assert kept.touched_at == max(kept.each_touched_at)
        if any(remembered[0] <= before for now_ms, remembered in came if now_ms > before):
            return
    pytest.fail("the restart took longer than all of them live")


def readings_over_a_restart(
    spark: Any, directory: Path, ttl_ms: int
) -> tuple[int, list[tuple[int, list[int]]]]:
    """Return when the last reading in front of a restart came, and what was remembered at each of ann's.

    Behind it is a savepoint, taken when those that stay away have expired.
    """
    source, count = Appended(directory / "input"), 0

    def reading_of_ann(client: Any) -> None:
        nonlocal count
        count += 1
        source.add(("ann", count))
        await_that(lambda: len(of_ann(sink)) == count, client)

    source.add(*((user, 0) for user in IDLE))
    env, sink = job(spark, directory, ttl_ms)
    with started(env) as client:
        reading_of_ann(client)
        reading_of_ann(client)
        stop(client)
    before = of_ann(sink)[-1][0]

    env, sink = job(spark, directory, ttl_ms)
    with started(env, partitions=3) as client:
        # Until a quarter of the time to live behind the expiry of those that stay away, and some more.
        while count < 4 or of_ann(sink)[-1][0] < before + 1.25 * ttl_ms + 2_000:
            reading_of_ann(client)
            time.sleep(1)
        stop_with(client, directory / "savepoint")
    return before, of_ann(sink)
