"""Event time of a running job: watermarks in Spark's log, idle streams that are woken, restarts, the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import (
    JobStatus,
    KeyedProcessFunction,
    MemorySink,
    WatermarkGenerator,
    WatermarkStrategy,
)
from flinkish_spark.protocol.watermark_valve import MAX_WATERMARK_MS, MIN_WATERMARK_MS
from flinkish_spark.runtime.spark_log import LoggedOffsets
from flinkish_spark.sources.dataframe import DataFrameSource
from tests.support import await_that, environment, rows

pytestmark = pytest.mark.timeout(600)
BOUNDED = WatermarkStrategy.for_bounded_out_of_orderness(0)


class Alarm(KeyedProcessFunction):
    """Says what it sees, and once more a second of event time later."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        timers = ctx.timer_service()
        timers.register_event_time_timer(value.at + 1_000)
        yield value.user, "seen", ctx.timestamp(), timers.current_watermark()

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield ctx.get_current_key(), "fired", time_ms, ctx.timer_service().current_watermark()


class Later(KeyedProcessFunction):
    """Says everything again, half a second later by the wall clock."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        timers = ctx.timer_service()
        timers.register_processing_time_timer(timers.current_processing_time() + 500)
        yield tuple(value)

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        yield ctx.get_current_key(), "later", time_ms, ctx.timer_service().current_processing_time()


def feed(folder: Path, name: str, *records: tuple[str, int]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"user": user, "at": at}) + "\n" for user, at in records]
    (folder / f".{name}").write_text("".join(lines))
    (folder / f".{name}").rename(folder / f"{name}.json")


def job(spark: Any, tmp_path: Path) -> tuple[Any, MemorySink]:
    env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
    files = spark.readStream.schema("user STRING, at LONG").json(str(tmp_path / "in"))
    strategy = BOUNDED.with_timestamp_assigner("at")
    timed = env.from_dataframe(files, uid="files").assign_timestamps_and_watermarks(strategy)
    output = "user STRING, what STRING, time LONG, clock LONG"
    alarms = timed.key_by("user").process(Alarm(), output=output, uid="alarms")
    again = alarms.key_by("user").process(Later(), output=output, uid="later")
    sink = MemorySink(f"{tmp_path}/rows")
    again.sink_to(sink, uid="out")
    return env, sink


def watermarks(tmp_path: Path) -> list[int]:
    """Return what each micro-batch of the log carried."""
    (folder,) = (tmp_path / "job" / "spark").glob("*/offsets")
    entries = sorted(
        (entry for entry in folder.iterdir() if entry.name.isdecimal()), key=lambda e: int(e.name)
    )
    return [LoggedOffsets.parse(entry.read_text()).control.time.watermark_ms for entry in entries]


def test_an_idle_stream_is_woken_and_time_survives_a_restart(spark: Any, tmp_path: Path) -> None:
    """Behaviour 124: what micro-batches carry never goes back."""
    feed(tmp_path / "in", "0", ("ann", 10_000), ("ben", 15_000))
    env, sink = job(spark, tmp_path)
    client = env.execute_async()
    # Ann's alarm is due by what ben has brought, his is not. Each of the three rows comes again, later.
    await_that(lambda: rows(client, "out") == 6, client)
    client.stop_with_checkpoint()
    client.wait()
    found = {tuple(row)[:3] for row in sink.rows() if row["what"] != "later"}
    assert found == {("ann", "seen", 10_000), ("ben", "seen", 15_000), ("ann", "fired", 11_000)}
    later = [row for row in sink.rows() if row["what"] == "later"]
    assert all(row["clock"] >= row["time"] for row in later)
    carried = watermarks(tmp_path)
    assert carried == sorted(carried) and (carried[0], carried[-1]) == (MIN_WATERMARK_MS, 14_999)

    feed(tmp_path / "in", "1", ("cid", 12_000))
    env, sink = job(spark, tmp_path)
    client = env.execute_async()
    # The record is late: its timer fires at once, and so does nothing of ben's.
    await_that(lambda: any(row["what"] == "fired" and row["user"] == "cid" for row in sink.rows()), client)
    client.stop_with_checkpoint()
    client.wait()
    of_cid = [tuple(row) for row in sink.rows() if row["user"] == "cid" and row["what"] != "later"]
    assert of_cid[0] == ("cid", "seen", 12_000, 14_999)
    assert not [row for row in sink.rows() if row["user"] == "ben" and row["what"] == "fired"]
    carried = watermarks(tmp_path)
    assert carried == sorted(carried) and carried[-1] == 14_999


@dataclass(frozen=True)
class ReadOnce(DataFrameSource):
    """Files of which there come no more."""

    @property
    def is_bounded(self) -> bool:
        return True

    def has_ended(self, position: LoggedOffsets) -> bool:
        return any(isinstance(one, dict) and one.get("logOffset", -1) >= 0 for one in position.sources)


def test_behind_the_end_of_its_input_a_job_fires_all_timers_and_ends(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "in", "0", ("ann", 10_000), ("ben", 15_000))
    env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
    files = spark.readStream.schema("user STRING, at LONG").json(str(tmp_path / "in"))
    source = env.from_source(ReadOnce(files), uid="files")
    timed = source.assign_timestamps_and_watermarks(BOUNDED.with_timestamp_assigner("at"))
    output = "user STRING, what STRING, time LONG, clock LONG"
    sink = MemorySink(f"{tmp_path}/rows")
    timed.key_by("user").process(Alarm(), output=output, uid="alarms").sink_to(sink, uid="out")
    client = env.execute_async()
    assert client.wait(timeout_ms=240_000), "the job does not end"
    assert client.status is JobStatus.FINISHED
    fired = {row["user"]: row["clock"] for row in sink.rows() if row["what"] == "fired"}
    assert fired.keys() == {"ann", "ben"} and fired["ben"] == MAX_WATERMARK_MS


class Behind(WatermarkGenerator):
    """Says that records come up to five seconds late."""

    def on_event(self, event: Any, timestamp_ms: int) -> int | None:
        return timestamp_ms - 5_000 if event.user != "nobody" else None


def test_a_generator_of_the_users_says_how_far_event_time_is(spark: Any, tmp_path: Path) -> None:
    feed(tmp_path / "in", "0", ("ann", 10_000), ("cid", 16_500), ("nobody", 90_000))
    env = environment(spark, tmp_path / "job", trigger_interval_ms=50)
    files = spark.readStream.schema("user STRING, at LONG").json(str(tmp_path / "in"))
    strategy = WatermarkStrategy.for_generator(Behind).with_timestamp_assigner(
        lambda record, known: record.at
    )
    timed = env.from_dataframe(files, uid="files").assign_timestamps_and_watermarks(strategy)
    output = "user STRING, what STRING, time LONG, clock LONG"
    sink = MemorySink(f"{tmp_path}/rows")
    timed.key_by("user").process(Alarm(), output=output, uid="alarms").sink_to(sink, uid="out")
    client = env.execute_async()
    await_that(lambda: rows(client, "out") == 4, client)
    client.stop_with_checkpoint()
    client.wait()
    fired = [tuple(row) for row in sink.rows() if row["what"] == "fired"]
    assert fired == [("ann", "fired", 11_000, 11_500)]
